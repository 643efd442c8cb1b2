// The Python module: collects the bindings of every part. Owns nothing.

#include <nanobind/nanobind.h>

namespace nb = nanobind;

void bind_adapters(nb::module_& m);
void bind_engine(nb::module_& m);
void bind_probe(nb::module_& m);
void bind_rows(nb::module_& m);
void bind_sampler(nb::module_& m);

NB_MODULE(_native, m) {
    m.doc() = "CPU kernels of Penstock.";
    bind_sampler(m);
    bind_adapters(m);
    bind_engine(m);
    bind_probe(m);
    bind_rows(m);
}
