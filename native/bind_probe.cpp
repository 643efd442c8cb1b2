// The probes in Python: a few numbers in, one number out, measured without the GIL.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <stdexcept>

#include "cpu.h"
#include "probe.h"

namespace nb = nanobind;
using nb::literals::operator""_a;
using namespace penstock;

using Lines = nb::ndarray<uint8_t, nb::shape<16, 64>, nb::c_contig, nb::device::cpu>;

void bind_probe(nb::module_& m) {
    nb::enum_<ProbeKind>(m, "ProbeKind")
        .value("INT8", ProbeKind::kInt8)
        .value("BF16", ProbeKind::kBf16)
        .value("FLOAT32", ProbeKind::kFloat32)
        .value("BF16_TILES", ProbeKind::kBf16Tiles);

    m.def(
        "tile_product",
        [](int rows, int k, const Lines& a, const Lines& b, Lines c, const std::string& variant) {
            const KernelTable& kernels = choose_variant(variant);
            if (!kernels.tile_product) throw std::invalid_argument("variant '" + variant + "' has no tiles");
            if (rows < 1 || rows > 16 || k < 1 || k > 16) throw std::invalid_argument("a tile has 1 to 16 rows");
            kernels.tile_product(rows, k, a.data(), b.data(), c.data());
        },
        "rows"_a, "k"_a, "a"_a, "b"_a, "c"_a, nb::kw_only(), "variant"_a,
        "One operation on tiles, each uint8 [16, 64]: c += a b, of which `rows` rows of a and c count, and `k` rows of b. For tests.");

    const ProbeOptions usual;
    m.def(
        "peak_gops",
        [](ProbeKind kind, int num_threads, const std::string& variant, double seconds, int repeat, bool cpu_time) {
            nb::gil_scoped_release release;
            return peak_gops(kind, {num_threads, variant, seconds, repeat, cpu_time});
        },
        "kind"_a, nb::kw_only(), "num_threads"_a, "variant"_a = usual.variant, "seconds"_a = usual.seconds,
        "repeat"_a = usual.repeat, "cpu_time"_a = usual.cpu_time,
        "1e9 operations per second that `num_threads` threads reach together in registers, the best of `repeat` measurements of\n"
        "`seconds` each; a multiply-add is two operations. INT8 is the dot product of bytes (avx512: dpbusd, avx2: maddubs, neon: sdot,\n"
        "neon-i8mm: smmla, portable: what the compiler makes of a loop). Without an instruction for BF16, and on Arm,\n"
        "that kind measures float32.\n"
        "With `cpu_time`, only the time counts that a thread had a processor.");
    m.def(
        "peak_read_gbs",
        [](int num_threads, int64_t num_bytes, const std::string& variant, double seconds, int repeat, bool cpu_time) {
            nb::gil_scoped_release release;
            return peak_read_gbs(num_bytes, {num_threads, variant, seconds, repeat, cpu_time});
        },
        nb::kw_only(), "num_threads"_a, "num_bytes"_a = int64_t{1} << 28, "variant"_a = usual.variant, "seconds"_a = usual.seconds,
        "repeat"_a = usual.repeat, "cpu_time"_a = usual.cpu_time,
        "1e9 bytes per second that `num_threads` threads read together, each in order from its own part of `num_bytes` of memory:\n"
        "the speed of DRAM if that is several times what the caches hold. The best of `repeat` measurements of `seconds` each.");
}
