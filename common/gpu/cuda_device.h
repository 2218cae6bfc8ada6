/// \file
/// The CUDA side of gpu.h: thin PTX wrappers, and the checked launch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/stage/stage.h"

/// What assert() calls on a card, present without it too (CUDA C++ Programming Guide, assertions).
extern "C" __device__ void __assertfail(const char* what, const char* file, unsigned line,
                                        const char* function, size_t char_size);

namespace flashsteps {

/// Throws DeviceError (common/stage/device.h) with advice unless `status` is success.
/// \param what was being done: "launch of scores_kernel"
void check_cuda(cudaError_t status, const char* what);

namespace detail {
/// Raises the kernel's limit of dynamic shared memory where it needs more than 48 KiB, once for
/// each kernel and device, and checks the request against the card's limit.
void prepare_launch(const void* kernel, int64_t grid, int block, int smem);
/// Checks the launch that was just made.
void check_launch(const void* kernel);
}  // namespace detail

inline namespace cuda_target {

/// What this source is being compiled for.
constexpr Target kTarget = Target::cuda;
/// All 32 lanes of a warp.
constexpr unsigned kFullMask = 0xffffffffu;

using fp16_t = __half;  ///< IEEE binary16
/// The upper half of an fp32.
using bf16_t = __nv_bfloat16;

/// threadIdx.x, read anew. The compiler cannot keep what follows from it in registers across a
/// loop: what is cheap to compute again is then computed again, where registers are short.
__device__ __forceinline__ int fresh_thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// --- 16-bit types ---

/// Exact.
__device__ __forceinline__ float to_float(fp16_t x) {
  return __half2float(x);
}
/// Exact.
__device__ __forceinline__ float to_float(bf16_t x) {
  return __bfloat162float(x);
}

/// Rounds to nearest even.
template <typename T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (std::is_same_v<T, fp16_t>) {
    return __float2half_rn(x);
  } else {
    return __float2bfloat16_rn(x);
  }
}

/// Two elements in one register, `lo` in the lower half (the lower address).
template <typename T>
__device__ __forceinline__ uint32_t pack2(float lo, float hi) {
  uint32_t packed;
  if constexpr (std::is_same_v<T, fp16_t>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(hi), "f"(lo));
  }
  return packed;
}

// --- counted arithmetic ---

/// 2^x; 0 for -inf.
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// e^x; 0 for -inf.
__device__ __forceinline__ float fast_exp(float x) {
  return __expf(x);
}

/// ln x; -inf for 0.
__device__ __forceinline__ float natural_log(float x) {
  return logf(x);
}

/// a / b, to 2 ulp, for |b| < 2^126.
__device__ __forceinline__ float divide(float a, float b) {
  return __fdividef(a, b);
}

// --- global memory, shared between blocks ---

/// Adds four neighbouring numbers in global memory, each atomically; the address is a multiple of
/// 16. One instruction from compute capability 9.0 on, else four.
__device__ __forceinline__ void atomic_add_quad(float* address, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(
                   __cvta_generic_to_global(address)),
               "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
#else
#pragma unroll
  for (int e = 0; e < 4; ++e) atomicAdd(address + e, x[e]);
#endif
}

/// Waits until *turn is `value`. Called by a whole warp; what other warps did before their
/// turn_pass is then seen by all of its lanes. The warps that *turn waits for must be of blocks
/// that have started.
__device__ __forceinline__ void turn_wait(const int* turn, int value) {
  if (threadIdx.x % 32 == 0) {
    int now;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
                   : "=r"(now)
                   : "l"(__cvta_generic_to_global(turn))
                   : "memory");
    } while (now != value);
  }
  __syncwarp();
}

/// Adds 1 to *turn, after all that the warp's lanes did before. Called by a whole warp, which has
/// the turn.
__device__ __forceinline__ void turn_pass(int* turn) {
  __syncwarp();  // a release covers what happened before it, hence what the other lanes did, too
  if (threadIdx.x % 32 == 0) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(__cvta_generic_to_global(turn))
                 : "memory");
  }
}

// --- dynamic shared memory ---

/// The dynamic shared memory of the block, 1024-byte aligned.
template <typename T>
__device__ __forceinline__ T* dynamic_smem() {
  extern __shared__ __align__(1024) unsigned char flashsteps_dynamic_smem[];
  return reinterpret_cast<T*>(flashsteps_dynamic_smem);
}

