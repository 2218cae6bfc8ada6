/// \file
/// The CUDA side of hopper.h: thin PTX wrappers for compute capability 9.0 (sm_90a), and the tensor
/// maps that TMA takes.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/gpu/cuda_device.h"
#include "common/gpu/cuda_wgmma.h"

namespace flashsteps {

/// What the L2 cache is told of a tile: nothing, or that it is wanted once, or again.
enum class CacheHint { none, evict_first, evict_last };

namespace detail {
/// Fills in a tensor map. \throws DeviceError where TMA cannot take the tensor, or is not there
void encode_tensor_map(CUtensorMap& map, DType dtype, const void* base, int head_dim, int rows,
                       int heads, int batch, const Strides& strides, int box_cols, int box_rows);
}  // namespace detail

inline namespace cuda_target {

// --- mbarriers ---

/// An mbarrier in shared memory.
using mbarrier_t = uint64_t;

/// A phase ends after `arrivals` arrivals and all bytes that were announced. By one thread, before
/// any other use; then fence_mbarrier_init() and __syncthreads().
__device__ __forceinline__ void mbarrier_init(mbarrier_t* bar, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals)
               : "memory");
}
/// Makes this thread's mbarrier_init visible to the copy engine.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
/// One arrival. What this thread did before is seen by those that wait for the phase.
__device__ __forceinline__ void mbarrier_arrive(mbarrier_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}
/// One arrival, which announces that `bytes` will be copied by TMA before the phase ends.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(mbarrier_t* bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)),
               "r"(bytes)
               : "memory");
}
/// Waits for the end of the phase with this parity: 0 for the first, 1 for the second, … An
/// mbarrier that is new counts as one whose phase of parity 1 has just ended.
__device__ __forceinline__ void mbarrier_wait(mbarrier_t* bar, int parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n}\n" ::"r"(shared_address(bar)),
      "r"(parity)
      : "memory");
}

// --- TMA ---

/// A tensor in global memory, as TMA knows it. A kernel takes it as `const __grid_constant__
/// TensorMap`.
using TensorMap = CUtensorMap;

/// The tensor (batch, heads, rows, head_dim) to be copied in tiles of box_rows x box_cols, with
/// the 128-byte swizzle. Host only.
///
/// \throws DeviceError where TMA cannot take it: the rule that it breaks, in one line
template <typename T>
TensorMap make_tensor_map(const T* base, int head_dim, int rows, int heads, int batch,
                          const Strides& strides, int box_cols, int box_rows) {
  TensorMap map;
  detail::encode_tensor_map(map, std::is_same_v<T, fp16_t> ? DType::fp16 : DType::bf16, base,
                            head_dim, rows, heads, batch, strides, box_cols, box_rows);
  return map;
}

/// Fetches the map itself, ahead of its first use.
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// Starts copying the box at (batch, head, row, col) to shared memory, by one thread. Elements
/// outside of the tensor arrive as zeros. All bytes of the box are counted by `bar`. \param to_smem
/// 1024-byte aligned; 16-byte chunk c of the box's row r lies in chunk c ^ (r % 8) of its 128 bytes
template <CacheHint kHint = CacheHint::none, typename T>
__device__ __forceinline__ void tma_load(T* to_smem, const TensorMap& map, mbarrier_t* bar, int col,
                                         int row, int head, int batch) {
  if constexpr (kHint == CacheHint::none) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to_smem)),
        "l"(&map), "r"(shared_address(bar)), "r"(col), "r"(row), "r"(head), "r"(batch)
        : "memory");
  } else {
    // The two policies' encodings, as createpolicy.fractional.L2 gives them for all of the data.
    constexpr uint64_t kPolicy =
        kHint == CacheHint::evict_first ? 0x12f0000000000000 : 0x14f0000000000000;
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(to_smem)),
        "l"(&map), "r"(shared_address(bar)), "r"(col), "r"(row), "r"(head), "r"(batch), "l"(kPolicy)
        : "memory");
  }
}

/// Starts copying a box from shared memory, by one thread; elements outside of the tensor are left
/// out. Closed by tma_store_commit().
template <typename T>
__device__ __forceinline__ void tma_store(const TensorMap& map, const T* from_smem, int col,
                                          int row, int head, int batch) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          &map),
      "r"(shared_address(from_smem)), "r"(col), "r"(row), "r"(head), "r"(batch)
      : "memory");
}
/// Closes a group of the stores that this thread has started since the last commit.
__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// Waits until at most kPending of this thread's latest groups have shared memory still to read.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
/// Waits until at most kPending of this thread's latest groups are still being written.
template <int kPending>
__device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Lets wgmma and TMA see what this thread stored to shared memory before: they reach it by
/// another way (the async proxy) than ordinary loads and stores. A barrier follows.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// --- warps that do different things ---

/// Waits until `threads` threads, a multiple of 32, have come to barrier `id`, 1 to 15, by
/// named_barrier_sync or named_barrier_arrive.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/// Comes to the barrier and goes on.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Gives registers back, down to kRegisters for each thread of the warpgroup.
template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
/// Takes registers, up to kRegisters for each thread of the warpgroup; waits until they are there.
template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// x, which is the same in all lanes of the warp; the compiler learns that it is.
__device__ __forceinline__ int warp_uniform(int x) {
  return __shfl_sync(kFullMask, x, 0);
}

// --- wgmma ---

/// Where an operand of wgmma lies: a tile with the 128-byte swizzle in rows of 64 elements, 8 rows
/// of which are 1024 bytes, aligned to as much. Along k: groups of 8 rows lie `stride_bytes` apart.
/// Along m or n: a row is one k; groups of 8 k lie `stride_bytes` apart, and panels of 64 columns
/// `leading_bytes`. Within a tile, add bytes / 16.
template <typename T>
__device__ __forceinline__ uint64_t matrix_descriptor(const T* smem, int leading_bytes,
                                                      int stride_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | uint64_t(stride_bytes >> 4) << 32 | uint64_t(leading_bytes >> 4) << 16 |
         (shared_address(smem) & 0x3ffff) >> 4;
}

/// Orders this warpgroup's accesses to the registers of the next wgmma before it.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
/// Closes a group of the wgmma that were started since the last commit.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most kPending of the latest groups are still at work. The sums that it names are
/// then complete: the compiler may not read them before
template <int kPending, int... kN>
__device__ __forceinline__ void wgmma_wait(float (&... d)[kN][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
  const auto complete = [](auto& sums) {
#pragma unroll
    for (auto& quad : sums) {
      asm volatile("" : "+f"(quad[0]), "+f"(quad[1]), "+f"(quad[2]), "+f"(quad[3])::"memory");
    }
  };
  (complete(d), ...);
}

// --- the card ---

/// Multiprocessors of the current card. Host only.
int multiprocessor_count();

}  // namespace cuda_target
}  // namespace flashsteps
