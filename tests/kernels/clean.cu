// A kernel without faults that uses all that the stages use: tiles by cp.async into two buffers,
// ldmatrix, mma, shuffles, barriers of block and warp, static and dynamic shared memory, atomics.
// Every synchronisation in it is needed, so each one that is taken out must be noticed.
#include "common/gpu/gpu.h"
#include "tests/kernels/test_kernels.h"

namespace flashsteps::inline FLASHSTEPS_TARGET {
namespace {

constexpr int kD = 64, kBr = 64, kBc = 32, kThreads = 128;

// row_max[i] = max_j (Q K^T)_ij for Q (64 x blocks rows) and K (32 x tiles rows), fp16, 64 columns;
// sums[0] += all row maxima; visits[0] += 1 from each block.
__global__ void __launch_bounds__(kThreads)
    row_max_kernel(const fp16_t* __restrict__ Q, const fp16_t* __restrict__ K,
                   float* __restrict__ row_max, float* __restrict__ sums, int* __restrict__ visits,
                   int tiles) {
  SharedMemory smem;
  fp16_t* Q_smem = smem.take<fp16_t>("Q_smem", kBr * kD);
  fp16_t* K_smem = smem.take<fp16_t>("K_smem", 2 * kBc * kD);
  __shared__ float max_smem[kBr];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

  copy_tile_async<kBr, kD, kThreads>(Q_smem, Q + int64_t{blockIdx.x} * kBr * kD, kD, kBr, kD);
  copy_tile_async<kBc, kD, kThreads>(K_smem, K, kD, kBc, kD);
  cp_async_commit();
  float m = -INFINITY;  // of row warp * 16 + lane, in the lower half of the warp
  for (int tile = 0; tile < tiles; ++tile) {
    if (tile + 1 < tiles) {
      copy_tile_async<kBc, kD, kThreads>(K_smem + (tile + 1) % 2 * kBc * kD,
                                         K + int64_t{tile + 1} * kBc * kD, kD, kBc, kD);
    }
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();  // the tile is there, for all threads

    const fp16_t* K_tile = K_smem + tile % 2 * kBc * kD;
    float S_rmem[kBc / 8][4] = {};
    for (int c = 0; c < kD; c += 16) {
      uint32_t a[4], b[4];
      ldmatrix_x4(a, Q_smem + swizzle<kD>(warp * 16 + lane % 16, c + lane / 16 * 8));
      for (int k = 0; k < kBc / 8; k += 2) {
        ldmatrix_x4(b,
                    K_tile + swizzle<kD>(k * 8 + lane / 16 * 8 + lane % 8, c + lane / 8 % 2 * 8));
        mma_m16n8k16<fp16_t>(S_rmem[k], a, b[0], b[1]);
        mma_m16n8k16<fp16_t>(S_rmem[k + 1], a, b[2], b[3]);
      }
    }
    float upper = -INFINITY, lower = -INFINITY;  // of rows g and g + 8
    for (int k = 0; k < kBc / 8; ++k) {
      upper = fmaxf(upper, fmaxf(S_rmem[k][0], S_rmem[k][1]));
      lower = fmaxf(lower, fmaxf(S_rmem[k][2], S_rmem[k][3]));
    }
    for (int offset = 1; offset < 4; offset *= 2) {
      upper = fmaxf(upper, __shfl_xor_sync(kFullMask, upper, offset));
      lower = fmaxf(lower, __shfl_xor_sync(kFullMask, lower, offset));
    }
    if (t == 0) {
      max_smem[warp * 16 + g] = upper;
      max_smem[warp * 16 + g + 8] = lower;
    }
    __syncwarp();  // the maxima of the warp's rows are there
    if (lane < 16) m = fmaxf(m, max_smem[warp * 16 + lane]);
    __syncthreads();  // all threads are done with this buffer of K and with the maxima
  }
  if (lane < 16) {
    row_max[blockIdx.x * kBr + warp * 16 + lane] = m;
    atomicAdd(sums, m);
  }
  if (threadIdx.x == 0) atomicAdd(visits, 1);
}

// extra: K; more: sums, visits; n: tiles.
FLASHSTEPS_TEST_KERNEL(row_max) {
  launch(row_max_kernel, {args.blocks, kThreads, (kBr + 2 * kBc) * kD * 2},
         static_cast<const fp16_t*>(args.in), static_cast<const fp16_t*>(args.extra),
         static_cast<float*>(args.out), static_cast<float*>(args.more[0]),
         static_cast<int*>(args.more[1]), args.n);
}

}  // namespace
}  // namespace flashsteps::inline FLASHSTEPS_TARGET
