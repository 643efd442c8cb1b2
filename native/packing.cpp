#include "packing.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#include "bf16.h"

namespace penstock {

namespace {

// The address sanitizer knows the ends of what malloc gives. So all of it comes from there, each array by itself.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kIsWatched = true;
#else
constexpr bool kIsWatched = false;
#endif

constexpr size_t kMapFromBytes = kIsWatched ? SIZE_MAX : size_t{1} << 18;  // malloc keeps freed pieces of this size, once it has seen a few
constexpr size_t kChunkBytes = size_t{1} << 27;  // of an arena; of what is not used less than a page is touched
constexpr int64_t kDearPageNs = 1'000'000;       // a huge page takes 0.1 ms, 512 small ones 0.5 ms
constexpr uintptr_t kFetchedBytes = 1 << 17;     // of one wish Linux reads as much as its read-ahead allows: 128 KiB, unless told otherwise
constexpr int64_t kMostMovedPages = 16384;       // each is a mapping of its own, of which Linux grants a process 65,530; 32 GiB
constexpr uint16_t kSmallestF16 = 1;  // 2^-24

[[noreturn]] void throw_disk_error(int error, const char* what) { throw DiskError(error, std::generic_category(), what); }

// As `mmap`, from the begin of a huge page on. `bytes` are whole pages.
void* map_at_huge_page(size_t bytes, int protection, int flags, int fd) {
    void* const whole = mmap(nullptr, bytes + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (whole == MAP_FAILED) return whole;
    uint8_t* const begin = static_cast<uint8_t*>(whole);
    const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(whole) % kHugePage) % kHugePage;
    if (before > 0) munmap(begin, before);
    munmap(begin + before + bytes, kHugePage - before);
    void* const memory = mmap(begin + before, bytes, protection, flags | MAP_FIXED, fd, 0);
    if (memory == MAP_FAILED) munmap(begin + before, bytes);
    return memory;
}

int64_t thread_cpu_ns() {
    timespec t{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

// The byte of a q that stands for zero, or in a table for the value nearest to it: see `mend_zero`.
uint8_t zero_byte(WeightKind kind) { return is_nibbles(kind) ? 0x88 : 0x80; }

// To the nearest, ties to even; no branches, so that sixteen are converted at once.
uint16_t to_f16(float x) {
    const auto bits = std::bit_cast<uint32_t>(x), size = bits & 0x7FFFFFFFu, sign = bits >> 16 & 0x8000u;
    const auto subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(size) + 0.5f) - 0x3F000000u;  // rounded to multiples of 2^-24
    const uint32_t normal = (size + 0xC8000FFFu + (size >> 13 & 1u)) >> 13;                           // exponent - 112, and rounding
    const uint32_t finite = size < 0x38800000u ? subnormal : normal;
    return static_cast<uint16_t>(sign | (size >= 0x47800000u ? 0x7C00u : finite));
}

// Where a group of a panel goes.
struct Target {
    uint8_t* quants;     // 4 or 8 chunks of 64 bytes
    uint16_t* scales;    // [16]
    uint16_t* offsets;   // [16], every other one; null if not affine
};

// A d of zero is not representable: such a group becomes zeros, or the smallest number of a table without zero, times the smallest
// d, so that a sum of d times something and m is as exact as m.
void mend_zero(Group& g, uint16_t& d, const BlockFormat& format) {
    d = kSmallestF16;
    std::memset(g.q, zero_byte(format.kind), kGroup);
}

// One group of the sixteen rows of a panel; false if a scale is no finite number.
bool pack_group(Group (*rows)[kMaxBlockGroups], int group, const BlockFormat& format, const Target& to) {
    const WeightKind kind = format.kind;
    float d[kPanel], m[kPanel];
    uint16_t scales[kPanel];
    for (int lane = 0; lane < kPanel; ++lane) {
        d[lane] = rows[lane][group].d;
        m[lane] = rows[lane][group].m;
    }
    for (int lane = 0; lane < kPanel; ++lane) scales[lane] = to_f16(d[lane]);
    bool finite = true, mend = false;
    for (int lane = 0; lane < kPanel; ++lane) {
        finite &= (scales[lane] & 0x7C00u) != 0x7C00u;
        mend |= (scales[lane] & 0x7FFFu) == 0;
    }
    if (mend) {
        for (int lane = 0; lane < kPanel; ++lane) {
            if ((scales[lane] & 0x7FFFu) == 0) mend_zero(rows[lane][group], scales[lane], format);
        }
    }
    std::memcpy(to.scales, scales, sizeof(scales));
    for (int c = 0; c < (is_nibbles(kind) ? 4 : 8); ++c) {
        for (int lane = 0; lane < kPanel; ++lane) std::memcpy(to.quants + c * 64 + lane * 4, rows[lane][group].q + c * 4, 4);
    }
    if (to.offsets) {
        for (int lane = 0; lane < kPanel; ++lane) {
            finite &= std::fabs(m[lane]) < 1e30f;
            to.offsets[2 * lane] = to_bf16(m[lane]);
        }
    }
    return finite;
}

// `first` is the panel's first row.
bool pack_quantised(PackedStorage& packed, const uint8_t* first, const BlockFormat& format, int panel) {
    const PackedMatrix& w = packed.matrix;
    const int groups = w.cols / kGroup, pairs = (groups + 1) / 2, blocks = groups / format.groups;
    const int group_bytes = bytes_of_group(w.kind);
    const int num_rows = std::min(kPanel, w.rows - panel * kPanel);
    const int64_t row_bytes = static_cast<int64_t>(blocks) * format.bytes;
    Group rows[kPanel][kMaxBlockGroups] = {};
    bool finite = true;
    for (int block = 0; block < blocks; ++block) {
        for (int row = 0; row < num_rows; ++row) format.decode(first + row * row_bytes + static_cast<int64_t>(block) * format.bytes, rows[row]);
        for (int i = 0; i < format.groups; ++i) {
            const int g = block * format.groups + i;
            uint8_t* const pair = packed.quants + (int64_t{panel} * pairs + g / 2) * pair_bytes(w.kind);
            const auto scales = reinterpret_cast<uint16_t*>(pair + 2 * group_bytes);
            const Target to{pair + g % 2 * group_bytes, scales + g % 2 * kPanel, is_affine(w.kind) ? scales + 2 * kPanel + g % 2 : nullptr};
            finite &= pack_group(rows, i, format, to);
        }
    }
    return finite;
}

constexpr int kRounded = 256;  // numbers rounded at a time, an even number

// `count` numbers of a format that is not quantised, as bf16. No branches, so that several are converted at once.
void round_to_bf16(SourceFormat format, const uint8_t* source, int count, uint16_t* out) {
    switch (format) {
        case SourceFormat::kF32:
            for (int i = 0; i < count; ++i) out[i] = to_bf16(std::bit_cast<float>(read_u32(source + 4 * i)));
            return;
        case SourceFormat::kF16:
            for (int i = 0; i < count; ++i) out[i] = to_bf16(from_f16(read_u16(source + 2 * i)));
            return;
        default: std::memcpy(out, source, static_cast<size_t>(count) * 2);
    }
}

// Likewise.
void pack_bf16(PackedStorage& packed, const uint8_t* first, int panel) {
    const PackedMatrix& w = packed.matrix;
    const SourceFormat format = packed.format;
    const int64_t pairs = (w.cols + 1) / 2, row_bytes = int64_t{w.cols} * float_bytes(format);
    uint8_t* const to = packed.quants + panel * pairs * 64;
    uint16_t rounded[kRounded];
    for (int lane = 0; lane < kPanel && panel * kPanel + lane < w.rows; ++lane) {
        const uint8_t* row = first + lane * row_bytes;
        for (int col = 0; col < w.cols; col += kRounded) {
            const int count = std::min(kRounded, w.cols - col);
            round_to_bf16(format, row + int64_t{col} * float_bytes(format), count, rounded);
            if (count % 2) rounded[count] = 0;
            for (int k = 0; k < count; k += 2) std::memcpy(to + (col + k) * 32 + lane * 4, rounded + k, 4);
        }
    }
}

// One panel, each row by its largest weight; false if a weight is no finite number.
bool pack_rows8(PackedStorage& packed, const uint8_t* first, int panel) {
    const PackedMatrix& w = packed.matrix;
    const SourceFormat format = packed.format;
    const int64_t bytes = float_bytes(format);
    uint8_t* const to = packed.quants + int64_t{panel} * w.cols * kPanel;
    float weights[kMostRow8Cols];  // not on the heap: tasks of a team must not throw
    bool finite = true;
    for (int lane = 0; lane < kPanel; ++lane) {
        const int row = panel * kPanel + lane;
        const uint8_t* const source = first + lane * w.cols * bytes;
        for (int col = 0; col < w.cols; ++col) {
            weights[col] = row < w.rows ? read_float(format, source + col * bytes) : 0.0f;
            finite &= std::fabs(weights[col]) < INFINITY;
        }
        for (int k = 0; w.apart && k < kApart; ++k) {
            packed.apart_weights[(panel * kApart + k) * kPanel + lane] = std::exchange(weights[w.apart[k]], 0.0f);
        }
        float largest = 0.0f;
        for (int col = 0; col < w.cols; ++col) largest = std::max(largest, std::fabs(weights[col]));
        const float scale = largest / 127.0f, inverse = scale > 1e-30f ? 1.0f / scale : 0.0f;
        int32_t sum = 0;
        for (int col = 0; col < w.cols; ++col) {
            const float x = inverse > 0.0f && finite ? weights[col] * inverse : 0.0f;
            const auto q = static_cast<int32_t>(std::nearbyint(std::min(127.0f, std::max(-127.0f, x))));
            to[col / 4 * 64 + lane * 4 + col % 4] = static_cast<uint8_t>(q + 128);
            sum += q;
        }
        packed.row_scales[row] = scale;
        packed.row_sums[row] = sum;
    }
    return finite;
}

}  // namespace

void lower_priority() { setpriority(PRIO_PROCESS, 0, 10); }

void FreeMemory::operator()(uint8_t* memory) const {
    if (mapped_bytes > 0) {
        munmap(memory, mapped_bytes);
    } else {
        std::free(memory);
    }
}

Memory allocate_aligned(int64_t bytes, bool zeroed) {
    const size_t size = static_cast<size_t>(std::max<int64_t>(1, (bytes + 63) / 64)) * 64;
    if (size >= kMapFromBytes) {
        void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);  // zeroed
        if (memory == MAP_FAILED) throw std::bad_alloc();
        return Memory(static_cast<uint8_t*>(memory), FreeMemory{size});
    }
    void* memory = std::aligned_alloc(64, size);
    if (!memory) throw std::bad_alloc();
    if (zeroed) std::memset(memory, 0, size);
    return Memory(static_cast<uint8_t*>(memory), FreeMemory{});
}

// By the system call: its wrapper is in a library that a machine may lack.
int spread(void* memory, size_t bytes, MemoryNodes nodes) {
    if (nodes == 0) return 0;
    int policy = MPOL_DEFAULT;
    if (syscall(SYS_get_mempolicy, &policy, nullptr, 0, nullptr, 0) == 0 && policy != MPOL_DEFAULT) return EEXIST;
    const unsigned long mask = nodes;
    return syscall(SYS_mbind, memory, bytes, MPOL_INTERLEAVE, &mask, 8 * sizeof(mask) + 1, 0) == 0 ? 0 : errno;
}

static Memory map_pages(int64_t bytes, MemoryNodes nodes, int flags, int fd) {
    const size_t size = (static_cast<size_t>(bytes) + kHugePage - 1) / kHugePage * kHugePage;
    void* memory = map_at_huge_page(size, PROT_READ | PROT_WRITE, flags, fd);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    madvise(memory, size, MADV_HUGEPAGE);  // a wish: small pages will do
    spread(memory, size, nodes);           // likewise: `penstock env` tells of a refusal
    return Memory(static_cast<uint8_t*>(memory), FreeMemory{size});
}

Memory allocate_huge(int64_t bytes, MemoryNodes nodes) {
    if (kIsWatched) return allocate_aligned(bytes, true);
    return map_pages(bytes, nodes, MAP_PRIVATE | MAP_ANONYMOUS, -1);
}

Memory allocate_in(int fd, int64_t bytes, MemoryNodes nodes) {
    if (ftruncate(fd, bytes) != 0) throw std::bad_alloc();
    return map_pages(bytes, nodes, MAP_SHARED, fd);
}

void Arena::check_open() const {
    if (is_complete_) throw std::logic_error("the weights are complete: their pages may be moving already");
}

uint8_t* Arena::take(int64_t bytes) {
    check_open();
    if (kIsWatched) return chunks_.emplace_back(allocate_aligned(bytes, true)).get();
    const int64_t size = aligned(bytes);
    if (size > end_ - next_) {
        end_chunk();
        chunks_.push_back(allocate_huge(std::max(kChunkBytes, static_cast<size_t>(size)), nodes_));
        next_ = touched_ = chunks_.back().get();
        end_ = next_ + chunks_.back().get_deleter().mapped_bytes;
        if (is_dear_) use_small_pages();
    }
    uint8_t* const taken = next_;
    next_ += size;
    touch(next_);
    return taken;
}

void Arena::touch(const uint8_t* end) {
    while (!is_dear_ && touched_ < end) {
        const int64_t began_ns = thread_cpu_ns();
        *const_cast<volatile uint8_t*>(touched_) = 0;
        touched_ += kHugePage;
        if (thread_cpu_ns() - began_ns > kDearPageNs) use_small_pages();
    }
}

void Arena::use_small_pages() {
    check_open();
    is_dear_ = true;
    if (touched_ == end_) return;
    madvise(touched_, static_cast<size_t>(end_ - touched_), MADV_NOHUGEPAGE);
    small_.push_back({touched_, end_});
    small_bytes_ += end_ - touched_;
    touched_ = end_;
}

// Pages of which nothing was taken stay out of it.
void Arena::end_chunk() {
    if (small_.empty() || small_.back().end != end_) return;
    const int64_t unused = (end_ - next_) / kHugePage * kHugePage;
    small_.back().end = end_ -= unused;
    small_bytes_ -= unused;
}

void Arena::complete() {
    if (is_complete_) return;
    end_chunk();
    is_complete_ = true;
}

// A copy is made beside the page and takes its place at once: who reads meanwhile reads one or the other.
void Arena::settle(const std::stop_token& stop) {
    int64_t num_moved = 0;
    MemoryNodes nodes = 0;  // those whose turn comes
    for (; !small_.empty(); small_.pop_back()) {
        for (Range& range = small_.back(); range.begin < range.end; range.begin += kHugePage) {
            if (stop.stop_requested() || num_moved++ == kMostMovedPages) return;
            if (nodes == 0) nodes = nodes_;
            // One node after the other: copies lie where the one before lay, so spread pages would all have the node of that address.
            Memory copy = allocate_huge(kHugePage, nodes & -nodes);
            nodes &= nodes - 1;
            std::memcpy(copy.get(), range.begin, kHugePage);
            if (mremap(copy.get(), kHugePage, kHugePage, MREMAP_MAYMOVE | MREMAP_FIXED, range.begin) == MAP_FAILED) return;
            static_cast<void>(copy.release());
            small_bytes_ -= kHugePage;
        }
    }
}

FileArena::FileArena(int fd) {
    struct statfs system {};
    if (fstatfs(fd, &system) != 0) throw_disk_error(errno, "the file can't be opened");
    if (system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC) throw_disk_error(EOPNOTSUPP, "the file lies in memory");
    fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 0);  // last: no destructor closes it if this throws
    if (fd_ < 0) throw_disk_error(errno, "the file can't be opened");
}

