/// \file
/// Fibers: each CUDA thread of a running block has one, and all of them share one OS thread.
#pragma once

#include <boost/context/detail/fcontext.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/model/async_units.h"
#include "common/model/bank_conflicts.h"
#include "common/model/local_memory.h"

namespace flashsteps::model {

/// What a thread knows, shared by the threads that know the same, and never changed while more than
/// its owners can see it.
struct View : Knowledge {
  int owners = 0;
};

/// One asynchronous copy of 16 bytes that its thread has not waited for.
struct AsyncCopy {
  void* to;
  const void* from;  // null: zeros
  uint32_t group;    // the number of commits before it
  bool landed;
  const char* file;
  int line;
};

/// One CUDA thread of the running block.
struct Fiber {
  enum class State : uint8_t { runnable, waiting, exited };

  boost::context::detail::fcontext_t context = nullptr;
  uintptr_t stack_low = 0;
  uint16_t index = 0;  // in the block
  uint8_t lane = 0;
  uint8_t warp = 0;
  State state = State::runnable;

  // Where it waits, for the report of a deadlock.
  const char* waits_for = nullptr;
  int mbarrier = -1;  // that it waits for
  const char* file = nullptr;
  int line = 0;

  // Happens-before. Of every thread this one knows all up to `floor`, and more where `view` says
  // so; of what works beside the threads, it knows what `view` says.
  uint32_t clock = 0;
  uint32_t floor = 0;
  View* view = nullptr;

  AccessLog log;  // accesses to shared memory since the warp came together

  std::vector<AsyncCopy> copies;  // oldest first
  uint32_t first_copy = 0;        // the number of copies[0], counted from the block's start
  uint32_t commits = 0;

  std::vector<BulkStore> stores;  // of TMA, not waited for; oldest first
  uint32_t store_commits = 0;

  // wgmma: products that this thread has not waited for, oldest first, and its registers, followed
  // from the first wgmma_fence on.
  std::vector<PendingProduct> products;
  uint32_t product_commits = 0;
  std::unique_ptr<LocalMemory> local_memory;
  bool follows_registers = false;
  int registers = 0;  // as setmaxnreg leaves them

  int64_t tiles = 0;
  int64_t tiles_masked = 0;
  bool in_tile_loop = false;

  const int* turn = nullptr;  // the turn that it has: waited for and not yet passed

  bool knows(uint16_t thread, uint32_t when) const {
    return when <= floor || thread == index || (view && view->clock[thread] >= when);
  }
  /// How much of the work of an agent (by its place in a view) this thread knows to be done.
  uint32_t known_of(size_t agent) const { return view ? view->of(agent) : 0; }
};

/// Stacks for the threads of one block, with a guard page below each.
class StackPool {
 public:
  static constexpr size_t kStack = 64 * 1024;
  static constexpr size_t kGuard = 4096;

  explicit StackPool(int count);
  ~StackPool();
  StackPool(const StackPool&) = delete;
  StackPool& operator=(const StackPool&) = delete;

  uintptr_t low(int i) const { return begin_ + size_t(i) * (kStack + kGuard) + kGuard; }
  /// Where thread i's stack starts, growing down. Staggered: at equal offsets all stacks would fall
  /// into the same sets of the cache.
  void* top(int i) const {
    return reinterpret_cast<void*>(low(i) + kStack - size_t(i * 5 % 32) * 128);
  }
  bool contains(uintptr_t a) const { return a - begin_ < bytes_; }

 private:
  uintptr_t begin_;
  size_t bytes_;
};

}  // namespace flashsteps::model
