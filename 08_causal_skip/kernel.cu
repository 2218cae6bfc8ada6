// 08 causal skip: as 07, but only tiles that have something to see are visited, and only those that
// also have something to hide are masked (FlashAttention-2, section 3.1.1). With a causal mask that
// is about half of the tiles, and one or two of them for each row block.

#include "common/gpu/product.h"
#include "common/gpu/score_scale.h"
#include "common/stage/kernel_stage.h"

namespace flashsteps::inline FLASHSTEPS_TARGET::stage_08_causal_skip {

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
  return m_old == -INFINITY ? 0.f : fast_exp2((m_old - m_new) * scale.log2);
}

template <typename T, int D, int kBr, int kBc>
__global__ void __launch_bounds__(kThreads, 2)
    attention_kernel(const T* __restrict__ Q, const T* __restrict__ K, const T* __restrict__ V,
                     T* __restrict__ O, float* __restrict__ L, Problem p, ScoreScale scale) {
  constexpr int kWarpRows = kBr / kWarps, kSlice = kBc;  // a warp's part of S: split Q
  const int tiles_q = ceil_div(p.seqlen_q, kBr);
  // The longest row blocks first, so that the short ones fill the gaps at the end.
  const int i0 = (tiles_q - 1 - blockIdx.x % tiles_q) * kBr;
  const int bh = blockIdx.x / tiles_q;
  const int b = bh / p.heads, h = bh % p.heads;
  const int64_t K_offset = p.k.offset(b, p.kv_head(h)), V_offset = p.v.offset(b, p.kv_head(h));
  Q += p.q.offset(b, h);

  // Tiles [0, tiles_unmasked) lie wholly below the diagonal, those from tiles_k on wholly above it.
  // BEGIN SOLUTION: where the first tile to mask and the first to skip are
  const int tiles_k = ceil_div(p.last_key(min(i0 + kBr, p.seqlen_q) - 1) + 1, kBc);
  const int tiles_unmasked = (p.last_key(i0) + 1) / kBc;
  // HANDOUT: const int tiles_k = ceil_div(p.seqlen_k, kBc), tiles_unmasked = 0;
  // END SOLUTION

  SharedMemory smem;
  T* Q_smem = smem.take<T>("Q_smem", kBr * D);
  T* K_smem = smem.take<T>("K_smem", kBc * D);
  T* V_smem = smem.take<T>("V_smem", kBc * D);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;  // PTX's names: a fragment's row and pair
  const int row0 = warp * kWarpRows;

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

  // Of rows 16 r + g + 8 half; l is this lane's part of the row's sum.
  float O_rmem[kWarpRows / 16][D / 8][4] = {};
  float m_rmem[kWarpRows / 16][2], l_rmem[kWarpRows / 16][2] = {};
#pragma unroll
  for (int r = 0; r < kWarpRows / 16; ++r) m_rmem[r][0] = m_rmem[r][1] = -INFINITY;

#pragma unroll 1
  for (int tile_k = 0; tile_k < tiles_k; ++tile_k) {
    const bool masked = tile_k >= tiles_unmasked;
    note_tile(masked);
    const int j0 = tile_k * kBc;
    cp_async_wait<0>();
    __syncthreads();  // Q and the K tile have arrived; all are done with the V tile before
    copy_tile_async<kBc, D, kThreads>(V_smem, V + V_offset + p.v.offset(0, 0, j0), p.v.row,
                                      p.seqlen_k - j0, p.head_dim);
    cp_async_commit();

    // S = Q K^T over this warp's rows
    float S_rmem[kWarpRows / 16][kSlice / 8][4] = {};
    multiply_by_transposed<D, D / 16>(S_rmem, Q_smem, fresh_thread_index() / 32 * kWarpRows, K_smem,
                                      0);
    apply_sign(S_rmem, scale);
    if (masked) {
      const int thread = fresh_thread_index();
      const int row0 = thread / 32 * kWarpRows, g = thread % 32 / 4, t = thread % 4;
#pragma unroll
      for (int r = 0; r < kWarpRows / 16; ++r) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = row0 + r * 16 + half * 8 + g;
          const int last = p.last_key(i0 + row) - j0 - 2 * t;
#pragma unroll
          for (int k = 0; k < kSlice / 8; ++k) {
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; ++e) {
              if (mask_if(k * 8 + e % 2 > last)) S_rmem[r][k][e] = -INFINITY;
            }
          }
        }
      }
    }
    cp_async_wait<0>();
    __syncthreads();  // V has arrived; all are done with K
    load_K(tile_k + 1);

    // P = e^(S - m_new), and its row sums; O and l are rescaled
