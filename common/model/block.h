/// \file
/// One block while it runs: its threads and who runs next, its barriers, its shared memory, and
/// what it counts. Each worker (OS thread) has one Block and runs the blocks of a grid through it,
/// one after the other.
#pragma once

#include <fmt/format.h>

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/model/async_units.h"
#include "common/model/fiber.h"
#include "common/model/heap.h"
#include "common/model/hopper_primitives.h"
#include "common/model/model.h"
#include "common/model/primitives.h"
#include "common/model/random.h"
#include "common/model/shared_shadow.h"
#include "common/model/sites.h"
#include "common/model/symbols.h"

namespace flashsteps::model {

/// What a worker counted beside global memory's traffic; Ledger defines each.
struct Counts {
  int64_t atomic_bytes = 0, shared_read = 0, shared_written = 0, warp_exchange_bytes = 0,
          bank_conflicts = 0, barriers = 0, warp_barriers = 0, shuffles = 0, ldmatrix = 0, mma = 0,
          cp_async = 0, named_barriers = 0, mbarrier_phases = 0, tma = 0, wgmma = 0,
          wgmma_flops = 0, exp = 0, div = 0, div_in_loop = 0, grid_blocks = 0, tiles_visited = 0,
          tiles_masked = 0;
};

/// What a kernel looks like to the model; found once for each kernel.
struct Kernel {
  KernelSymbols symbols;
  int64_t static_bytes = 0;
  /// The piece of the thread-local block that spans the static arrays, and for each granule of it
  /// which array it is part of: its number + 1, or 0.
  size_t static_offset = 0, static_span = 0;
  std::vector<uint8_t> array_of;
};

/// What all blocks of a launch have in common.
struct LaunchState {
  const Launch& launch;
  const Kernel& kernel;
  const Options& options;
  uint64_t number;  // of the launch, since the options were set
  /// Returns once all blocks before this one have ended.
  void (*wait_for_blocks_before)(const LaunchState&, int64_t block);
};

/// What writes to shared memory.
enum class Access { write, copy, atomic, bulk };

class Block;

/// What the running thread of this OS thread is. Outside of kernels everything but global memory
/// counts as its stack,
/// so that instrumented host code costs one comparison.
struct Running {
  uintptr_t stack_low = 0;
  size_t stack_bytes = SIZE_MAX;
  bool follows_registers = false;
  Fiber* fiber = nullptr;
  Block* block = nullptr;
};
inline constinit thread_local Running running;

class Block {
 public:
  Block();
  ~Block();

  /// Runs block `index` of the launch to its end.
  ///
  /// \return what went wrong
  std::optional<Fault> run(const LaunchState& launch, int64_t index);

  /// Makes ready for a launch: one entry of traffic for each live buffer. Called on the worker's
  /// own OS thread.
  void prepare(const LaunchState& launch);

  Counts counts;
  Traffic traffic[Heap::kSlots];

  // --- for primitives: all below is called from a thread of the block

  /// An instrumented access of the running thread, made from code at `call`.
  template <int kBytes, bool kWrite>
  void access(uintptr_t a, uintptr_t call);

  /// The offset of shared address `a` in the shadow.
  /// \return whether it is shared memory at all; a fault where it is, but [a, a + bytes) is outside
  /// of any array
  bool find_shared(uintptr_t a, int bytes, const char* verb, size_t& offset);
  template <int kGranules>
  void shared_read(size_t offset);
  template <int kGranules>
  void shared_write(size_t offset, Access how);
  /// Checks and counts a read of 16 bytes of shared memory by all lanes of the warp together, at
  /// the address of this lane.
  void shared_warp_read(Fiber& lane, size_t offset);
  void global_read(uintptr_t a, int bytes);
  void global_write(uintptr_t a, int bytes);
  void global_atomic(uintptr_t a, int bytes);
  /// An atomic of 4 bytes: ordered after what it overwrites, but for other atomics.
  void shared_atomic(size_t offset);
  /// Waits until the blocks before this one have ended, so that atomics happen in the order of
  /// blocks.
  void take_turn();
  /// The warp goes on once *turn is `value`; as blocks take their turns in order, it is so now or
  /// never.
  void turn_wait(const int* turn, int value, const char* file, int line);
  /// Adds 1 to the turn that the warp has waited for.
  void turn_pass(int* turn, const char* file, int line);
  void log_shared(uintptr_t a, int log2_size, uintptr_t call);

