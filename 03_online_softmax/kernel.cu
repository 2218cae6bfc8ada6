// 03 online softmax: as 02d, but softmax and P V are one pass over S. A block keeps, for each of
// its rows, the maximum m, the sum l and the output O of the keys that it has seen so far. A new
// tile of S may raise the maximum; what was summed before is then worth 2^(m_old - m_new) as much:
//
//   scores    as 02d; S is in units of log 2, so that exponentials are powers of 2
//   output    for each tile of 64 keys: read S, update m and l, P tile to shared memory, rescale O,
//             add P V. P never goes to global memory, and S is read once

#include "common/stage/kernel_stage.h"

namespace flashsteps::inline FLASHSTEPS_TARGET::stage_03_online_softmax {

constexpr int kThreads = 128;
constexpr int kBlocksPerSM = 3;  // at least; leaves a thread 168 registers, so that none spill
// The scores kernel's tiles: as in 02d.
constexpr int kScoresBr = 64;
constexpr int kScoresBc = 64;
constexpr int kChunk = 32;  // columns of Q and K that it waits for at a time
// The output kernel's.
constexpr int kBc = 64;  // keys in a tile
// Queries in a tile.
constexpr int rows_for(int D) {
  return D <= 64 ? 64 : 32;
}
// Its softmax: 8 lanes share a row of the tile, 8 columns each; a warp has every 4th row group.
constexpr int kLanesPerRow = 8;
constexpr int kRowsAtOnce = kThreads / kLanesPerRow;

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// S (batch, heads, seqlen_q, seqlen_k), fp32: times scale and log2 e, and -inf where query i does
// not see key j.
template <typename T, int D>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM)
    scores_kernel(const T* __restrict__ Q, const T* __restrict__ K, float* __restrict__ S,
                  Problem p, float scale_log2) {
  const int tiles_q = ceil_div(p.seqlen_q, kScoresBr), tiles_k = ceil_div(p.seqlen_k, kScoresBc);
  const int j0 = blockIdx.x % tiles_k * kScoresBc;
  const int i0 = blockIdx.x / tiles_k % tiles_q * kScoresBr;
  const int bh = blockIdx.x / tiles_k / tiles_q;
  const int b = bh / p.heads, h = bh % p.heads;
  Q += p.q.offset(b, h, i0);
  K += p.k.offset(b, p.kv_head(h), j0);
  S += (int64_t{bh} * p.seqlen_q + i0) * padded_row(p.seqlen_k) + j0;

  constexpr int kWarpRows = kScoresBr / 2, kWarpCols = kScoresBc / 2;  // a 2 x 2 grid of warps
  SharedMemory smem;
  T* Q_smem = smem.take<T>("Q_smem", kScoresBr * D);
  T* K_smem = smem.take<T>("K_smem", kScoresBc * D);
  const auto load_chunk = [&](int c0) {  // each chunk is a tile of its own
    if (c0 < D) {
      copy_tile_async<kScoresBr, kChunk, kThreads>(Q_smem + kScoresBr * c0, Q + c0, p.q.row,
                                                   p.seqlen_q - i0, p.head_dim - c0);
      copy_tile_async<kScoresBc, kChunk, kThreads>(K_smem + kScoresBc * c0, K + c0, p.k.row,
                                                   p.seqlen_k - j0, p.head_dim - c0);
    }
    cp_async_commit();  // may be empty: so that the wait below always leaves one group, the next
  };

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;  // PTX's names: a fragment's row and pair
  const int row0 = warp / 2 * kWarpRows, col0 = warp % 2 * kWarpCols;
  float S_rmem[kWarpRows / 16][kWarpCols / 8][4] = {};
  load_chunk(0);
#pragma unroll 1
  for (int c0 = 0; c0 < D; c0 += kChunk) {
    load_chunk(c0 + kChunk);
    cp_async_wait<1>();
    __syncthreads();  // every thread's part of this chunk has arrived, and is seen by all
#pragma unroll
    for (int c = 0; c < kChunk; c += 16) {
      uint32_t a[kWarpRows / 16][4];
#pragma unroll
      for (int r = 0; r < kWarpRows / 16; ++r) {
        ldmatrix_x4(a[r], Q_smem + kScoresBr * c0 +
                              swizzle<kChunk>(row0 + r * 16 + lane % 16, c + lane / 16 * 8));
      }
#pragma unroll
      for (int k = 0; k < kWarpCols / 8; k += 2) {  // one ldmatrix feeds two products: 16 keys
        uint32_t b[4];
        ldmatrix_x4(
            b, K_smem + kScoresBc * c0 +
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
        if (i >= p.seqlen_q || j >= padded_row(p.seqlen_k)) continue;
        const int last =
            p.causal ? min(i + p.seqlen_k - p.seqlen_q, p.seqlen_k - 1) : p.seqlen_k - 1;
        float2 s = make_float2(S_rmem[r][k][e] * scale_log2, S_rmem[r][k][e + 1] * scale_log2);
        if (mask_if(j > last)) s.x = -INFINITY;
        if (mask_if(j + 1 > last)) s.y = -INFINITY;
        *reinterpret_cast<float2*>(S + row * padded_row(p.seqlen_k) + col) = s;
      }
    }
  }
}

// O (batch, heads, seqlen_q, head_dim); m and l (batch, heads, seqlen_q), fp32, m in natural units.
template <typename T, int D>
__global__ void __launch_bounds__(kThreads, kBlocksPerSM)
    output_kernel(const float* __restrict__ S, const T* __restrict__ V, T* __restrict__ O,
                  float* __restrict__ m, float* __restrict__ l, Problem p) {
  constexpr int kBr = rows_for(D);
  const int tiles_q = ceil_div(p.seqlen_q, kBr);
  const int i0 = blockIdx.x % tiles_q * kBr;
  const int bh = blockIdx.x / tiles_q;
  const int b = bh / p.heads, h = bh % p.heads;
  const int64_t row_block = int64_t{bh} * p.seqlen_q + i0;
  S += row_block * padded_row(p.seqlen_k);
  V += p.v.offset(b, p.kv_head(h));
  O += p.o.offset(b, h, i0);
  m += row_block;
  l += row_block;

  SharedMemory smem;
  T* P_smem = smem.take<T>("P_smem", kBr * kBc);
  T* V_smem = smem.take<T>("V_smem", 2 * kBc * D);
  float* rescale_smem = smem.take<float>("rescale_smem", kBr);

  const int tiles_k = ceil_div(p.seqlen_k, kBc);
  const auto load_tile = [&](int tile) {  // into the buffer of its parity
    if (tile < tiles_k) {
      const int j0 = tile * kBc;
      copy_tile_async<kBc, D, kThreads>(V_smem + tile % 2 * kBc * D, V + j0 * p.v.row, p.v.row,
                                        p.seqlen_k - j0, p.head_dim);
    }
    cp_async_commit();  // may be empty: so that the wait below always leaves one group, the next
  };

  // Of the softmax: rows softmax_row + kRowsAtOnce * x, columns softmax_col to softmax_col + 7.
  const int softmax_row = threadIdx.x / kLanesPerRow;
  const int softmax_col = threadIdx.x % kLanesPerRow * 8;
  float m_rmem[kBr / kRowsAtOnce], l_rmem[kBr / kRowsAtOnce];
#pragma unroll
  for (int x = 0; x < kBr / kRowsAtOnce; ++x) {
    m_rmem[x] = -INFINITY;
    l_rmem[x] = 0.f;
  }

  // Of the product: a 2 x 2 grid of warps over the kBr x D tile of O.
  constexpr int kWarpRows = kBr / 2, kWarpCols = D / 2;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;  // PTX's names: a fragment's row and pair
  const int row0 = warp / 2 * kWarpRows, col0 = warp % 2 * kWarpCols;
  float O_rmem[kWarpRows / 16][kWarpCols / 8][4] = {};

  load_tile(0);
  for (int tile = 0; tile < tiles_k; ++tile) {
    note_tile(false);
    load_tile(tile + 1);
    const int j0 = tile * kBc;
    const T* V_tile = V_smem + tile % 2 * kBc * D;

#pragma unroll
    for (int x = 0; x < kBr / kRowsAtOnce; ++x) {
      const int row = softmax_row + x * kRowsAtOnce;
      float s[8];
      const float4* S_gmem =
          reinterpret_cast<const float4*>(S + row * padded_row(p.seqlen_k) + j0 + softmax_col);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float4 quad = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
        if (i0 + row < p.seqlen_q && j0 + softmax_col < p.seqlen_k) quad = S_gmem[half];
        s[4 * half + 0] = quad.x;
        s[4 * half + 1] = quad.y;
        s[4 * half + 2] = quad.z;
        s[4 * half + 3] = quad.w;
      }

      // BEGIN SOLUTION: the online softmax of this row: m, l, its P tile and its factor for O
      // m_new = max(m, rowmax(S))
      float m_new = m_rmem[x];
#pragma unroll
      for (int e = 0; e < 8; ++e) m_new = fmaxf(m_new, s[e]);
      for (int offset = kLanesPerRow / 2; offset > 0; offset /= 2) {
        m_new = fmaxf(m_new, __shfl_xor_sync(kFullMask, m_new, offset));
      }
      // Nothing seen yet: exp2(-inf - 0) = 0 where -inf - -inf would be NaN.
      const float m_finite = m_new == -INFINITY ? 0.f : m_new;

      // l_new = 2^(m - m_new) l + rowsum(2^(S - m_new))
      float sum = 0.f;
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        s[e] = fast_exp2(s[e] - m_finite);
        sum += s[e];
      }
      for (int offset = kLanesPerRow / 2; offset > 0; offset /= 2) {
        sum += __shfl_xor_sync(kFullMask, sum, offset);
      }
      const float l_old = l_rmem[x] * fast_exp2(m_rmem[x] - m_finite);
      const float l_new = l_old + sum;
      const float l_inverse = l_new == 0.f ? 0.f : divide(1.f, l_new);
      m_rmem[x] = m_new;
      l_rmem[x] = l_new;

      // O = (l_old / l_new) O + (P / l_new) V: O stays normalised after every tile
      uint4 P_packed;
      P_packed.x = pack2<T>(s[0] * l_inverse, s[1] * l_inverse);
      P_packed.y = pack2<T>(s[2] * l_inverse, s[3] * l_inverse);
      P_packed.z = pack2<T>(s[4] * l_inverse, s[5] * l_inverse);
      P_packed.w = pack2<T>(s[6] * l_inverse, s[7] * l_inverse);
      *reinterpret_cast<uint4*>(P_smem + swizzle<kBc>(row, softmax_col)) = P_packed;
      if (softmax_col == 0) rescale_smem[row] = l_old * l_inverse;
      // END SOLUTION
    }

    cp_async_wait<1>();
    __syncthreads();  // the P tile, the factors and every thread's part of the V tile are there

    // BEGIN SOLUTION: O times the factor of its row, before P V is added
#pragma unroll
    for (int r = 0; r < kWarpRows / 16; ++r) {
      const float upper = rescale_smem[row0 + r * 16 + g];
      const float lower = rescale_smem[row0 + r * 16 + g + 8];
#pragma unroll
      for (int c = 0; c < kWarpCols / 8; ++c) {
        O_rmem[r][c][0] *= upper;
        O_rmem[r][c][1] *= upper;
        O_rmem[r][c][2] *= lower;
        O_rmem[r][c][3] *= lower;
      }
    }
    // END SOLUTION
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
        ldmatrix_x4_trans(b, V_tile + swizzle<D>(j + lane % 16, col0 + c * 8 + lane / 16 * 8));
#pragma unroll
        for (int r = 0; r < kWarpRows / 16; ++r) {
          mma_m16n8k16<T>(O_rmem[r][c], a[r], b[0], b[1]);
          mma_m16n8k16<T>(O_rmem[r][c + 1], a[r], b[2], b[3]);
        }
      }
    }
    __syncthreads();  // all threads are done with P, the factors and this V buffer
  }
  note_tiles_done();

