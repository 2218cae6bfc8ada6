// 10e fast: as 10d, but a block takes one row block after the other, as many blocks as there are
// multiprocessors, and what was pipelined over the tiles of keys goes on over the row blocks: the
// first S of the next one is computed beside the last P V of this one; its Q is loaded long before,
// with word of what it is, and a warp of its own stores O. With a causal mask a long and a short
// row block go together, so that blocks have as nearly the same work as row blocks allow. O is
// rescaled only where the maximum grew by much (FlashAttention-3; FlashAttention-4).

#include "common/gpu/hopper.h"
#include "common/gpu/schedule.h"
#include "common/gpu/score_scale.h"
#include "common/stage/kernel_stage.h"

namespace flashsteps::inline FLASHSTEPS_TARGET::stage_10e_fast {

constexpr int kStages = 2;                 // tiles of K, and of V, in shared memory
constexpr int kSharedMemory = 227 * 1024;  // of a block, in bytes
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kLargeExponent = 1024.f;
// A maximum m is left as it was while e^m has grown by no more than a factor of 2 to this power: P
// is at most 2^8, and O, l and P are all relative to the same maximum. 0 follows every maximum.
constexpr float kRescaleThreshold = 8.f;

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
    float m = m_new[half][0];
    if ((m - m_rmem[half]) * scale.log2 <= kRescaleThreshold) m = m_rmem[half];
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
// from tiles_k on wholly above it. `bh` is -1 where there is none left.
struct Work {
  int i0, bh, tiles_k, tiles_unmasked;
};

// Tiles of Q in shared memory. O leaves through the same space, so that a third is what keeps a
// row block from waiting for the one before the last. 1536 bytes are for what a warpgroup is told
// and for the mbarriers, each array 128-byte aligned.
template <int D, int kBr, int kBc>
constexpr int kQStages = (3 * kBr + 2 * kStages * kBc) * D * 2 + 1536 <= kSharedMemory ? 3 : 2;

template <typename T, int D, int kBr, int kBc>
__global__ void __launch_bounds__(kBr * 2 + 128, 1)
    attention_kernel(const __grid_constant__ TensorMap Q_map,
                     const __grid_constant__ TensorMap K_map,
                     const __grid_constant__ TensorMap V_map,
                     const __grid_constant__ TensorMap O_map, T* __restrict__ O,
                     float* __restrict__ L, Problem p, ScoreScale scale, Schedule schedule) {
  constexpr int kWarpgroups = kBr / 64;  // that multiply; one more loads
  constexpr int kQ = 64 * D, kKV = kBc * D;
  constexpr int kQs = kQStages<D, kBr, kBc>;
  SharedMemory smem;
  T* Q_smem = smem.take<T>("Q_smem", kQs * kWarpgroups * kQ);
  T* K_smem = smem.take<T>("K_smem", kStages * kKV);
  T* V_smem = smem.take<T>("V_smem", kStages * kKV);
  Work* work_smem = smem.take<Work>("work_smem", kQs * kWarpgroups);
  mbarrier_t* Q_full = smem.take<mbarrier_t>("Q_full", kQs * kWarpgroups);
  mbarrier_t* O_full = smem.take<mbarrier_t>("O_full", kQs * kWarpgroups);
  mbarrier_t* Q_empty = smem.take<mbarrier_t>("Q_empty", kQs * kWarpgroups);
  mbarrier_t* K_full = smem.take<mbarrier_t>("K_full", kStages);
  mbarrier_t* K_empty = smem.take<mbarrier_t>("K_empty", kStages);
  mbarrier_t* V_full = smem.take<mbarrier_t>("V_full", kStages);
  mbarrier_t* V_empty = smem.take<mbarrier_t>("V_empty", kStages);

  const int warpgroup = warp_uniform(threadIdx.x / 128) - 1;  // -1 loads

  if (threadIdx.x == 0) {
    prefetch_tensor_map(Q_map);
    prefetch_tensor_map(K_map);
    prefetch_tensor_map(V_map);
    for (int q = 0; q < kQs * kWarpgroups; ++q) {
      mbarrier_init(&Q_full[q], 1);
      // BEGIN SOLUTION: make the mbarriers that hand a buffer on when O is in it, and when it left
      mbarrier_init(&O_full[q], 4);  // warps
      mbarrier_init(&Q_empty[q], 1);
      // END SOLUTION
    }
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(&K_full[s], 1);
      mbarrier_init(&V_full[s], 1);
      mbarrier_init(&K_empty[s], 4 * kWarpgroups);
      mbarrier_init(&V_empty[s], 4 * kWarpgroups);
    }
    fence_mbarrier_init();
  }
  __syncthreads();  // the mbarriers are there

