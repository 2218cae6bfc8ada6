// 06 deferred rescale: as 05, but O is kept unnormalised until the end (FlashAttention-2, section
// 3.1.1). What 05 multiplies by l in one step and divides by l_new in the next cancels; one
// division for each row remains, after the loop. And L = m + ln l is all that the backward pass
// needs of m and l.

#include "common/gpu/product.h"
#include "common/gpu/score_scale.h"
#include "common/stage/kernel_stage.h"

namespace flashsteps::inline FLASHSTEPS_TARGET::stage_06_deferred_rescale {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * 32;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLargeExponent = 1024.f;

// The maximum and the sum over the four lanes that share the rows of a fragment.
__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kFullMask, x, 1));
  return fmaxf(x, __shfl_xor_sync(kFullMask, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kFullMask, x, 1);
  return x + __shfl_xor_sync(kFullMask, x, 2);
}

// S = 2^(scale (S - m)), in place; adds this lane's part of each row's sum to l.
template <int kM, int kN>
__device__ __forceinline__ void exponentiate(float (&S_rmem)[kM][kN][4],
                                             const float (&m_rmem)[kM][2], float (&l_rmem)[kM][2],
                                             ScoreScale scale) {
  // One fma computes scale S - scale m, and rounds scale m apart from it. Where that would show,
  // the maximum is subtracted first. A row that has seen no key subtracts 0: -inf - -inf would be
  // NaN.
  float shift[kM][2], largest = 0.f;
#pragma unroll
  for (int x = 0; x < 2 * kM; ++x) {
    const float m = m_rmem[x / 2][x % 2];
    shift[x / 2][x % 2] = m == -INFINITY ? 0.f : scale.log2 * m;
    largest = fmaxf(largest, fabsf(shift[x / 2][x % 2]));
  }
  if (largest > kLargeExponent) {
#pragma unroll
    for (int r = 0; r < kM; ++r) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float m = m_rmem[r][e / 2] == -INFINITY ? 0.f : m_rmem[r][e / 2];
        shift[r][e / 2] = 0.f;
#pragma unroll
        for (int k = 0; k < kN; ++k) S_rmem[r][k][e] -= m;
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kM; ++r) {
#pragma unroll
    for (int k = 0; k < kN; ++k) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        S_rmem[r][k][e] = fast_exp2(fmaf(S_rmem[r][k][e], scale.log2, -shift[r][e / 2]));
        l_rmem[r][e / 2] += S_rmem[r][k][e];
      }
    }
  }
}

// What e^m_old is worth against e^m_new; 0 where nothing was seen before.
__device__ __forceinline__ float rescale_factor(float m_old, float m_new, ScoreScale scale) {
  return fast_exp2((m_old - (m_new == -INFINITY ? 0.f : m_new)) * scale.log2);
}

