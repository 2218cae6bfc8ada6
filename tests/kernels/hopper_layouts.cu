// Kernels that show where wgmma finds the elements of its operands and leaves those of D, and where
// TMA puts those of a box, bare: shared memory is filled and told byte by byte.
#include <utility>

#include "tests/kernels/hopper_names.h"
#include "tests/kernels/test_kernels.h"

#ifdef FLASHSTEPS_HOPPER
namespace flashsteps::inline FLASHSTEPS_TARGET {
namespace {

constexpr int kM = 64, kK = 64, kWarpgroup = 128;

// Where A comes from: rows of m, rows of k, registers.
enum class Source { k, mn, registers };

/// Columns of D that this target has a wgmma for.
constexpr bool has_columns(int n) {
  for (const int card : {64, 80, 96, 128, 160, 176, 192, 256}) {
    if (kTarget == Target::model || n == card) return true;
  }
  return false;
}

// in: 2048 words of A (what is to lie in shared memory; or registers, by thread and step of 16 k),
// then 32 kN words of B in shared memory. out: thread by thread the kN / 2 sums, which start as
// they are.
template <typename T, int kN, Source kA, Major kMajorB>
__global__ void wgmma_kernel(const uint32_t* in, float* out, bool accumulate) {
  SharedMemory smem;
  constexpr int kAWords = kM * kK / 2, kBWords = kN * kK / 2;
  // B stored along n lies in whole panels of 64 columns.
  constexpr int kBTaken = kMajorB == Major::k ? kBWords : (kN + 63) / 64 * 64 * kK / 2;
  uint32_t* A_smem = smem.take<uint32_t>("A_smem", kAWords);
  uint32_t* B_smem = smem.take<uint32_t>("B_smem", kBTaken);
  const int thread = threadIdx.x;
  for (int i = thread; i < kAWords; i += kWarpgroup) A_smem[i] = in[i];
  for (int i = thread; i < kBTaken; i += kWarpgroup) B_smem[i] = in[kAWords + i];
  float d[kN / 8][4];
  uint32_t a[kK / 16][4];
  for (int n = 0; n < kN / 8; ++n) {
    for (int e = 0; e < 4; ++e) d[n][e] = out[thread * kN / 2 + n * 4 + e];
  }
  for (int k = 0; k < kK / 16; ++k) {
    for (int r = 0; r < 4; ++r) a[k][r] = in[thread * kK / 4 + k * 4 + r];
  }
  fence_proxy_async();
  __syncthreads();  // A and B are there
  const uint64_t A_descriptor = matrix_descriptor(reinterpret_cast<const T*>(A_smem), 1, 1024);
  const uint64_t B_descriptor = matrix_descriptor(reinterpret_cast<const T*>(B_smem),
                                                  kMajorB == Major::k ? 1 : kK * 128, 1024);
  // 16 k are 32 bytes of a row, or 16 rows.
  constexpr int kStepA = kA == Source::mn ? 16 * 128 : 32;
  constexpr int kStepB = kMajorB == Major::mn ? 16 * 128 : 32;
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kK / 16; ++k) {
    const uint64_t B_step = B_descriptor + (k * kStepB >> 4);
    if constexpr (kA == Source::registers) {
      wgmma<T, kN, kMajorB>(d, a[k], B_step, accumulate || k > 0);
    } else {
      constexpr Major kMajorA = kA == Source::mn ? Major::mn : Major::k;
      wgmma<T, kN, kMajorA, kMajorB>(d, A_descriptor + (k * kStepA >> 4), B_step,
                                     accumulate || k > 0);
    }
  }
  wgmma_commit();
  wgmma_wait<0>(d);
  for (int n = 0; n < kN / 8; ++n) {
    for (int e = 0; e < 4; ++e) out[thread * kN / 2 + n * 4 + e] = d[n][e];
  }
}

// blocks: 4 where D is accumulated on what it was, plus 2 where B is stored along n.
template <typename T, Source kA, int... kIndex>
void multiply(const test::KernelArgs& args, std::integer_sequence<int, kIndex...>) {
  const bool accumulate = args.blocks & 4;
  const auto with = [&]<int kN>() {
    if constexpr (has_columns(kN)) {
      const int smem = (kM * kK + (kN + 63) / 64 * 64 * kK) * 2;
      const auto in = static_cast<const uint32_t*>(args.in);
      const auto out = static_cast<float*>(args.out);
      if (args.blocks & 2) {
        launch(wgmma_kernel<T, kN, kA, Major::mn>, {1, kWarpgroup, smem}, in, out, accumulate);
      } else {
        launch(wgmma_kernel<T, kN, kA, Major::k>, {1, kWarpgroup, smem}, in, out, accumulate);
      }
    }
  };
  ((args.n == 8 * (kIndex + 1) ? with.template operator()<8 * (kIndex + 1)>() : void()), ...);
}

#define WGMMA(NAME, T, SOURCE)                                                \
  FLASHSTEPS_TEST_KERNEL(NAME) {                                              \
    multiply<T, Source::SOURCE>(args, std::make_integer_sequence<int, 32>()); \
  }
WGMMA(wgmma_k_fp16, fp16_t, k)
WGMMA(wgmma_k_bf16, bf16_t, k)
WGMMA(wgmma_mn_fp16, fp16_t, mn)
WGMMA(wgmma_mn_bf16, bf16_t, mn)
WGMMA(wgmma_registers_fp16, fp16_t, registers)
WGMMA(wgmma_registers_bf16, bf16_t, registers)
#undef WGMMA

// One box of 64 columns to shared memory, and that to `out` as it lies there; or the other way.
__global__ void box_kernel(const __grid_constant__ TensorMap map, const int* at, uint32_t* words,
                           int rows, bool store) {
  SharedMemory smem;
  uint32_t* box_smem = smem.take<uint32_t>("box_smem", rows * 32);
  mbarrier_t* full = smem.take<mbarrier_t>("full", 1);
  fp16_t* box = reinterpret_cast<fp16_t*>(box_smem);
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    fence_mbarrier_init();
  }
  if (store) {
    for (int i = threadIdx.x; i < rows * 32; i += blockDim.x) box_smem[i] = words[i];
    fence_proxy_async();
  }
  __syncthreads();  // the mbarrier, and what is to be stored, are there
  if (store) {
    if (threadIdx.x == 0) {
      tma_store(map, box, at[0], at[1], at[2], at[3]);
      tma_store_commit();
      tma_store_wait<0>();
    }
    return;
  }
  if (threadIdx.x == 0) {
    mbarrier_arrive_expect_tx(full, rows * 128);
    tma_load(box, map, full, at[0], at[1], at[2], at[3]);
  }
  mbarrier_wait(full, 0);
  for (int i = threadIdx.x; i < rows * 32; i += blockDim.x) words[i] = box_smem[i];
}

// in: the tensor (batch 2, heads 3, rows n, 72 columns of 80); extra: col, row, head, batch of the
// box of `blocks` rows; out: its words.
void copy_box(const test::KernelArgs& args, bool store) {
  const Strides strides{int64_t{args.n} * 80 * 3, 80, 240};  // heads within rows
  const TensorMap map = make_tensor_map(static_cast<const fp16_t*>(args.in), 72, args.n, 3, 2,
                                        strides, 64, args.blocks);
  launch(box_kernel, {1, 64, args.blocks * 128 + 128}, map, static_cast<const int*>(args.extra),
         static_cast<uint32_t*>(args.out), args.blocks, store);
}

FLASHSTEPS_TEST_KERNEL(load_box) {
  copy_box(args, false);
}
FLASHSTEPS_TEST_KERNEL(store_box) {
  copy_box(args, true);
}

}  // namespace
}  // namespace flashsteps::inline FLASHSTEPS_TARGET
#endif