  int round = 0;
  // The next row block that this block is to do.
  const auto next = [&](Work& w) {
    const auto [bh, tile] = schedule(blockIdx.x, round++);
    w.i0 = tile * kBr;
    w.bh = bh;
    w.tiles_k = ceil_div(p.last_key(min(w.i0 + kBr, p.seqlen_q) - 1) + 1, kBc);
    w.tiles_unmasked = scale.sign == 1.f ? (p.last_key(w.i0) + 1) / kBc : 0;
    return bh >= 0;
  };

  if (warpgroup < 0) {
    shrink_registers<kWarpgroups == 2 ? 40 : 32>();
    if (threadIdx.x == 0) {
      // Of a new mbarrier the phase of parity 1 counts as ended: all buffers are empty.
      Ring<kStages> K_ring{0, 1}, V_ring{0, 1};
      Ring<kQs * kWarpgroups> Q_ring{0, 1};
      Work w{};
      const auto load_Q = [&](int h, int b) {
#pragma unroll 1
        for (int g = 0; g < kWarpgroups; ++g) {
          const int q = Q_ring.stage;
          mbarrier_wait(&Q_empty[q], Q_ring.phase);  // O has left the buffer
          work_smem[q] = w;
          mbarrier_arrive_expect_tx(&Q_full[q], w.bh >= 0 ? kQ * sizeof(T) : 0);
          if (w.bh >= 0) {
            load_tile<64, D, CacheHint::evict_first>(Q_smem + q * kQ, Q_map, &Q_full[q],
                                                     w.i0 + g * 64, h, b);
          }
          Q_ring.next();
        }
      };
      const auto load = [&](Ring<kStages>& ring, mbarrier_t* full, mbarrier_t* empty, T* tiles_smem,
                            const TensorMap& map, int tile_k, int kv_head, int b) {
        mbarrier_wait(&empty[ring.stage], ring.phase);  // all have multiplied by it
        mbarrier_arrive_expect_tx(&full[ring.stage], kKV * sizeof(T));
        load_tile<kBc, D, CacheHint::evict_last>(tiles_smem + ring.stage * kKV, map,
                                                 &full[ring.stage], tile_k * kBc, kv_head, b);
        ring.next();
      };
      const auto load_K = [&](int tile_k, int kv_head, int b) {
        load(K_ring, K_full, K_empty, K_smem, K_map, tile_k, kv_head, b);
      };
      const auto load_V = [&](int tile_k, int kv_head, int b) {
        load(V_ring, V_full, V_empty, V_smem, V_map, tile_k, kv_head, b);
      };
      // BEGIN SOLUTION: load for one row block after the other, as if their tiles were of one
      int kv_head_V = 0, b_V = -1;  // of the row block before
      while (next(w)) {
        if (w.tiles_k == 0) continue;
        const int b = w.bh / p.heads, h = w.bh - b * p.heads, kv_head = p.kv_head(h);
        load_Q(h, b);
        // As the consumers take them: S of a tile comes before P V of the one before.
        load_K(w.tiles_k - 1, kv_head, b);
        if (b_V >= 0) load_V(0, kv_head_V, b_V);
#pragma unroll 1
        for (int tile_k = w.tiles_k - 1; tile_k > 0; --tile_k) {
          load_K(tile_k - 1, kv_head, b);
          load_V(tile_k, kv_head, b);
        }
        kv_head_V = kv_head, b_V = b;
      }
      load_Q(0, 0);  // word that there is none left
      if (b_V >= 0) load_V(0, kv_head_V, b_V);
      // END SOLUTION
    } else if (threadIdx.x / 32 == 1) {
      Ring<kQs * kWarpgroups> Q_ring;
      for (Work w{}; next(w);) {
        const int b = w.bh / p.heads, h = w.bh - b * p.heads;
        if (w.tiles_k == 0) {
          store_no_keys(O, L, p, b, h, w.i0, min(w.i0 + kBr, p.seqlen_q));
          continue;
        }
        // BEGIN SOLUTION: store O of each warpgroup, and give its buffer back
#pragma unroll 1
        for (int g = 0; threadIdx.x == 32 && g < kWarpgroups; ++g) {
          const int q = Q_ring.stage;
          mbarrier_wait(&O_full[q], Q_ring.phase);
#pragma unroll
          for (int col = 0; col < D; col += kPanel) {
            tma_store(O_map, Q_smem + q * kQ + col * 64, col, w.i0 + g * 64, h, b);
          }
          tma_store_commit();
          tma_store_wait_read<0>();
          mbarrier_arrive(&Q_empty[q]);
          Q_ring.next();
        }
        // END SOLUTION
      }
    }
  } else {
    grow_registers<kWarpgroups == 2 ? 232 : 160>();
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;  // PTX's names: a fragment's row and pair
    const int row0 = warpgroup * 64 + warp * 16 + g;
    // The warpgroups take turns at the tensor cores.
    const auto wait_turn = [&] { named_barrier_sync(1 + warpgroup, 256); };
    const auto pass_turn = [&] { named_barrier_arrive(1 + (warpgroup + 1) % kWarpgroups, 256); };
    const auto release = [&](Ring<kStages>& ring, mbarrier_t* empty) {
      if (lane == 0) mbarrier_arrive(&empty[ring.stage]);
      ring.next();
    };
    if (warpgroup == kWarpgroups - 1) pass_turn();  // the first one begins
    Ring<kStages> K_ring, V_ring;
    Ring<kQs> Q_ring;
    int q = warpgroup;  // its part of the Q that it works on
    Work w{};

    // Of rows g and g + 8 of the warp; l is this lane's part of the row's sum.
    float O_rmem[D / 8][4] = {};
    float m_rmem[2] = {-INFINITY, -INFINITY}, l_rmem[2] = {};

    // O / l goes through the warp's own rows of Q, which only its own products have read: a warp
    // has 16 of the 64 rows of its warpgroup.
    const auto store = [&](int q, const float(&m)[2], const float(&l_part)[2]) {
      Work w;  // the row block that is done
      w.i0 = work_smem[q].i0, w.bh = work_smem[q].bh;
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
      fence_proxy_async();  // TMA sees what this lane stored, now and when it loads the next Q
      __syncwarp();         // all lanes have left their part of the warp's rows
      if (lane == 0) mbarrier_arrive(&O_full[q]);
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
      mbarrier_wait(&K_full[K_ring.stage], K_ring.phase);
      wait_turn();
      wgmma_fence();
      start_multiply_by_transposed<D, 64, kBc>(S_rmem, Q_smem + q * kQ, 0,
                                               K_smem + K_ring.stage * kKV);
      wgmma_commit();
    };
    const auto start_PV = [&] {
      mbarrier_wait(&V_full[V_ring.stage], V_ring.phase);
      wgmma_fence();
      start_multiply<D>(O_rmem, P_rmem, V_smem + V_ring.stage * kKV);
      wgmma_commit();
    };

    // BEGIN SOLUTION: one pipeline over the tiles of one row block after the other
    // The next row block comes with its Q.
    const auto take = [&] {
      q = Q_ring.stage * kWarpgroups + warpgroup;
      mbarrier_wait(&Q_full[q], Q_ring.phase);
      Q_ring.next();
      w = work_smem[q];
      return w.bh >= 0;
    };
    if (take()) {
      float rescale[2];
      int tile_k = w.tiles_k - 1;
      int q_done = q;
      // S of a tile, and behind it P V of the one before, which runs beside the softmax
      const auto step = [&](auto is_first) {
        float S_rmem[kBc / 8][4];
        start_S(S_rmem);
        start_PV();
        pass_turn();
        wgmma_wait<1>(S_rmem);
        release(K_ring, K_empty);
        const float m_done[2] = {m_rmem[0], m_rmem[1]}, l_done[2] = {l_rmem[0], l_rmem[1]};
        if constexpr (is_first) {
          m_rmem[0] = m_rmem[1] = -INFINITY;
          l_rmem[0] = l_rmem[1] = 0.f;
        }
        softmax(S_rmem, tile_k, rescale);
        wgmma_wait<0>(O_rmem);
        release(V_ring, V_empty);
        to_operands<T>(P_rmem, S_rmem);
        if constexpr (is_first) store(q_done, m_done, l_done);
        const bool grew = is_first || rescale[0] != 1.f || rescale[1] != 1.f;
        if (__any_sync(kFullMask, grew)) {
#pragma unroll
          for (int c = 0; c < D / 8; ++c) {
#pragma unroll
            for (int e = 0; e < 4; ++e)
              O_rmem[c][e] = is_first ? 0.f : O_rmem[c][e] * rescale[e / 2];
          }
        }
      };
      {
        float S_rmem[kBc / 8][4];
        start_S(S_rmem);
        pass_turn();
        wgmma_wait<0>(S_rmem);
        release(K_ring, K_empty);
        softmax(S_rmem, tile_k, rescale);
        to_operands<T>(P_rmem, S_rmem);
      }
      while (true) {
        q = warp_uniform(
            q);  // else each wgmma of the loop has its descriptor fetched from the lanes
#pragma unroll 1
        while (--tile_k >= 0) step(std::false_type{});
        q_done = q;
        if (!take()) break;
        tile_k = w.tiles_k - 1;
        step(std::true_type{});
      }
      start_PV();
      wgmma_wait<0>(O_rmem);
      store(q_done, m_rmem, l_rmem);
    }
    // END SOLUTION
  }
}

