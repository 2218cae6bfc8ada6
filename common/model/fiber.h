/// \file
/// Fibers: each CUDA thread of a running block has one, and all of them share one OS thread.
#pragma once

#include <boost/context/detail/fcontext.hpp>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/model/bank_conflicts.h"

namespace flashsteps::model {

/// What a thread knows of the others: of thread t, everything up to clock[t]. Shared by the threads
/// that know the same, and never changed while more than its owners can see it.
struct View {
  int owners = 0;
  std::vector<uint32_t> clock;
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
  const char* file = nullptr;
  int line = 0;

  // Happens-before. Of every thread this one knows all up to `floor`, and more where `view` says
  // so.
  uint32_t clock = 0;
  uint32_t floor = 0;
  View* view = nullptr;

  AccessLog log;  // accesses to shared memory since the warp came together

  std::vector<AsyncCopy> copies;  // oldest first
  uint32_t first_copy = 0;        // the number of copies[0], counted from the block's start
  uint32_t commits = 0;

  int64_t tiles = 0;
  int64_t tiles_masked = 0;
  bool in_tile_loop = false;

  const int* turn = nullptr;  // the turn that it has: waited for and not yet passed

  bool knows(uint16_t thread, uint32_t when) const {
    return when <= floor || thread == index || (view && view->clock[thread] >= when);
  }
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
