// Which kernel variants were built, which this machine can run, and the choice between them.

#pragma once

#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace penstock {

// Names of the variants that this build has and this machine can run, best first (kVariants in cpu.cpp). The first call asks
// the system for tiles.
std::vector<std::string> usable_variants();

// Names of those that compute what another machine would, bit by bit, slowly: for tests.
std::vector<std::string> emulated_variants();

// Why the tiles of this processor can't be used, as part of a sentence; empty if they can, or if it has none.
std::string why_no_tiles();

// The table of a usable or emulated variant; an empty name chooses the best. Throws std::invalid_argument that lists the usable ones.
const KernelTable& choose_variant(const std::string& name);

}  // namespace penstock
