// 02b tensor cores: as 02a, but the products are mma.sync instructions. Each multiplies a 16 x 16
// by a 16 x 8 matrix for a whole warp. The operands are spread over the registers of its 32 lanes
// (docs/notation.md has the picture); each lane gathers its share from shared memory with plain
// loads:
//
//   scores    a 64 x 64 tile of S: four warps, 32 x 32 elements each
//   softmax   as 01
//   output    a 64 x d tile of O: four warps, 32 x d/2 elements each

#include "common/stage/kernel_stage.h"

namespace flashsteps::inline FLASHSTEPS_TARGET::stage_02b_tensor_cores {

constexpr int kBr = 64;  // queries in a tile
constexpr int kBc = 64;  // keys in a tile
constexpr int kThreads = 128;
constexpr int kBlocksPerSM = 3;  // at least; leaves a thread 168 registers, so that none spill
constexpr int kWarps = kThreads / 32;
// The warps of a block form a 2 x 2 grid over the tile.
constexpr int kWarpRows = kBr / 2;

// Copies rows [0, valid_rows) and columns [0, valid_cols) of a tile to shared memory, zeros around
// them. One element at a time.
template <int kRows, int kCols, typename T>
__device__ void copy_tile(T* tile_smem, const T* tile_gmem, int64_t row_stride, int valid_rows,
                          int valid_cols) {
  for (int e = threadIdx.x; e < kRows * kCols; e += kThreads) {
    const int row = e / kCols, col = e % kCols;
    const bool inside = row < valid_rows && col < valid_cols;
    tile_smem[e] = inside ? tile_gmem[row * row_stride + col] : from_float<T>(0.f);
  }
}

// Two neighbours of a row, in one register.
template <typename T>
__device__ uint32_t load_pair(const T* pair) {
  return *reinterpret_cast<const uint32_t*>(pair);
}

// Two neighbours of a column, in one register.
template <int kCols, typename T>
__device__ uint32_t load_column_pair(const T* upper) {
  return pack2<T>(to_float(upper[0]), to_float(upper[kCols]));
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
  // BEGIN SOLUTION: gather the fragments of Q and K, and multiply them: S += Q K^T
#pragma unroll
  for (int c = 0; c < D; c += 16) {
    uint32_t a[kWarpRows / 16][4];
#pragma unroll
    for (int r = 0; r < kWarpRows / 16; ++r) {
      const T* q = Q_smem + (row0 + r * 16 + g) * D + c + 2 * t;
      a[r][0] = load_pair(q);
      a[r][1] = load_pair(q + 8 * D);
      a[r][2] = load_pair(q + 8);
      a[r][3] = load_pair(q + 8 * D + 8);
    }
#pragma unroll
    for (int k = 0; k < kWarpCols / 8; ++k) {
      const T* key = K_smem + (col0 + k * 8 + g) * D + c + 2 * t;
      const uint32_t b0 = load_pair(key), b1 = load_pair(key + 8);
#pragma unroll
      for (int r = 0; r < kWarpRows / 16; ++r) mma_m16n8k16<T>(S_rmem[r][k], a[r], b0, b1);
    }
  }
  // END SOLUTION

#pragma unroll
  for (int r = 0; r < kWarpRows / 16; ++r) {
#pragma unroll
    for (int k = 0; k < kWarpCols / 8; ++k) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = row0 + r * 16 + g + e / 2 * 8, col = col0 + k * 8 + 2 * t + e % 2;
        const int i = i0 + row, j = j0 + col;
        if (i >= p.seqlen_q || j >= p.seqlen_k) continue;
        float s = S_rmem[r][k][e] * p.scale;
        if (mask_if(p.causal && j > i + p.seqlen_k - p.seqlen_q)) s = -INFINITY;
        S[row * padded_row(p.seqlen_k) + col] = s;
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
    copy_tile<kBr, kBc>(P_smem, P + j0, padded_row(p.seqlen_k), p.seqlen_q - i0, p.seqlen_k - j0);
    copy_tile<kBc, D>(V_smem, V + j0 * p.v.row, p.v.row, p.seqlen_k - j0, p.head_dim);
    __syncthreads();  // both tiles are complete before any thread reads them

    // BEGIN SOLUTION: gather the fragments of P and V, and multiply them: O += P V
#pragma unroll
    for (int j = 0; j < kBc; j += 16) {
      uint32_t a[kWarpRows / 16][4];
#pragma unroll
      for (int r = 0; r < kWarpRows / 16; ++r) {
        const T* prob = P_smem + (row0 + r * 16 + g) * kBc + j + 2 * t;
        a[r][0] = load_pair(prob);
        a[r][1] = load_pair(prob + 8 * kBc);
        a[r][2] = load_pair(prob + 8);
        a[r][3] = load_pair(prob + 8 * kBc + 8);
      }
#pragma unroll
      for (int c = 0; c < kWarpCols / 8; ++c) {
        // V lies by rows, the operand wants pairs along the keys: each half of a pair is a load of
        // its own.
        const T* value = V_smem + (j + 2 * t) * D + col0 + c * 8 + g;
        const uint32_t b0 = load_column_pair<D>(value), b1 = load_column_pair<D>(value + 8 * D);
#pragma unroll
        for (int r = 0; r < kWarpRows / 16; ++r) mma_m16n8k16<T>(O_rmem[r][c], a[r], b0, b1);
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
      for (int e = 0; e < 4; ++e) {
        const int row = row0 + r * 16 + g + e / 2 * 8, col = col0 + c * 8 + 2 * t + e % 2;
        if (i0 + row < p.seqlen_q && col < p.head_dim) {
          O[row * p.o.row + col] = from_float<T>(O_rmem[r][c][e]);
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

FLASHSTEPS_STAGE("02b", "tensor_cores", "products by mma.sync, fragments by plain loads", lse)

}  // namespace flashsteps::inline FLASHSTEPS_TARGET::stage_02b_tensor_cores
