#include "cpu.h"

#include <stdexcept>

namespace penstock {

std::vector<std::string> usable_variants() {
    std::vector<std::string> names;
#if defined(PENSTOCK_HAVE_X86)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                            __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
    if (has_avx512) names.push_back("avx512");
    if (has_avx2) names.push_back("avx2");
#endif
    names.push_back("portable");
    return names;
}

const KernelTable& choose_variant(const std::string& name) {
    const std::vector<std::string> usable = usable_variants();
    const std::string chosen = name.empty() ? usable.front() : name;
    std::string list;
    for (const std::string& one : usable) {
        if (one != chosen) {
            list += (list.empty() ? "" : ", ") + one;
            continue;
        }
#if defined(PENSTOCK_HAVE_X86)
        if (one == "avx512") return avx512::kernel_table();
        if (one == "avx2") return avx2::kernel_table();
#endif
        return portable::kernel_table();
    }
    throw std::invalid_argument("instruction set '" + name + "' is unknown or not usable on this machine; usable are: " + list);
}

}  // namespace penstock
