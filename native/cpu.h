// Which kernel variants were built, which this machine can run, and the choice between them.

#pragma once

#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace penstock {

// Names of the variants that this build has and this machine can run, best first: avx512, avx2, portable.
std::vector<std::string> usable_variants();

// The table of a usable variant; an empty name chooses the best. Throws std::invalid_argument that lists the usable ones.
const KernelTable& choose_variant(const std::string& name);

}  // namespace penstock
