/// \file
/// The CPU model's side of common/gpu/hopper.h: Hopper's mbarriers, TMA, named barriers, setmaxnreg
/// and wgmma, under the names that common/gpu/cuda_hopper.h has for a card. As in device.h, each
/// primitive ends with two defaulted parameters that tell the model the line of the call.
#pragma once

#include "common/model/device.h"
#include "common/model/hopper_primitives.h"

#define FLASHSTEPS_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace flashsteps {

/// What a card's L2 cache is told of a load; nothing on the model.
enum class CacheHint { none, evict_first, evict_last };

/// Along which dimension an operand of wgmma lies in shared memory: along k, which is summed over,
/// or along m or n.
enum class Major { k, mn };

inline namespace model_target {

// --- host ---

/// What a kernel needs to know of a tensor to copy boxes of it by TMA; a kernel takes it by value,
/// as `const __grid_constant__ TensorMap X_map`.
using TensorMap = model::TensorMap;

/// The tensor (head_dim, rows, heads, batch), innermost first, in boxes of box_rows rows and
/// box_cols columns, with the 128-byte swizzle: box_cols is 64.
///
/// \param strides in elements
///
/// \throws DeviceError with what TMA requires and what was given
template <typename T>
TensorMap make_tensor_map(const T* base, int head_dim, int rows, int heads, int batch,
                          const Strides& strides, int box_cols, int box_rows) {
  static_assert(std::is_same_v<T, fp16_t> || std::is_same_v<T, bf16_t>, "fp16_t or bf16_t");
  return model::make_tensor_map(base, head_dim, rows, heads, batch, strides, box_cols, box_rows);
}

/// Multiprocessors of the current card: the grid of a persistent kernel. On the model a small
/// number, so that its blocks take several tiles each.
int multiprocessor_count();

// --- mbarriers ---

/// A barrier in shared memory. A phase of it ends when all its arrivals and all the bytes that
/// arrivals announced have come.
using mbarrier_t = uint64_t;

/// \param arrivals of each phase, 1 to 2^20 - 1
__device__ __forceinline__ void mbarrier_init(mbarrier_t* bar, int arrivals, FLASHSTEPS_SITE) {
  model::mbarrier_init(bar, arrivals, file, line);
}
/// Makes this thread's mbarrier_init visible to TMA; then __syncthreads().
__device__ __forceinline__ void fence_mbarrier_init(FLASHSTEPS_SITE) {
  model::fence_mbarrier_init(file, line);
}
/// Arrives once; what this thread did before is done for whoever waits for the phase.
__device__ __forceinline__ void mbarrier_arrive(mbarrier_t* bar, FLASHSTEPS_SITE) {
  model::mbarrier_arrive(bar, file, line);
}
/// Announces bytes that TMA will bring in this phase, and arrives once.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(mbarrier_t* bar, int bytes,
                                                          FLASHSTEPS_SITE) {
  model::mbarrier_arrive_expect_tx(bar, bytes, file, line);
}
/// Waits until the phase of this parity has ended: 0 for the first one; of a new barrier, parity 1
/// counts as ended.
__device__ __forceinline__ void mbarrier_wait(mbarrier_t* bar, int parity, FLASHSTEPS_SITE) {
  model::mbarrier_wait(bar, parity, file, line);
}

// --- TMA ---

/// Starts copying the box at (col, row, head, batch) to shared memory; all its bytes are counted on
/// `bar`, those outside of the tensor, which arrive as zeros, too. One thread calls it.
///
/// \param to_smem a multiple of 1024 bytes
template <CacheHint kHint = CacheHint::none, typename T>
__device__ __forceinline__ void tma_load(T* to_smem, const TensorMap& map, mbarrier_t* bar, int col,
                                         int row, int head, int batch, FLASHSTEPS_SITE) {
  model::tma_load(to_smem, map, bar, col, row, head, batch, file, line);
}
/// Starts copying a box from shared memory to (col, row, head, batch); what lies outside of the
/// tensor is not stored. One thread calls it, and waits.
template <typename T>
__device__ __forceinline__ void tma_store(const TensorMap& map, const T* from_smem, int col,
                                          int row, int head, int batch, FLASHSTEPS_SITE) {
  model::tma_store(map, from_smem, col, row, head, batch, file, line);
}
/// Closes a group of the stores that this thread has started since the last commit.
__device__ __forceinline__ void tma_store_commit(FLASHSTEPS_SITE) {
  model::tma_store_commit(file, line);
}
/// Waits until at most kPending of this thread's latest groups still read their source.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read(FLASHSTEPS_SITE) {
  model::tma_store_wait(kPending, true, file, line);
}
/// Waits until at most kPending of this thread's latest groups are not in global memory yet.
template <int kPending>
__device__ __forceinline__ void tma_store_wait(FLASHSTEPS_SITE) {
  model::tma_store_wait(kPending, false, file, line);
}
/// Fetches the descriptor ahead of its use; nothing on the model.
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap&) {}
/// Makes what this thread stored to shared memory (or knows to be stored) visible to TMA and wgmma;
/// then a barrier with the thread that starts them.
__device__ __forceinline__ void fence_proxy_async(FLASHSTEPS_SITE) {
  model::fence_proxy_async(file, line);
}

// --- named barriers, registers, warps ---

