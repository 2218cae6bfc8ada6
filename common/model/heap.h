/// \file
/// The model's global memory: named, typed buffers, far apart in one reservation of address space,
/// so that an access outside a buffer meets nothing, and what a kernel asks of each of them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "common/attention/problem.h"

namespace flashsteps::model {

/// One bit for each byte of a piece of 64 bytes.
using ByteMask = uint64_t;

inline ByteMask byte_mask(size_t offset, int bytes) {
  return (bytes == 64 ? ~ByteMask{0} : (ByteMask{1} << bytes) - 1) << (offset % 64);
}

/// A buffer in global memory.
struct Buffer {
  uintptr_t begin = 0;
  size_t bytes = 0;  // 0 once released
  /// Every byte has been written: the bitmap need not be read.
  std::atomic<bool> all_written = false;
  /// Which bytes have been written. Words are shared by blocks on several OS threads.
  std::atomic<ByteMask>* written = nullptr;

  std::string name;
  DType type = DType::fp32;
  bool live = false;
  int slots = 0;            // of the heap
  uint64_t generation = 0;  // differs between buffers that had the same slot

  size_t pieces() const { return (bytes + 63) / 64; }
  bool is_written(size_t offset, int size) const {
    const ByteMask mask = byte_mask(offset, size);
    return (written[offset / 64].load(std::memory_order_relaxed) & mask) == mask;
  }
  void mark_written(size_t offset, int size) {
    const ByteMask mask = byte_mask(offset, size);
    std::atomic<ByteMask>& word = written[offset / 64];
    if ((word.load(std::memory_order_relaxed) & mask) != mask)
      word.fetch_or(mask, std::memory_order_relaxed);
  }
  /// From the host, between launches.
  void mark_written_range(size_t offset, size_t size);
  void mark_unwritten_range(size_t offset, size_t size);
};

/// The reservation is cut into equal slots; a buffer begins a quarter into its first slot and has
/// as many as it needs, so the slot's number finds the buffer, and what lies on both sides of a
/// buffer is no memory at all.
class Heap {
 public:
  /// The one heap of the process.
  static Heap& instance();

  /// \throws DeviceError when there is no room
  Buffer& allocate(const char* name, DType type, int64_t count);
  void release(void* pointer);
  /// The buffer that holds [pointer, pointer + bytes).
  /// \throws std::invalid_argument when none does
  Buffer& find(const void* pointer, size_t bytes);

  bool contains(uintptr_t a) const { return a - begin_ < size_; }
  /// All addresses that do not belong to the heap, as one range that goes round the end.
  uintptr_t outside_begin() const { return begin_ + size_; }
  size_t outside_bytes() const { return 0 - size_; }
  unsigned slot_of(uintptr_t a) const { return unsigned((a - begin_) >> slot_shift_); }
  /// The number of the buffer nearest to this address of the heap: that of the first slot of its
  /// buffer.
  unsigned owner_of(uintptr_t a) const { return owner_[slot_of(a)]; }
  Buffer& buffer(unsigned owner) { return buffers_[owner]; }
  static constexpr unsigned kSlots = 1024;

  /// Marks buffers whose every byte has been written since.
  void notice_all_written();

 private:
  Heap();
  uintptr_t begin_ = 0;
  size_t size_ = 0;
  int slot_shift_ = 0;
  unsigned next_ =
      0;  // slots are reused as late as possible, so that a stale pointer meets no memory
  uint64_t generation_ = 0;
  uint16_t owner_[kSlots] = {};
  Buffer buffers_[kSlots];
};

/// What one worker counted of one buffer.
struct Traffic {
  int64_t read = 0;
  int64_t written = 0;
  int64_t unique_read = 0;

  /// Which bytes of a piece the running block has read.
  struct Piece {
    uint32_t block;
    ByteMask read;
  };
  Piece* pieces = nullptr;
  size_t pieces_bytes = 0;
  uint64_t generation = 0;  // of the buffer that `pieces` is for

  void prepare(const Buffer& buffer);

  /// Counts a read; `block` differs between all blocks that this worker ran.
  void count_read(size_t offset, int size, uint32_t block) {
    read += size;
    Piece& piece = pieces[offset / 64];
    if (piece.block != block) piece = {block, 0};
    const ByteMask mask = byte_mask(offset, size), fresh = mask & ~piece.read;
    if (fresh == 0) return;
    piece.read |= mask;
    unique_read += fresh == mask ? size : __builtin_popcountll(fresh);
  }
};

}  // namespace flashsteps::model
