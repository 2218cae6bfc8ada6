// A kernel without faults that uses all of Hopper that stage 10 uses: a producer warpgroup that
// loads tiles by TMA, two consumer warpgroups that multiply by wgmma from shared memory and from
// registers, mbarriers with phases, named barriers, setmaxnreg, TMA stores, blocks that take
// several tiles. Every synchronisation in it is needed, so each one that is taken out must be
// noticed.
#include "tests/kernels/hopper_names.h"
#include "tests/kernels/test_kernels.h"

#ifdef FLASHSTEPS_HOPPER
namespace flashsteps::inline FLASHSTEPS_TARGET {
namespace {

constexpr int kD = 64, kBr = 128, kBc = 64, kStages = 2, kThreads = 384;
constexpr int kTileBytes = kBc * kD * 2;

// O = (Q K^T rounded to 16 bits) V, by tiles of kBr rows, for one head of kD columns; counts[tile]
// = how often a sum of the second warpgroup's S was larger than all of the first one's in that
// tile.
__global__ void __launch_bounds__(kThreads, 1)
    products_kernel(const __grid_constant__ TensorMap Q_map,
                    const __grid_constant__ TensorMap K_map,
                    const __grid_constant__ TensorMap V_map,
                    const __grid_constant__ TensorMap O_map, float* maxima, int tiles_q,
                    int tiles_k) {
  SharedMemory smem;
  fp16_t* Q_smem = smem.take<fp16_t>("Q_smem", kBr * kD);
  fp16_t* K_smem = smem.take<fp16_t>("K_smem", kStages * kBc * kD);
  fp16_t* V_smem = smem.take<fp16_t>("V_smem", kStages * kBc * kD);
  float* max_smem = smem.take<float>("max_smem", kBr);
  mbarrier_t* Q_full = smem.take<mbarrier_t>("Q_full", 1);
  mbarrier_t* Q_empty = smem.take<mbarrier_t>("Q_empty", 1);
  mbarrier_t* K_full = smem.take<mbarrier_t>("K_full", kStages);
  mbarrier_t* K_empty = smem.take<mbarrier_t>("K_empty", kStages);
  mbarrier_t* V_full = smem.take<mbarrier_t>("V_full", kStages);
  mbarrier_t* V_empty = smem.take<mbarrier_t>("V_empty", kStages);
  const int thread = threadIdx.x % 128;
  const int warpgroup = warp_uniform(threadIdx.x / 128);
  if (threadIdx.x == 0) {
    mbarrier_init(Q_full, 1);
    mbarrier_init(Q_empty, 2);
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(K_full + s, 1);
      mbarrier_init(K_empty + s, 2);
      mbarrier_init(V_full + s, 1);
      mbarrier_init(V_empty + s, 2);
    }
    fence_mbarrier_init();
  }
  __syncthreads();  // the mbarriers are there

  if (warpgroup == 0) {
    shrink_registers<24>();
    if (thread != 0) return;
    int stage = 0, phase = 0, tile = 0;
    for (int q = blockIdx.x; q < tiles_q; q += gridDim.x, ++tile) {
      mbarrier_wait(Q_empty, 1 ^ (tile & 1));  // both warpgroups have stored O from there
      mbarrier_arrive_expect_tx(Q_full, 2 * kTileBytes);
      for (int half = 0; half < 2; ++half) {
        tma_load(Q_smem + half * 64 * kD, Q_map, Q_full, 0, q * kBr + half * 64, 0, 0);
      }
      for (int k = 0; k < tiles_k; ++k) {
        mbarrier_wait(K_empty + stage, 1 ^ phase);  // both warpgroups are done with this tile of K
        mbarrier_arrive_expect_tx(K_full + stage, kTileBytes);
        tma_load<CacheHint::evict_last>(K_smem + stage * kBc * kD, K_map, K_full + stage, 0,
                                        k * kBc, 0, 0);
        mbarrier_wait(V_empty + stage, 1 ^ phase);  // likewise of V
        mbarrier_arrive_expect_tx(V_full + stage, kTileBytes);
        tma_load(V_smem + stage * kBc * kD, V_map, V_full + stage, 0, k * kBc, 0, 0);
        if (++stage == kStages) stage = 0, phase ^= 1;
      }
    }
    return;
  }

