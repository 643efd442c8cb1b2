// The weights of one model, by id: matrices packed for products, tables of which single rows are read, vectors, and
// orders of columns.
//
// Filled call by call while a model is loaded, then only read. Knows no program.

#pragma once

#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "floats.h"
#include "packing.h"
#include "team.h"

namespace penstock {

class Weights {
  public:
    explicit Weights(MemoryNodes nodes) : arena_(nodes) {}

    struct Table {
        SourceFormat format;
        int32_t rows, cols;
        int64_t row_bytes;
        const uint8_t* source;
    };

    // Matrices of which a step reads only a part lie in this file from now on: FileArena says more.
    void keep_partly_read_in(int fd) { file_ = std::make_unique<FileArena>(fd); }
    // Memory for a matrix, whose rows are packed by `pack_rows`: all of them, before the first step. DiskError, see above.
    // `by_row`: floats become kU8Row; then `apart` may name kApart columns that are multiplied apart.
    int add_matrix(SourceFormat format, int rows, int cols, bool is_partly_read = false, bool by_row = false, const std::vector<int>& apart = {});
    // Matrices of `map_matrix` lie in this file, which may be closed then. DiskError.
    void map_file(int fd) { mapped_ = std::make_unique<MappedFile>(fd); }
    // A matrix that was packed before: its arrays lie from `offset` of the mapped file on, each from a multiple of 64. std::invalid_argument
    // unless the file has all of them, they take so many bytes, and the columns apart are the matrix's.
    int map_matrix(SourceFormat format, int rows, int cols, bool by_row, bool has_apart, int64_t offset, int64_t bytes);
    // Rows as in the file, packed by the whole team in turns of the account. `first_row` begins a panel, and the last one ends one or is the
    // matrix's last.
    void pack_rows(Team& team, Account& account, int matrix, int first_row, int num_rows, const uint8_t* source);
    // A matrix of which a step reads single rows: it stays where and as it is, and must outlive this. It is not read now,
    // so damage shows when a row is looked up: a group whose scale is no finite number is NaN, and so are that request's logits.
    int add_table(SourceFormat format, int rows, int cols, const uint8_t* source);
    // Every NaN gets the bits of `NAN`, as in a table: no rounding makes a number of them.
    int add_vector(const float* values, int64_t count);
    // For each column that a matrix multiplies, the column of a buffer. std::invalid_argument unless all are in [0, count).
    int add_order(const int32_t* columns, int64_t count);
    int add_integers(const int16_t* values, int64_t count);
    // The weights are complete: a thread of low priority sees to their pages (Arena). A matrix that comes later: std::logic_error.
    // DiskError if the file can't be written.
    void settle();
    bool is_in_file(int id) const { return is_in_file_[id]; }

    // The parts of a matrix: its format in the file, rows, columns and bytes. std::out_of_range for an unknown id.
    const PackedStorage& packed(int id) const { return matrices_.at(id); }
    const PackedMatrix& matrix(int id) const { return matrices_[id].matrix; }
    const Table& table(int id) const { return tables_[id]; }
    // Null for -1.
    const float* vector(int id) const { return id < 0 ? nullptr : vectors_[id].data(); }

    const int32_t* order(int id) const { return orders_[id].data(); }

    const int16_t* integers(int id) const { return integers_[id].data(); }
    int64_t num_integers(int id) const { return static_cast<int64_t>(integers_.at(id).size()); }

    int64_t bytes() const { return bytes_; }
    // Those of them that lie in the file.
    int64_t file_bytes() const { return file_bytes_; }
    int64_t small_page_bytes() const { return arena_.small_bytes(); }
    void use_small_pages() { arena_.use_small_pages(); }  // for tests

  private:
    Arena arena_;
    std::unique_ptr<FileArena> file_;
    std::unique_ptr<MappedFile> mapped_;
    std::vector<PackedStorage> matrices_;
    std::vector<bool> is_in_file_;  // by matrix
    std::vector<Table> tables_;
    std::vector<Floats> vectors_;
    std::vector<std::vector<int32_t>> orders_;
    std::vector<std::vector<int16_t>> integers_;
    int64_t bytes_ = 0, file_bytes_ = 0;
    std::jthread settler_;  // ends before anything else
};

}  // namespace penstock