template <typename T, int D, int kBr, int kBc>
__global__ void __launch_bounds__(kThreads, 2)
    attention_kernel(const T* __restrict__ Q, const T* __restrict__ K, const T* __restrict__ V,
                     T* __restrict__ O, float* __restrict__ L, Problem p, ScoreScale scale,
                     int blocks_per_head) {
  constexpr int kWarpRows = kBr, kSlice = kBc / kWarps;  // a warp's part of S: split K
  constexpr int kOwners = kThreads / kBr;    // threads that merge a row of O, 4 columns at a time
  constexpr int kOwned = D / (4 * kOwners);  // and how often
  const int tiles_q = ceil_div(p.seqlen_q, kBr), tiles_k = ceil_div(p.seqlen_k, kBc);
  const int bh = blockIdx.x / blocks_per_head;
  const int b = bh / p.heads, h = bh % p.heads;
  const int64_t K_offset = p.k.offset(b, p.kv_head(h)), V_offset = p.v.offset(b, p.kv_head(h));
  Q += p.q.offset(b, h);

  SharedMemory smem;
  T* Q_smem = smem.take<T>("Q_smem", kBr * D);
  T* K_smem = smem.take<T>("K_smem", kBc * D);
  T* V_smem = smem.take<T>("V_smem", kBc * D);
  float* PV_smem = smem.take<float>("PV_smem", kWarps * kBr * D);  // P V over each warp's keys
  float* max_smem = smem.take<float>("max_smem", kWarps * kBr);    // row maxima over them
  float* sum_smem = smem.take<float>("sum_smem", kWarps * kBr);    // row sums of exponentials
  float* m_smem = smem.take<float>("m_smem", kBr);                 // m before this tile

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;  // PTX's names: a fragment's row and pair
  const int own_row = threadIdx.x / kOwners, own_col = threadIdx.x % kOwners * 4;

  for (int tile_q = blockIdx.x % blocks_per_head; tile_q < tiles_q; tile_q += blocks_per_head) {
    const int i0 = tile_q * kBr;
    const auto load_K = [&](int tile) {
      if (tile < tiles_k) {
        copy_tile_async<kBc, D, kThreads>(K_smem, K + K_offset + p.k.offset(0, 0, tile * kBc),
                                          p.k.row, p.seqlen_k - tile * kBc, p.head_dim);
      }
      cp_async_commit();
    };
    if (tiles_k > 0) {
      copy_tile_async<kBr, D, kThreads>(Q_smem, Q + p.q.offset(0, 0, i0), p.q.row, p.seqlen_q - i0,
                                        p.head_dim);
    }
    load_K(0);

    float O_rmem[kOwned][4] = {};
    float m_own = -INFINITY, l_own = 0.f;
    if (own_col == 0) m_smem[own_row] = m_own;

    for (int tile_k = 0; tile_k < tiles_k; ++tile_k) {
      note_tile(true);
      const int j0 = tile_k * kBc;
      cp_async_wait<0>();
      __syncthreads();  // Q and the K tile have arrived; all have merged the tile before
      copy_tile_async<kBc, D, kThreads>(V_smem, V + V_offset + p.v.offset(0, 0, j0), p.v.row,
                                        p.seqlen_k - j0, p.head_dim);
      cp_async_commit();

      // S = Q K^T over this warp's keys
      float S_rmem[kWarpRows / 16][kSlice / 8][4] = {};
      multiply_by_transposed<D>(S_rmem, Q_smem, 0, K_smem, warp * kSlice);
      apply_sign(S_rmem, scale);
#pragma unroll
      for (int r = 0; r < kWarpRows / 16; ++r) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = r * 16 + half * 8 + g;
          const int last = p.last_key(i0 + row) - j0 - warp * kSlice - 2 * t;
          float row_max = -INFINITY;
#pragma unroll
          for (int k = 0; k < kSlice / 8; ++k) {
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; ++e) {
              if (mask_if(k * 8 + e % 2 > last)) S_rmem[r][k][e] = -INFINITY;
              row_max = fmaxf(row_max, S_rmem[r][k][e]);
            }
          }
          row_max = quad_max(row_max);
          if (t == 0) max_smem[warp * kBr + row] = row_max;
        }
      }
      cp_async_wait<0>();
      __syncthreads();  // V and every warp's maxima have arrived; all are done with K
      load_K(tile_k + 1);

      // P = e^(S - m_new), and its row sums, over this warp's keys
      float m_rmem[kWarpRows / 16][2], sum_rmem[kWarpRows / 16][2] = {};
#pragma unroll
      for (int x = 0; x < kWarpRows / 8; ++x) {
        float m_new = m_smem[x * 8 + g];
#pragma unroll
        for (int w = 0; w < kWarps; ++w) m_new = fmaxf(m_new, max_smem[w * kBr + x * 8 + g]);
        m_rmem[x / 2][x % 2] = m_new;
      }
      exponentiate(S_rmem, m_rmem, sum_rmem, scale);
#pragma unroll
      for (int x = 0; x < kWarpRows / 8; ++x) {
        const float sum = quad_sum(sum_rmem[x / 2][x % 2]);
        if (t == 0) sum_smem[warp * kBr + x * 8 + g] = sum;
      }

      // P V over this warp's keys
      float PV_rmem[kWarpRows / 16][D / 8][4] = {};
      multiply<D>(PV_rmem, S_rmem, V_smem, warp * kSlice);
