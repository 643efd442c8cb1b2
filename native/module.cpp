// The Python module: collects the bindings of every part. Owns nothing.
//
// It leaves the GIL of a free-threaded Python off, and its classes take no locks for that: an engine and its rows belong to one thread at
// a time, the engine's. A team has a mutex, the time of an account is atomic, and what packs adapters does not change.

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