  void block_barrier(const char* file, int line);
  /// Waits until all lanes of the warp are here with their arguments; the last one calls `together`
  /// with those of all 32 lanes, and all go on.
  template <typename Args, typename F>
  void warp_together(const char* name, unsigned mask, Args& args, const char* file, int line,
                     F&& together);
  /// Each lane of the warp knows from now on what any of them knew.
  void synchronise_warp(int warp);

  void start_copy(const AsyncCopy& copy, size_t to_offset);
  void commit_copies();
  void wait_for_copies(uint32_t pending);

  // Of Hopper; mbarrier.cpp, tma.cpp, wgmma.cpp.
  void init_mbarrier(uint64_t* bar, int arrivals, SourceLine line);
  void fence_mbarriers();
  /// \param bytes that the arrival announces
  void arrive_at_mbarrier(const char* name, uint64_t* bar, int64_t bytes, SourceLine line);
  void wait_for_mbarrier(uint64_t* bar, int parity, SourceLine line);
  void named_barrier(bool sync, int id, int threads, SourceLine line);
  void fence_proxy();
  void load_bulk(const TensorMap& map, void* to, uint64_t* bar, const int (&at)[4],
                 SourceLine line);
  void store_bulk(const TensorMap& map, const void* from, const int (&at)[4], SourceLine line);
  void commit_stores() { ++running.fiber->store_commits; }
  void wait_for_stores(uint32_t pending, SourceLine line);
  uint64_t descriptor_of(const void* smem, int leading_bytes, int stride_bytes, SourceLine line);
  void start_product(const Wgmma& product, SourceLine line);
  void fence_registers();
  void commit_products() { ++running.fiber->product_commits; }
  void wait_for_products(uint32_t pending, const WgmmaSums& sums, SourceLine line);
  void set_registers(int registers, bool grow, SourceLine line);
  /// An access of local memory by a thread whose registers are followed.
  template <int kBytes, bool kWrite>
  void local_access(uintptr_t a);
  /// The model itself writes to local memory of the running thread.
  void note_local_write(const void* p, size_t bytes);

  void* dynamic_memory() const { return dynamic_; }
  void* take_shared(const char* name, int64_t offset, int64_t count, int element_size,
                    const char* file, int line);

  uint3 block_index() const { return {unsigned(index_), 0, 0}; }
  uint3 block_dim() const { return {unsigned(threads_), 1, 1}; }
  uint3 grid_dim() const { return {unsigned(launch_->launch.grid), 1, 1}; }

  /// Ends the block with a fault of the running thread. The text is prefixed with kernel, block and
  /// thread. Nothing is unwound: the block's threads are never resumed.
  [[noreturn]] void fail(FaultKind kind, const std::string& what);

  /// "thread 54 (warp 1 lane 22)"
  static std::string name_of(const Fiber& f);
  std::string name_of_shared(size_t offset) const;
  Fiber& fiber(int i) { return fibers_[i]; }

 private:
  struct Part {  // of dynamic shared memory, as the kernel named it
    std::string name;
    int64_t offset, bytes;
    int element_size;
  };
  struct Warp {
    uint32_t arrived = 0;
    const char* name = nullptr;
    const char* file = nullptr;
    int line = 0;
    void* args[32];
  };
  struct Barrier {
    int arrived = 0;
    const char* file = nullptr;
    int line = 0;
  };

  /// Waits until all threads of the warpgroup are here with their arguments; the last one calls
  /// `together` with those of all 128, and all go on.
  template <typename Args, typename F>
  void warpgroup_together(const char* name, Args& args, SourceLine line, F&& together);

  static void enter(boost::context::detail::transfer_t from);
  void exit_thread();
  void resume(Fiber& next);
  Fiber& pick();
  void wait(const char* what, const char* file, int line);
  void wake(Fiber& f);
  void preempt();
  /// Lets others go first now and then: for primitives that seldom wait.
  void sometimes_preempt() {
    if (launch_->options.preempt > 0 && random_.below(4) == 0) preempt();
  }
  int64_t preemption_interval();
  [[noreturn]] void deadlock();
  [[noreturn]] void leave();

