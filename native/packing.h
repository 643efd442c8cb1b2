// Bytes of a weight file, repacked into the layout of kernels.h. Runs once, at load.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stop_token>
#include <system_error>
#include <vector>

#include "blocks.h"
#include "kernels/kernels.h"

namespace penstock {

constexpr int64_t kHugePage = int64_t{1} << 21;

// Leaves this thread a tenth of a core that others want. On Linux of this thread alone; the system may refuse.
void lower_priority();

// Gives back what `allocate_aligned` gave.
struct FreeMemory {
    size_t mapped_bytes = 0;  // 0: from malloc
    void operator()(uint8_t* memory) const;
};
using Memory = std::unique_ptr<uint8_t, FreeMemory>;

// 64-byte aligned memory, zeroed or (for buffers that are written before they are read) not; or std::bad_alloc. Large memory
// is the system's own pages: they go back to it when freed, and are first touched by the thread that fills them.
Memory allocate_aligned(int64_t bytes, bool zeroed);

// Memory nodes of the machine (NUMA), a bit each, over which pages are spread; 0: the system puts a page beside the thread that touches it
// first. Tasks go to threads only when the step runs, so no node is the right one for a page; spreading uses all nodes'
// bandwidth.
using MemoryNodes = uint64_t;

// Has the system spread pages that were not touched yet. 0, or why it does not, as errno has it: the pages then lie where it puts
// them. EEXIST: the thread has a policy for all of its memory, from whoever started the process (numactl), which stays.
int spread(void* memory, size_t bytes, MemoryNodes nodes);

// Zeroed memory of the system's own pages, huge ones where it has them; or std::bad_alloc. For what is larger than a cache.
Memory allocate_huge(int64_t bytes, MemoryNodes nodes);
// The same in an empty file that lies in memory, where other processes can read it; the file may be closed then.
Memory allocate_in(int fd, int64_t bytes, MemoryNodes nodes);

// Memory for weights, side by side in huge pages where the system has them: a step reads all of it, once, and small
// pages would end the processor's prefetching every 4 KiB.
//
// A virtual machine may have returned its free memory to the host; then a huge page takes milliseconds, as the host supplies
// 4 KiB at a time. Small pages were more likely used lately. So from the first slow page on
// pages are small; `settle` makes them huge when there is time.
class Arena {
  public:
    explicit Arena(MemoryNodes nodes) : nodes_(nodes) {}

    // 64-byte aligned, zeroed, valid as long as the arena; or std::bad_alloc. std::logic_error once it is complete.
    uint8_t* take(int64_t bytes);

    // Nothing more is taken, and what was taken is only read.
    void complete();
    // After that, on any one thread, while others read: replaces small pages by huge ones until all are, or a stop is wanted,
    // or many were (see `kMostMovedPages`).
    void settle(const std::stop_token& stop);

    // Bytes in pages that are to become huge.
    int64_t small_bytes() const { return small_bytes_.load(std::memory_order_relaxed); }
    // As if the next huge page were dear: for tests. std::logic_error once the arena is complete.
    void use_small_pages();

  private:
    void check_open() const;
    struct Range {
        uint8_t *begin, *end;
    };
    void touch(const uint8_t* end);
    void end_chunk();

    MemoryNodes nodes_;
    std::vector<Memory> chunks_;
    std::vector<Range> small_;  // whole huge pages each
    uint8_t* next_ = nullptr;
    uint8_t* touched_ = nullptr;  // where the present chunk's first page begins that was not used yet
    uint8_t* end_ = nullptr;      // of the present chunk
    bool is_dear_ = false;
    bool is_complete_ = false;  // from then on the ranges are the settling thread's alone
    std::atomic<int64_t> small_bytes_{0};
};

// The disk is full, failed, or is not a disk.
struct DiskError : std::system_error {
    using std::system_error::system_error;
};

// Memory for weights that is that of a file: the system takes pages away when it lacks memory, and reads them again when they are
// wanted. No thread waits for a page that `fetch_panels` asked for in time.
class FileArena {
  public:
    // Of an open file that is empty, which nobody else uses. DiskError if it lies in memory itself.
    explicit FileArena(int fd);
    FileArena(const FileArena&) = delete;
    FileArena& operator=(const FileArena&) = delete;
    ~FileArena();

    // As `Arena::take`; its place on the disk is reserved, so that no write fails later for want of room. Or DiskError.
    uint8_t* take(int64_t bytes);
    // Nothing more is taken, and what was taken is only read. All of it is on the disk when this returns, or DiskError.
    void complete();

  private:
    int fd_ = -1;
    int64_t bytes_ = 0;
    std::vector<Memory> parts_;
};

// A file of matrices that were packed before, for reading. Processes that map the same file share its pages.
class MappedFile {
  public:
    // Of an open file, which may be closed then. DiskError.
    explicit MappedFile(int fd);

    // `bytes` of the file from `offset` on, a multiple of 64, valid as long as this. std::invalid_argument unless all of them lie in the file.
    uint8_t* at(int64_t offset, int64_t bytes) const;

  private:
    Memory memory_;
    int64_t bytes_ = 0;
};

// A packed matrix whose memory is that of an arena or of a file.
struct PackedStorage {
    // One of its arrays. In those of a matrix that is fetched by panels, panels follow each other.
    struct Part {
        uint8_t* begin;
        int64_t bytes;
    };

    PackedMatrix matrix{};
    std::vector<Part> parts;
    SourceFormat format{};  // of the file's rows
    uint8_t* quants = nullptr;
    float* row_scales = nullptr;
    int32_t* row_sums = nullptr;
    int32_t* apart = nullptr;
    float* apart_weights = nullptr;
    int64_t bytes = 0;
    bool is_mapped = false;  // packed by an earlier process: only read
};

constexpr int64_t kArrayAlignment = 64;
// Where the next array may begin.
constexpr int64_t aligned(int64_t bytes) { return (bytes + kArrayAlignment - 1) / kArrayAlignment * kArrayAlignment; }

// `take` gives memory as an arena does.
// `by_row`: numbers become kU8Row; their columns are a multiple of 32. `has_apart`: it has columns apart.
PackedStorage allocate_packed(const std::function<uint8_t*(int64_t)>& take, SourceFormat format, int rows, int cols, bool by_row = false,
                              bool has_apart = false);

// The rows from panel `panel0` on, row-major as in the file: blocks of the format, or numbers, which become bf16 or, by row, integers. Quantised rows have
// whole blocks. Panels [panel0, panel1) are written; disjoint ranges may run on different threads. False: a scale is no finite number.
bool pack_panels(PackedStorage& packed, const uint8_t* source, int panel0, int panel1);

// Has the system read panels [panel0, panel1) of a file's, as far as they are not in memory, while the caller goes on.
void fetch_panels(const PackedStorage& packed, int panel0, int panel1);

}  // namespace penstock
