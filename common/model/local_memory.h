/// \file
/// What is remembered of a thread's local memory while it multiplies by wgmma. Accumulators and
/// operands are passed by reference, so they lie on the thread's stack and the compiler shows their
/// accesses; on a card they are registers, which wgmma uses behind the thread's back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace flashsteps::model {

/// Of each 4 bytes of a stack: touched since the last wgmma_fence, an accumulator in flight, an
/// operand in flight.
class LocalMemory {
 public:
  static constexpr size_t kBytes = 64 * 1024;

  /// Notes an access of kSize bytes at `offset` in the stack.
  /// \return whether it may be made: not of what is in flight, but operands may be read
  template <int kSize, bool kWrite>
  bool touch(size_t offset) {
    const size_t word = offset / 4;
    constexpr int kWords = (kSize + 3) / 4;
    uint64_t mask = ((uint64_t{1} << kWords) - 1) << (word % 64);
    touched_[word / 64] |= mask;
    uint64_t taken = accumulator_[word / 64] & mask;
    if (kWrite) taken |= operand_[word / 64] & mask;
    return taken == 0;
  }
  void forget_touched() { std::memset(touched_, 0, sizeof touched_); }
  void touch(size_t offset, size_t bytes) { set(touched_, offset, bytes, true); }
  bool was_touched(size_t offset, size_t bytes) const { return any(touched_, offset, bytes); }

  void set_accumulator(size_t offset, size_t bytes, bool in_flight) {
    set(accumulator_, offset, bytes, in_flight);
  }
  void set_operand(size_t offset, size_t bytes, bool in_flight) {
    set(operand_, offset, bytes, in_flight);
  }
  bool in_flight(size_t offset, size_t bytes) const {
    return any(accumulator_, offset, bytes) || any(operand_, offset, bytes);
  }
  void clear() { std::memset(this, 0, sizeof *this); }

 private:
  static constexpr size_t kPieces = kBytes / 4 / 64;
  using Bits = uint64_t[kPieces];

  template <typename F>
  static void for_each_piece(size_t offset, size_t bytes, F&& f) {
    for (size_t word = offset / 4, end = (offset + bytes + 3) / 4; word < end;) {
      const size_t here = end - word < 64 - word % 64 ? end - word : 64 - word % 64;
      const uint64_t mask = (here == 64 ? ~uint64_t{0} : (uint64_t{1} << here) - 1) << (word % 64);
      f(word / 64, mask);
      word += here;
    }
  }
  static void set(Bits& bits, size_t offset, size_t bytes, bool on) {
    for_each_piece(offset, bytes, [&](size_t piece, uint64_t mask) {
      on ? bits[piece] |= mask : bits[piece] &= ~mask;
    });
  }
  static bool any(const Bits& bits, size_t offset, size_t bytes) {
    uint64_t found = 0;
    for_each_piece(offset, bytes,
                   [&](size_t piece, uint64_t mask) { found |= bits[piece] & mask; });
    return found != 0;
  }

  Bits touched_ = {}, accumulator_ = {}, operand_ = {};
};

}  // namespace flashsteps::model