  void synchronise_all();
  View* new_view();
  void drop_view(Fiber& f);
  /// The thread's view, for it alone to change.
  View& own_view(Fiber& f);
  /// Adds what the thread knows and did to `to`; what it does from here on is later.
  void release(Fiber& f, Knowledge& to);
  void acquire(Fiber& f, const Knowledge& from) { own_view(f).join(from); }
  /// What the warp's threads do from here on is later than what they did.
  void tick(int warp);
  bool knows(const Fiber& f, const WriteRecord& w) const;
  bool is_of_former_block(const WriteRecord& w) const;

  // What works beside the threads.
  bool has_async_work() const {
    return !not_landed_.empty() || !load_pieces_.empty() || open_stores_ > 0 || open_products_ > 0;
  }
  /// Does one piece of the work that is under way.
  void advance();
  void start_async();
  /// What the launch gives each thread: an equal part of the multiprocessor's registers.
  int launch_registers() const { return std::min(65536 / threads_ / 8 * 8, 256); }
  size_t products_agent(int warpgroup) const { return size_t(threads_) + warpgroup; }
  size_t loads_agent(int mbarrier) const {
    return size_t(threads_) + SharedShadow::kWarpgroups + mbarrier;
  }
  /// A clock of an agent: `count` counts from the block's start.
  uint32_t agent_clock(uint32_t count) {
    last_agent_clock_ = std::max(last_agent_clock_, first_agent_clock_ + count);
    return first_agent_clock_ + count;
  }
  Mbarrier& find_mbarrier(const char* what, uint64_t* bar, SourceLine line);
  std::string name_of(const Mbarrier& m) const { return name_of_shared(m.offset); }
  std::string state_of(const Mbarrier& m) const;
  void end_phase_if_complete(Mbarrier& m);
  void land_piece(size_t i);
  void complete_bytes(const BulkLoad& load, int64_t bytes);
  void do_store(BulkStore& store);
  size_t find_box(const char* what, const TensorMap& map, const void* smem, const int (&at)[4],
                  SourceLine line);
  template <typename F>
  void for_each_chunk(const TensorMap& map, const int (&at)[4], int first_row, int rows, F&& f);
  /// Checks that `count` granules may be read past the threads, on behalf of these threads.
  /// \param good a record that has been found fine; of no granule at first
  void check_async_read(size_t granule, size_t count, std::span<Fiber> readers,
                        const std::string& what, WriteRecord& good);
  void check_async_write(size_t granule, size_t count, const std::string& what);
  std::string agent_read_text(size_t offset) const;
  /// Calls f(offset in shared memory) for the 16-byte pieces of an operand of `size` rows or
  /// columns, in order of what lies along k, or along m or n.
  template <typename F>
  static void for_each_piece(uint64_t descriptor, bool mn, int size, F&& f);
  void check_operand(const char* name, uint64_t descriptor, bool mn, int size, int warpgroup,
                     uint32_t clock, SourceLine line, WriteRecord& good, size_t& begin,
                     size_t& end);
  void load_operand(uint64_t descriptor, bool mn, int size, uint16_t* to) const;
  void compute_product(int warpgroup);
  size_t local_offset(const Fiber& f, const void* p) const {
    return reinterpret_cast<uintptr_t>(p) - f.stack_low;
  }
  [[gnu::noinline, noreturn]] void touched_in_flight(size_t offset, int bytes, bool write);
  void check_end_of_thread();
  void check_end_of_block();
  std::string barriers_text() const;

  void settle_bank_conflicts(int warp);
  void land(const AsyncCopy& copy);
  bool land_one(uint32_t i);

