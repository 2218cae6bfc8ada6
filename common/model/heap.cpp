#include "common/model/heap.h"

#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "common/stage/device.h"

namespace flashsteps::model {
namespace {

constexpr size_t kPage = 4096;

size_t round_up(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

void* reserve(void* at, size_t bytes, int protection) {
  const int fixed = at ? MAP_FIXED : 0;
  void* p = mmap(at, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | fixed, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}

}  // namespace

namespace {
/// Calls f(piece, mask) for every piece of [offset, offset + size).
template <typename F>
void for_each_piece(size_t offset, size_t size, F&& f) {
  while (size > 0) {
    const size_t here = std::min<size_t>(size, 64 - offset % 64);
    f(offset / 64, byte_mask(offset, int(here)));
    offset += here;
    size -= here;
  }
}
}  // namespace

void Buffer::mark_written_range(size_t offset, size_t size) {
  if (size == bytes) all_written = true;
  for_each_piece(offset, size, [&](size_t piece, ByteMask mask) { written[piece] |= mask; });
}

void Buffer::mark_unwritten_range(size_t offset, size_t size) {
  all_written = false;
  for_each_piece(offset, size, [&](size_t piece, ByteMask mask) { written[piece] &= ~mask; });
}

Heap& Heap::instance() {
  static Heap* heap = new Heap;  // never destroyed: buffers may outlive static objects
  return *heap;
}

Heap::Heap() {
  // 4 TiB of addresses cost nothing; where a limit on address space forbids them, less will do.
  for (slot_shift_ = 32; slot_shift_ >= 24 && begin_ == 0; --slot_shift_) {
    size_ = size_t{kSlots} << slot_shift_;
    begin_ = reinterpret_cast<uintptr_t>(reserve(nullptr, size_, PROT_NONE));
  }
  ++slot_shift_;
  if (begin_ == 0)
    throw DeviceError("the CPU model needs 16 GiB of address space for global memory");
  for (unsigned i = 0; i < kSlots; ++i) owner_[i] = i;
}

Buffer& Heap::allocate(const char* name, DType type, int64_t count) {
  if (count < 0) {
    throw std::invalid_argument(
        fmt::format("{}: {} elements were asked for; at least 0 are allowed", name, count));
  }
  const size_t bytes = size_t(count) * size_of(type);
  const size_t slot = size_t{1} << slot_shift_, quarter = slot / 4;
  const size_t slots = (bytes + 2 * quarter + slot - 1) / slot;
  // The first run of free slots at or after next_.
  unsigned first = next_, free = 0;
  for (unsigned tried = 0; tried < 2 * kSlots && free < slots; ++tried) {
    if (first + free == kSlots) first = 0, free = 0;
    if (buffers_[owner_[first + free]].live) {
      first = first + free + 1, free = 0;
      if (first >= kSlots) first = 0;
    } else {
      ++free;
    }
  }
  const auto no_room = [&] {
    return DeviceError(fmt::format("the CPU model has no room for {} ({} bytes)", name, bytes));
  };
  if (free < slots) throw no_room();
  const size_t mapped = round_up(bytes, kPage);
  void* const begin = reinterpret_cast<void*>(begin_ + (uintptr_t{first} << slot_shift_) + quarter);
  if (mapped && mprotect(begin, mapped, PROT_READ | PROT_WRITE) != 0) throw no_room();
  void* const written = reserve(nullptr, round_up((bytes / 64 + 1) * sizeof(ByteMask), kPage),
                                PROT_READ | PROT_WRITE);
  if (!written) throw no_room();
  for (unsigned i = first; i < first + slots; ++i) {  // former owners give up all of their slots
    const unsigned former = owner_[i];
    for (unsigned k = former; k < former + buffers_[former].slots; ++k) owner_[k] = k;
  }
  for (unsigned i = first; i < first + slots; ++i) owner_[i] = first;
  next_ = (first + slots) % kSlots;

  Buffer& b = buffers_[first];
  b.begin = reinterpret_cast<uintptr_t>(begin);
  b.bytes = bytes;
  b.all_written = false;
  b.written = static_cast<std::atomic<ByteMask>*>(written);
  b.name = name;
  b.type = type;
  b.live = true;
  b.slots = slots;
  b.generation = ++generation_;
  std::memset(begin, 0xff, bytes);
  return b;
}

void Heap::release(void* pointer) {
  Buffer& b = find(pointer, 0);
  if (b.begin != reinterpret_cast<uintptr_t>(pointer)) {
    throw std::invalid_argument(
        fmt::format("release of {}: not the pointer that allocate gave", b.name));
  }
  munmap(b.written, round_up((b.bytes / 64 + 1) * sizeof(ByteMask), kPage));
  const size_t mapped = round_up(b.bytes, kPage);
  if (mapped) reserve(pointer, mapped, PROT_NONE);
  // The slots stay this buffer's until another takes them, so that a stale pointer can be named.
  b.live = false;
  b.bytes = 0;
  b.written = nullptr;
}

Buffer& Heap::find(const void* pointer, size_t bytes) {
  const auto a = reinterpret_cast<uintptr_t>(pointer);
  if (contains(a)) {
    Buffer& b = buffers_[owner_of(a)];
    if (b.live && a - b.begin <= b.bytes && bytes <= b.bytes - (a - b.begin)) return b;
  }
  throw std::invalid_argument(
      fmt::format("[{}, +{} bytes) is not within one buffer of the CPU model", pointer, bytes));
}

void Heap::notice_all_written() {
  for (Buffer& b : buffers_) {
    if (!b.live || b.all_written || b.bytes == 0) continue;
    size_t piece = 0;
    while (piece < b.bytes / 64 && b.written[piece].load(std::memory_order_relaxed) == ~ByteMask{0})
      ++piece;
    const int tail = b.bytes % 64;
    b.all_written = piece == b.bytes / 64 && (tail == 0 || b.is_written(b.bytes - tail, tail));
  }
}

void Traffic::prepare(const Buffer& buffer) {
  if (generation == buffer.generation) return;
  if (pieces) munmap(pieces, pieces_bytes);
  pieces = nullptr;
  generation = buffer.generation;
  pieces_bytes = round_up(buffer.pieces() * sizeof(Piece), kPage);
  if (pieces_bytes == 0) return;
  pieces = static_cast<Piece*>(reserve(nullptr, pieces_bytes, PROT_READ | PROT_WRITE));
  if (!pieces)
    throw DeviceError(
        fmt::format("the CPU model has no room to count the reads of {}", buffer.name));
}

}  // namespace flashsteps::model