FileArena::~FileArena() { close(fd_); }

uint8_t* FileArena::take(int64_t bytes) {
    sync_file_range(fd_, 0, bytes_, SYNC_FILE_RANGE_WRITE);  // begins to write what was packed: memory need not hold all of it
    const int64_t page = sysconf(_SC_PAGESIZE), size = (bytes + page - 1) / page * page;
    int error;
    do error = posix_fallocate(fd_, bytes_, size);
    while (error == EINTR);
    if (error != 0) throw_disk_error(error, "no room in the file");
    void* memory = mmap(nullptr, static_cast<size_t>(size), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, bytes_);
    if (memory == MAP_FAILED) throw_disk_error(errno, "the file can't be mapped");
    parts_.emplace_back(static_cast<uint8_t*>(memory), FreeMemory{static_cast<size_t>(size)});
    bytes_ += size;
    return parts_.back().get();
}

void FileArena::complete() {
    if (fdatasync(fd_) != 0) throw_disk_error(errno, "the file can't be written");
    for (const Memory& part : parts_) {
        const size_t size = part.get_deleter().mapped_bytes;
        mprotect(part.get(), size, PROT_READ);
        madvise(part.get(), size, MADV_RANDOM);  // who needs more than a page asks for it
    }
}

MappedFile::MappedFile(int fd) {
    struct stat status {};
    if (fstat(fd, &status) != 0) throw_disk_error(errno, "the file can't be opened");
    if (status.st_size <= 0) throw_disk_error(EINVAL, "the file is empty");
    const size_t page = sysconf(_SC_PAGESIZE), size = (static_cast<size_t>(status.st_size) + page - 1) / page * page;
    void* memory = map_at_huge_page(size, PROT_READ, MAP_SHARED, fd);
    if (memory == MAP_FAILED) throw_disk_error(errno, "the file can't be mapped");
    memory_ = Memory(static_cast<uint8_t*>(memory), FreeMemory{size});
    bytes_ = status.st_size;
    madvise(memory, size, MADV_HUGEPAGE);  // a wish: file systems with large folios have huge pages, and read ahead by them
}

