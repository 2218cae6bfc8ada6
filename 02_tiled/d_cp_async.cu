// 02d cp.async: as 02c, but copies run under the products. cp.async goes from global to shared
// memory past the registers, and a thread waits for it only where it needs the data:
//
//   scores    head_dim goes by chunks of 32: the next one is on its way during this one's products
//   output    two buffers: the next P and V tiles are on their way during this one's products

#include "common/stage/kernel_stage.h"

namespace flashsteps::inline FLASHSTEPS_TARGET::stage_02d_cp_async {

constexpr int kBr = 64;  // queries in a tile
constexpr int kBc = 64;  // keys in a tile
constexpr int kThreads = 128;
constexpr int kBlocksPerSM = 3;  // at least; leaves a thread 168 registers, so that none spill
constexpr int kWarps = kThreads / 32;
// The warps of a block form a 2 x 2 grid over the tile.
constexpr int kWarpRows = kBr / 2;
constexpr int kChunk = 32;  // columns of Q and K that the scores kernel waits for at a time

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
  const auto load_chunk = [&](int c0) {  // each chunk is a tile of its own
    // BEGIN SOLUTION: start copying chunk c0 of Q and K, as a group
    if (c0 < D) {
      copy_tile_async<kBr, kChunk, kThreads>(Q_smem + kBr * c0, Q + c0, p.q.row, p.seqlen_q - i0,
                                             p.head_dim - c0);
      copy_tile_async<kBc, kChunk, kThreads>(K_smem + kBc * c0, K + c0, p.k.row, p.seqlen_k - j0,
                                             p.head_dim - c0);
    }
    cp_async_commit();  // may be empty: so that the wait below always leaves one group, the next
    // END SOLUTION
  };

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;  // PTX's names: a fragment's row and pair
  const int row0 = warp / 2 * kWarpRows, col0 = warp % 2 * kWarpCols;
  float S_rmem[kWarpRows / 16][kWarpCols / 8][4] = {};
  load_chunk(0);
#pragma unroll 1
  for (int c0 = 0; c0 < D; c0 += kChunk) {
    // BEGIN SOLUTION: start the next chunk, and wait for this one alone
    load_chunk(c0 + kChunk);
    cp_async_wait<1>();
    __syncthreads();  // every thread's part of this chunk has arrived, and is seen by all

    // END SOLUTION
#pragma unroll
    for (int c = 0; c < kChunk; c += 16) {
      uint32_t a[kWarpRows / 16][4];
#pragma unroll
      for (int r = 0; r < kWarpRows / 16; ++r) {
        ldmatrix_x4(a[r], Q_smem + kBr * c0 +
                              swizzle<kChunk>(row0 + r * 16 + lane % 16, c + lane / 16 * 8));
      }
#pragma unroll
      for (int k = 0; k < kWarpCols / 8; k += 2) {  // one ldmatrix feeds two products: 16 keys
        uint32_t b[4];
        ldmatrix_x4(
            b, K_smem + kBc * c0 +
                   swizzle<kChunk>(col0 + k * 8 + lane / 16 * 8 + lane % 8, c + lane / 8 % 2 * 8));
#pragma unroll
        for (int r = 0; r < kWarpRows / 16; ++r) {
          mma_m16n8k16<T>(S_rmem[r][k], a[r], b[0], b[1]);
          mma_m16n8k16<T>(S_rmem[r][k + 1], a[r], b[2], b[3]);
        }
      }
    }
  }

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
  T* P_smem = smem.take<T>("P_smem", 2 * kBr * kBc);
  T* V_smem = smem.take<T>("V_smem", 2 * kBc * D);

  const int tiles_k = ceil_div(p.seqlen_k, kBc);
  const auto load_tiles = [&](int tile) {  // into the buffer of its parity
    // BEGIN SOLUTION: start copying these tiles of P and V into the buffer of their parity
    if (tile < tiles_k) {
      const int j0 = tile * kBc;
      copy_tile_async<kBr, kBc, kThreads>(P_smem + tile % 2 * kBr * kBc, P + j0,
                                          padded_row(p.seqlen_k), p.seqlen_q - i0,
                                          padded_row(p.seqlen_k) - j0);
      copy_tile_async<kBc, D, kThreads>(V_smem + tile % 2 * kBc * D, V + j0 * p.v.row, p.v.row,
                                        p.seqlen_k - j0, p.head_dim);
    }
    cp_async_commit();  // may be empty: so that the wait below always leaves one group, the next
    // END SOLUTION
  };

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;  // PTX's names: a fragment's row and pair
  const int row0 = warp / 2 * kWarpRows, col0 = warp % 2 * kWarpCols;
  float O_rmem[kWarpRows / 16][kWarpCols / 8][4] = {};
  load_tiles(0);
  for (int tile = 0; tile < tiles_k; ++tile) {
    // BEGIN SOLUTION: start the next tiles, and wait for these alone
    load_tiles(tile + 1);
    cp_async_wait<1>();
    __syncthreads();  // every thread's part of these tiles has arrived, and is seen by all
    // END SOLUTION
    const T* P_tile = P_smem + tile % 2 * kBr * kBc;
    const T* V_tile = V_smem + tile % 2 * kBc * D;

#pragma unroll
    for (int j = 0; j < kBc; j += 16) {
      uint32_t a[kWarpRows / 16][4];
#pragma unroll
      for (int r = 0; r < kWarpRows / 16; ++r) {
        ldmatrix_x4(a[r], P_tile + swizzle<kBc>(row0 + r * 16 + lane % 16, j + lane / 16 * 8));
      }
#pragma unroll
      for (int c = 0; c < kWarpCols / 8; c += 2) {  // one ldmatrix feeds two products: 16 columns
        // V lies by rows, the operand wants pairs along the keys: transposed on the way.
        uint32_t b[4];
        ldmatrix_x4_trans(b, V_tile + swizzle<D>(j + lane % 16, col0 + c * 8 + lane / 16 * 8));
#pragma unroll
        for (int r = 0; r < kWarpRows / 16; ++r) {
          mma_m16n8k16<T>(O_rmem[r][c], a[r], b[0], b[1]);
          mma_m16n8k16<T>(O_rmem[r][c + 1], a[r], b[2], b[3]);
        }
      }
    }
    // BEGIN SOLUTION: keep the buffers from being overwritten too early
    __syncthreads();  // all threads are done with this buffer before the next round fills it
    // END SOLUTION
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
  constexpr int kOutputSmem = 2 * (kBr * kBc + kBc * D) * sizeof(T);

  launch(scores_kernel<T, D>, {score_tiles, kThreads, kScoresSmem, stream}, Q, K, S, p);
  launch(softmax_kernel<T>, {(p.rows() + kWarps - 1) / kWarps, kThreads, 0, stream}, S, P, p);
  launch(output_kernel<T, D>, {row_blocks, kThreads, kOutputSmem, stream}, P, V, O, p);
}

void lse(const Problem& p, const ForwardArgs& a, Stream stream) {
  lse_from_scores(p, static_cast<const float*>(a.workspace[0]), padded_row(p.seqlen_k), a.L,
                  stream);
}

FLASHSTEPS_STAGE("02d", "cp_async", "copies under the products: cp.async, two buffers", lse)

}  // namespace flashsteps::inline FLASHSTEPS_TARGET::stage_02d_cp_async