template <typename T, int D, int kBr, int kBc>
constexpr int kSmemBytes = (kQStages<D, kBr, kBc> * kBr + 2 * kStages * kBc) * D * sizeof(T) + 1536;

// What was fastest of the candidates below.
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
  const TensorMap O_map = map_of(a.O, p.seqlen_q, p.heads, p.o, 64);
  // There is no map of a tensor without rows, and nothing of it to load.
  const bool no_keys = p.seqlen_k == 0;
  const TensorMap K_map = no_keys ? Q_map : map_of(a.K, p.seqlen_k, p.kv_heads, p.k, kBc);
  const TensorMap V_map = no_keys ? Q_map : map_of(a.V, p.seqlen_k, p.kv_heads, p.v, kBc);
  const int tiles_q = ceil_div(p.seqlen_q, kBr);
  static_assert(kSmemBytes<T, D, kBr, kBc> <= kSharedMemory);
  const int64_t blocks = min(p.batch_heads() * tiles_q, int64_t{multiprocessor_count()});
  launch(attention_kernel<T, D, kBr, kBc>,
         {blocks, kBr * 2 + 128, kSmemBytes<T, D, kBr, kBc>, stream}, Q_map, K_map, V_map, O_map,
         static_cast<T*>(a.O), a.L, p, score_scale(p.scale), schedule_of(p, tiles_q, blocks));
}

template <typename T, int D>
void forward(const Problem& p, const ForwardArgs& a, Stream stream) {
  const Tiles tile = a.tiles == Tiles{} ? tiles(p) : a.tiles;
  if (tile == Tiles{128, 128}) return run<T, D, 128, 128>(p, a, stream);
  run<T, D, D == 64 ? 192 : 128, D == 64 ? 128 : 160>(p, a, stream);
}

FLASHSTEPS_HOPPER_STAGE("10e", "e_fast", "one pipeline over all row blocks of a multiprocessor")

}  // namespace flashsteps::inline FLASHSTEPS_TARGET::stage_10e_fast
