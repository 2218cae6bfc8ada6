// 10a TMA and WGMMA: as 08, with Hopper's instructions. One thread has tiles copied by the copy
// engine (TMA), which counts their bytes at an mbarrier; a warpgroup of four warps multiplies 64
// rows at a time, with operands from shared memory (WGMMA). K and V have two buffers each.

#include "common/gpu/hopper.h"
#include "common/gpu/score_scale.h"
#include "common/stage/kernel_stage.h"

namespace flashsteps::inline FLASHSTEPS_TARGET::stage_10a_tma_wgmma {

constexpr int kStages = 2;  // tiles of K, and of V, in shared memory
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLargeExponent = 1024.f;
// The sum over the four lanes that share the rows of a fragment.
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kFullMask, x, 1);
  return x + __shfl_xor_sync(kFullMask, x, 2);
}

// One step of the online softmax over rows g and g + 8: S = 2^(scale (S - m)) in place, with the
// new m; l is this lane's part of the rows' sums. `rescale` is what O is to be multiplied by.
template <int kN>
__device__ __forceinline__ void softmax_step(float (&S_rmem)[kN][4], float (&m_rmem)[2],
                                             float (&l_rmem)[2], float (&rescale)[2],
                                             ScoreScale scale) {
  // Four maxima for each row, so that none waits for the one before.
  float m_new[2][4], shift[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int x = 0; x < 4; ++x) m_new[half][x] = S_rmem[x / 2][2 * half + x % 2];
    m_new[half][0] = fmaxf(m_new[half][0], m_rmem[half]);
  }
#pragma unroll
  for (int k = 2; k < kN; ++k) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& m = m_new[e / 2][k % 2 * 2 + e % 2];
      m = fmaxf(m, S_rmem[k][e]);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    m_new[half][0] =
        fmaxf(fmaxf(m_new[half][0], m_new[half][1]), fmaxf(m_new[half][2], m_new[half][3]));
  }
#pragma unroll
  for (int lanes = 1; lanes < 4; lanes *= 2) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      m_new[half][0] = fmaxf(m_new[half][0], __shfl_xor_sync(kFullMask, m_new[half][0], lanes));
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float m = m_new[half][0];
    // 0 where nothing was seen before.
    rescale[half] = m_rmem[half] == -INFINITY ? 0.f : fast_exp2((m_rmem[half] - m) * scale.log2);
    m_rmem[half] = m;
    // A row that has seen no key subtracts 0: -inf - -inf would be NaN.
    shift[half] = m == -INFINITY ? 0.f : scale.log2 * m;
  }
  // One fma computes scale S - scale m, and rounds scale m apart from it. Where that would show,
  // the maximum is subtracted first.
  if (fmaxf(fabsf(shift[0]), fabsf(shift[1])) > kLargeExponent) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float m = m_rmem[half] == -INFINITY ? 0.f : m_rmem[half];
#pragma unroll
      for (int k = 0; k < kN; ++k) {
        S_rmem[k][2 * half] -= m;
        S_rmem[k][2 * half + 1] -= m;
      }
      shift[half] = 0.f;
    }
  }
  float sum[4] = {};
#pragma unroll
  for (int k = 0; k < kN; ++k) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      S_rmem[k][e] = fast_exp2(fmaf(S_rmem[k][e], scale.log2, -shift[e / 2]));
      sum[e] += S_rmem[k][e];
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    l_rmem[half] = l_rmem[half] * rescale[half] + (sum[2 * half] + sum[2 * half + 1]);
  }
}

// A row block of a head: tiles [0, tiles_unmasked) of keys lie wholly below the diagonal, those
// from tiles_k on wholly above it.
struct Work {
  int i0, bh, tiles_k, tiles_unmasked;
};

