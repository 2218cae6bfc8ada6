// The calls that g++ -fsanitize=thread puts before every load and store of a kernel. The
// sanitizer's own runtime is not linked: these are the model's eyes.
#include <atomic>

#include "common/model/block.h"

namespace flashsteps::model {
namespace {

template <int kBytes, bool kWrite>
[[gnu::always_inline]] inline void see(const void* pointer, uintptr_t call) {
  const auto a = reinterpret_cast<uintptr_t>(pointer);
  if (a - running.stack_low < running.stack_bytes) [[likely]] {  // local memory, or no kernel
    if (running.follows_registers) running.block->local_access<kBytes, kWrite>(a);
    return;
  }
  if (!running.block) return host_access(a, kBytes, kWrite);
  running.block->access<kBytes, kWrite>(a, call);
}

/// A piece of memory, in the largest accesses that its alignment allows.
template <bool kWrite>
void see_range(const void* pointer, size_t bytes, uintptr_t call) {
  const auto begin = reinterpret_cast<uintptr_t>(pointer);
  if (begin - running.stack_low < running.stack_bytes && !running.follows_registers) return;
  for (size_t done = 0; done < bytes;) {
    const void* p = static_cast<const char*>(pointer) + done;
    const uintptr_t a = begin + done;
    const size_t left = bytes - done;
    if (a % 16 == 0 && left >= 16)
      see<16, kWrite>(p, call), done += 16;
    else if (a % 8 == 0 && left >= 8)
      see<8, kWrite>(p, call), done += 8;
    else if (a % 4 == 0 && left >= 4)
      see<4, kWrite>(p, call), done += 4;
    else if (a % 2 == 0 && left >= 2)
      see<2, kWrite>(p, call), done += 2;
    else
      see<1, kWrite>(p, call), done += 1;
  }
}

void refuse_atomic() {
  if (running.block) {
    running.block->fail(FaultKind::unsupported,
                        "std::atomic (or a static variable that is initialised at run time) "
                        "in a kernel; use atomicAdd");
  }
}

}  // namespace
}  // namespace flashsteps::model

using namespace flashsteps::model;
#define CALL reinterpret_cast<uintptr_t>(__builtin_return_address(0))

extern "C" {

void __tsan_init() {}

#define FLASHSTEPS_ACCESS(BYTES)                \
  void __tsan_read##BYTES(void* p) {            \
    see<BYTES, false>(p, CALL);                 \
  }                                             \
  void __tsan_write##BYTES(void* p) {           \
    see<BYTES, true>(p, CALL);                  \
  }                                             \
  void __tsan_unaligned_read##BYTES(void* p) {  \
    see_range<false>(p, BYTES, CALL);           \
  }                                             \
  void __tsan_unaligned_write##BYTES(void* p) { \
    see_range<true>(p, BYTES, CALL);            \
  }
FLASHSTEPS_ACCESS(1)
FLASHSTEPS_ACCESS(2)
FLASHSTEPS_ACCESS(4)
FLASHSTEPS_ACCESS(8)
FLASHSTEPS_ACCESS(16)
#undef FLASHSTEPS_ACCESS

void __tsan_read_range(void* p, unsigned long bytes) {
  see_range<false>(p, bytes, CALL);
}
void __tsan_write_range(void* p, unsigned long bytes) {
  see_range<true>(p, bytes, CALL);
}
void __tsan_vptr_update(void** p, void*) {
  see<8, true>(p, CALL);
}
void __tsan_vptr_read(void** p) {
  see<8, false>(p, CALL);
}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

// std::atomic in host code of a kernel file, and the guards of its static variables.
#define FLASHSTEPS_ATOMIC(BITS, T)                                                                 \
  T __tsan_atomic##BITS##_load(const volatile T* p, int) {                                         \
    return refuse_atomic(), __atomic_load_n(p, __ATOMIC_SEQ_CST);                                  \
  }                                                                                                \
  void __tsan_atomic##BITS##_store(volatile T* p, T x, int) {                                      \
    refuse_atomic(), __atomic_store_n(p, x, __ATOMIC_SEQ_CST);                                     \
  }                                                                                                \
  T __tsan_atomic##BITS##_exchange(volatile T* p, T x, int) {                                      \
    return refuse_atomic(), __atomic_exchange_n(p, x, __ATOMIC_SEQ_CST);                           \
  }                                                                                                \
  T __tsan_atomic##BITS##_fetch_add(volatile T* p, T x, int) {                                     \
    return refuse_atomic(), __atomic_fetch_add(p, x, __ATOMIC_SEQ_CST);                            \
  }                                                                                                \
  T __tsan_atomic##BITS##_fetch_sub(volatile T* p, T x, int) {                                     \
    return refuse_atomic(), __atomic_fetch_sub(p, x, __ATOMIC_SEQ_CST);                            \
  }                                                                                                \
  int __tsan_atomic##BITS##_compare_exchange_strong(volatile T* p, T* expected, T x, int, int) {   \
    return refuse_atomic(),                                                                        \
           __atomic_compare_exchange_n(p, expected, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }
FLASHSTEPS_ATOMIC(8, uint8_t)
FLASHSTEPS_ATOMIC(32, uint32_t)
FLASHSTEPS_ATOMIC(64, uint64_t)
#undef FLASHSTEPS_ATOMIC

}  // extern "C"