#pragma unroll
      for (int r = 0; r < kWarpRows / 16; ++r) {
#pragma unroll
        for (int c = 0; c < D / 8; ++c) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int at = fp32_swizzle<D>(r * 16 + half * 8 + g, c * 8 + 2 * t);
            store_pair(PV_smem + warp * kBr * D + at, PV_rmem[r][c][2 * half],
                       PV_rmem[r][c][2 * half + 1]);
          }
        }
      }
      __syncthreads();  // every warp's P V and row sums have arrived

      // O = e^(m - m_new) O + sum over warps of P V
      float m_new = m_own, sum = 0.f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        m_new = fmaxf(m_new, max_smem[w * kBr + own_row]);
        sum += sum_smem[w * kBr + own_row];
      }
      // BEGIN SOLUTION: merge this tile into O and l, and divide nothing
      const float rescale = rescale_factor(m_own, m_new, scale);
#pragma unroll
      for (int x = 0; x < kOwned; ++x) {
        const int at = fp32_swizzle<D>(own_row, own_col + x * 4 * kOwners);
        for (int e = 0; e < 4; ++e) O_rmem[x][e] *= rescale;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          float PV_part[4];
          load_quad(PV_part, PV_smem + w * kBr * D + at);
          for (int e = 0; e < 4; ++e) O_rmem[x][e] += PV_part[e];
        }
      }
      m_own = m_new;
      l_own = l_own * rescale + sum;
      // END SOLUTION
      if (own_col == 0) m_smem[own_row] = m_new;
    }
    note_tiles_done();

    if (i0 + own_row >= p.seqlen_q) continue;
    // BEGIN SOLUTION: divide once, store O, and L in the place of m and l
    const float l_inverse = l_own == 0.f ? 0.f : divide(1.f, l_own);
#pragma unroll
    for (int x = 0; x < kOwned; ++x) {
      const int col = own_col + x * 4 * kOwners;
      for (int e = 0; e < 4; ++e) O_rmem[x][e] *= l_inverse;
      if (col < p.head_dim) store_quad(O + p.o.offset(b, h, i0 + own_row) + col, O_rmem[x]);
    }
    if (own_col == 0) {
      L[int64_t{bh} * p.seqlen_q + i0 + own_row] =
          l_own == 0.f ? -INFINITY : m_own * scale.log2 * kLn2 + natural_log(l_own);
    }
    // END SOLUTION
  }
}

template <typename T, int D, int kBr, int kBc>
constexpr int kSmemBytes = ((kBr + 2 * kBc) * D) * sizeof(T) +
                           (kWarps * kBr * D + 2 * kWarps * kBr + kBr) * sizeof(float);

// Fewer rows where the partial sums of P V would not fit the card's shared memory.
Tiles tiles(const Problem& p) {
  if (tile_width(p.head_dim) == 64) return {64, 64};
  return {shared_memory_per_block() >= kSmemBytes<fp16_t, 128, 32, 64> ? 32 : 16, 64};
}

WorkspaceList workspaces(const Problem&) {
  return {};
}

template <typename T, int D, int kBr, int kBc>
void run(const Problem& p, const ForwardArgs& a, Stream stream) {
  const T* Q = static_cast<const T*>(a.Q);
  const T* K = static_cast<const T*>(a.K);
  const T* V = static_cast<const T*>(a.V);
  T* O = static_cast<T*>(a.O);
  const int tiles_q = ceil_div(p.seqlen_q, kBr);
  const int blocks_per_head = a.one_block_per_head ? min(1, tiles_q) : tiles_q;
  launch(attention_kernel<T, D, kBr, kBc>,
         {p.batch_heads() * blocks_per_head, kThreads, kSmemBytes<T, D, kBr, kBc>, stream}, Q, K, V,
         O, a.L, p, score_scale(p.scale), blocks_per_head);
}

template <typename T, int D>
void forward(const Problem& p, const ForwardArgs& a, Stream stream) {
  if constexpr (D == 64) {
    run<T, D, 64, 64>(p, a, stream);
  } else if (tiles(p).Br == 32) {
    run<T, D, 32, 64>(p, a, stream);
  } else {
    run<T, D, 16, 64>(p, a, stream);
  }
}

FLASHSTEPS_STAGE("06", "deferred_rescale", "O divided once, at the end; L replaces m and l",
                 nullptr)

}  // namespace flashsteps::inline FLASHSTEPS_TARGET::stage_06_deferred_rescale
