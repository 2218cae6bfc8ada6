/// \file
/// The products of attention, by one warp on tensor cores, as stages 04 to 09 use them: operands
/// from swizzled tiles in shared memory, sums in registers. The same source for both targets.
///
/// A tile of R x C sums is held as `float X_rmem[R / 16][C / 8][4]`: element e of X_rmem[r][c] is
/// in row 16 r + g + 8 (e / 2) and column 8 c + 2 t + e % 2, with g = lane / 4 and t = lane % 4
/// (the D fragment of mma.m16n8k16).
#pragma once

#include "common/gpu/gpu.h"

namespace flashsteps::inline FLASHSTEPS_TARGET {

/// C += A B^T: rows [A_row, A_row + 16 kM) of A times rows [B_row, B_row + 8 kN) of B, both tiles
/// of kCols columns. (S += Q K^T)
///
/// \tparam kUnroll steps of 16 columns that are unrolled together. With all of them, ptxas has more
/// operands on their way, and a kernel that is short of registers spills: half of them by default
template <int kCols, int kUnroll = kCols / 32, int kM, int kN, typename T>
__device__ __forceinline__ void multiply_by_transposed(float (&C_rmem)[kM][kN][4], const T* A_smem,
                                                       int A_row, const T* B_smem, int B_row) {
  static_assert(kN % 2 == 0, "one ldmatrix gives the operands of two products");
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

/// Rows [A_row, A_row + 16 kM) of the tile A of 16 kK columns as operands, to be kept in registers.
template <int kM, int kK, typename T>
__device__ __forceinline__ void load_operand(uint32_t (&A_rmem)[kM][kK][4], const T* A_smem,
                                             int A_row) {
  const int lane = fresh_thread_index() % 32;
  const int A_lane = swizzle<16 * kK>(A_row + lane % 16, lane / 16 * 8);
#pragma unroll
  for (int r = 0; r < kM; ++r) {
#pragma unroll
    for (int c = 0; c < kK; ++c) {
      ldmatrix_x4(A_rmem[r][c], A_smem + (A_lane ^ (c * 16)) + r * 256 * kK);
    }
  }
}

/// C += A B^T, as multiply_by_transposed above, with the rows of A kept in registers.
template <int kM, int kN, int kK, typename T>
__device__ __forceinline__ void multiply_by_transposed(float (&C_rmem)[kM][kN][4],
                                                       const uint32_t (&A_rmem)[kM][kK][4],
                                                       const T* B_smem, int B_row) {
  static_assert(kN % 2 == 0, "one ldmatrix gives the operands of two products");
  const int lane = fresh_thread_index() % 32;
  const int B_lane = swizzle<16 * kK>(B_row + lane / 16 * 8 + lane % 8, lane / 8 % 2 * 8);
#pragma unroll
  for (int c = 0; c < kK; ++c) {
#pragma unroll
    for (int k = 0; k < kN; k += 2) {
      uint32_t b[4];
      ldmatrix_x4(b, B_smem + (B_lane ^ (c * 16)) + k * 128 * kK);
#pragma unroll
      for (int r = 0; r < kM; ++r) {
        mma_m16n8k16<T>(C_rmem[r][k], A_rmem[r][c], b[0], b[1]);
        mma_m16n8k16<T>(C_rmem[r][k + 1], A_rmem[r][c], b[2], b[3]);
      }
    }
  }
}

/// C += A B: the warp's own sums A, rounded to T, times rows [B_row, B_row + 8 kK) and columns
/// [B_col, B_col + 8 kN) of the tile B of kCols columns; B_col is a multiple of 8 kN, a power of 2.
/// What one product leaves in a lane's registers is what the next one wants of it as
/// an operand, so A never leaves them. (O += P V)
template <int kCols, int kM, int kN, int kK, typename T>
__device__ __forceinline__ void multiply(float (&C_rmem)[kM][kN][4],
                                         const float (&A_rmem)[kM][kK][4], const T* B_smem,
                                         int B_row, int B_col = 0) {
  static_assert(kK % 2 == 0 && kN % 2 == 0,
                "an operand is 16 columns of A; ldmatrix gives two of B");
  const int lane = threadIdx.x % 32;
  const int B_lane = swizzle<kCols>(B_row + lane % 16, B_col + lane / 16 * 8);
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
    for (int c = 0; c < kN; c += 2) {
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

/// The warp's own sums C, rounded to T, to rows [row, row + 16 kM) and columns [col, col + 8 kN) of
/// a tile of kCols columns, where multiply_tiles and multiply_transposed find them.
template <int kCols, int kM, int kN, typename T>
__device__ __forceinline__ void store_rounded(T* tile_smem, int row, int col,
                                              const float (&C_rmem)[kM][kN][4]) {
  const int lane = fresh_thread_index() % 32;
  // Rows 8 apart have the same swizzle, and a step along the columns is an XOR.
  const int C_lane = swizzle<kCols>(row + lane / 4, col + lane % 4 * 2);
#pragma unroll
  for (int r = 0; r < kM; ++r) {
#pragma unroll
    for (int c = 0; c < kN; ++c) {
      T* const to = tile_smem + (C_lane ^ (c * 8)) + r * 16 * kCols;
      store_pair(to, C_rmem[r][c][0], C_rmem[r][c][1]);
      store_pair(to + 8 * kCols, C_rmem[r][c][2], C_rmem[r][c][3]);
    }
  }
}

/// C += A B, both from shared memory: rows [A_row, A_row + 16 kM) and columns [depth0, depth0 +
/// kDepth) of the tile A of kACols columns, times rows [depth0, depth0 + kDepth) and columns
/// [B_col, B_col + 8 kN) of the tile B of kCols columns. depth0 and B_col are multiples of kDepth
/// and 8 kN, powers of 2. (dV += P^T dO, where P^T lies in shared memory)
template <int kDepth, int kACols, int kCols, int kM, int kN, typename T>
__device__ __forceinline__ void multiply_tiles(float (&C_rmem)[kM][kN][4], const T* A_smem,
                                               int A_row, const T* B_smem, int depth0, int B_col,
                                               int thread = fresh_thread_index()) {
  static_assert(kN % 2 == 0, "one ldmatrix gives the operands of two products");
  const int lane = thread % 32;
  const int A_lane = swizzle<kACols>(A_row + lane % 16, depth0 + lane / 16 * 8);
  const int B_lane = swizzle<kCols>(depth0 + lane % 16, B_col + lane / 16 * 8);
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) {
    uint32_t a[kM][4];
#pragma unroll
    for (int r = 0; r < kM; ++r) ldmatrix_x4(a[r], A_smem + (A_lane ^ k) + r * 16 * kACols);
#pragma unroll
    for (int c = 0; c < kN; c += 2) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, B_smem + (B_lane ^ (c * 8)) + k * kCols);
#pragma unroll
      for (int r = 0; r < kM; ++r) {
        mma_m16n8k16<T>(C_rmem[r][c], a[r], b[0], b[1]);
        mma_m16n8k16<T>(C_rmem[r][c + 1], a[r], b[2], b[3]);
      }
    }
  }
}

/// C += A^T B, both from shared memory: columns [A_col, A_col + 16 kM) of the tile A of kDepth rows
/// and kRows columns, transposed, times columns [B_col, B_col + 8 kN) of the tile B of kDepth rows
/// and kCols columns. A_col is a multiple of 16 kM and B_col one of 8 kN, both powers of 2. (dQ +=
/// dS K, where dS^T lies in shared memory)
///
/// \tparam kUnroll steps of 16 rows that are unrolled together, as in multiply_by_transposed
template <int kDepth, int kRows, int kCols, int kUnroll = kDepth / 32, int kM, int kN, typename T>
__device__ __forceinline__ void multiply_transposed(float (&C_rmem)[kM][kN][4], const T* A_smem,
                                                    int A_col, const T* B_smem, int B_col,
                                                    int thread = fresh_thread_index()) {
  static_assert(kN % 2 == 0, "one ldmatrix gives the operands of two products");
  const int lane = thread % 32;
  const int A_lane = swizzle<kRows>(lane / 16 * 8 + lane % 8, A_col + lane / 8 % 2 * 8);
  const int B_lane = swizzle<kCols>(lane % 16, B_col + lane / 16 * 8);
#pragma unroll kUnroll
  for (int k = 0; k < kDepth; k += 16) {
    uint32_t a[kM][4];
#pragma unroll
    for (int r = 0; r < kM; ++r) {
      ldmatrix_x4_trans(a[r], A_smem + (A_lane ^ (r * 16)) + k * kRows);
    }
#pragma unroll
    for (int c = 0; c < kN; c += 2) {
      uint32_t b[4];
      ldmatrix_x4_trans(b, B_smem + (B_lane ^ (c * 8)) + k * kCols);
#pragma unroll
      for (int r = 0; r < kM; ++r) {
        mma_m16n8k16<T>(C_rmem[r][c], a[r], b[0], b[1]);
        mma_m16n8k16<T>(C_rmem[r][c + 1], a[r], b[2], b[3]);
      }
    }
  }
}

}  // namespace flashsteps::inline FLASHSTEPS_TARGET