  [[gnu::noinline]] void other_access(uintptr_t a, int bytes, bool write);
  [[gnu::noinline, noreturn]] void global_out_of_bounds(uintptr_t a, int bytes, const char* verb);
  template <int kGranules>
  bool written_and_known(const WriteRecord* w, const Fiber& f);
  [[gnu::noinline]] void check_shared_read(size_t granule);
  [[gnu::noinline]] void check_shared_write(size_t granule, Access how);
  std::string race_with_writer(const WriteRecord& w) const;
  std::string in_flight_text(size_t offset, const WriteRecord& w);
  static std::string site(const char* file, int line);

  Heap& heap_ = Heap::instance();
  const LaunchState* launch_ = nullptr;
  int64_t index_ = 0;
  int threads_ = 0, warps_ = 0;
  uint32_t number_ = 0;  // of blocks that this worker ran; stamps what it read

  std::unique_ptr<StackPool> stacks_;
  int stacks_count_ = 0;
  std::vector<Fiber> fibers_;
  Fiber main_;  // the worker itself
  std::vector<Fiber*> runnable_;
  int alive_ = 0;
  Random random_;
  int64_t until_preemption_ = 0;
  std::optional<Fault> fault_;
  std::vector<Warp> warp_;
  Barrier barrier_;
  bool has_turn_ = false;

  // Shared memory: dynamic memory lies in the middle of a reservation, static arrays in the
  // thread-local block.
  static constexpr size_t kDynamicMax = 256 * 1024, kReservation = 4 * 1024 * 1024;
  uintptr_t reservation_ = 0;
  unsigned char* dynamic_ = nullptr;
  size_t dynamic_bytes_ = 0;
  AddressRange thread_locals_;
  uintptr_t static_begin_ = 0;
  size_t static_span_ = 0;
  std::unique_ptr<SharedShadow> shadow_;
  uint32_t first_clock_ = 1;  // of this block; records before it are of former blocks
  std::vector<Part> parts_;

  std::vector<std::unique_ptr<View>> views_;
  std::vector<View*> free_views_;
  struct CopyNumber {
    uint16_t thread;
    uint32_t copy;
  };
  std::vector<CopyNumber> not_landed_;