template <typename T, int D, int kBr, int kBc>
__global__ void __launch_bounds__(kBr * 2, 1)
    attention_kernel(const __grid_constant__ TensorMap Q_map,
                     const __grid_constant__ TensorMap K_map,
                     const __grid_constant__ TensorMap V_map,
                     const __grid_constant__ TensorMap O_map, float* __restrict__ L, Problem p,
                     ScoreScale scale) {
  constexpr int kWarpgroups = kBr / 64;
  constexpr int kQ = 64 * D, kKV = kBc * D;
  SharedMemory smem;
  T* Q_smem = smem.take<T>("Q_smem", kWarpgroups * kQ);
  T* K_smem = smem.take<T>("K_smem", kStages * kKV);
  T* V_smem = smem.take<T>("V_smem", kStages * kKV);
  mbarrier_t* Q_full = smem.take<mbarrier_t>("Q_full", kWarpgroups);
  mbarrier_t* K_full = smem.take<mbarrier_t>("K_full", kStages);
  mbarrier_t* V_full = smem.take<mbarrier_t>("V_full", kStages);

  const int warpgroup = warp_uniform(threadIdx.x / 128);

  if (threadIdx.x == 0) {
    prefetch_tensor_map(Q_map);
    prefetch_tensor_map(K_map);
    prefetch_tensor_map(V_map);
    // BEGIN SOLUTION: make the mbarriers of Q, K and V, and let TMA know of them
    for (int q = 0; q < kWarpgroups; ++q) mbarrier_init(&Q_full[q], 1);
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(&K_full[s], 1);
      mbarrier_init(&V_full[s], 1);
    }
    fence_mbarrier_init();
    // END SOLUTION
  }
  __syncthreads();  // the mbarriers are there

  const int tiles_q = ceil_div(p.seqlen_q, kBr);
  // The longest row blocks first, so that the short ones fill the gaps at the end.
  const int bh = blockIdx.x / tiles_q, tile = tiles_q - 1 - blockIdx.x % tiles_q;
  Work w;
  w.i0 = tile * kBr;
  w.bh = bh;
  w.tiles_k = ceil_div(p.last_key(min(w.i0 + kBr, p.seqlen_q) - 1) + 1, kBc);
  w.tiles_unmasked = scale.sign == 1.f ? (p.last_key(w.i0) + 1) / kBc : 0;

  const int b = w.bh / p.heads, h = w.bh - b * p.heads, kv_head = p.kv_head(h);
  const auto load_Q = [&] {
#pragma unroll 1
    for (int q = 0; q < kWarpgroups; ++q) {
      mbarrier_arrive_expect_tx(&Q_full[q], kQ * sizeof(T));
      load_tile<64, D, CacheHint::evict_first>(Q_smem + q * kQ, Q_map, &Q_full[q], w.i0 + q * 64, h,
                                               b);
    }
  };
  // Where thread 0 loads to; all threads work on the tile that is K_ring's and V_ring's.
  Ring<kStages> K_next, V_next;
  const auto load = [&](Ring<kStages>& ring, mbarrier_t* full, T* tiles_smem, const TensorMap& map,
                        int tile_k, int kv_head, int b) {
    // BEGIN SOLUTION: have the tile copied to the place of the ring, announced at its mbarrier
    mbarrier_arrive_expect_tx(&full[ring.stage], kKV * sizeof(T));
    load_tile<kBc, D, CacheHint::evict_last>(tiles_smem + ring.stage * kKV, map, &full[ring.stage],
                                             tile_k * kBc, kv_head, b);
    ring.next();
    // END SOLUTION
  };
  const auto load_K = [&](int tile_k, int kv_head, int b) {
    load(K_next, K_full, K_smem, K_map, tile_k, kv_head, b);
  };
  const auto load_V = [&](int tile_k, int kv_head, int b) {
    load(V_next, V_full, V_smem, V_map, tile_k, kv_head, b);
  };
  if (threadIdx.x == 0 && w.tiles_k > 0) {
    load_Q();
    load_K(w.tiles_k - 1, kv_head, b);
    load_V(w.tiles_k - 1, kv_head, b);
  }
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4;  // PTX's names: a fragment's row and pair
  const int row0 = warpgroup * 64 + warp * 16 + g;
  Ring<kStages> K_ring, V_ring;
  const int q = warpgroup;  // its part of Q

  // Of rows g and g + 8 of the warp; l is this lane's part of the row's sum.
  float O_rmem[D / 8][4] = {};
  float m_rmem[2] = {-INFINITY, -INFINITY}, l_rmem[2] = {};

  // O / l goes through the warp's own rows of Q, which only its own products have read: a warp has
  // 16 of the 64 rows of its warpgroup.
  const auto store = [&](int q, const float(&m)[2], const float(&l_part)[2]) {
    note_tiles_done();
    T* O_smem = Q_smem + q * kQ;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = w.i0 + row0 + half * 8;
      const float l = quad_sum(l_part[half]);
      const float l_inverse = l == 0.f ? 0.f : divide(1.f, l);
      if (t == 0 && i < p.seqlen_q)
        L[int64_t{w.bh} * p.seqlen_q + i] =
            l == 0.f ? -INFINITY : m[half] * scale.log2 * kLn2 + natural_log(l);
#pragma unroll
      for (int c = 0; c < D / 8; ++c) {
        store_pair(O_smem + panel_swizzle<64>(warp * 16 + g + half * 8, c * 8 + 2 * t),
                   O_rmem[c][2 * half] * l_inverse, O_rmem[c][2 * half + 1] * l_inverse);
      }
    }
    // BEGIN SOLUTION: let TMA store the warp's 16 rows
    fence_proxy_async();  // TMA sees what this lane stored
    __syncwarp();         // all lanes have left their part of the warp's rows
    if (lane == 0) {
#pragma unroll
      for (int col = 0; col < D; col += kPanel) {
        tma_store(O_map, O_smem + col * 64 + warp * 16 * kPanel, col,
                  w.i0 + warpgroup * 64 + warp * 16, h, b);
      }
      tma_store_commit();
    }
    // END SOLUTION
  };
  const auto softmax = [&](float(&S_rmem)[kBc / 8][4], int tile_k, float(&rescale)[2]) {
    note_tile(tile_k >= w.tiles_unmasked);
    if (tile_k >= w.tiles_unmasked) {
      apply_sign(S_rmem, scale);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int last = p.last_key(w.i0 + row0 + half * 8) - tile_k * kBc - 2 * t;
#pragma unroll
        for (int k = 0; k < kBc / 8; ++k) {
#pragma unroll
          for (int e = 2 * half; e < 2 * half + 2; ++e) {
            if (mask_if(k * 8 + e % 2 > last)) S_rmem[k][e] = -INFINITY;
          }
        }
      }
    }
    softmax_step(S_rmem, m_rmem, l_rmem, rescale, scale);
  };

  uint32_t P_rmem[kBc / 16][4];
  const auto start_S = [&](float(&S_rmem)[kBc / 8][4]) {
    // BEGIN SOLUTION: start S = Q K^T for the warpgroup's rows, when K is there
    mbarrier_wait(&K_full[K_ring.stage], K_ring.phase);
    wgmma_fence();
    start_multiply_by_transposed<D, 64, kBc>(S_rmem, Q_smem + q * kQ, 0,
                                             K_smem + K_ring.stage * kKV);
    wgmma_commit();
    // END SOLUTION
  };
  const auto start_PV = [&] {
    // BEGIN SOLUTION: start O += P V, when V is there
    mbarrier_wait(&V_full[V_ring.stage], V_ring.phase);
    wgmma_fence();
    start_multiply<D>(O_rmem, P_rmem, V_smem + V_ring.stage * kKV);
    wgmma_commit();
    // END SOLUTION
  };

  if (w.tiles_k > 0) {
    float rescale[2];
    mbarrier_wait(&Q_full[q], 0);
#pragma unroll 1
    for (int tile_k = w.tiles_k - 1; tile_k >= 0; --tile_k) {
      // BEGIN SOLUTION: have the next tile copied, and S of this one computed
      // HANDOUT: float S_rmem[kBc / 8][4];
      // Into the buffers of the tile before, which all were done with at the barrier below.
      if (threadIdx.x == 0 && tile_k > 0) {
        load_K(tile_k - 1, kv_head, b);
        load_V(tile_k - 1, kv_head, b);
      }
      float S_rmem[kBc / 8][4];
      start_S(S_rmem);
      wgmma_wait<0>(S_rmem);
      K_ring.next();
      // END SOLUTION
      softmax(S_rmem, tile_k, rescale);
      to_operands<T>(P_rmem, S_rmem);
      const bool grew = rescale[0] != 1.f || rescale[1] != 1.f;
      if (__any_sync(kFullMask, grew)) {
#pragma unroll
        for (int c = 0; c < D / 8; ++c) {
#pragma unroll
          for (int e = 0; e < 4; ++e) O_rmem[c][e] *= rescale[e / 2];
        }
      }
      // BEGIN SOLUTION: O += P V; and the buffers may be written
      start_PV();
      wgmma_wait<0>(O_rmem);
      V_ring.next();
      __syncthreads();  // all are done with the tile: its buffers may be written
      // END SOLUTION
    }
  }
  store(q, m_rmem, l_rmem);
  tma_store_wait_read<0>();  // the block's shared memory goes with it
}

