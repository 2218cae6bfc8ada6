// 02c swizzle and ldmatrix: as 02b, but nothing waits for a bank of shared memory any more.
//
//   - Tiles are swizzled: the 16-byte chunks of a row are permuted by the row's number (swizzle()
//   in
//     common/gpu/tile.h), so that one chunk of 8 rows lies in 8 different groups of banks.
//   - ldmatrix loads a whole fragment for a warp: 8 rows of 16 bytes at a time, V transposed on the
//     way.
//   - Copies move 16 bytes a thread; results are stored in pairs.

#include "common/stage/kernel_stage.h"

namespace flashsteps::inline FLASHSTEPS_TARGET::stage_02c_swizzle_ldmatrix {

constexpr int kBr = 64;  // queries in a tile
constexpr int kBc = 64;  // keys in a tile
constexpr int kThreads = 128;
constexpr int kBlocksPerSM = 3;  // at least; leaves a thread 168 registers, so that none spill
constexpr int kWarps = kThreads / 32;
// The warps of a block form a 2 x 2 grid over the tile.
constexpr int kWarpRows = kBr / 2;

// Copies rows [0, valid_rows) and columns [0, valid_cols) of a tile to swizzled shared memory,
// zeros around them. 16 bytes at a time; valid_cols is a multiple of 8.
template <int kRows, int kCols, typename T>
__device__ void copy_tile(T* tile_smem, const T* tile_gmem, int64_t row_stride, int valid_rows,
                          int valid_cols) {
  constexpr int kChunks = kCols / 8;
  // BEGIN SOLUTION: copy 16 bytes at a time, to swizzled places
#pragma unroll
  for (int e = 0; e < kRows * kChunks / kThreads; ++e) {
    const int chunk = e * kThreads + threadIdx.x;
    const int row = chunk / kChunks, col = chunk % kChunks * 8;
    const bool inside = row < valid_rows && col < valid_cols;
    uint4 data = make_uint4(0, 0, 0, 0);
    if (inside) data = *reinterpret_cast<const uint4*>(tile_gmem + row * row_stride + col);
    *reinterpret_cast<uint4*>(tile_smem + swizzle<kCols>(row, col)) = data;
  }
  // END SOLUTION
}

// S (batch, heads, seqlen_q, seqlen_k), fp32: scaled, and -inf where query i does not see key j.
template <typename T, int D>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM)
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

  constexpr int kWarpCols = kBc / 2;
  SharedMemory smem;
  T* Q_smem = smem.take<T>("Q_smem", kBr * D);
  T* K_smem = smem.take<T>("K_smem", kBc * D);
  copy_tile<kBr, D>(Q_smem, Q, p.q.row, p.seqlen_q - i0, p.head_dim);
  copy_tile<kBc, D>(K_smem, K, p.k.row, p.seqlen_k - j0, p.head_dim);
  __syncthreads();  // both tiles are complete before any thread reads them

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;  // PTX's names: a fragment's row and pair
  const int row0 = warp / 2 * kWarpRows, col0 = warp % 2 * kWarpCols;
  float S_rmem[kWarpRows / 16][kWarpCols / 8][4] = {};
  // BEGIN SOLUTION: load the fragments of Q and K by ldmatrix, and multiply them
#pragma unroll
  for (int c = 0; c < D; c += 16) {
    uint32_t a[kWarpRows / 16][4];
#pragma unroll
    for (int r = 0; r < kWarpRows / 16; ++r) {
      ldmatrix_x4(a[r], Q_smem + swizzle<D>(row0 + r * 16 + lane % 16, c + lane / 16 * 8));
    }
#pragma unroll
    for (int k = 0; k < kWarpCols / 8; k += 2) {  // one ldmatrix feeds two products: 16 keys
      uint32_t b[4];
      ldmatrix_x4(
          b, K_smem + swizzle<D>(col0 + k * 8 + lane / 16 * 8 + lane % 8, c + lane / 8 % 2 * 8));
#pragma unroll
      for (int r = 0; r < kWarpRows / 16; ++r) {
        mma_m16n8k16<T>(S_rmem[r][k], a[r], b[0], b[1]);
        mma_m16n8k16<T>(S_rmem[r][k + 1], a[r], b[2], b[3]);
      }
    }
  }
  // END SOLUTION

