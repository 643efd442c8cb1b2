// Packs adapters for Python: factors in, pages out, on any thread and without the GIL.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <tuple>
#include <vector>

#include "adapters.h"

namespace nb = nanobind;
using nb::literals::operator""_a;
using namespace penstock;

namespace {

using Factor = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::shared_ptr<const AdapterImage> pack(const AdapterFormat& self, const std::vector<std::tuple<int, Factor, Factor>>& factors) {
    std::vector<SiteFactors> found;
    for (const auto& [site, a, b] : factors) {
        if (site < 0 || site >= self.num_sites()) throw std::invalid_argument("no such site");
        const AdapterSite& s = self.site(site);
        if (a.shape(1) != static_cast<size_t>(s.cols) || b.shape(0) != static_cast<size_t>(s.rows) || a.shape(0) != b.shape(1)) {
            throw std::invalid_argument("the factors have not the shape of the site");
        }
        found.push_back({site, static_cast<int32_t>(a.shape(0)), a.data(), b.data()});
    }
    nb::gil_scoped_release release;
    return self.pack(found);
}

}  // namespace

void bind_adapters(nb::module_& m) {
    nb::class_<AdapterImage>(m, "AdapterImage", "An adapter in pages, for engines of one model and its settings.")
        .def_ro("num_pages", &AdapterImage::num_pages)
        .def_prop_ro("num_bytes", [](const AdapterImage& self) { return self.num_pages * self.page_bytes; });
    nb::class_<AdapterFormat>(m, "AdapterFormat", "Packs adapters for an engine, which need not live any more; for any thread.")
        .def("pack", &pack, "factors"_a, "(site, A, B) each, float32 [rank, cols] and [rows, rank]. ValueError for what can't be packed.");
}