  grow_registers<240>();
  const int row0 = (warpgroup - 1) * 64, warp = thread / 32, lane = thread % 32;
  fp16_t* Q_own = Q_smem + row0 * kD;
  int stage = 0, phase = 0, tile = 0;
  for (int q = blockIdx.x; q < tiles_q; q += gridDim.x, ++tile) {
    float O_rmem[kD / 8][4] = {}, S_rmem[kBc / 8][4] = {};
    uint32_t P_rmem[kBc / 16][4];
    float largest = -INFINITY;
    mbarrier_wait(Q_full, tile & 1);
    const uint64_t Q_descriptor = matrix_descriptor(Q_own, 1, 1024);
    for (int k = 0; k < tiles_k; ++k) {
      mbarrier_wait(K_full + stage, phase);
      const uint64_t K_descriptor = matrix_descriptor(K_smem + stage * kBc * kD, 1, 1024);
      const uint64_t V_descriptor = matrix_descriptor(V_smem + stage * kBc * kD, 1, 1024);
      wgmma_fence();
      for (int c = 0; c < kD / 16; ++c) {
        wgmma<fp16_t, kBc>(S_rmem, Q_descriptor + (c * 32 >> 4), K_descriptor + (c * 32 >> 4),
                           c > 0);
      }
      wgmma_commit();
      wgmma_wait<0>(S_rmem);  // S is there; this warpgroup is done with the tile of K
      if (thread == 0) mbarrier_arrive(K_empty + stage);
      for (int c = 0; c < kBc / 16; ++c) {
        for (int r = 0; r < 4; ++r) {
          const float lo = S_rmem[2 * c + r / 2][r % 2 * 2],
                      hi = S_rmem[2 * c + r / 2][r % 2 * 2 + 1];
          largest = fmaxf(largest, fmaxf(lo, hi));
          P_rmem[c][r] = pack2<fp16_t>(lo, hi);
        }
      }
      mbarrier_wait(V_full + stage, phase);
      wgmma_fence();
      for (int c = 0; c < kBc / 16; ++c) {
        wgmma<fp16_t, kD, Major::mn>(O_rmem, P_rmem[c], V_descriptor + (c * 16 * 128 >> 4), true);
      }
      wgmma_commit();
      wgmma_wait<0>(O_rmem);  // O is there; this warpgroup is done with the tile of V
      if (thread == 0) mbarrier_arrive(V_empty + stage);
      if (++stage == kStages) stage = 0, phase ^= 1;
    }

    // O goes through this warpgroup's rows of Q.
    for (int n = 0; n < kD / 8; ++n) {
      for (int half = 0; half < 2; ++half) {
        const int row = warp * 16 + half * 8 + lane / 4;
        store_pair(Q_own + swizzle<kD>(row, n * 8 + 2 * (lane % 4)), O_rmem[n][2 * half],
                   O_rmem[n][2 * half + 1]);
      }
    }
    fence_proxy_async();
    named_barrier_sync(2 + warpgroup, 128);  // all of the warpgroup's rows of O are there
    if (thread == 0) {
      tma_store(O_map, Q_own, 0, q * kBr + row0, 0, 0);
      tma_store_commit();
      tma_store_wait_read<0>();
      mbarrier_arrive(Q_empty);
    }

    // The first warpgroup hands its threads' maxima to the second, which tells when it has them.
    if (warpgroup == 1) {
      named_barrier_sync(2, 256);  // the second warpgroup has read the maxima before
      max_smem[thread] = largest;
      named_barrier_arrive(1, 256);
    } else {
      named_barrier_arrive(2, 256);
      named_barrier_sync(1, 256);  // the maxima are there
      maxima[q * 128 + thread] = fmaxf(largest, max_smem[thread ^ 1]);
    }
  }
}

// The same products with FlashAttention-3's two overlaps: the two consumer warpgroups issue their
// products by turns (named barriers 1 and 2, whose last arrival nobody meets), and S of the next
// tile and P V of this one are under way while the threads work on S. One tile of Q for each block.
__global__ void __launch_bounds__(kThreads, 1)
    overlapped_kernel(const __grid_constant__ TensorMap Q_map,
                      const __grid_constant__ TensorMap K_map,
                      const __grid_constant__ TensorMap V_map,
                      const __grid_constant__ TensorMap O_map, int tiles_k) {
  SharedMemory smem;
  fp16_t* Q_smem = smem.take<fp16_t>("Q_smem", kBr * kD);
  fp16_t* K_smem = smem.take<fp16_t>("K_smem", kStages * kBc * kD);
  fp16_t* V_smem = smem.take<fp16_t>("V_smem", kStages * kBc * kD);
  mbarrier_t* Q_full = smem.take<mbarrier_t>("Q_full", 1);
  mbarrier_t* K_full = smem.take<mbarrier_t>("K_full", kStages);
  mbarrier_t* K_empty = smem.take<mbarrier_t>("K_empty", kStages);
  mbarrier_t* V_full = smem.take<mbarrier_t>("V_full", kStages);
  mbarrier_t* V_empty = smem.take<mbarrier_t>("V_empty", kStages);
  const int thread = threadIdx.x % 128, row0 = blockIdx.x * kBr;
  const int warpgroup = warp_uniform(threadIdx.x / 128);
  if (threadIdx.x == 0) {
    mbarrier_init(Q_full, 1);
    for (int s = 0; s < kStages; ++s) {
      mbarrier_init(K_full + s, 1);
      mbarrier_init(K_empty + s, 8);
      mbarrier_init(V_full + s, 1);
      mbarrier_init(V_empty + s, 8);
    }
    fence_mbarrier_init();
  }
  __syncthreads();  // the mbarriers are there

  if (warpgroup == 0) {
    shrink_registers<40>();
    if (thread / 32 != 0 || thread % 32 != 0) return;
    mbarrier_arrive_expect_tx(Q_full, 2 * kTileBytes);
    tma_load(Q_smem, Q_map, Q_full, 0, row0, 0, 0);
    tma_load(Q_smem + 64 * kD, Q_map, Q_full, 0, row0 + 64, 0, 0);
    for (int k = tiles_k - 1; k >= 0; --k) {
      const int i = tiles_k - 1 - k, s = i % kStages, phase = i / kStages % 2;
      mbarrier_wait(K_empty + s, 1 ^ phase);  // all warps are done with this tile of K
      mbarrier_arrive_expect_tx(K_full + s, kTileBytes);
      tma_load(K_smem + s * kBc * kD, K_map, K_full + s, 0, k * kBc, 0, 0);
      mbarrier_wait(V_empty + s, 1 ^ phase);  // likewise of V
      mbarrier_arrive_expect_tx(V_full + s, kTileBytes);
      tma_load(V_smem + s * kBc * kD, V_map, V_full + s, 0, k * kBc, 0, 0);
    }
    return;
  }

  grow_registers<232>();
  const int warp = thread / 32, lane = thread % 32;
  fp16_t* Q_own = Q_smem + (warpgroup - 1) * 64 * kD;
  if (warpgroup == 1) named_barrier_arrive(2, 256);  // the first turn is the second warpgroup's
  float O_rmem[kD / 8][4], S_rmem[kBc / 8][4];
  uint32_t P_rmem[kBc / 16][4];
  const auto start_S = [&](int i) {
    const int s = i % kStages;
    mbarrier_wait(K_full + s, i / kStages % 2);
    const uint64_t Q_descriptor = matrix_descriptor(Q_own, 1, 1024);
    const uint64_t K_descriptor = matrix_descriptor(K_smem + s * kBc * kD, 1, 1024);
    wgmma_fence();
    for (int c = 0; c < kD / 16; ++c) {
      wgmma<fp16_t, kBc>(S_rmem, Q_descriptor + (c * 32 >> 4), K_descriptor + (c * 32 >> 4), c > 0);
    }
    wgmma_commit();
  };
  const auto start_O = [&](int i) {
    const int s = i % kStages;
    mbarrier_wait(V_full + s, i / kStages % 2);
    const uint64_t V_descriptor = matrix_descriptor(V_smem + s * kBc * kD, 1, 1024);
    wgmma_fence();
    for (int c = 0; c < kBc / 16; ++c) {
      wgmma<fp16_t, kD, Major::mn>(O_rmem, P_rmem[c], V_descriptor + (c * 16 * 128 >> 4),
                                   i > 0 || c > 0);
    }
    wgmma_commit();
  };
  const auto done_with = [&](mbarrier_t* empty, int i) {
    if (lane == 0) mbarrier_arrive(empty + i % kStages);
  };
  float factor = 1.f;  // O is scaled by a half and back, as a softmax would do
  const auto pack_P = [&] {
    for (int c = 0; c < kBc / 16; ++c) {
      for (int r = 0; r < 4; ++r) {
        P_rmem[c][r] =
            pack2<fp16_t>(S_rmem[2 * c + r / 2][r % 2 * 2], S_rmem[2 * c + r / 2][r % 2 * 2 + 1]);
      }
    }
  };
  const auto scale_S = [&] {
    for (int k = 0; k < kBc / 8; ++k) {
      for (int e = 0; e < 4; ++e) S_rmem[k][e] *= factor;
    }
  };

  mbarrier_wait(Q_full, 0);
  start_S(0);
  wgmma_wait<0>(S_rmem);
  done_with(K_empty, 0);
  scale_S();
  pack_P();
  for (int i = 1; i < tiles_k; ++i) {
    named_barrier_sync(warpgroup, 256);  // it is this warpgroup's turn
    start_S(i);
    start_O(i - 1);
    named_barrier_arrive(3 - warpgroup, 256);
    wgmma_wait<1>(S_rmem);  // S is there
    done_with(K_empty, i);
    const float next = factor == 1.f ? 0.5f : 1.f;
    const float rescale = next / factor;
    factor = next;
    scale_S();
    wgmma_wait<0>(O_rmem);  // O is there
    done_with(V_empty, i - 1);
    pack_P();
    for (int n = 0; n < kD / 8; ++n) {
      for (int e = 0; e < 4; ++e) O_rmem[n][e] *= rescale;
    }
  }
  start_O(tiles_k - 1);
  wgmma_wait<0>(O_rmem);
  done_with(V_empty, tiles_k - 1);

  for (int n = 0; n < kD / 8; ++n) {
    for (int half = 0; half < 2; ++half) {
      const int row = warp * 16 + half * 8 + lane / 4;
      store_pair(Q_own + swizzle<kD>(row, n * 8 + 2 * (lane % 4)), O_rmem[n][2 * half] / factor,
                 O_rmem[n][2 * half + 1] / factor);
    }
  }
  fence_proxy_async();
  named_barrier_sync(2 + warpgroup, 128);  // all of the warpgroup's rows of O are there
  if (thread == 0) {
    tma_store(O_map, Q_own, 0, row0 + (warpgroup - 1) * 64, 0, 0);
    tma_store_commit();
    tma_store_wait<0>();
  }
}

// A persistent kernel that takes its tiles from a queue: values[64 tile + t] = 2 tile + t, and
// takers[block] = how many tiles the block took.
__global__ void queue_kernel(int* next, float* values, float* takers, int tiles) {
  SharedMemory smem;
  int* tile_smem = smem.take<int>("tile_smem", 2);
  mbarrier_t* full = smem.take<mbarrier_t>("full", 2);
  mbarrier_t* empty = smem.take<mbarrier_t>("empty", 2);
  const int thread = threadIdx.x;
  if (thread == 0) {
    for (int s = 0; s < 2; ++s) {
      mbarrier_init(full + s, 1);
      mbarrier_init(empty + s, 64);
    }
    fence_mbarrier_init();
  }
  __syncthreads();  // the mbarriers are there
  int stage = 0, phase = 0, taken = 0;
  for (;;) {
    if (thread == 64) {
      mbarrier_wait(empty + stage, 1 ^ phase);  // the readers are done with the tile before
      tile_smem[stage] = atomicAdd(next, 1);
      mbarrier_arrive(full + stage);
    } else if (thread > 64) {
      return;
    }
    int tile;
    if (thread < 64) {
      mbarrier_wait(full + stage, phase);
      tile = tile_smem[stage];
      mbarrier_arrive(empty + stage);
    } else {
      tile = tile_smem[stage];
    }
    if (tile >= tiles) break;
    if (thread < 64) values[tile * 64 + thread] = 2.f * tile + thread;
    ++taken;
    if (++stage == 2) stage = 0, phase ^= 1;
  }
  if (thread == 0) takers[blockIdx.x] = taken;
}

// in: Q (n tiles of rows), extra: K and more[0]: V (blocks tiles of rows), out: O.
FLASHSTEPS_TEST_KERNEL(overlapped) {
  const int rows_q = args.n * kBr, rows_k = args.blocks * kBc;
  const Strides packed{int64_t{1} << 20, int64_t{1} << 20, kD};
  const auto map = [&](const void* base, int rows) {
    return make_tensor_map(static_cast<const fp16_t*>(base), kD, rows, 1, 1, packed, kD, 64);
  };
  const int smem = (kBr + 2 * kStages * kBc) * kD * 2 + 5 * 128;
  launch(overlapped_kernel, {args.n, kThreads, smem}, map(args.in, rows_q), map(args.extra, rows_k),
         map(args.more[0], rows_k), map(args.out, rows_q), args.blocks);
}

// in: the queue, out: values, extra: takers; n tiles.
FLASHSTEPS_TEST_KERNEL(queue) {
  launch(queue_kernel, {multiprocessor_count(), 96, 384}, static_cast<int*>(args.in),
         static_cast<float*>(args.out), static_cast<float*>(args.extra), args.n);
}

constexpr int kSmem = (kBr + 2 * kStages * kBc) * kD * 2 + kBr * 4 + 6 * 128;

// in: Q (n tiles of rows), extra: K and more[0]: V (blocks tiles of rows), out: O, more[1]: maxima.
FLASHSTEPS_TEST_KERNEL(products) {
  const int rows_q = args.n * kBr, rows_k = args.blocks * kBc;
  const Strides packed{int64_t{1} << 20, int64_t{1} << 20, kD};
  const auto map = [&](const void* base, int rows) {
    return make_tensor_map(static_cast<const fp16_t*>(base), kD, rows, 1, 1, packed, kD, 64);
  };
  launch(products_kernel, {multiprocessor_count(), kThreads, kSmem}, map(args.in, rows_q),
         map(args.extra, rows_k), map(args.more[0], rows_k), map(args.out, rows_q),
         static_cast<float*>(args.more[1]), args.n, args.blocks);
}

}  // namespace
}  // namespace flashsteps::inline FLASHSTEPS_TARGET
#endif