uint8_t* MappedFile::at(int64_t offset, int64_t bytes) const {
    if (offset < 0 || offset % kArrayAlignment != 0 || bytes < 0 || bytes > bytes_ - offset) {
        throw std::invalid_argument("the file of packed weights does not have this matrix");
    }
    return memory_.get() + offset;
}

PackedStorage allocate_packed(const std::function<uint8_t*(int64_t)>& take_bytes, SourceFormat format, int rows, int cols, bool by_row,
                              bool has_apart) {
    PackedStorage packed;
    const int64_t panels = (rows + kPanel - 1) / kPanel;
    const auto take = [&](int64_t bytes) {
        packed.bytes += bytes;
        packed.parts.push_back({take_bytes(bytes), bytes});
        return packed.parts.back().begin;
    };
    WeightKind kind = WeightKind::kBf16;
    const uint8_t* table = nullptr;
    if (by_row) {
        kind = WeightKind::kU8Row;
        packed.quants = take(panels * cols * kPanel);
        packed.row_scales = reinterpret_cast<float*>(take(panels * kPanel * 4));
        packed.row_sums = reinterpret_cast<int32_t*>(take(panels * kPanel * 4));
        if (has_apart) {
            packed.apart = reinterpret_cast<int32_t*>(take(kApart * 4));
            packed.apart_weights = reinterpret_cast<float*>(take(panels * kApart * kPanel * 4));
        }
    } else if (float_bytes(format) > 0) {
        packed.quants = take(panels * ((cols + 1) / 2) * 64);
    } else {
        kind = block_format(format).kind;
        table = block_format(format).table;
        packed.quants = take(panels * ((cols / kGroup + 1) / 2) * pair_bytes(kind));
    }
    packed.matrix = {kind, rows, cols, static_cast<int32_t>(panels), packed.quants, table, packed.row_scales, packed.row_sums, packed.apart,
                     packed.apart_weights};
    packed.format = format;
    return packed;
}

