/// \file
/// Tiles in shared memory: where an element lies (the swizzle) and how a tile gets there. The same
/// source for both targets.
#pragma once

#include "common/gpu/gpu.h"

namespace flashsteps::inline FLASHSTEPS_TARGET {

/// How many tiles of b rows cover a rows: a / b, rounded up.
constexpr int ceil_div(int a, int b) {
  return a / b + (a % b != 0);
}

/// Length of a row of S or P in memory: the next multiple of 8, so that every row starts at a
/// multiple of 16 bytes. What lies behind column n - 1 is padding.
constexpr int64_t padded_row(int n) {
  return (int64_t{n} + 7) / 8 * 8;
}

/// Offset, in elements, of (row, col) in a tile of 16-bit elements with kCols columns.
///
/// A row of 64 elements is 128 bytes, so it spans all 32 banks, and the same column of 8 rows would
/// meet in the same 4 banks. The 16-byte chunk index is therefore XORed with the row: any 8
/// consecutive rows of one chunk column (what one phase of ldmatrix reads) and any 8 chunks of one
/// row (what a copy writes) lie in different banks. Rows of 32 elements are half as long, so every
/// second row steps the XOR.
template <int kCols>
constexpr int swizzle(int row, int col) {
  static_assert(kCols == 32 || kCols % 64 == 0, "a row is half of the banks, or all of them");
  const int chunk = col / 8;
  const int flip = kCols == 32 ? (row / 2) % 4 : row % 8;
  return row * kCols + ((chunk ^ flip) * 8 + col % 8);
}

/// Offset, in elements, of (row, col) in a tile of fp32 elements with kCols columns, a multiple
/// of 32. Groups of 8 columns are permuted by the row, so that pairs at the same columns of 4 rows
/// (what half a warp stores of an mma's sums) and up to 4 quads of each of 2 or 4 rows (what a
/// quarter of a warp loads) lie in different banks.
template <int kCols>
constexpr int fp32_swizzle(int row, int col) {
  static_assert(kCols % 32 == 0, "a row is all of the banks, once or more");
  return row * kCols + (col ^ ((row & 1) * 16 + (row & 2) * 4));
}

/// Four neighbouring fp32 elements in one access of 16 bytes; the address is a multiple of 16.
__device__ __forceinline__ void load_quad(float (&x)[4], const float* from) {
  const float4 quad = *reinterpret_cast<const float4*>(from);
  x[0] = quad.x;
  x[1] = quad.y;
  x[2] = quad.z;
  x[3] = quad.w;
}
/// Likewise.
__device__ __forceinline__ void store_quad(float* to, const float (&x)[4]) {
  *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
}
/// Rounded to T, in one access of 8 bytes; the address is a multiple of 8.
template <typename T>
__device__ __forceinline__ void store_quad(T* to, const float (&x)[4]) {
  *reinterpret_cast<uint2*>(to) = make_uint2(pack2<T>(x[0], x[1]), pack2<T>(x[2], x[3]));
}
/// Two neighbouring fp32 elements in one access of 8 bytes; the address is a multiple of 8.
__device__ __forceinline__ void load_pair(float (&x)[2], const float* from) {
  const float2 pair = *reinterpret_cast<const float2*>(from);
  x[0] = pair.x;
  x[1] = pair.y;
}
/// Likewise.
__device__ __forceinline__ void store_pair(float* to, float x0, float x1) {
  *reinterpret_cast<float2*>(to) = make_float2(x0, x1);
}
/// Rounded to T, in one access of 4 bytes; the address is a multiple of 4.
template <typename T>
__device__ __forceinline__ void store_pair(T* to, float x0, float x1) {
  *reinterpret_cast<uint32_t*>(to) = pack2<T>(x0, x1);
}

/// Starts copying a kRows x kCols tile of 16-bit elements from global to swizzled shared memory, 16
/// bytes a copy, by all kThreads threads of the block. Rows from valid_rows and columns from
/// valid_cols on are filled with zeros (valid_cols is a multiple of 8). The caller commits and
/// waits. \param row_stride of the tensor, in elements, a multiple of 8; tile_gmem is 16-byte
/// aligned
template <int kRows, int kCols, int kThreads, typename T>
__device__ __forceinline__ void copy_tile_async(T* tile_smem, const T* tile_gmem,
                                                int64_t row_stride, int valid_rows,
                                                int valid_cols) {
  constexpr int kChunks = kCols / 8;
  constexpr int kRowStep = kThreads / kChunks;  // rows that the block copies at once
  static_assert(kThreads % kChunks == 0 && kRows % kRowStep == 0,
                "every thread copies one chunk of as many rows");
  static_assert(kRowStep % 8 == 0, "one swizzle serves all rows of a thread");
  const int thread = fresh_thread_index();
  const int row = thread / kChunks, col = thread % kChunks * 8;
  const T* from = tile_gmem + row * row_stride + col;
  T* to = tile_smem + swizzle<kCols>(row, col);
#pragma unroll
  for (int r = 0; r < kRows; r += kRowStep) {
    const bool inside = row + r < valid_rows && col < valid_cols;
    cp_async_16(to + r * kCols, inside ? from : tile_gmem, inside);
    from += kRowStep * row_stride;
  }
}

/// Starts copying a whole tile as copy_tile_async does, or nothing where `fetch` is false: some
/// two instructions for each copy, and no branch.
/// \param row_stride as there, and kRows rows of it fit 32 bits
template <int kRows, int kCols, int kThreads, typename T>
__device__ __forceinline__ void copy_whole_tile_async(bool fetch, T* tile_smem, const T* tile_gmem,
                                                      int64_t row_stride) {
  constexpr int kChunks = kCols / 8;
  constexpr int kRowStep = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0 && kRows % kRowStep == 0 && kRowStep % 8 == 0,
                "as in copy_tile_async");
  const unsigned thread = fresh_thread_index();
  const unsigned row = thread / kChunks, col = thread % kChunks * 8;
  const T* from = tile_gmem + (row * unsigned(row_stride) + col);
  T* to = tile_smem + swizzle<kCols>(row, col);
#pragma unroll
  for (int r = 0; r < kRows; r += kRowStep) {
    cp_async_16_if(fetch, to + r * kCols, from);
    from += kRowStep * row_stride;
  }
}

}  // namespace flashsteps::inline FLASHSTEPS_TARGET
