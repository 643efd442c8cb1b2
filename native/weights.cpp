#include "weights.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <new>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace penstock {

namespace {

constexpr int kPackingTasksPerMember = 8;  // a member that loses its core delays the others by one of them
constexpr int64_t kValuesPerTurn = 1 << 20;  // for each member: some milliseconds, for which other models wait
constexpr int64_t kSmallestPage = 4096;

// Have the system read what is not in memory yet.
void fetch(const uint8_t* source, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += kSmallestPage) static_cast<void>(*const_cast<const volatile uint8_t*>(source + at));
}

// Panels [first, first + panels) of a matrix, in about equal parts.
struct Packing final : Work {
    PackedStorage& packed;
    const uint8_t* source;
    int first, panels, num_parts;
    std::atomic<bool> finite{true};

    Packing(PackedStorage& p, const uint8_t* s, int first_panel, int num_panels, int parts)
        : packed(p), source(s), first(first_panel), panels(num_panels), num_parts(std::min(num_panels, parts)) {}

    void run_task(int, int part, int) override {
        const auto begin = static_cast<int>(int64_t{panels} * part / num_parts), end = static_cast<int>(int64_t{panels} * (part + 1) / num_parts);
        const uint8_t* const rows = source + begin * source_bytes(packed.format, kPanel, packed.matrix.cols);
        if (!pack_panels(packed, rows, first + begin, first + end)) finite.store(false, std::memory_order_relaxed);
    }
};

void check_apart(const int* columns, size_t count, int cols) {
    if (count != 0 && count != kApart) throw std::invalid_argument("a matrix has four columns apart, or none");
    for (size_t i = 0; i < count; ++i) {
        if (columns[i] < 0 || columns[i] >= cols) throw std::invalid_argument("a column apart is not one of the matrix's");
    }
}

}  // namespace

int Weights::add_matrix(SourceFormat format, int rows, int cols, bool is_partly_read, bool by_row, const std::vector<int>& apart) {
    check_apart(apart.data(), apart.size(), cols);
    const bool is_in_file = is_partly_read && file_;
    const auto take = [&](int64_t bytes) { return is_in_file ? file_->take(bytes) : arena_.take(bytes); };
    matrices_.push_back(allocate_packed(take, format, rows, cols, by_row, !apart.empty()));
    if (matrices_.back().apart) std::copy(apart.begin(), apart.end(), matrices_.back().apart);
    is_in_file_.push_back(is_in_file);
    bytes_ += matrices_.back().bytes;
    if (is_in_file) file_bytes_ += matrices_.back().bytes;
    return static_cast<int>(matrices_.size()) - 1;
}

int Weights::map_matrix(SourceFormat format, int rows, int cols, bool by_row, bool has_apart, int64_t offset, int64_t bytes) {
    if (!mapped_) throw std::invalid_argument("no file of packed weights is mapped");
    int64_t end = offset;
    const auto take = [&](int64_t part_bytes) {
        uint8_t* const part = mapped_->at(end, part_bytes);
        end += aligned(part_bytes);
        return part;
    };
    PackedStorage packed = allocate_packed(take, format, rows, cols, by_row, has_apart);
    if (end - offset != bytes) throw std::invalid_argument("the matrix has another size in the file of packed weights");
    if (packed.apart) check_apart(packed.apart, kApart, cols);
    packed.is_mapped = true;
    bytes_ += packed.bytes;
    matrices_.push_back(std::move(packed));
    is_in_file_.push_back(false);
    return static_cast<int>(matrices_.size()) - 1;
}

void Weights::pack_rows(Team& team, Account& account, int matrix, int first_row, int num_rows, const uint8_t* source) {
    PackedStorage& packed = matrices_.at(matrix);
    const int64_t panel_values = int64_t{kPanel} * packed.matrix.cols;
    const int rows_per_turn = kPanel * static_cast<int>(std::max<int64_t>(1, kValuesPerTurn * team.size() / panel_values));
    for (int row = 0, rows; row < num_rows; row += rows) {
        rows = std::min(rows_per_turn, num_rows - row);
        const uint8_t* const part = source + row * source_bytes(packed.format, 1, packed.matrix.cols);
        fetch(part, source_bytes(packed.format, rows, packed.matrix.cols));  // not in the turn: others would wait for the disk
        Packing packing(packed, part, (first_row + row) / kPanel, (rows + kPanel - 1) / kPanel, kPackingTasksPerMember * team.size());
        team.run(account, packing, {packing.num_parts});
        if (!packing.finite.load(std::memory_order_relaxed)) throw std::invalid_argument("a scale is no finite number: the file is damaged");
    }
}

int Weights::add_table(SourceFormat format, int rows, int cols, const uint8_t* source) {
    tables_.push_back({format, rows, cols, source_bytes(format, rows, cols) / rows, source});
    return static_cast<int>(tables_.size()) - 1;
}

int Weights::add_vector(const float* values, int64_t count) {
    vectors_.emplace_back(values, values + count);
    for (float& x : vectors_.back()) {
        if (std::isnan(x)) x = NAN;
    }
    return static_cast<int>(vectors_.size()) - 1;
}

int Weights::add_order(const int32_t* columns, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        if (columns[i] < 0 || columns[i] >= count) throw std::invalid_argument("an order names a column that is not there");
    }
    orders_.emplace_back(columns, columns + count);
    return static_cast<int>(orders_.size()) - 1;
}

int Weights::add_integers(const int16_t* values, int64_t count) {
    integers_.emplace_back(values, values + count);
    bytes_ += count * static_cast<int64_t>(sizeof(int16_t));
    return static_cast<int>(integers_.size()) - 1;
}

void Weights::settle() {
    if (settler_.joinable()) return;
    if (file_) file_->complete();
    arena_.complete();
    if (arena_.small_bytes() == 0) return;
    try {
        settler_ = std::jthread([this](const std::stop_token& stop) {
            lower_priority();
            try {
                arena_.settle(stop);
            } catch (const std::bad_alloc&) {  // then the rest stays in small pages
            }
        });
    } catch (const std::system_error&) {  // no thread: then all stays in small pages, which serve as well, but slower
    }
}

}  // namespace penstock
