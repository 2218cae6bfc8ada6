// 02a shared tiles: as 01, but both products go by tiles. A block copies a tile of each operand to
// shared memory once, and every thread then uses each element of it many times:
//
//   scores    a 64 x 64 tile of S: Q and K tiles in shared memory
//   softmax   as 01
//   output    a 64 x d tile of O: 64 keys at a time, P and V tiles in shared memory

#include "common/stage/kernel_stage.h"

namespace flashsteps::inline FLASHSTEPS_TARGET::stage_02a_shared_tiles {

constexpr int kBr = 64;  // queries in a tile
constexpr int kBc = 64;  // keys in a tile
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
// The threads of a block form a 16 x 16 grid; each owns every 16th row and column of the tile.
constexpr int kGrid = 16;

// Copies rows [0, valid_rows) and columns [0, valid_cols) of a tile to shared memory, zeros around
// them. One element at a time.
template <int kRows, int kCols, typename T>
__device__ void copy_tile(T* tile_smem, const T* tile_gmem, int64_t row_stride, int valid_rows,
                          int valid_cols) {
  // BEGIN SOLUTION: copy the tile, zeros around what is valid
  for (int e = threadIdx.x; e < kRows * kCols; e += kThreads) {
    const int row = e / kCols, col = e % kCols;
    const bool inside = row < valid_rows && col < valid_cols;
    tile_smem[e] = inside ? tile_gmem[row * row_stride + col] : from_float<T>(0.f);
  }
  // END SOLUTION
}

// S (batch, heads, seqlen_q, seqlen_k), fp32: scaled, and -inf where query i does not see key j.
template <typename T, int D>
__global__ void __launch_bounds__(kThreads)
    scores_kernel(const T* __restrict__ Q, const T* __restrict__ K, float* __restrict__ S,
                  Problem p) {
  const int tiles_q = ceil_div(p.seqlen_q, kBr), tiles_k = ceil_div(p.seqlen_k, kBc);
  const int j0 = blockIdx.x % tiles_k * kBc;
  const int i0 = blockIdx.x / tiles_k % tiles_q * kBr;
  const int bh = blockIdx.x / tiles_k / tiles_q;
  const int b = bh / p.heads, h = bh % p.heads;
  Q += p.q.offset(b, h, i0);
  K += p.k.offset(b, p.kv_head(h), j0);
  S += (int64_t{bh} * p.seqlen_q + i0) * padded_row(p.seqlen_k) + j0;

  SharedMemory smem;
  T* Q_smem = smem.take<T>("Q_smem", kBr * D);
  T* K_smem = smem.take<T>("K_smem", kBc * D);
  copy_tile<kBr, D>(Q_smem, Q, p.q.row, p.seqlen_q - i0, p.head_dim);
  copy_tile<kBc, D>(K_smem, K, p.k.row, p.seqlen_k - j0, p.head_dim);
  __syncthreads();  // both tiles are complete before any thread reads them

  const int row0 = threadIdx.x / kGrid, col0 = threadIdx.x % kGrid;
  float S_rmem[kBr / kGrid][kBc / kGrid] = {};
  // BEGIN SOLUTION: add up Q K^T, 4 x 4 elements a thread, each loaded value used four times
  for (int c = 0; c < D; ++c) {
    float Q_rmem[kBr / kGrid], K_rmem[kBc / kGrid];
#pragma unroll
    for (int r = 0; r < kBr / kGrid; ++r) Q_rmem[r] = to_float(Q_smem[(row0 + r * kGrid) * D + c]);
#pragma unroll
    for (int k = 0; k < kBc / kGrid; ++k) K_rmem[k] = to_float(K_smem[(col0 + k * kGrid) * D + c]);
#pragma unroll
    for (int r = 0; r < kBr / kGrid; ++r) {
#pragma unroll
      for (int k = 0; k < kBc / kGrid; ++k) S_rmem[r][k] += Q_rmem[r] * K_rmem[k];
    }
  }
  // END SOLUTION

#pragma unroll
  for (int r = 0; r < kBr / kGrid; ++r) {
#pragma unroll
    for (int k = 0; k < kBc / kGrid; ++k) {
      const int row = row0 + r * kGrid, col = col0 + k * kGrid;
      const int i = i0 + row, j = j0 + col;
      if (i >= p.seqlen_q || j >= p.seqlen_k) continue;
      float s = S_rmem[r][k] * p.scale;
      if (mask_if(p.causal && j > i + p.seqlen_k - p.seqlen_q)) s = -INFINITY;
      S[row * padded_row(p.seqlen_k) + col] = s;
    }
  }
}

// P = softmax(S) by rows, rounded to T; zeros in a row that sees no key, and in the padding.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    softmax_kernel(const float* __restrict__ S, T* __restrict__ P, Problem p) {
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= p.rows()) return;
  S += row * padded_row(p.seqlen_k);
  P += row * padded_row(p.seqlen_k);

  float m = -INFINITY;  // pass 1: the row's maximum
  for (int j = lane; j < p.seqlen_k; j += 32) m = fmaxf(m, S[j]);
  for (int offset = 16; offset > 0; offset /= 2) {
    m = fmaxf(m, __shfl_xor_sync(kFullMask, m, offset));
  }
  if (m == -INFINITY) m = 0.f;  // no key is seen: exp(-inf - 0) = 0 where -inf - -inf would be NaN

  float l = 0.f;  // pass 2: the sum of the exponentials
  for (int j = lane; j < p.seqlen_k; j += 32) l += fast_exp(S[j] - m);
  for (int offset = 16; offset > 0; offset /= 2) l += __shfl_xor_sync(kFullMask, l, offset);

  // pass 3: normalise
  for (int j = lane; j < p.seqlen_k; j += 32) {
    P[j] = from_float<T>(l == 0.f ? 0.f : divide(fast_exp(S[j] - m), l));
  }
  for (int64_t j = p.seqlen_k + lane; j < padded_row(p.seqlen_k); j += 32) {
    P[j] = from_float<T>(0.f);
  }
}

