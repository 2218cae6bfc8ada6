/// \file
/// Tiles that TMA brings and the products that wgmma makes of them, by one warpgroup. The same
/// source for both targets.
///
/// A tile of kRows x kCols lies in panels of 64 columns: kRows rows of 128 bytes each, the 16-byte
/// chunks of which are swizzled as swizzle<64> does it. Panels lie one behind the other.
#pragma once

#include "common/gpu/hopper.h"

namespace flashsteps::inline FLASHSTEPS_TARGET {

constexpr int kPanel = 64;  ///< columns of a panel

/// Offset, in elements, of (row, col) in a tile of kRows rows.
template <int kRows>
constexpr int panel_swizzle(int row, int col) {
  return col / kPanel * (kRows * kPanel) + swizzle<kPanel>(row, col % kPanel);
}

/// The descriptor of what lies `bytes` further on. Only its lower half changes: the address is in
/// it, and cannot carry out of it.
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, int bytes) {
  const uint32_t upper = descriptor >> 32, lower = uint32_t(descriptor) + bytes / 16;
  return uint64_t{upper} << 32 | lower;
}

/// Where a thread is in a ring of kBuffers buffers, and the parity of the phase that the buffer's
/// mbarrier is in.
template <int kBuffers>
struct Ring {
  int stage = 0, phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == kBuffers) stage = 0, phase ^= 1;
  }
};

/// Starts copying rows [row, row + kRows) of one head to shared memory, by one thread. `bar` counts
/// kRows * kCols elements. \param tile_smem 1024-byte aligned
template <int kRows, int kCols, CacheHint kHint = CacheHint::none, typename T>
__device__ __forceinline__ void load_tile(T* tile_smem, const TensorMap& map, mbarrier_t* bar,
                                          int row, int head, int batch) {
#pragma unroll
  for (int col = 0; col < kCols; col += kPanel) {
    tma_load<kHint>(tile_smem + col * kRows, map, bar, col, row, head, batch);
  }
}

/// C = A B^T for one warpgroup: rows [A_row, A_row + 64) of a tile A of kRowsA rows, times all kN
/// rows of a tile B, both of kCols columns. Started here; the caller fences, commits and waits.
/// (S = Q K^T)
template <int kCols, int kRowsA, int kN, typename T>
__device__ __forceinline__ void start_multiply_by_transposed(float (&C_rmem)[kN / 8][4],
                                                             const T* A_smem, int A_row,
                                                             const T* B_smem) {
  const uint64_t A = matrix_descriptor(A_smem + A_row * kPanel, 16, 1024);
  const uint64_t B = matrix_descriptor(B_smem, 16, 1024);
#pragma unroll
  for (int c = 0; c < kCols; c += 16) {
    const int A_bytes = c / kPanel * (kRowsA * 128) + c % kPanel * 2;
    const int B_bytes = c / kPanel * (kN * 128) + c % kPanel * 2;
    wgmma<T, kN>(C_rmem, advance(A, A_bytes), advance(B, B_bytes), c > 0);
  }
}

/// C += A B for one warpgroup: A of 64 x 16 kK in registers, as operands, times all rows of a tile
/// B of kCols columns. Started here; the caller fences, commits and waits. (O += P V)
template <int kCols, int kK, typename T>
__device__ __forceinline__ void start_multiply(float (&C_rmem)[kCols / 8][4],
                                               const uint32_t (&A_rmem)[kK][4], const T* B_smem) {
  const uint64_t B = matrix_descriptor(B_smem, 16 * kK * 128, 1024);
#pragma unroll
  for (int k = 0; k < kK; ++k) {
    wgmma<T, kCols, Major::mn>(C_rmem, A_rmem[k], advance(B, k * 16 * 128), true);
  }
}

/// A tile of sums, rounded to T, as operands of the next product: what one product leaves in a
/// lane's registers is what the next one wants of it.
template <typename T, int kK>
__device__ __forceinline__ void to_operands(uint32_t (&A_rmem)[kK][4],
                                            const float (&C_rmem)[2 * kK][4]) {
#pragma unroll
  for (int k = 0; k < kK; ++k) {
    A_rmem[k][0] = pack2<T>(C_rmem[2 * k][0], C_rmem[2 * k][1]);
    A_rmem[k][1] = pack2<T>(C_rmem[2 * k][2], C_rmem[2 * k][3]);
    A_rmem[k][2] = pack2<T>(C_rmem[2 * k + 1][0], C_rmem[2 * k + 1][1]);
    A_rmem[k][3] = pack2<T>(C_rmem[2 * k + 1][2], C_rmem[2 * k + 1][3]);
  }
}

/// Rows [i, i_end) of one head that see no key: O = 0 and L = -inf, by one warp.
template <typename T>
__device__ __forceinline__ void store_no_keys(T* O, float* L, const Problem& p, int b, int h, int i,
                                              int i_end) {
  for (i += threadIdx.x % 32; i < i_end; i += 32) {
#pragma unroll 1
    for (int c = 0; c < p.head_dim; c += 8) {
      *reinterpret_cast<uint4*>(O + p.o.offset(b, h, i) + c) = uint4{};
    }
    L[(int64_t{b} * p.heads + h) * p.seqlen_q + i] = -INFINITY;
  }
}

}  // namespace flashsteps::inline FLASHSTEPS_TARGET
