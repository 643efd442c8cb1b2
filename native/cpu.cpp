#include "cpu.h"

#include <stdexcept>

#if defined(PENSTOCK_HAVE_X86)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#endif
#if defined(PENSTOCK_HAVE_ARM)
#include <sys/auxv.h>
#endif

namespace penstock {

namespace {

#if defined(PENSTOCK_HAVE_X86)

bool has_avx2() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

#if defined(PENSTOCK_HAVE_AVX_VNNI)
// AVX-VNNI is bit 4 of EAX in leaf 7, subleaf 1 (Intel's manual, CPUID).
bool has_avx2_vnni() {
    unsigned a, b, c, d;
    return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
}
#endif

// Cascade Lake and Ice Lake have no bf16, Cooper Lake no GFNI.
bool has_avx512_vnni() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
}

bool has_avx512() { return has_avx512_vnni() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("gfni"); }

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
    if (!has_avx512()) return "the processor, or a virtual machine's host, lacks AVX-512 with VNNI, bf16 and GFNI, which kernels with tiles want beside them";
    if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0) return "";
    if (errno == ENOSPC) return "the stack on which a thread's signals are handled is too small for them (sigaltstack)";
    return std::string("the system refuses them (arch_prctl: ") + std::strerror(errno) + ")";
}
#endif

#endif

#if defined(PENSTOCK_HAVE_ARM)
// Bits of Linux (Documentation/arch/arm64/elf_hwcaps.rst): the headers of an older C library lack the later ones.
bool has_neon() {
    constexpr unsigned long kDotProducts = 1ul << 20;
    return getauxval(AT_HWCAP) & kDotProducts;
}

bool has_neon_i8mm() {
    constexpr unsigned long kInt8Matrices = 1ul << 13, kBf16 = 1ul << 14, kBoth = kInt8Matrices | kBf16;
    return has_neon() && (getauxval(AT_HWCAP2) & kBoth) == kBoth;
}
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

namespace {

struct Variant {
    const char* name;
    const KernelTable& (*table)();
    bool (*is_usable)();
};

// Best first.
constexpr Variant kVariants[] = {
#if defined(PENSTOCK_HAVE_X86)
#if defined(PENSTOCK_HAVE_AMX)
    {"amx", amx::kernel_table, [] { return processor_has_tiles() && why_no_tiles().empty(); }},
#endif
    {"avx512", avx512::kernel_table, has_avx512},
    {"avx512-vnni", avx512_vnni::kernel_table, has_avx512_vnni},
#if defined(PENSTOCK_HAVE_AVX_VNNI)
    {"avx2-vnni", avx2_vnni::kernel_table, has_avx2_vnni},
#endif
    {"avx2", avx2::kernel_table, has_avx2},
#endif
#if defined(PENSTOCK_HAVE_ARM)
    {"neon-i8mm", neon_i8mm::kernel_table, has_neon_i8mm},
    {"neon", neon::kernel_table, has_neon},
#endif
    {"portable", portable::kernel_table, [] { return true; }},
};

}  // namespace

std::vector<std::string> usable_variants() {
    std::vector<std::string> names;
    for (const Variant& variant : kVariants) {
        if (variant.is_usable()) names.push_back(variant.name);
    }
    return names;
}

std::vector<std::string> emulated_variants() {
#if defined(PENSTOCK_HAVE_X86)
    if (has_avx512()) return {"amx-emulated"};
#endif
    return {};
}

const KernelTable& choose_variant(const std::string& name) {
#if defined(PENSTOCK_HAVE_X86)
    if (name == "amx-emulated" && has_avx512()) return amx_emulated::kernel_table();
#endif
    std::string list;
    for (const Variant& variant : kVariants) {
        if (!variant.is_usable()) continue;
        if (name.empty() || name == variant.name) return variant.table();
        list += (list.empty() ? "" : ", ") + std::string(variant.name);
    }
    throw std::invalid_argument("instruction set '" + name + "' is unknown or not usable on this machine; usable are: " + list);
}

}  // namespace penstock