#pragma unroll
  for (int r = 0; r < kWarpRows / 16; ++r) {
#pragma unroll
    for (int k = 0; k < kWarpCols / 8; ++k) {
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        const int row = row0 + r * 16 + g + e / 2 * 8, col = col0 + k * 8 + 2 * t;
        const int i = i0 + row, j = j0 + col;
        if (i >= p.seqlen_q || j >= p.seqlen_k) continue;
        float2 s = make_float2(S_rmem[r][k][e] * p.scale, S_rmem[r][k][e + 1] * p.scale);
        if (mask_if(p.causal && j > i + p.seqlen_k - p.seqlen_q)) s.x = -INFINITY;
        if (mask_if(p.causal && j + 1 > i + p.seqlen_k - p.seqlen_q)) s.y = -INFINITY;
        // Where seqlen_k is odd, the last pair reaches into the padding.
        *reinterpret_cast<float2*>(S + row * padded_row(p.seqlen_k) + col) = s;
      }
    }
  }
}

// P = softmax(S) by rows, rounded to T; zeros in a row that sees no key, and in the padding.
template <typename T>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM)
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
__global__ void __launch_bounds__(kThreads, kBlocksPerSM)
    output_kernel(const T* __restrict__ P, const T* __restrict__ V, T* __restrict__ O, Problem p) {
  const int tiles_q = ceil_div(p.seqlen_q, kBr);
  const int i0 = blockIdx.x % tiles_q * kBr;
  const int bh = blockIdx.x / tiles_q;
  const int b = bh / p.heads, h = bh % p.heads;
  P += (int64_t{bh} * p.seqlen_q + i0) * padded_row(p.seqlen_k);
  V += p.v.offset(b, p.kv_head(h));
  O += p.o.offset(b, h, i0);

  constexpr int kWarpCols = D / 2;
  SharedMemory smem;
  T* P_smem = smem.take<T>("P_smem", kBr * kBc);
  T* V_smem = smem.take<T>("V_smem", kBc * D);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;  // PTX's names: a fragment's row and pair
  const int row0 = warp / 2 * kWarpRows, col0 = warp % 2 * kWarpCols;
  float O_rmem[kWarpRows / 16][kWarpCols / 8][4] = {};
  for (int j0 = 0; j0 < p.seqlen_k; j0 += kBc) {
    copy_tile<kBr, kBc>(P_smem, P + j0, padded_row(p.seqlen_k), p.seqlen_q - i0,
                        padded_row(p.seqlen_k) - j0);
    copy_tile<kBc, D>(V_smem, V + j0 * p.v.row, p.v.row, p.seqlen_k - j0, p.head_dim);
    __syncthreads();  // both tiles are complete before any thread reads them

    // BEGIN SOLUTION: load the fragments of P and V by ldmatrix, and multiply them
#pragma unroll
    for (int j = 0; j < kBc; j += 16) {
      uint32_t a[kWarpRows / 16][4];
#pragma unroll
      for (int r = 0; r < kWarpRows / 16; ++r) {
        ldmatrix_x4(a[r], P_smem + swizzle<kBc>(row0 + r * 16 + lane % 16, j + lane / 16 * 8));
      }
#pragma unroll
      for (int c = 0; c < kWarpCols / 8; c += 2) {  // one ldmatrix feeds two products: 16 columns
        // V lies by rows, the operand wants pairs along the keys: transposed on the way.
        uint32_t b[4];
        ldmatrix_x4_trans(b, V_smem + swizzle<D>(j + lane % 16, col0 + c * 8 + lane / 16 * 8));
#pragma unroll
        for (int r = 0; r < kWarpRows / 16; ++r) {
          mma_m16n8k16<T>(O_rmem[r][c], a[r], b[0], b[1]);
          mma_m16n8k16<T>(O_rmem[r][c + 1], a[r], b[2], b[3]);
        }
      }
    }
    // END SOLUTION
    __syncthreads();  // all threads are done with the tiles before the next ones overwrite them
  }

#pragma unroll
  for (int r = 0; r < kWarpRows / 16; ++r) {
#pragma unroll
    for (int c = 0; c < kWarpCols / 8; ++c) {
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        const int row = row0 + r * 16 + g + e / 2 * 8, col = col0 + c * 8 + 2 * t;
        if (i0 + row < p.seqlen_q && col < p.head_dim) {
          *reinterpret_cast<uint32_t*>(O + row * p.o.row + col) =
              pack2<T>(O_rmem[r][c][e], O_rmem[r][c][e + 1]);
        }
      }
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

FLASHSTEPS_STAGE("02c", "swizzle_ldmatrix",
                 "no bank conflicts: swizzled tiles, ldmatrix, 16-byte copies", lse)

}  // namespace flashsteps::inline FLASHSTEPS_TARGET::stage_02c_swizzle_ldmatrix
