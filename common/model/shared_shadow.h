/// \file
/// What the model remembers of shared memory: who wrote each piece last, and who read it, and when.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flashsteps::model {

/// Shared memory is followed in granules of 2 bytes.
constexpr int kGranule = 2;

/// The last write of a granule, by a thread or by an agent (TMA, on behalf of one mbarrier).
struct WriteRecord {
  static constexpr uint32_t kAsync = 1 << 16;     // by an asynchronous copy
  static constexpr uint32_t kAtomic = 1 << 17;    // by an atomic
  static constexpr uint32_t kAgent = 1 << 18;     // by an agent
  static constexpr uint32_t kMbarrier = 1 << 19;  // by mbarrier_init
  static constexpr uint32_t kInFlight = 0xffffffffu;
  static constexpr uint32_t kAgentClock = 1u << 31;  // above every thread's clock

  uint32_t who;    // the thread or the agent, and the flags above
  uint32_t clock;  // the thread's; below the block's first: never written. kInFlight: not there yet

  static WriteRecord by_agent(uint32_t agent, uint32_t clock) {
    return {agent | kAgent | kAsync, clock | kAgentClock};
  }
  static WriteRecord in_flight(uint32_t agent) { return {agent | kAgent | kAsync, kInFlight}; }

  uint16_t thread() const { return uint16_t(who); }
  bool async() const { return who & kAsync; }
  bool atomic() const { return who & kAtomic; }
  bool agent() const { return who & kAgent; }
  bool mbarrier() const { return who & kMbarrier; }
  uint32_t agent_clock() const { return clock & ~kAgentClock; }
  bool is_in_flight() const { return clock == kInFlight; }
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
  /// Being read, until somebody waits for it.
  static ReadRecord in_flight() { return ReadRecord(0xffffffffu); }
  bool is_in_flight() const { return bits_ == 0xffffffffu; }
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
  /// The reader's records from this granule on: a warp, or one of those below.
  ReadRecord* read(int reader, size_t granule) {
    return reads_ + size_t(reader) * granules_ + granule;
  }
  static constexpr int kMaxWarps = 32, kWarpgroups = 8;
  /// TMA, of what it stores; and wgmma, of each warpgroup.
  static constexpr int kStores = kMaxWarps, kProducts = kMaxWarps + 1;
  static constexpr int kReaders = kMaxWarps + 1 + kWarpgroups;
  void clear();

 private:
  size_t granules_;
  WriteRecord* writes_;
  ReadRecord* reads_;
};

}  // namespace flashsteps::model