#pragma unroll
    for (int r = 0; r < kWarpRows / 16; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float m_new = m_rmem[r][half];
#pragma unroll
        for (int k = 0; k < kSlice / 8; ++k) {
          m_new = fmaxf(m_new, fmaxf(S_rmem[r][k][2 * half], S_rmem[r][k][2 * half + 1]));
        }
        m_new = quad_max(m_new);
        const float rescale = rescale_factor(m_rmem[r][half], m_new, scale);
        m_rmem[r][half] = m_new;
        l_rmem[r][half] *= rescale;
#pragma unroll
        for (int c = 0; c < D / 8; ++c) {
          O_rmem[r][c][2 * half] *= rescale;
          O_rmem[r][c][2 * half + 1] *= rescale;
        }
      }
    }
    exponentiate(S_rmem, m_rmem, l_rmem, scale);
    multiply<D>(O_rmem, S_rmem, V_smem, 0);
  }
  note_tiles_done();
  O += p.o.offset(b, h);
  L += int64_t{bh} * p.seqlen_q;

  // O / l goes through the warp's own rows of Q_smem, so that it is stored 16 bytes at a time.
#pragma unroll
  for (int r = 0; r < kWarpRows / 16; ++r) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + r * 16 + half * 8 + g;
      const float l = quad_sum(l_rmem[r][half]);
      const float l_inverse = l == 0.f ? 0.f : divide(1.f, l);
#pragma unroll
      for (int c = 0; c < D / 8; ++c) {
        store_pair(Q_smem + swizzle<D>(row, c * 8 + 2 * t), O_rmem[r][c][2 * half] * l_inverse,
                   O_rmem[r][c][2 * half + 1] * l_inverse);
      }
      if (t == 0 && i0 + row < p.seqlen_q) {
        L[i0 + row] = l == 0.f ? -INFINITY : m_rmem[r][half] * scale.log2 * kLn2 + natural_log(l);
      }
    }
  }
  __syncwarp();  // all lanes have left their part of the warp's rows
#pragma unroll
  for (int x = 0; x < kWarpRows * D / (8 * 32); ++x) {
    const int chunk = x * 32 + lane;
    const int row = row0 + chunk / (D / 8), col = chunk % (D / 8) * 8;
    if (i0 + row < p.seqlen_q && col < p.head_dim) {
      *reinterpret_cast<uint4*>(O + p.o.offset(0, 0, i0 + row) + col) =
          *reinterpret_cast<const uint4*>(Q_smem + swizzle<D>(row, col));
    }
  }
}

template <typename T, int D, int kBr, int kBc>
constexpr int kSmemBytes = (kBr + 2 * kBc) * D * sizeof(T);

// What was fastest of the candidates below (attention bench --tune).
Tiles tiles(const Problem& p) {
  return tile_width(p.head_dim) == 64 ? Tiles{128, 128} : Tiles{128, 64};
}

TileList candidates(const Problem& p) {
  if (tile_width(p.head_dim) == 64) return {3, {{128, 128}, {128, 64}, {64, 64}}};
  return {2, {{128, 64}, {64, 64}}};
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
  launch(attention_kernel<T, D, kBr, kBc>,
         {p.batch_heads() * tiles_q, kThreads, kSmemBytes<T, D, kBr, kBc>, stream}, Q, K, V, O, a.L,
         p, score_scale(p.scale));
}

template <typename T, int D>
void forward(const Problem& p, const ForwardArgs& a, Stream stream) {
  if (a.tiles.Br == 64) {
    run<T, D, 64, 64>(p, a, stream);
  } else if (D == 64 && a.tiles.Bc != 64) {
    run<T, D, 128, D == 64 ? 128 : 64>(p, a, stream);
  } else {
    run<T, D, 128, 64>(p, a, stream);
  }
}

FLASHSTEPS_STAGE("08", "causal_skip",
                 "tiles above the diagonal are skipped, those below never masked", nullptr)

}  // namespace flashsteps::inline FLASHSTEPS_TARGET::stage_08_causal_skip