/// Hands out dynamic shared memory in named parts, each 128-byte aligned.
class SharedMemory {
 public:
  template <typename T>
  __device__ __forceinline__ T* take(const char* /*name*/, int count) {
    T* part = reinterpret_cast<T*>(dynamic_smem<unsigned char>() + used_);
    used_ += (count * int(sizeof(T)) + 127) / 128 * 128;
    return part;
  }

 private:
  int used_ = 0;
};

// --- tensor cores ---

/// The address that PTX instructions on shared memory take.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/// Loads four 8x8 matrices of 16-bit elements; lane 8i+r gives the address of row r of matrix i,
/// and lane t receives in r[i] elements (t/4, 2(t%4)) and the next of matrix i (PTX ISA, ldmatrix).
template <typename T>
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const T* row_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row_smem))
               : "memory");
}

/// As ldmatrix_x4, with each matrix transposed on the way: lane t receives (2(t%4), t/4) and the
/// one below.
template <typename T>
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const T* row_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row_smem))
               : "memory");
}

/// D += A B for one warp, A 16x16 by rows, B 16x8 by columns, D 16x8 fp32 (PTX ISA, mma.m16n8k16).
/// With g = lane/4 and t = lane%4: a[0], a[1], a[2], a[3] hold (g, 2t), (g+8, 2t), (g, 2t+8), (g+8,
/// 2t+8) and the next column; b[0], b[1] hold (2t, g), (2t+8, g) and the next row; d holds (g, 2t),
/// (g, 2t+1), (g+8, 2t), (g+8, 2t+1).
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  if constexpr (std::is_same_v<T, fp16_t>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// --- asynchronous copies ---

/// Starts copying 16 bytes from global to shared memory, past the registers; zeros instead where
/// `fetch` is false (global memory is then not touched). Both addresses are 16-byte aligned.
template <typename T>
__device__ __forceinline__ void cp_async_16(T* to_smem, const T* from_gmem, bool fetch) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to_smem)),
               "l"(from_gmem), "r"(fetch ? 16 : 0)
               : "memory");
}

/// Starts copying 16 bytes as cp_async_16 does where `condition` holds, and does nothing elsewhere:
/// one predicated instruction, around which the compiler moves others as it likes.
template <typename T>
__device__ __forceinline__ void cp_async_16_if(bool condition, T* to_smem, const T* from_gmem) {
  asm volatile(
      "{\n"
      ".reg .pred start;\n"
      "setp.ne.b32 start, %2, 0;\n"
      "@start cp.async.cg.shared.global [%0], [%1], 16;\n"
      "}" ::"r"(shared_address(to_smem)),
      "l"(from_gmem), "r"(int{condition})
      : "memory");
}

/// Closes a group of the copies that this thread has started since the last commit.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits until at most kPending of this thread's latest groups are still in flight. Other threads
/// see the data after a barrier that follows.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// --- the ledger, and what mutants switch off ---

/// Marks that the block starts on a tile of keys, and whether it masks it. Counted by the model.
__device__ __forceinline__ void note_tile(bool /*masked*/) {}
/// Marks the end of the loop over tiles.
__device__ __forceinline__ void note_tiles_done() {}
/// The condition itself; marks it as a mask, so that a mutant can switch it off.
__device__ __forceinline__ bool mask_if(bool condition) {
  return condition;
}

// --- labs ---

/// Where a lab leaves out what the student is to write: stops the kernel with a message that says
/// what is missing. One thread speaks for all: the failed assertion ends the kernel.
__device__ __forceinline__ void not_implemented(const char* what) {
  if (blockIdx.x == 0 && threadIdx.x == 0) __assertfail(what, "not implemented", 0, "lab", 1);
}

// --- the card ---

/// Dynamic shared memory that a block may ask for on the current card, in bytes. Host only.
int shared_memory_per_block();

// --- launch ---

/// Where and how a kernel runs.
struct LaunchConfig {
  int64_t grid = 0;  ///< blocks; 0 launches nothing
  int block = 0;     ///< threads
  int smem = 0;      ///< bytes of dynamic shared memory
  Stream stream = nullptr;
};

/// Launches and checks; throws DeviceError with what is needed and what was found.
template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), const LaunchConfig& config, Args... args) {
  if (config.grid == 0) return;
  const void* entry = reinterpret_cast<const void*>(kernel);
  const dim3 grid(static_cast<unsigned>(config.grid));
  const dim3 block(static_cast<unsigned>(config.block));
  detail::prepare_launch(entry, config.grid, config.block, config.smem);
  kernel<<<grid, block, config.smem, static_cast<cudaStream_t>(config.stream)>>>(args...);
  detail::check_launch(entry);
}

}  // namespace cuda_target
}  // namespace flashsteps
