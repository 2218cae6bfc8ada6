/// \file
/// What the model remembers of shared memory: who wrote each piece last, and who read it, and when.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashsteps::model {

/// Shared memory is followed in granules of 2 bytes.
constexpr int kGranule = 2;

/// The last write of a granule.
struct WriteRecord {
  static constexpr uint32_t kAsync = 1 << 10;   // by an asynchronous copy
  static constexpr uint32_t kAtomic = 1 << 11;  // by an atomic
  static constexpr uint32_t kInFlight = 0xffffffffu;

  uint32_t who;    // the thread, and the flags above
  uint32_t clock;  // the thread's; below the block's first: never written. kInFlight: not there yet

  uint16_t thread() const { return who & 1023; }
  bool async() const { return who & kAsync; }
  bool atomic() const { return who & kAtomic; }
  /// By an ordinary store of another warp.
  bool exchanged(int warp) const { return !async() && thread() / 32 != warp; }
  bool operator==(const WriteRecord& other) const {
    return __builtin_bit_cast(uint64_t, *this) == __builtin_bit_cast(uint64_t, other);
  }
};
static_assert(sizeof(WriteRecord) == 8);

/// The last reads of a granule by one warp.
class ReadRecord {
 public:
  static constexpr int kClockShift = 6;
  static ReadRecord by_lane(uint32_t clock, int lane) {
    return ReadRecord(clock << kClockShift | uint32_t(lane));
  }
  static ReadRecord by_warp(uint32_t clock, int lane) {
    return ReadRecord(clock << kClockShift | kSeveral | uint32_t(lane));
  }
  /// Below the block's first clock: never read.
  uint32_t clock() const { return bits_ >> kClockShift; }
  int lane() const { return bits_ & 31; }
  /// Other lanes read too, at the same clock.
  bool several() const { return bits_ & kSeveral; }
  bool later_than(uint32_t clock) const { return bits_ >= (clock + 1) << kClockShift; }
  /// This read after the former one.
  ReadRecord after(ReadRecord former) const {
    const uint32_t difference = bits_ ^ former.bits_;
    const bool also = difference >> kClockShift == 0 && difference != 0;
    return ReadRecord(bits_ | (also ? kSeveral : 0));
  }

 private:
  static constexpr uint32_t kSeveral = 1 << 5;
  explicit ReadRecord(uint32_t bits) : bits_(bits) {}
  uint32_t bits_;
};
static_assert(sizeof(ReadRecord) == 4);

/// The records of all granules that one block can have. Clocks only grow from block to block, so
/// records of a former block are recognised, and nothing needs to be cleared between blocks.
class SharedShadow {
 public:
  static constexpr uint32_t kMaxClock = (1u << 26) - 1;

  explicit SharedShadow(size_t bytes);
  ~SharedShadow();
  SharedShadow(const SharedShadow&) = delete;
  SharedShadow& operator=(const SharedShadow&) = delete;

  WriteRecord* write(size_t granule) { return writes_ + granule; }
  /// The warp's records from this granule on.
  ReadRecord* read(int warp, size_t granule) { return reads_ + size_t(warp) * granules_ + granule; }
  void clear();

 private:
  size_t granules_;
  WriteRecord* writes_;
  ReadRecord* reads_;
};

}  // namespace flashsteps::model
