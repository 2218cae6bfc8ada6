// What each thread does by itself: its indices, counted arithmetic, atomics, named shared memory,
// block barriers.
#include <cmath>

#include "common/model/block.h"

namespace flashsteps::model {

uint3 thread_index() noexcept {
  current_block("threadIdx");
  return {running.fiber->index, 0, 0};
}
uint3 block_index() noexcept {
  return current_block("blockIdx").block_index();
}
uint3 block_dim() noexcept {
  return current_block("blockDim").block_dim();
}
uint3 grid_dim() noexcept {
  return current_block("gridDim").grid_dim();
}

void block_barrier(const char* file, int line) {
  if (skipped(SiteKind::barrier, file, line)) return;
  current_block("__syncthreads").block_barrier(file, line);
}

float exponential(float x, const char* file, int line) {
  ++current_block("fast_exp").counts.exp;
  return skipped(SiteKind::exp, file, line) ? 1.f : std::exp(x);
}

float exponential2(float x, const char* file, int line) {
  ++current_block("fast_exp2").counts.exp;
  return skipped(SiteKind::exp, file, line) ? 1.f : std::exp2(x);
}

float divide(float a, float b, const char* file, int line) {
  Counts& counts = current_block("divide").counts;
  ++counts.div;
  if (running.fiber->in_tile_loop) ++counts.div_in_loop;
  return skipped(SiteKind::div, file, line) ? a : a / b;
}

bool mask(bool condition, const char* file, int line) {
  return !skipped(SiteKind::mask, file, line) && condition;
}

void note_tile(bool masked) {
  current_block("note_tile");
  Fiber& f = *running.fiber;
  ++f.tiles;
  f.tiles_masked += masked;
  f.in_tile_loop = true;
}

void note_tiles_done() {
  current_block("note_tiles_done");
  running.fiber->in_tile_loop = false;
}

void not_implemented(const char* what, const char* file, int line) {
  current_block("not_implemented")
      .fail(FaultKind::missing_part, fmt::format("{} ({}:{})", what, file, line));
}

void* dynamic_shared_memory() {
  return current_block("dynamic_smem").dynamic_memory();
}

void* take_shared_memory(const char* name, int64_t offset, int64_t count, int element_size,
                         const char* file, int line) {
  return current_block("SharedMemory").take_shared(name, offset, count, element_size, file, line);
}

namespace {

template <typename T>
T add(T* address, T value, const char* file, int line, uintptr_t call) {
  Block& b = current_block("atomicAdd");
  const auto a = reinterpret_cast<uintptr_t>(address);
  const bool plain_store = skipped(SiteKind::atomic, file, line);
  const bool global = Heap::instance().contains(a);
  size_t offset = 0;
  if (!global && !b.find_shared(a, sizeof(T), "atomicAdd on", offset)) {
    b.fail(FaultKind::host_memory,
           fmt::format("atomicAdd ({}:{}) on {:#x}, which is neither global nor shared memory",
                       file, line, a));
  }
  if (a % sizeof(T) != 0) {
    b.fail(FaultKind::misaligned,
           fmt::format("atomicAdd ({}:{}) on an address that is not a multiple of {}", file, line,
                       sizeof(T)));
  }
  if (plain_store) {
    b.access<sizeof(T), true>(a, call);
    const T old = *address;
    *address = value;
    return old;
  }
  if (global) {
    b.take_turn();
    b.global_atomic(a, sizeof(T));
  } else {
    b.shared_atomic(offset);
    b.log_shared(a, 2, call);
  }
  const T old = *address;
  *address = old + value;
  return old;
}

}  // namespace

float atomic_add(float* address, float value, const char* file, int line) {
  return add(address, value, file, line, reinterpret_cast<uintptr_t>(__builtin_return_address(0)));
}
int atomic_add(int* address, int value, const char* file, int line) {
  // Unsigned, since CUDA's sum wraps around.
  return int(add(reinterpret_cast<unsigned*>(address), unsigned(value), file, line,
                 reinterpret_cast<uintptr_t>(__builtin_return_address(0))));
}
unsigned atomic_add(unsigned* address, unsigned value, const char* file, int line) {
  return add(address, value, file, line, reinterpret_cast<uintptr_t>(__builtin_return_address(0)));
}

void atomic_add_quad(float* address, const float* values, const char* file, int line) {
  const auto call = reinterpret_cast<uintptr_t>(__builtin_return_address(0));
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) {
    current_block("atomic_add_quad")
        .fail(FaultKind::misaligned,
              fmt::format("atomic_add_quad ({}:{}) on an address that is not a multiple of 16",
                          file, line));
  }
  for (int e = 0; e < 4; ++e) add(address + e, values[e], file, line, call);
}

// Blocks take their turns in order, so a turn that has not come when all blocks before this one
// have ended will never come.
void turn_wait(const int* turn, int value, const char* file, int line) {
  if (skipped(SiteKind::turn, file, line)) return;
  Block& b = current_block("turn_wait");
  b.turn_wait(turn, value, file, line);
}
void turn_pass(int* turn, const char* file, int line) {
  if (skipped(SiteKind::turn, file, line)) return;
  Block& b = current_block("turn_pass");
  b.turn_pass(turn, file, line);
}

}  // namespace flashsteps::model