/// Arrives at barrier `id`, 1 to 15, and waits until `threads` threads have arrived there.
__device__ __forceinline__ void named_barrier_sync(int id, int threads, FLASHSTEPS_SITE) {
  model::named_barrier_sync(id, threads, file, line);
}
/// Arrives likewise, and goes on.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads, FLASHSTEPS_SITE) {
  model::named_barrier_arrive(id, threads, file, line);
}

/// Gives up registers down to kRegisters for each thread of the warpgroup (setmaxnreg.dec).
template <int kRegisters>
__device__ __forceinline__ void shrink_registers(FLASHSTEPS_SITE) {
  model::set_registers(kRegisters, false, file, line);
}
/// Waits for registers up to kRegisters for each thread of the warpgroup (setmaxnreg.inc).
template <int kRegisters>
__device__ __forceinline__ void grow_registers(FLASHSTEPS_SITE) {
  model::set_registers(kRegisters, true, file, line);
}

/// x, which is the same in all lanes of the warp, as the compiler is to know.
__device__ __forceinline__ int warp_uniform(int x, FLASHSTEPS_SITE) {
  return model::warp_uniform(x, file, line);
}

// --- wgmma: all is called by all 128 threads of a warpgroup ---

/// Orders this thread's accesses to registers before the products that follow.
__device__ __forceinline__ void wgmma_fence(FLASHSTEPS_SITE) {
  model::wgmma_fence(file, line);
}
/// Closes a group of the products since the last commit.
__device__ __forceinline__ void wgmma_commit(FLASHSTEPS_SITE) {
  model::wgmma_commit(file, line);
}
/// Waits until at most kPending of the latest groups are not done. The sums that are then complete
/// are named, so that a card's compiler does not read them before; where any are named, all are.
template <int kPending>
__device__ __forceinline__ void wgmma_wait(FLASHSTEPS_SITE) {
  model::wgmma_wait(kPending, {}, file, line);
}
template <int kPending, int kN1>
__device__ __forceinline__ void wgmma_wait(float (&d1)[kN1][4], FLASHSTEPS_SITE) {
  model::wgmma_wait(kPending, {{&d1[0][0]}, 1}, file, line);
}
template <int kPending, int kN1, int kN2>
__device__ __forceinline__ void wgmma_wait(float (&d1)[kN1][4], float (&d2)[kN2][4],
                                           FLASHSTEPS_SITE) {
  model::wgmma_wait(kPending, {{&d1[0][0], &d2[0][0]}, 2}, file, line);
}
template <int kPending, int kN1, int kN2, int kN3>
__device__ __forceinline__ void wgmma_wait(float (&d1)[kN1][4], float (&d2)[kN2][4],
                                           float (&d3)[kN3][4], FLASHSTEPS_SITE) {
  model::wgmma_wait(kPending, {{&d1[0][0], &d2[0][0], &d3[0][0]}, 3}, file, line);
}

/// Where an operand lies in shared memory, with the 128-byte swizzle (PTX ISA, "Matrix Descriptor
/// Format"). To start `bytes` later within the tile, add bytes >> 4.
///
/// \param leading_bytes between panels of 64 elements of an operand stored along m or n
///
/// \param stride_bytes between groups of 8 rows of 128 bytes
template <typename T>
__device__ __forceinline__ uint64_t matrix_descriptor(const T* smem, int leading_bytes,
                                                      int stride_bytes, FLASHSTEPS_SITE) {
  return model::matrix_descriptor(smem, leading_bytes, stride_bytes, file, line);
}

/// D = A B, or D + A B: A 64 x 16 and B 16 x kN from shared memory, D 64 x kN fp32. Warp w of the
/// warpgroup has rows 16 w + g and + 8 of D, g = lane / 4 and t = lane % 4: d[n][e] is in row
/// g + 8 (e / 2) and column 8 n + 2 t + e % 2. D is not to be touched before the wait that covers
/// the product.
template <typename T, int kN, Major kMajorA = Major::k, Major kMajorB = Major::k>
__device__ __forceinline__ void wgmma(float (&d)[kN / 8][4], uint64_t a_descriptor,
                                      uint64_t b_descriptor, bool accumulate, FLASHSTEPS_SITE) {
  static_assert(kN % 8 == 0 && kN >= 8 && kN <= 256, "8, 16, ..., 256 columns");
  model::wgmma({kType16<T>, kN, kMajorA == Major::mn, kMajorB == Major::mn, &d[0][0], nullptr,
                a_descriptor, b_descriptor, accumulate},
               file, line);
}
/// Likewise, with A from registers, as mma_m16n8k16 has it for each warp's 16 rows. They are not to
/// be changed before the wait that covers the product.
template <typename T, int kN, Major kMajorB = Major::k>
__device__ __forceinline__ void wgmma(float (&d)[kN / 8][4], const uint32_t (&a)[4],
                                      uint64_t b_descriptor, bool accumulate, FLASHSTEPS_SITE) {
  static_assert(kN % 8 == 0 && kN >= 8 && kN <= 256, "8, 16, ..., 256 columns");
  model::wgmma(
      {kType16<T>, kN, false, kMajorB == Major::mn, &d[0][0], a, 0, b_descriptor, accumulate}, file,
      line);
}

}  // namespace model_target
}  // namespace flashsteps

#undef FLASHSTEPS_SITE
