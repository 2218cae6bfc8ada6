// Kernels whose every count is known beforehand: they test the counters of the CPU model.
#include "common/gpu/gpu.h"
#include "tests/kernels/test_kernels.h"

namespace flashsteps::inline FLASHSTEPS_TARGET {
namespace {

// out = the transpose of the n x n matrix in; one block of 8 warps for each tile of 32 x 32.
template <int kRow>
__global__ void transpose_kernel(const float* in, float* out, int n) {
  __shared__ float tile[32][kRow];
  const int tiles = n / 32, x0 = blockIdx.x % tiles * 32, y0 = blockIdx.x / tiles * 32;
  const int x = threadIdx.x % 32;
  for (int y = threadIdx.x / 32; y < 32; y += 8) tile[y][x] = in[(y0 + y) * n + x0 + x];
  __syncthreads();
  for (int y = threadIdx.x / 32; y < 32; y += 8) out[(x0 + y) * n + y0 + x] = tile[x][y];
}

// One warp stores and loads T at elements lane * kStride of shared memory.
template <typename T, int kStride>
__global__ void stride_kernel(const T* in, T* out) {
  T* buffer_smem = SharedMemory().take<T>("buffer_smem", 32 * kStride);
  const int lane = threadIdx.x;
  buffer_smem[lane * kStride] = in[lane];
  __syncwarp();  // else the compiler would not load what it has just stored
  out[lane] = buffer_smem[lane * kStride];
}

// All lanes load one word.
__global__ void broadcast_kernel(const float* in, float* out) {
  __shared__ float word;
  if (threadIdx.x == 0) word = in[0];
  __syncthreads();
  out[threadIdx.x] = word;
}

// Lanes that go different ways: the lower half of the warp alone, with a stride of 32 words; then
// twice where the upper half goes once, before an access of all lanes with a stride of 2.
__global__ void divergent_kernel(const float* in, float* out) {
  __shared__ float low[16 * 32], twice[2][32], all[64];
  const int lane = threadIdx.x;
  if (lane < 16) low[lane * 32] = in[lane];
  __syncwarp();
  const int times = lane < 16 ? 2 : 1;
  for (int i = 0; i < times; ++i) twice[i][lane] = in[lane];
  all[lane * 2] = in[lane];
  __syncwarp();
  float x = all[lane * 2];
  if (lane < 16) x += low[lane * 32] + twice[1][lane];
  out[lane] = x;
}

// One warp: 16-byte copies to rows of 128 bytes, all at the same column; then ldmatrix from there.
__global__ void rows_kernel(const fp16_t* in, uint32_t* out) {
  fp16_t* rows_smem = SharedMemory().take<fp16_t>("rows_smem", 32 * 64);
  const int lane = threadIdx.x;
  cp_async_16(rows_smem + lane * 64, in + lane * 8, lane < 24);
  cp_async_commit();
  cp_async_wait<0>();
  __syncwarp();
  uint32_t r[4];
  ldmatrix_x4(r, rows_smem + lane * 64);
  for (int i = 0; i < 4; ++i) out[lane * 4 + i] = r[i];
}

// Every block reads all n floats of `in` twice.
__global__ void reread_kernel(const float* in, float* out, int n) {
  const int threads = blockDim.x;
  float sum = 0.f;
  for (int i = threadIdx.x; i < n; i += threads) sum += in[i];
  for (int i = threadIdx.x; i < n; i += threads) sum += in[n - 1 - i];
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// Four warps write words by turns; then the first warp loads four of them at once.
__global__ void gather_kernel(const float* in, float4* out) {
  __shared__ float4 words[32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  reinterpret_cast<float*>(words)[lane * 4 + warp] = in[threadIdx.x];
  __syncthreads();
  if (warp == 0) out[lane] = words[lane];
}

// A warp-wide copy of 16-byte vectors.
__global__ void vector_kernel(const float4* in, float4* out) {
  out[threadIdx.x] = in[threadIdx.x];
}

// Block b visits b + 1 tiles, masks the last; divisions and exponentials inside and outside.
__global__ void tiles_kernel(const float* in, float* out) {
  float x = in[threadIdx.x];
  for (unsigned tile = 0; tile <= blockIdx.x; ++tile) {
    note_tile(tile == blockIdx.x);
    x = fast_exp2(divide(x, 3.f));
    __syncthreads();
  }
  note_tiles_done();
  x = divide(fast_exp(x) + __shfl_xor_sync(kFullMask, x, 1), 2.f);
  if (threadIdx.x < 32) __syncwarp();
  out[blockIdx.x * blockDim.x + threadIdx.x] = x;
}

// Every thread adds 1 to counts[0] and its value to sum[0]; the sum of shared memory is added once.
__global__ void atomics_kernel(const float* in, float* sum, int* counts) {
  __shared__ int in_block;
  if (threadIdx.x == 0) in_block = 0;
  __syncthreads();
  atomicAdd(&counts[0], 1);
  atomicAdd(&sum[0], in[blockIdx.x * blockDim.x + threadIdx.x]);
  atomicAdd(&in_block, 2);
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(reinterpret_cast<unsigned*>(&counts[1]), unsigned(in_block));
}

// Block after block, each warp adds a quad a lane to numbers of its own, and passes its turn on.
__global__ void turns_kernel(const float* in, float* sums, int* turns) {
  int* const turn = turns + threadIdx.x / 32;
  const float x = in[blockIdx.x * blockDim.x + threadIdx.x];
  const float quad[4] = {x, 2.f * x, 3.f * x, 4.f * x};
  turn_wait(turn, int(blockIdx.x));
  atomic_add_quad(sums + threadIdx.x * 4, quad);
  turn_pass(turn);
}

template <int kRow>
void transpose(const test::KernelArgs& args) {
  launch(transpose_kernel<kRow>, {int64_t{args.n / 32} * (args.n / 32), 256},
         static_cast<const float*>(args.in), static_cast<float*>(args.out), args.n);
}
template <typename T, int kStride>
void stride(const test::KernelArgs& args) {
  launch(stride_kernel<T, kStride>, {1, 32, 32 * kStride * int(sizeof(T))},
         static_cast<const T*>(args.in), static_cast<T*>(args.out));
}

FLASHSTEPS_TEST_KERNEL(transpose_32) {
  transpose<32>(args);
}
FLASHSTEPS_TEST_KERNEL(transpose_33) {
  transpose<33>(args);
}
FLASHSTEPS_TEST_KERNEL(stride_half_1) {
  stride<fp16_t, 1>(args);
}
FLASHSTEPS_TEST_KERNEL(stride_half_64) {
  stride<fp16_t, 64>(args);
}
FLASHSTEPS_TEST_KERNEL(stride_float_1) {
  stride<float, 1>(args);
}
FLASHSTEPS_TEST_KERNEL(stride_float_2) {
  stride<float, 2>(args);
}
FLASHSTEPS_TEST_KERNEL(stride_float_33) {
  stride<float, 33>(args);
}
FLASHSTEPS_TEST_KERNEL(stride_float2_1) {
  stride<float2, 1>(args);
}
FLASHSTEPS_TEST_KERNEL(stride_float2_2) {
  stride<float2, 2>(args);
}
FLASHSTEPS_TEST_KERNEL(stride_float4_1) {
  stride<float4, 1>(args);
}
FLASHSTEPS_TEST_KERNEL(stride_float4_2) {
  stride<float4, 2>(args);
}
FLASHSTEPS_TEST_KERNEL(broadcast) {
  launch(broadcast_kernel, {1, 32}, static_cast<const float*>(args.in),
         static_cast<float*>(args.out));
}
FLASHSTEPS_TEST_KERNEL(divergent) {
  launch(divergent_kernel, {1, 32}, static_cast<const float*>(args.in),
         static_cast<float*>(args.out));
}
FLASHSTEPS_TEST_KERNEL(rows) {
  launch(rows_kernel, {1, 32, 32 * 64 * 2}, static_cast<const fp16_t*>(args.in),
         static_cast<uint32_t*>(args.out));
}
FLASHSTEPS_TEST_KERNEL(reread) {
  launch(reread_kernel, {3, 64}, static_cast<const float*>(args.in), static_cast<float*>(args.out),
         args.n);
}
FLASHSTEPS_TEST_KERNEL(gather) {
  launch(gather_kernel, {1, 128}, static_cast<const float*>(args.in),
         static_cast<float4*>(args.out));
}
FLASHSTEPS_TEST_KERNEL(vector) {
  launch(vector_kernel, {1, 32}, static_cast<const float4*>(args.in),
         static_cast<float4*>(args.out));
}
FLASHSTEPS_TEST_KERNEL(tiles) {
  launch(tiles_kernel, {4, 64}, static_cast<const float*>(args.in), static_cast<float*>(args.out));
}
FLASHSTEPS_TEST_KERNEL(atomics) {
  launch(atomics_kernel, {args.n, 64}, static_cast<const float*>(args.in),
         static_cast<float*>(args.out), static_cast<int*>(args.extra));
}
FLASHSTEPS_TEST_KERNEL(turns) {
  launch(turns_kernel, {args.n, 64}, static_cast<const float*>(args.in),
         static_cast<float*>(args.out), static_cast<int*>(args.extra));
}

}  // namespace
}  // namespace flashsteps::inline FLASHSTEPS_TARGET
