// The probes in Python: a few numbers in, one number out, measured without the GIL.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "probe.h"

namespace nb = nanobind;
using nb::literals::operator""_a;
using namespace penstock;

void bind_probe(nb::module_& m) {
    nb::enum_<ProbeKind>(m, "ProbeKind")
        .value("INT8", ProbeKind::kInt8)
        .value("BF16", ProbeKind::kBf16)
        .value("FLOAT32", ProbeKind::kFloat32);

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
        "`seconds` each; a multiply-add is two operations. INT8 is the dot product of unsigned by signed bytes (avx512: dpbusd, avx2:\n"
        "maddubs, portable: what the compiler makes of a loop). BF16 is float32 where there is no such instruction.\n"
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
        "the speed of DRAM if that is several times the last-level cache. The best of `repeat` measurements of `seconds` each.");
}