// O (batch, heads, seqlen_q, head_dim)
template <typename T, int D>
__global__ void __launch_bounds__(kThreads)
    output_kernel(const T* __restrict__ P, const T* __restrict__ V, T* __restrict__ O, Problem p) {
  const int tiles_q = ceil_div(p.seqlen_q, kBr);
  const int i0 = blockIdx.x % tiles_q * kBr;
  const int bh = blockIdx.x / tiles_q;
  const int b = bh / p.heads, h = bh % p.heads;
  P += (int64_t{bh} * p.seqlen_q + i0) * padded_row(p.seqlen_k);
  V += p.v.offset(b, p.kv_head(h));
  O += p.o.offset(b, h, i0);

  SharedMemory smem;
  T* P_smem = smem.take<T>("P_smem", kBr * kBc);
  T* V_smem = smem.take<T>("V_smem", kBc * D);

  const int row0 = threadIdx.x / kGrid, col0 = threadIdx.x % kGrid;
  float O_rmem[kBr / kGrid][D / kGrid] = {};
  for (int j0 = 0; j0 < p.seqlen_k; j0 += kBc) {
    // BEGIN SOLUTION: bring P and V tiles, add up P V, and guard the tiles
    copy_tile<kBr, kBc>(P_smem, P + j0, padded_row(p.seqlen_k), p.seqlen_q - i0, p.seqlen_k - j0);
    copy_tile<kBc, D>(V_smem, V + j0 * p.v.row, p.v.row, p.seqlen_k - j0, p.head_dim);
    __syncthreads();  // both tiles are complete before any thread reads them

    for (int j = 0; j < kBc; ++j) {
      float P_rmem[kBr / kGrid], V_rmem[D / kGrid];
#pragma unroll
      for (int r = 0; r < kBr / kGrid; ++r)
        P_rmem[r] = to_float(P_smem[(row0 + r * kGrid) * kBc + j]);
#pragma unroll
      for (int c = 0; c < D / kGrid; ++c) V_rmem[c] = to_float(V_smem[j * D + col0 + c * kGrid]);
#pragma unroll
      for (int r = 0; r < kBr / kGrid; ++r) {
#pragma unroll
        for (int c = 0; c < D / kGrid; ++c) O_rmem[r][c] += P_rmem[r] * V_rmem[c];
      }
    }
    __syncthreads();  // all threads are done with the tiles before the next ones overwrite them
    // END SOLUTION
  }

#pragma unroll
  for (int r = 0; r < kBr / kGrid; ++r) {
#pragma unroll
    for (int c = 0; c < D / kGrid; ++c) {
      const int row = row0 + r * kGrid, col = col0 + c * kGrid;
      if (i0 + row < p.seqlen_q && col < p.head_dim)
        O[row * p.o.row + col] = from_float<T>(O_rmem[r][c]);
    }
  }
}

Tiles tiles(const Problem&) {
  return {kBr, kBc};
}

WorkspaceList workspaces(const Problem& p) {
  const int64_t elements = p.rows() * padded_row(p.seqlen_k);
  return {2, {{"S", DType::fp32, elements}, {"P", p.dtype, elements}}};
}

template <typename T, int D>
void forward(const Problem& p, const ForwardArgs& a, Stream stream) {
  const T* Q = static_cast<const T*>(a.Q);
  const T* K = static_cast<const T*>(a.K);
  const T* V = static_cast<const T*>(a.V);
  T* O = static_cast<T*>(a.O);
  float* S = static_cast<float*>(a.workspace[0]);
  T* P = static_cast<T*>(a.workspace[1]);
  const int64_t row_blocks = p.batch_heads() * ceil_div(p.seqlen_q, kBr);
  const int64_t score_tiles = row_blocks * ceil_div(p.seqlen_k, kBc);
  constexpr int kScoresSmem = (kBr + kBc) * D * sizeof(T);
  constexpr int kOutputSmem = (kBr * kBc + kBc * D) * sizeof(T);

  launch(scores_kernel<T, D>, {score_tiles, kThreads, kScoresSmem, stream}, Q, K, S, p);
  launch(softmax_kernel<T>, {(p.rows() + kWarps - 1) / kWarps, kThreads, 0, stream}, S, P, p);
  launch(output_kernel<T, D>, {row_blocks, kThreads, kOutputSmem, stream}, P, V, O, p);
}

void lse(const Problem& p, const ForwardArgs& a, Stream stream) {
  lse_from_scores(p, static_cast<const float*>(a.workspace[0]), padded_row(p.seqlen_k), a.L,
                  stream);
}

FLASHSTEPS_STAGE("02a", "shared_tiles", "tiles of both operands in shared memory, products by FMA",
                 lse)

}  // namespace flashsteps::inline FLASHSTEPS_TARGET::stage_02a_shared_tiles
