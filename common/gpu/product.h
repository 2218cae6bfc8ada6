/// \file
/// The two products of attention, by one warp on tensor cores, as stages 04 to 09 use them:
/// operands from swizzled tiles in shared memory, sums in registers. The same source for both
/// targets.
///
/// A tile of R x C sums is held as `float X_rmem[R / 16][C / 8][4]`: element e of X_rmem[r][c] is
/// in row 16 r + g + 8 (e / 2) and column 8 c + 2 t + e % 2, with g = lane / 4 and t = lane % 4
/// (the D fragment of mma.m16n8k16).
#pragma once

#include "common/gpu/gpu.h"

namespace flashsteps::inline FLASHSTEPS_TARGET {

/// C += A B^T: rows [A_row, A_row + 16 kM) of A times rows [B_row, B_row + 8 kN) of B, both tiles
/// of kCols columns. (S += Q K^T)
template <int kCols, int kM, int kN, typename T>
__device__ __forceinline__ void multiply_by_transposed(float (&C_rmem)[kM][kN][4], const T* A_smem,
                                                       int A_row, const T* B_smem, int B_row) {
  static_assert(kN % 2 == 0, "one ldmatrix gives the operands of two products");
  // Half of the columns at a time: with all of them, ptxas has more operands on their way than it
  // has registers for, and spills.
  [[maybe_unused]] constexpr int kUnroll = kCols / 32;
  const int lane = threadIdx.x % 32;
  // The swizzle is an XOR with the row, so that a step along the columns is an XOR, too.
  const int A_lane = swizzle<kCols>(A_row + lane % 16, lane / 16 * 8);
  const int B_lane = swizzle<kCols>(B_row + lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8);
#pragma unroll kUnroll
  for (int c = 0; c < kCols; c += 16) {
    uint32_t a[kM][4];
#pragma unroll
    for (int r = 0; r < kM; ++r) ldmatrix_x4(a[r], A_smem + (A_lane ^ c) + r * 16 * kCols);
#pragma unroll
    for (int k = 0; k < kN; k += 2) {
      uint32_t b[4];
      ldmatrix_x4(b, B_smem + (B_lane ^ c) + k * 8 * kCols);
#pragma unroll
      for (int r = 0; r < kM; ++r) {
        mma_m16n8k16<T>(C_rmem[r][k], a[r], b[0], b[1]);
        mma_m16n8k16<T>(C_rmem[r][k + 1], a[r], b[2], b[3]);
      }
    }
  }
}

/// C += A B: the warp's own sums A, rounded to T, times rows [B_row, B_row + 8 kK) of the tile B of
/// kCols columns. What one product leaves in a lane's registers is what the next one wants of it as
/// an operand, so A never leaves them. (O += P V)
template <int kCols, int kM, int kK, typename T>
__device__ __forceinline__ void multiply(float (&C_rmem)[kM][kCols / 8][4],
                                         const float (&A_rmem)[kM][kK][4], const T* B_smem,
                                         int B_row) {
  static_assert(kK % 2 == 0, "an operand is 16 columns of A");
  const int lane = threadIdx.x % 32;
  const int B_lane = swizzle<kCols>(B_row + lane % 16, lane / 16 * 8);
#pragma unroll
  for (int k = 0; k < kK; k += 2) {
    uint32_t a[kM][4];
#pragma unroll
    for (int r = 0; r < kM; ++r) {
      a[r][0] = pack2<T>(A_rmem[r][k][0], A_rmem[r][k][1]);
      a[r][1] = pack2<T>(A_rmem[r][k][2], A_rmem[r][k][3]);
      a[r][2] = pack2<T>(A_rmem[r][k + 1][0], A_rmem[r][k + 1][1]);
      a[r][3] = pack2<T>(A_rmem[r][k + 1][2], A_rmem[r][k + 1][3]);
    }
#pragma unroll
    for (int c = 0; c < kCols / 8; c += 2) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, B_smem + (B_lane ^ (c * 8)) + k * 8 * kCols);
#pragma unroll
      for (int r = 0; r < kM; ++r) {
        mma_m16n8k16<T>(C_rmem[r][c], a[r], b[0], b[1]);
        mma_m16n8k16<T>(C_rmem[r][c + 1], a[r], b[2], b[3]);
      }
    }
  }
}

}  // namespace flashsteps::inline FLASHSTEPS_TARGET