#pragma unroll
  for (int x = 0; x < kBr / kRowsAtOnce; ++x) {
    const int row = softmax_row + x * kRowsAtOnce;
    if (softmax_col == 0 && i0 + row < p.seqlen_q) {
      m[row] = m_rmem[x] * kLn2;
      l[row] = l_rmem[x];
    }
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

Tiles tiles(const Problem& p) {
  return {rows_for(tile_width(p.head_dim)), kBc};
}

WorkspaceList workspaces(const Problem& p) {
  return {3,
          {{"S", DType::fp32, p.rows() * padded_row(p.seqlen_k)},
           {"m", DType::fp32, p.rows()},
           {"l", DType::fp32, p.rows()}}};
}

template <typename T, int D>
void forward(const Problem& p, const ForwardArgs& a, Stream stream) {
  constexpr int kBr = rows_for(D);
  const T* Q = static_cast<const T*>(a.Q);
  const T* K = static_cast<const T*>(a.K);
  const T* V = static_cast<const T*>(a.V);
  T* O = static_cast<T*>(a.O);
  float* S = static_cast<float*>(a.workspace[0]);
  float* m = static_cast<float*>(a.workspace[1]);
  float* l = static_cast<float*>(a.workspace[2]);
  const int64_t row_blocks = p.batch_heads() * ceil_div(p.seqlen_q, kBr);
  const int64_t score_tiles =
      p.batch_heads() * ceil_div(p.seqlen_q, kScoresBr) * ceil_div(p.seqlen_k, kScoresBc);
  constexpr int kScoresSmem = (kScoresBr + kScoresBc) * D * sizeof(T);
  constexpr int kOutputSmem = (kBr * kBc + 2 * kBc * D) * sizeof(T) + kBr * sizeof(float);

  launch(scores_kernel<T, D>, {score_tiles, kThreads, kScoresSmem, stream}, Q, K, S, p,
         p.scale * kLog2e);
  launch(output_kernel<T, D>, {row_blocks, kThreads, kOutputSmem, stream}, S, V, O, m, l, p);
}

void lse(const Problem& p, const ForwardArgs& a, Stream stream) {
  lse_from_stats(p, static_cast<const float*>(a.workspace[1]),
                 static_cast<const float*>(a.workspace[2]), a.L, stream);
}

FLASHSTEPS_STAGE("03", "online_softmax", "softmax and P V in one pass over S; P never stored", lse)

}  // namespace flashsteps::inline FLASHSTEPS_TARGET::stage_03_online_softmax
