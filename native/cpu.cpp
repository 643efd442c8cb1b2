#include "cpu.h"

#include <stdexcept>

#if defined(PENSTOCK_HAVE_X86)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#endif

namespace penstock {

namespace {

#if defined(PENSTOCK_HAVE_X86)

bool has_avx2() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}

// Products of bf16 and of bytes (Intel's manual, CPUID leaf 7: EDX bits 22, 24 and 25).
bool processor_has_tiles() {
    unsigned a, b, c, d;
    constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25, kAll = kBf16 | kTile | kInt8;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kAll) == kAll;
}

#if defined(PENSTOCK_HAVE_AMX)
// Linux keeps the 8 KiB of a thread's tiles only for processes that ask (Documentation/arch/x86/xstate.rst). Empty if it does.
std::string ask_for_tiles() {
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    unsigned a, b, c, d, low = 0, high = 0;
    constexpr unsigned kOsxsave = 1u << 27, kTileState = 3u << 17;
    if (__get_cpuid(1, &a, &b, &c, &d) && (c & kOsxsave)) asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & kTileState) != kTileState) return "the system, or a virtual machine's host, has switched them off (XCR0)";
    if (!has_avx512()) return "the processor, or a virtual machine's host, lacks AVX-512, which kernels with tiles want beside them";
    if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0) return "";
    if (errno == ENOSPC) return "the stack on which a thread's signals are handled is too small for them (sigaltstack)";
    return std::string("the system refuses them (arch_prctl: ") + std::strerror(errno) + ")";
}
#endif

#endif

}  // namespace

std::string why_no_tiles() {
#if defined(PENSTOCK_HAVE_X86)
#if defined(PENSTOCK_HAVE_AMX)
    static const std::string why = processor_has_tiles() ? ask_for_tiles() : "";
#else
    static const std::string why = processor_has_tiles() ? "this build has no kernels for them (its assembler knew none)" : "";
#endif
    return why;
#else
    return "";
#endif
}

std::vector<std::string> usable_variants() {
    std::vector<std::string> names;
#if defined(PENSTOCK_HAVE_X86)
#if defined(PENSTOCK_HAVE_AMX)
    if (processor_has_tiles() && why_no_tiles().empty()) names.push_back("amx");
#endif
    if (has_avx512()) names.push_back("avx512");
    if (has_avx2()) names.push_back("avx2");
#endif
    names.push_back("portable");
    return names;
}

std::vector<std::string> emulated_variants() {
#if defined(PENSTOCK_HAVE_X86)
    if (has_avx512()) return {"amx-emulated"};
#endif
    return {};
}

const KernelTable& choose_variant(const std::string& name) {
    const std::vector<std::string> usable = usable_variants(), emulated = emulated_variants();
    const std::string chosen = name.empty() ? usable.front() : name;
    std::string list;
#if defined(PENSTOCK_HAVE_X86)
    if (chosen == "amx-emulated" && !emulated.empty()) return amx_emulated::kernel_table();
#endif
    for (const std::string& one : usable) {
        if (one != chosen) {
            list += (list.empty() ? "" : ", ") + one;
            continue;
        }
#if defined(PENSTOCK_HAVE_X86)
#if defined(PENSTOCK_HAVE_AMX)
        if (one == "amx") return amx::kernel_table();
#endif
        if (one == "avx512") return avx512::kernel_table();
        if (one == "avx2") return avx2::kernel_table();
#endif
        return portable::kernel_table();
    }
    throw std::invalid_argument("instruction set '" + name + "' is unknown or not usable on this machine; usable are: " + list);
}

}  // namespace penstock
