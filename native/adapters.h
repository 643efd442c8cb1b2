// The adapters of one model: what they change of which products, where their factors lie in blocks of the KV cache, and which rows of
// a step have which. Knows no requests.
//
// `AdapterFormat` knows the sites, the products that an adapter may change, and packs factors for them into pages. `Adapters` is the
// engine's: it puts pages into blocks, and computes for a step's rows what `LoraFactors` (kernels/kernels.h) says.

#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "instructions.h"
#include "kv_cache.h"
#include "owned_activation.h"
#include "packing.h"

namespace penstock {

// What an adapter may change: a product with a matrix [rows, cols]; or an embedding, whose columns are tokens.
struct AdapterSite {
    int32_t rows, cols;
    bool is_quantised;            // what the matrix is, and so the factors; false of an embedding
    bool is_embedding;
    std::vector<int32_t> order;   // of the columns, or empty
};

// An adapter's factors for one site, float32: A [rank, cols], B [rows, rank].
struct SiteFactors {
    int32_t site, rank;
    const float *a, *b;
};

// An adapter in pages, each as large as a block of the KV cache but for what aligns it. Any engine of the same model and settings takes it.
struct AdapterImage {
    int64_t page_bytes = 0;
    int32_t num_pages = 0;
    Memory pages{};                // [num_pages][page_bytes]
    std::vector<int32_t> ranks;    // of each site; 0: the adapter leaves it alone
    std::vector<int64_t> places;   // of units: of A, then of B, site by site
};

// Filled call by call while a model is loaded, then only read, by any thread.
class AdapterFormat {
  public:
    AdapterFormat(int64_t block_bytes, int max_rank);
    int add_site(AdapterSite site);

    // std::invalid_argument for factors that the kernels can't compute, or that fit into no page; std::bad_alloc without memory.
    std::shared_ptr<const AdapterImage> pack(const std::vector<SiteFactors>& factors) const;
    // Shapes of a site's units, without places.
    LoraFactors layout(int site, int rank) const;
    int num_a_units(int site, int rank) const;
    int num_b_units(int site, int rank) const;

    const AdapterSite& site(int id) const { return sites_[id]; }
    int num_sites() const { return static_cast<int>(sites_.size()); }
    int64_t page_bytes() const { return page_bytes_; }
    int max_rank() const { return max_rank_; }

  private:
    int64_t a_bytes(int site, int rank, int cols) const;
    int a_panels(int site, int rank) const { return sites_[site].is_embedding ? rank > 0 : ceil_div(rank, kRanks); }
    int64_t b_bytes(const LoraFactors& layout, int panels) const;

    int64_t page_bytes_;
    int max_rank_;
    std::deque<AdapterSite> sites_;
};

class Adapters {
  public:
    Adapters(const EngineShape& shape, const KernelTable& kernels, KvCache& kv, int max_rank);

    // `slot` tells apart sites whose products are computed at the same time by the same rows.
    int add_site(AdapterSite site, Domain domain, int slot);
    const std::shared_ptr<AdapterFormat>& format() const { return format_; }

    // Between steps. std::invalid_argument for a number that is placed, an image of another format or another number of blocks.
    void place(int64_t number, const AdapterImage& image, const std::vector<int32_t>& blocks);
    // Of one that is not placed nothing.
    void drop(int64_t number);

    // std::invalid_argument for a row whose adapter is not placed.
    void begin_step(const StepInput& input);
    // Whether any of a site's rows has an adapter that changes it.
    bool changes(int site, int row0, int row1) const;
    // Of a site, for rows [row0, row1) of its domain: x A^T is kept, and then added to `channels` of panels [begin, end) of out, [., ld].
    void shrink(int site, const Activation& x, int row0, int row1) const;
    void expand(int site, int row0, int row1, int begin, int end, float* out, int64_t ld) const;
    // Of an embedding: scale * A[:, token] B^T is added to rows [row0, row1) of out, [., rows of the site].
    void embed(int site, const int32_t* tokens, float scale, int row0, int row1, float* out) const;

  private:
    struct Placed {
        std::vector<const uint8_t*> units;
        std::vector<LoraFactors> sites;
    };
    struct Segment {
        int32_t first, end;  // rows of a domain that have the same adapter
        const Placed* adapter;
    };
    struct Slot {
        LoraHidden view;
        std::vector<Memory> memory;
    };
    struct SiteUse {
        Domain domain;
        int32_t slot;  // of slots_
    };

    int slot_of(Domain domain, int slot);
    static void add_row(std::vector<Segment>& segments, int32_t first, int32_t end, const Placed* adapter);
    const std::vector<Segment>& segments(Domain domain) const { return domain == Domain::kTokens ? token_segments_ : sample_segments_; }
    // Calls f(factors, first row, end, factors of the site's next rows or null).
    template <typename F>
    void for_segments(int site, int row0, int row1, F f) const;

    EngineShape shape_;
    const KernelTable& kernels_;
    KvCache& kv_;
    std::shared_ptr<AdapterFormat> format_;
    std::vector<SiteUse> uses_;  // of sites
    std::vector<Slot> slots_;
    std::vector<std::pair<Domain, int>> slot_keys_;
    std::unordered_map<int64_t, std::unique_ptr<Placed>> placed_;
    std::vector<Segment> token_segments_, sample_segments_;  // of the step, in order; rows without an adapter are in none
};

}  // namespace penstock