bool pack_panels(PackedStorage& packed, const uint8_t* source, int panel0, int panel1) {
    const int64_t panel_bytes = source_bytes(packed.format, kPanel, packed.matrix.cols);
    bool finite = true;
    for (int panel = panel0; panel < panel1; ++panel, source += panel_bytes) {
        if (packed.matrix.kind == WeightKind::kU8Row) {
            finite = pack_rows8(packed, source, panel) && finite;
        } else if (float_bytes(packed.format) > 0) {
            pack_bf16(packed, source, panel);
        } else {
            finite = pack_quantised(packed, source, block_format(packed.format), panel) && finite;
        }
    }
    return finite;
}

void fetch_panels(const PackedStorage& packed, int panel0, int panel1) {
    const uintptr_t page = sysconf(_SC_PAGESIZE);
    for (const auto& [begin, bytes] : packed.parts) {
        const int64_t panel_bytes = bytes / packed.matrix.panels;
        const uintptr_t first = reinterpret_cast<uintptr_t>(begin + panel0 * panel_bytes) / page * page;
        const uintptr_t end = reinterpret_cast<uintptr_t>(begin + panel1 * panel_bytes);
        for (uintptr_t at = first; at < end; at += kFetchedBytes) {
            madvise(reinterpret_cast<void*>(at), std::min(kFetchedBytes, end - at), MADV_WILLNEED);  // a wish
        }
    }
}

}  // namespace penstock