template <typename T, int D, int kBr, int kBc>
constexpr int kSmemBytes = (kBr + 2 * kStages * kBc) * D * sizeof(T) + 1024;

// 10e's choice, so that each step is at equal tiles.
Tiles tiles(const Problem& p) {
  if (tile_width(p.head_dim) == 64)
    return p.causal && p.seqlen_k < 2048 ? Tiles{128, 128} : Tiles{192, 128};
  return p.seqlen_k < (p.causal ? 8192 : 4096) ? Tiles{128, 128} : Tiles{128, 160};
}

TileList candidates(const Problem& p) {
  if (tile_width(p.head_dim) == 64) return {2, {{192, 128}, {128, 128}}};
  return {2, {{128, 160}, {128, 128}}};
}

WorkspaceList workspaces(const Problem&) {
  return {};
}

template <typename T, int D, int kBr, int kBc>
void run(const Problem& p, const ForwardArgs& a, Stream stream) {
  if (p.seqlen_q == 0) return;
  const auto map_of = [&](const void* base, int rows, int heads, const Strides& strides,
                          int box_rows) {
    return make_tensor_map(static_cast<const T*>(base), p.head_dim, rows, heads, p.batch, strides,
                           64, box_rows);
  };
  const TensorMap Q_map = map_of(a.Q, p.seqlen_q, p.heads, p.q, 64);
  const TensorMap O_map = map_of(a.O, p.seqlen_q, p.heads, p.o, 16);
  // There is no map of a tensor without rows, and nothing of it to load.
  const bool no_keys = p.seqlen_k == 0;
  const TensorMap K_map = no_keys ? Q_map : map_of(a.K, p.seqlen_k, p.kv_heads, p.k, kBc);
  const TensorMap V_map = no_keys ? Q_map : map_of(a.V, p.seqlen_k, p.kv_heads, p.v, kBc);
  const int tiles_q = ceil_div(p.seqlen_q, kBr);
  launch(attention_kernel<T, D, kBr, kBc>,
         {p.batch_heads() * tiles_q, kBr * 2, kSmemBytes<T, D, kBr, kBc>, stream}, Q_map, K_map,
         V_map, O_map, a.L, p, score_scale(p.scale));
}

template <typename T, int D>
void forward(const Problem& p, const ForwardArgs& a, Stream stream) {
  const Tiles tile = a.tiles == Tiles{} ? tiles(p) : a.tiles;
  if (tile == Tiles{128, 128}) return run<T, D, 128, 128>(p, a, stream);
  run<T, D, D == 64 ? 192 : 128, D == 64 ? 128 : 160>(p, a, stream);
}

FLASHSTEPS_HOPPER_STAGE("10a", "a_tma_wgmma", "tiles by TMA, products by WGMMA")

}  // namespace flashsteps::inline FLASHSTEPS_TARGET::stage_10a_tma_wgmma