  // Hopper.
  bool async_used_ = false;  // the block has used what is below
  uint32_t first_agent_clock_ = 1, last_agent_clock_ = 1;
  std::vector<Mbarrier> mbarriers_;
  NamedBarrier named_barriers_[16];
  std::deque<BulkLoad> loads_;  // since the block's start, but for those that have landed
  uint32_t first_load_ = 0;     // the number of loads_[0]
  std::vector<LoadPiece> load_pieces_;
  int open_stores_ = 0, open_products_ = 0;
  Warpgroup warpgroups_[SharedShadow::kWarpgroups];
  std::unique_ptr<ProductBuffers> product_buffers_;
  int64_t free_registers_ = 0;
  std::vector<uint16_t> waiting_for_registers_;
};

/// What `running` is while no kernel runs, once there is global memory.
Running outside_kernels();
/// An access that host code of a kernel file may not make: throws Fault. On a card a device pointer
/// is none of the host's.
void host_access(uintptr_t a, int bytes, bool write);

/// The block of the running thread.
///
/// \throws std::logic_error outside of a kernel
Block& current_block(const char* what);

// --- the paths that every access takes

inline void Block::global_read(uintptr_t a, int bytes) {
  const unsigned owner = heap_.owner_of(a);
  const Buffer& b = heap_.buffer(owner);
  const size_t offset = a - b.begin;
  if (offset >= b.bytes || b.bytes - offset < size_t(bytes)) [[unlikely]]
    global_out_of_bounds(a, bytes, "reads");
  if (!b.all_written.load(std::memory_order_relaxed) && !b.is_written(offset, bytes)) [[unlikely]] {
    global_out_of_bounds(a, bytes, "reads");
  }
  traffic[owner].count_read(offset, bytes, number_);
}

inline void Block::global_write(uintptr_t a, int bytes) {
  const unsigned owner = heap_.owner_of(a);
  Buffer& b = heap_.buffer(owner);
  const size_t offset = a - b.begin;
  if (offset >= b.bytes || b.bytes - offset < size_t(bytes)) [[unlikely]]
    global_out_of_bounds(a, bytes, "writes");
  if (!b.all_written.load(std::memory_order_relaxed)) b.mark_written(offset, bytes);
  traffic[owner].written += bytes;
}

inline void Block::log_shared(uintptr_t a, int log2_size, uintptr_t call) {
  running.fiber->log.push_back(SharedAccess::make(call, a, log2_size));
}

/// Whether the write of each granule is known to everyone at this point; counts what it brought
/// from other warps.
template <int kGranules>
[[gnu::always_inline]] inline bool Block::written_and_known(const WriteRecord* w, const Fiber& f) {
  const uint32_t known =
      f.floor + 1 - first_clock_;  // clocks from first_clock_ on, up to the floor
  bool alike = true;
  for (int i = 1; i < kGranules; ++i) alike &= w[i] == w[0];
  if (alike) {
    if (w[0].exchanged(f.warp)) counts.warp_exchange_bytes += kGranules * kGranule;
    return w[0].clock - first_clock_ < known;
  }
  bool fine = true;
  for (int i = 0; i < kGranules; ++i) {
    fine &= w[i].clock - first_clock_ < known;
    if (w[i].exchanged(f.warp)) counts.warp_exchange_bytes += kGranule;
  }
  return fine;
}

template <int kGranules>
inline void Block::shared_read(size_t offset) {
  Fiber& f = *running.fiber;
  const size_t granule = offset / kGranule;
  if (!written_and_known<kGranules>(shadow_->write(granule), f)) [[unlikely]] {
    for (int i = 0; i < kGranules; ++i) check_shared_read(granule + i);
  }
  ReadRecord* r = shadow_->read(f.warp, granule);
  const ReadRecord now = ReadRecord::by_lane(f.clock, f.lane);
  for (int i = 0; i < kGranules; ++i) r[i] = now.after(r[i]);
  counts.shared_read += kGranules * kGranule;
}

template <int kGranules>
inline void Block::shared_write(size_t offset, Access how) {
  Fiber& f = *running.fiber;
  const size_t granule = offset / kGranule;
  WriteRecord* w = shadow_->write(granule);
  bool fine = true;
  for (int i = 0; i < kGranules; ++i) fine &= w[i].clock <= f.floor;
  fine &= !async_used_;
  for (int warp = 0; warp < warps_; ++warp) {
    const ReadRecord* r = shadow_->read(warp, granule);
    for (int i = 0; i < kGranules; ++i) fine &= !r[i].later_than(f.floor);
  }
  if (!fine) [[unlikely]] {
    for (int i = 0; i < kGranules; ++i) check_shared_write(granule + i, how);
  }
  const uint32_t flags = how == Access::copy     ? WriteRecord::kAsync
                         : how == Access::atomic ? WriteRecord::kAtomic
                                                 : 0;
  const WriteRecord now{f.index | flags, how == Access::copy ? WriteRecord::kInFlight : f.clock};
  for (int i = 0; i < kGranules; ++i) w[i] = now;
  counts.shared_written += kGranules * kGranule;
}

template <int kBytes, bool kWrite>
inline void Block::access(uintptr_t a, uintptr_t call) {
  if (--until_preemption_ < 0) [[unlikely]]
    preempt();
  if (heap_.contains(a)) {
    if (a % kBytes != 0) [[unlikely]]
      other_access(a, kBytes, kWrite);
    if constexpr (kWrite) {
      global_write(a, kBytes);
    } else {
      global_read(a, kBytes);
    }
    return;
  }
  size_t offset;
  if (!find_shared(a, kBytes, kWrite ? "writes" : "reads", offset)) [[unlikely]] {
    return other_access(a, kBytes, kWrite);
  }
  if (a % kBytes != 0 || kBytes == 1) [[unlikely]]
    other_access(a, kBytes, kWrite);
  constexpr int kGranules = kBytes == 1 ? 1 : kBytes / kGranule;
  if constexpr (kWrite) {
    shared_write<kGranules>(offset, Access::write);
  } else {
    shared_read<kGranules>(offset);
  }
  log_shared(a, __builtin_ctz(kBytes), call);
}

inline bool Block::find_shared(uintptr_t a, int bytes, const char* verb, size_t& offset) {
  if (a - reservation_ < kReservation) {
    offset = a - reinterpret_cast<uintptr_t>(dynamic_);
    if (offset >= dynamic_bytes_ || dynamic_bytes_ - offset < size_t(bytes)) [[unlikely]] {
      fail(FaultKind::out_of_bounds,
           fmt::format("{} {} bytes at {}, but the launch gave the block {} bytes of dynamic "
                       "shared memory",
                       verb, bytes, name_of_shared(offset), dynamic_bytes_));
    }
    return true;
  }
  const size_t at = a - static_begin_;
  if (at >= static_span_) return false;
  const std::vector<uint8_t>& array_of = launch_->kernel.array_of;
  const uint8_t array = array_of[at / kGranule];
  const size_t last = (at + bytes - 1) / kGranule;
  if (array == 0 || last >= array_of.size() || array_of[last] != array) [[unlikely]]
    return false;
  offset = kDynamicMax + at;
  return true;
}

template <int kBytes, bool kWrite>
inline void Block::local_access(uintptr_t a) {
  const size_t offset = a - running.stack_low;
  if (!running.fiber->local_memory->touch<kBytes, kWrite>(offset)) [[unlikely]]
    touched_in_flight(offset, kBytes, kWrite);
}

template <typename Args, typename F>
void Block::warpgroup_together(const char* name, Args& args, SourceLine line, F&& together) {
  Fiber& f = *running.fiber;
  const int number = f.warp / 4;
  if (number * 4 + 4 > warps_) {
    fail(FaultKind::divergence,
         fmt::format("is at {} ({}), which takes a warpgroup of 128 threads; the block has {}",
                     name, site(line.file, line.line), threads_));
  }
  Warpgroup& w = warpgroups_[number];
  if (w.arrived == 0) {
    w.name = name, w.line = line;
  } else if (w.line.line != line.line || w.name != name) {
    fail(FaultKind::divergence,
         fmt::format("is at {} ({}) while other threads of its warpgroup wait at {} ({})", name,
                     site(line.file, line.line), w.name, site(w.line.file, w.line.line)));
  }
  w.args[f.index % 128] = &args;
  if (++w.arrived < 128) return wait(name, line.file, line.line);
  for (int warp = number * 4; warp < number * 4 + 4; ++warp) settle_bank_conflicts(warp);
  together(std::span<Args*, 128>(reinterpret_cast<Args**>(w.args), 128));
  w.arrived = 0;
  for (int t = number * 128; t < number * 128 + 128; ++t) {
    if (t != f.index) wake(fibers_[t]);
  }
}

inline void Block::note_local_write(const void* p, size_t bytes) {
  const Fiber& f = *running.fiber;
  if (!f.follows_registers) return;
  const size_t offset = local_offset(f, p);
  if (offset >= LocalMemory::kBytes) return;
  f.local_memory->touch(offset, bytes);
  if (f.local_memory->in_flight(offset, bytes)) touched_in_flight(offset, int(bytes), true);
}

template <typename Args, typename F>
void Block::warp_together(const char* name, unsigned mask, Args& args, const char* file, int line,
                          F&& together) {
  Fiber& f = *running.fiber;
  if (mask != 0xffffffffu) {
    fail(FaultKind::mask,
         fmt::format("{} ({}) with mask {:#010x}: the model does full warps only (0xffffffff)",
                     name, site(file, line), mask));
  }
  Warp& w = warp_[f.warp];
  if (w.arrived == 0) {
    w.name = name, w.file = file, w.line = line;
  } else if (w.line != line || w.name != name) {
    fail(FaultKind::divergence,
         fmt::format("is at {} ({}) while other lanes of its warp wait at {} ({})", name,
                     site(file, line), w.name, site(w.file, w.line)));
  }
  w.arrived |= 1u << f.lane;
  w.args[f.lane] = &args;
  if (w.arrived != 0xffffffffu) return wait(name, file, line);
  settle_bank_conflicts(f.warp);
  std::span<Args*, 32> all(reinterpret_cast<Args**>(w.args), 32);
  together(all);
  w.arrived = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if (lane != f.lane) wake(fibers_[f.warp * 32 + lane]);
  }
}

}  // namespace flashsteps::model
