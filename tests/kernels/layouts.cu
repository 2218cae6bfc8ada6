// Kernels that show where the elements of fragments and of 16-bit types go, bare: what goes in and
// comes out of the instruction, in order of lane and register.
#include "common/gpu/gpu.h"
#include "tests/kernels/test_kernels.h"

namespace flashsteps::inline FLASHSTEPS_TARGET {
namespace {

// in: 32 rows of 8 elements. out[lane][i] = register i, after ldmatrix with lane's address at row
// `row_of_lane[lane]`.
template <bool kTransposed>
__global__ void ldmatrix_kernel(const uint16_t* in, const int* row_of_lane, uint32_t* out) {
  __shared__ __align__(16) uint16_t rows[32 * 8];
  const int lane = threadIdx.x;
  for (int i = 0; i < 8; ++i) rows[lane * 8 + i] = in[lane * 8 + i];
  __syncthreads();
  const fp16_t* row = reinterpret_cast<const fp16_t*>(rows + row_of_lane[lane] * 8);
  uint32_t r[4];
  if (kTransposed) {
    ldmatrix_x4_trans(r, row);
  } else {
    ldmatrix_x4(r, row);
  }
  for (int i = 0; i < 4; ++i) out[lane * 4 + i] = r[i];
}

// in[lane][6]: a[0..3], b0, b1. out[lane][4]: d, which is added to.
template <typename T>
__global__ void mma_kernel(const uint32_t* in, float* out) {
  const int lane = threadIdx.x;
  uint32_t a[4];
  float d[4];
  for (int i = 0; i < 4; ++i) a[i] = in[lane * 6 + i];
  for (int i = 0; i < 4; ++i) d[i] = out[lane * 4 + i];
  mma_m16n8k16<T>(d, a, in[lane * 6 + 4], in[lane * 6 + 5]);
  for (int i = 0; i < 4; ++i) out[lane * 4 + i] = d[i];
}

// D (16 x 8) = A (16 x 16, by rows) B (16 x 8, by rows), through shared memory and ldmatrix, as
// stages do it.
template <typename T>
__global__ void tile_product_kernel(const T* A, const T* B, float* D) {
  __shared__ __align__(16) T A_smem[16 * 16], B_smem[16 * 16];
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  for (int i = lane; i < 16 * 16; i += 32) {
    A_smem[i] = A[i];
    B_smem[i] = i % 16 < 8 ? B[i / 16 * 8 + i % 16] : from_float<T>(0.f);
  }
  __syncthreads();
  uint32_t a[4], b[4];
  ldmatrix_x4(a, A_smem + lane % 16 * 16 + lane / 16 * 8);
  ldmatrix_x4_trans(b, B_smem + lane % 16 * 16 + lane / 16 * 8);
  float d[4] = {};
  mma_m16n8k16<T>(d, a, b[0], b[1]);
  for (int e = 0; e < 4; ++e) D[(g + e / 2 * 8) * 8 + 2 * t + e % 2] = d[e];
}

// Out of 2n elements of T in `in`: n pairs, unpacked, as floats.
template <typename T>
__global__ void widen_kernel(const T* in, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = to_float(in[i]);
}

// Rounded one by one, and by pairs: out[i] and out[n + i] must be equal.
template <typename T>
__global__ void narrow_kernel(const float* in, T* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = from_float<T>(in[i]);
  if (2 * i < n) {
    reinterpret_cast<uint32_t*>(out + n)[i] = pack2<T>(in[2 * i], in[2 * i + 1]);
  }
}

// out[kind][lane]: what each shuffle gives when lane i offers in[i]; the operand is n.
__global__ void shuffle_kernel(const int* in, int* out, int n, int width) {
  const int lane = threadIdx.x, mine = in[lane];
  out[0 * 32 + lane] = __shfl_sync(kFullMask, mine, n, width);
  out[1 * 32 + lane] = __shfl_up_sync(kFullMask, mine, n, width);
  out[2 * 32 + lane] = __shfl_down_sync(kFullMask, mine, n, width);
  out[3 * 32 + lane] = __shfl_xor_sync(kFullMask, mine, n, width);
  out[4 * 32 + lane] = __any_sync(kFullMask, mine % n == 0);
  out[5 * 32 + lane] = __all_sync(kFullMask, mine % n == 0);
  out[6 * 32 + lane] = static_cast<int>(__ballot_sync(kFullMask, mine % n == 0));
}

template <typename T>
void widen(const test::KernelArgs& args) {
  launch(widen_kernel<T>, {(args.n + 127) / 128, 128}, static_cast<const T*>(args.in),
         static_cast<float*>(args.out), args.n);
}
template <typename T>
void narrow(const test::KernelArgs& args) {
  launch(narrow_kernel<T>, {(args.n + 127) / 128, 128}, static_cast<const float*>(args.in),
         static_cast<T*>(args.out), args.n);
}
template <bool kTransposed>
void load_matrices(const test::KernelArgs& args) {
  launch(ldmatrix_kernel<kTransposed>, {1, 32}, static_cast<const uint16_t*>(args.in),
         static_cast<const int*>(args.extra), static_cast<uint32_t*>(args.out));
}
template <typename T>
void multiply(const test::KernelArgs& args) {
  launch(mma_kernel<T>, {1, 32}, static_cast<const uint32_t*>(args.in),
         static_cast<float*>(args.out));
}
template <typename T>
void multiply_tiles(const test::KernelArgs& args) {
  launch(tile_product_kernel<T>, {1, 32}, static_cast<const T*>(args.in),
         static_cast<const T*>(args.extra), static_cast<float*>(args.out));
}

FLASHSTEPS_TEST_KERNEL(ldmatrix) {
  load_matrices<false>(args);
}
FLASHSTEPS_TEST_KERNEL(ldmatrix_trans) {
  load_matrices<true>(args);
}
FLASHSTEPS_TEST_KERNEL(mma_fp16) {
  multiply<fp16_t>(args);
}
FLASHSTEPS_TEST_KERNEL(mma_bf16) {
  multiply<bf16_t>(args);
}
FLASHSTEPS_TEST_KERNEL(tile_product_fp16) {
  multiply_tiles<fp16_t>(args);
}
FLASHSTEPS_TEST_KERNEL(tile_product_bf16) {
  multiply_tiles<bf16_t>(args);
}
FLASHSTEPS_TEST_KERNEL(widen_fp16) {
  widen<fp16_t>(args);
}
FLASHSTEPS_TEST_KERNEL(widen_bf16) {
  widen<bf16_t>(args);
}
FLASHSTEPS_TEST_KERNEL(narrow_fp16) {
  narrow<fp16_t>(args);
}
FLASHSTEPS_TEST_KERNEL(narrow_bf16) {
  narrow<bf16_t>(args);
}
FLASHSTEPS_TEST_KERNEL(shuffles_32) {
  launch(shuffle_kernel, {1, 32}, static_cast<const int*>(args.in), static_cast<int*>(args.out),
         args.n, 32);
}
FLASHSTEPS_TEST_KERNEL(shuffles_8) {
  launch(shuffle_kernel, {1, 32}, static_cast<const int*>(args.in), static_cast<int*>(args.out),
         args.n, 8);
}

}  // namespace
}  // namespace flashsteps::inline FLASHSTEPS_TARGET
