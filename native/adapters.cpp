#include "adapters.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "bf16.h"

namespace penstock {

namespace {

constexpr int kUnitCols = 512;          // most columns of a unit of A: what is left of a page is small
constexpr int64_t kUnitBytes = 4096;    // about that many of a unit of B
constexpr int64_t kLine = 64;
constexpr float kLargestFactor = 1e6f;  // of A: its scales times those of activations are numbers
constexpr float kSmallestScale8 = 0x1p-40f;

int64_t in_lines(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// The smallest bf16 that is no smaller, of a number that is.
uint16_t bf16_above(float x) { return static_cast<uint16_t>((std::bit_cast<uint32_t>(x) + 0xFFFF) >> 16); }

// Scale of some numbers of at most that size.
uint16_t scale_of(float largest) { return bf16_above(std::max(largest / 127.0f, kSmallestScale8)); }

float largest_of(const float* values, int count) {
    float largest = 0.0f;
    for (int i = 0; i < count; ++i) largest = std::max(largest, std::fabs(values[i]));
    return largest;
}

// Numbers as 8-bit integers, to the nearest, with 128 more than their number; no branches, so that several are rounded at once.
void round_all(const float* values, int count, float inverse, uint8_t* out) {
    constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: a sum with it is an integer
    for (int i = 0; i < count; ++i) out[i] = static_cast<uint8_t>(static_cast<int32_t>(values[i] * inverse + kMagic - kMagic) + 128);
}

// Factors of one site on their way into units, which are zeros before.
struct Packer {
    const AdapterSite& site;
    const SiteFactors& f;

    // Eight ranks from `rank0` on, columns [first, first + cols).
    void pack_a(int rank0, int first, int cols, uint8_t* to) const {
        float values[kUnitCols];
        uint8_t q[kUnitCols];
        uint8_t* const scales = to + int64_t{cols} * kRanks;
        for (int r = 0; r < kRanks; ++r) {
            std::fill_n(values, cols, 0.0f);
            if (rank0 + r < f.rank) {
                const float* const row = f.a + int64_t{rank0 + r} * site.cols;
                for (int i = 0; i < cols; ++i) values[i] = row[site.order.empty() ? first + i : site.order[static_cast<size_t>(first + i)]];
            }
            if (!site.is_quantised) {
                for (int i = 0; i < cols; ++i) {
                    const uint16_t value = to_bf16(values[i]);
                    std::memcpy(to + i / 4 * 64 + r * 8 + i % 4 * 2, &value, 2);
                }
                continue;
            }
            for (int begin = 0; begin < cols; begin += kScaledCols) {
                const int count = std::min(cols - begin, kScaledCols);
                const uint16_t scale = scale_of(largest_of(values + begin, count));
                round_all(values + begin, count, 1.0f / from_bf16(scale), q + begin);
                for (int half = 0; half < 2; ++half) std::memcpy(scales + begin / kScaledCols * 32 + r * 4 + half * 2, &scale, 2);
            }
            for (int i = 0; i < cols; i += 8) std::memcpy(to + i / 8 * 64 + r * 8, q + i, 8);
        }
    }

    // Tokens [first, first + count) of an embedding.
    void pack_tokens(int first, int count, uint8_t* to) const {
        for (int i = 0; i < count; ++i) {
            for (int r = 0; r < f.rank; ++r, to += 2) {
                const uint16_t value = to_bf16(f.a[int64_t{r} * site.cols + first + i]);
                std::memcpy(to, &value, 2);
            }
        }
    }

    // Panels [first, first + panels) of sixteen rows.
    void pack_b(int first, int panels, int panel_bytes, uint8_t* to) const {
        float values[kMostRank];
        uint8_t q[kMostRank];
        uint8_t* const scales = to + int64_t{panels} * panel_bytes;
        const int padded = (f.rank + 3) / 4 * 4;
        for (int lane = 0; lane < panels * kPanel; ++lane) {
            const int row = first * kPanel + lane;
            uint8_t* const panel = to + int64_t{lane / kPanel} * panel_bytes;
            std::fill_n(values, padded, 0.0f);
            if (row < site.rows) std::copy_n(f.b + int64_t{row} * f.rank, f.rank, values);
            if (!site.is_quantised) {
                for (int j = 0; j < f.rank; ++j) {
                    const uint16_t value = to_bf16(values[j]);
                    std::memcpy(panel + (j * kPanel + lane % kPanel) * 2, &value, 2);
                }
                continue;
            }
            const uint16_t scale = scale_of(largest_of(values, f.rank));
            round_all(values, padded, 1.0f / from_bf16(scale), q);
            for (int j = 0; j < padded; j += 4) std::memcpy(panel + j * kPanel + lane % kPanel * 4, q + j, 4);
            std::memcpy(scales + int64_t{lane} * 2, &scale, 2);
        }
    }
};

}  // namespace

// A block may begin anywhere in a line: then there is a line less of room.
AdapterFormat::AdapterFormat(int64_t block_bytes, int max_rank)
    : page_bytes_(block_bytes % kLine == 0 ? block_bytes : std::max<int64_t>(0, block_bytes - (kLine - 1)) / kLine * kLine), max_rank_(max_rank) {
    if (max_rank < 1 || max_rank > kMostRank) throw std::invalid_argument("the rank of adapters must be from 1 to 256");
}

int AdapterFormat::add_site(AdapterSite site) {
    sites_.push_back(std::move(site));
    return num_sites() - 1;
}

int64_t AdapterFormat::a_bytes(int site, int rank, int cols) const {
    if (sites_[site].is_embedding) return in_lines(int64_t{2} * rank * cols);
    if (!sites_[site].is_quantised) return int64_t{ceil_div(cols, 4)} * 64;
    return in_lines(int64_t{cols} * kRanks + ceil_div(cols, kScaledCols) * 2 * kPanel);
}

int64_t AdapterFormat::b_bytes(const LoraFactors& layout, int panels) const {
    return in_lines(int64_t{panels} * (layout.panel_bytes_of_b() + (layout.is_quantised ? 2 * kPanel : 0)));
}

LoraFactors AdapterFormat::layout(int site, int rank) const {
    const AdapterSite& s = sites_[site];
    LoraFactors f{s.is_quantised, rank, kUnitCols, 1, nullptr, nullptr};
    const int64_t wanted = std::min(kUnitBytes, page_bytes_);
    if (s.is_embedding) {
        f.unit_cols = static_cast<int32_t>(std::max<int64_t>(1, wanted / (2 * std::max(1, rank))));
    } else {
        while (f.unit_cols > kScaledCols && a_bytes(site, rank, f.unit_cols) > page_bytes_) f.unit_cols -= kScaledCols;
    }
    while (f.unit_panels < ceil_div(s.rows, kPanel) && b_bytes(f, f.unit_panels + 1) <= wanted) ++f.unit_panels;
    return f;
}

int AdapterFormat::num_a_units(int site, int rank) const {
    return a_panels(site, rank) * ceil_div(sites_[site].cols, layout(site, rank).unit_cols);
}

int AdapterFormat::num_b_units(int site, int rank) const {
    return rank == 0 ? 0 : ceil_div(ceil_div(sites_[site].rows, kPanel), layout(site, rank).unit_panels);
}

std::shared_ptr<const AdapterImage> AdapterFormat::pack(const std::vector<SiteFactors>& factors) const {
    auto image = std::make_shared<AdapterImage>();
    image->page_bytes = page_bytes_;
    image->ranks.assign(sites_.size(), 0);
    std::vector<const SiteFactors*> by_site(sites_.size(), nullptr);
    for (const SiteFactors& f : factors) {
        const AdapterSite& s = sites_.at(static_cast<size_t>(f.site));
        if (f.rank < 1 || f.rank > max_rank_) throw std::invalid_argument("the rank of the adapter is beyond what was set");
        for (int64_t i = 0; i < int64_t{f.rank} * s.cols; ++i) {
            if (!(std::fabs(f.a[i]) < kLargestFactor)) throw std::invalid_argument("a factor of the adapter is no number, or beyond 1e6");
        }
        for (int64_t i = 0; i < int64_t{f.rank} * s.rows; ++i) {
            if (!std::isfinite(f.b[i])) throw std::invalid_argument("a factor of the adapter is no finite number");
        }
        image->ranks[static_cast<size_t>(f.site)] = f.rank;
        by_site[static_cast<size_t>(f.site)] = &f;
    }
    int64_t page = 0, used = 0;
    const auto take = [&](int64_t bytes) {
        if (bytes > page_bytes_) throw std::invalid_argument("a part of the adapter is larger than a block of the KV cache");
        if (used + bytes > page_bytes_) {
            ++page;
            used = 0;
        }
        image->places.push_back(page * page_bytes_ + used);
        used += bytes;
    };
    // First where everything lies, then the memory for it.
    const auto for_units = [&](auto of_a, auto of_b) {
        for (int site = 0; site < num_sites(); ++site) {
            const int rank = image->ranks[static_cast<size_t>(site)];
            if (rank == 0) continue;
            const LoraFactors f = layout(site, rank);
            const int cols = sites_[site].cols, panels = ceil_div(sites_[site].rows, kPanel);
            for (int p = 0; p < a_panels(site, rank); ++p) {
                for (int first = 0; first < cols; first += f.unit_cols) of_a(site, p * kRanks, first, std::min(f.unit_cols, cols - first));
            }
            for (int first = 0; first < panels; first += f.unit_panels) of_b(site, f, first, std::min(f.unit_panels, panels - first));
        }
    };
    for_units([&](int site, int, int, int cols) { take(a_bytes(site, image->ranks[static_cast<size_t>(site)], cols)); },
              [&](int, const LoraFactors& f, int, int panels) { take(b_bytes(f, panels)); });
    image->num_pages = static_cast<int32_t>(page) + 1;
    image->pages = allocate_aligned(image->num_pages * page_bytes_, true);
    size_t unit = 0;
    const auto next = [&] { return image->pages.get() + image->places[unit++]; };
    for_units(
        [&](int site, int rank0, int first, int cols) {
            const Packer packer{sites_[site], *by_site[static_cast<size_t>(site)]};
            if (sites_[site].is_embedding) {
                packer.pack_tokens(first, cols, next());
            } else {
                packer.pack_a(rank0, first, cols, next());
            }
        },
        [&](int site, const LoraFactors& f, int first, int panels) {
            Packer{sites_[site], *by_site[static_cast<size_t>(site)]}.pack_b(first, panels, f.panel_bytes_of_b(), next());
        });
    return image;
}

Adapters::Adapters(const EngineShape& shape, const KernelTable& kernels, KvCache& kv, int max_rank)
    : shape_(shape), kernels_(kernels), kv_(kv), format_(std::make_shared<AdapterFormat>(kv.block_bytes(), max_rank)) {}

int Adapters::slot_of(Domain domain, int slot) {
    const std::pair key{domain, slot};
    const auto found = std::find(slot_keys_.begin(), slot_keys_.end(), key);
    if (found != slot_keys_.end()) return static_cast<int>(found - slot_keys_.begin());
    const int64_t rows = domain == Domain::kSamples ? shape_.max_logits() : shape_.max_step_tokens;
    Slot made;
    made.view.ld = ceil_div(format_->max_rank(), kRanks) * kRanks;
    const auto allocate = [&](auto*& field, int64_t count) {
        made.memory.push_back(allocate_aligned(count * static_cast<int64_t>(sizeof(*field)), false));
        field = reinterpret_cast<std::remove_reference_t<decltype(field)>>(made.memory.back().get());
    };
    allocate(made.view.q, rows * made.view.ld);
    allocate(made.view.scale, rows);
    allocate(made.view.start, rows);
    allocate(made.view.values, rows * made.view.ld);
    slot_keys_.push_back(key);
    slots_.push_back(std::move(made));
    return static_cast<int>(slots_.size()) - 1;
}

int Adapters::add_site(AdapterSite site, Domain domain, int slot) {
    uses_.push_back({domain, slot_of(domain, slot)});
    return format_->add_site(std::move(site));
}

void Adapters::place(int64_t number, const AdapterImage& image, const std::vector<int32_t>& blocks) {
    if (number < 1 || placed_.contains(number)) throw std::invalid_argument("the adapter is placed already, or has no number");
    if (image.page_bytes != format_->page_bytes() || image.ranks.size() != static_cast<size_t>(format_->num_sites()) ||
        blocks.size() != static_cast<size_t>(image.num_pages)) {
        throw std::invalid_argument("the adapter was packed for another engine, or has another number of pages than blocks");
    }
    std::vector<const uint8_t*> pages;
    for (const int32_t block : blocks) pages.push_back(kv_.write_page(block, image.pages.get() + pages.size() * image.page_bytes, image.page_bytes));
    auto placed = std::make_unique<Placed>();
    for (const int64_t place : image.places) {
        placed->units.push_back(pages[static_cast<size_t>(place / image.page_bytes)] + place % image.page_bytes);
    }
    const uint8_t* const* units = placed->units.data();
    for (int site = 0; site < format_->num_sites(); ++site) {
        const int rank = image.ranks[static_cast<size_t>(site)];
        LoraFactors f = format_->layout(site, rank);
        f.a = units;
        f.b = units += format_->num_a_units(site, rank);
        units += format_->num_b_units(site, rank);
        placed->sites.push_back(f);
    }
    placed_.emplace(number, std::move(placed));
}

void Adapters::drop(int64_t number) { placed_.erase(number); }

void Adapters::add_row(std::vector<Segment>& segments, int32_t first, int32_t end, const Placed* adapter) {
    if (!segments.empty() && segments.back().adapter == adapter && segments.back().end == first) {
        segments.back().end = end;
    } else {
        segments.push_back({first, end, adapter});
    }
}

void Adapters::begin_step(const StepInput& input) {
    token_segments_.clear();
    sample_segments_.clear();
    if (input.adapter_of_slot == nullptr) return;
    int sample = 0;
    for (int row = 0; row < input.num_rows; ++row) {
        const int32_t first = input.query_start_loc[row], end = input.query_start_loc[row + 1];
        const int first_sample = sample;
        while (sample < input.num_logits && input.logit_tokens[sample] < end) ++sample;
        const int64_t number = input.adapter_of_slot[input.row_slots[row]];
        if (number == 0) continue;
        const auto found = placed_.find(number);
        if (found == placed_.end()) throw std::invalid_argument("a row of the step has an adapter that is not placed");
        add_row(token_segments_, first, end, found->second.get());
        if (sample > first_sample) add_row(sample_segments_, first_sample, sample, found->second.get());
    }
}

template <typename F>
void Adapters::for_segments(int site, int row0, int row1, F f) const {
    const std::vector<Segment>& all = segments(uses_[site].domain);
    if (all.empty()) return;
    auto segment = std::partition_point(all.begin(), all.end(), [&](const Segment& s) { return s.end <= row0; });
    for (; segment != all.end() && segment->first < row1; ++segment) {
        const LoraFactors& factors = segment->adapter->sites[site];
        if (factors.rank == 0) continue;
        const LoraFactors* const next = segment + 1 != all.end() ? &segment[1].adapter->sites[site] : nullptr;
        f(factors, std::max(row0, segment->first), std::min(row1, segment->end), next);
    }
}

bool Adapters::changes(int site, int row0, int row1) const {
    bool found = false;
    for_segments(site, row0, row1, [&](const LoraFactors&, int, int, const LoraFactors*) { found = true; });
    return found;
}

void Adapters::shrink(int site, const Activation& x, int row0, int row1) const {
    const LoraHidden& hidden = slots_[uses_[site].slot].view;
    for_segments(site, row0, row1, [&](const LoraFactors& f, int first, int end, const LoraFactors* next) {
        kernels_.lora_shrink(f, x, first, end, hidden, next);
    });
}

void Adapters::expand(int site, int row0, int row1, int begin, int end, float* out, int64_t ld) const {
    const LoraHidden& hidden = slots_[uses_[site].slot].view;
    const int channels = format_->site(site).rows;
    for_segments(site, row0, row1, [&](const LoraFactors& f, int first, int last, const LoraFactors*) {
        kernels_.lora_expand(f, hidden, first, last, begin, end, channels, out, ld);
    });
}

void Adapters::embed(int site, const int32_t* tokens, float scale, int row0, int row1, float* out) const {
    const LoraHidden& hidden = slots_[uses_[site].slot].view;
    const int channels = format_->site(site).rows;
    for_segments(site, row0, row1, [&](const LoraFactors& f, int first, int last, const LoraFactors*) {
        for (int row = first; row < last; ++row) {
            const int unit = tokens[row] / f.unit_cols, at = tokens[row] % f.unit_cols;
            const auto* const a = reinterpret_cast<const uint16_t*>(f.a[unit]) + int64_t{at} * f.rank;
            for (int j = 0; j < f.rank; ++j) hidden.values[int64_t{row} * hidden.ld + j] = scale * from_bf16(a[j]);
        }
        kernels_.lora_expand(f, hidden, first, last, 0, ceil_div(channels, kPanel), channels, out, channels);
    });
}

}  // namespace penstock
