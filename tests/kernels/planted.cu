// Kernels with one planted fault each; a comment names it where it is. They run on the CPU model
// alone: on a card their behaviour is undefined.
//
// `buffer_smem` and its like are filled and behind a barrier first, so that the fault is the one
// planted and not a read of what was never written.
#include "common/gpu/gpu.h"
#include "tests/kernels/test_kernels.h"

#ifdef FLASHSTEPS_MODEL_TARGET
namespace flashsteps::inline FLASHSTEPS_TARGET {
namespace {

constexpr int kThreads = 64;
constexpr int kCopied = kThreads * 4;  // floats, 16 bytes for each thread

// --- missing barriers

__global__ void read_after_write(const float* in, float* out) {
  __shared__ float tile[kThreads];
  const int t = threadIdx.x;
  tile[t] = 0.f;
  __syncthreads();
  tile[t] = in[t];
  // fault: no barrier
  out[t] = tile[kThreads - 1 - t];
}

__global__ void write_after_read(const float* in, float* out) {
  __shared__ float tile[kThreads];
  const int t = threadIdx.x;
  tile[t] = in[t];
  __syncthreads();
  out[t] = tile[kThreads - 1 - t];
  // fault: no barrier
  tile[t] = 0.f;
}

__global__ void write_after_write(const float* in, float* out) {
  __shared__ float tile[32];
  tile[threadIdx.x % 32] = in[threadIdx.x];  // fault: two warps, one element
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x % 32];
}

__global__ void warp_read_after_write(const float* in, float* out) {
  float* buffer_smem = SharedMemory().take<float>("buffer_smem", kThreads);
  const int t = threadIdx.x;
  buffer_smem[t] = 0.f;
  __syncthreads();
  buffer_smem[t] = in[t];
  // fault: no __syncwarp
  out[t] = buffer_smem[t ^ 1];
}

__global__ void warp_write_after_read(const float* in, float* out) {
  float* buffer_smem = SharedMemory().take<float>("buffer_smem", kThreads);
  const int t = threadIdx.x;
  buffer_smem[t] = in[t];
  __syncthreads();
  out[t] = buffer_smem[t ^ 1];
  // fault: no __syncwarp
  buffer_smem[t] = 0.f;
}

// A read of 8 bytes whose second half alone is at fault. The shuffle makes sure that it comes after
// the write, and orders no memory.
__global__ void wide_read_after_write(const float* in, float* out) {
  float* buffer_smem = SharedMemory().take<float>("buffer_smem", kThreads);
  const int t = threadIdx.x;
  buffer_smem[t] = in[t];
  __syncthreads();
  if (t % 2 == 1) buffer_smem[t] = 0.f;
  const float y = __shfl_xor_sync(kFullMask, in[t], 1);
  // fault: no __syncwarp
  const float2 x = reinterpret_cast<const float2*>(buffer_smem)[t / 2 ^ 1];
  out[t] = x.x + x.y + y;
}

// All lanes read one word, one of them twice, and that one overwrites it.
__global__ void warp_write_after_all_read(const float* in, float* out) {
  float* buffer_smem = SharedMemory().take<float>("buffer_smem", kThreads);
  const int t = threadIdx.x, warp = t / 32;
  buffer_smem[t] = in[t];
  __syncthreads();
  float x = __shfl_xor_sync(kFullMask, buffer_smem[warp], 1);
  if (t % 32 == 7) {
    x += buffer_smem[warp];
    buffer_smem[warp] = x;  // fault: no __syncwarp after the others' reads
  }
  out[t] = x;
}

// A shuffle brings a warp together, but does not order its memory.
__global__ void shuffle_is_no_barrier(const float* in, float* out) {
  float* buffer_smem = SharedMemory().take<float>("buffer_smem", kThreads);
  const int t = threadIdx.x;
  buffer_smem[t] = in[t];
  const float x = __shfl_xor_sync(kFullMask, in[t], 1);
  out[t] = x + buffer_smem[t ^ 1];  // fault: no __syncwarp
}

// A barrier of the warp does not order another warp's memory.
__global__ void warp_barrier_for_block(const float* in, float* out) {
  __shared__ float tile[kThreads];
  const int t = threadIdx.x;
  tile[t] = 0.f;
  __syncthreads();
  tile[t] = in[t];
  __syncwarp();  // fault: not __syncthreads
  out[t] = tile[kThreads - 1 - t];
}

__global__ void ldmatrix_without_barrier(const float*, float* out) {
  fp16_t* rows_smem = SharedMemory().take<fp16_t>("rows_smem", kThreads * 8);
  const int t = threadIdx.x;
  for (int i = 0; i < 8; ++i) rows_smem[t * 8 + i] = from_float<fp16_t>(float(i));
  uint32_t r[4];
  ldmatrix_x4(r, rows_smem + t * 8);  // fault: its own row, but other lanes get it
  out[t] = __uint_as_float(r[0]);
}

__global__ void atomic_and_plain(const float* in, float* out) {
  __shared__ float sum;
  if (threadIdx.x == 0) sum = 0.f;
  __syncthreads();
  atomicAdd(&sum, in[threadIdx.x]);
  // fault: no barrier
  out[threadIdx.x] = sum;
}

// --- asynchronous copies ---

enum class CopyFault { no_commit, no_wait, too_early, no_barrier, overwrites, never_waited };

template <CopyFault kFault>
__global__ void copy_kernel(const float* in, float* out) {
  float* stage_smem = SharedMemory().take<float>("stage_smem", kCopied);
  const int t = threadIdx.x;
  for (int i = 0; i < 4; ++i) stage_smem[t * 4 + i] = 0.f;
  __syncthreads();
  float x = 0.f;
  if (kFault == CopyFault::overwrites) x = stage_smem[kCopied - 1 - 4 * t];  // fault: no barrier
  cp_async_16(stage_smem + t * 4, in + t * 4, true);
  if (kFault != CopyFault::no_commit) cp_async_commit();
  if (kFault == CopyFault::too_early) {
    cp_async_wait<1>();  // fault: allows one group in flight
  } else if (kFault != CopyFault::no_wait && kFault != CopyFault::never_waited) {
    cp_async_wait<0>();
  }
  if (kFault != CopyFault::no_barrier) __syncthreads();
  if (kFault != CopyFault::never_waited) x += stage_smem[kCopied - 1 - 4 * t];
  out[t] = x;
}

// --- bounds

__global__ void global_read_at(const float* in, float* out, int index) {
  out[threadIdx.x] = in[int(threadIdx.x) + index];
}

__global__ void global_write_at(const float* in, float* out, int index) {
  out[int(threadIdx.x) + index] = in[threadIdx.x];
}

__global__ void global_vector_read_at(const float* in, float* out, int index) {
  const float4 x = *reinterpret_cast<const float4*>(in + index);
  out[threadIdx.x] = x.x;
}

__global__ void static_shared_at(const float* in, float* out, int index) {
  __shared__ float tile[kThreads];
  tile[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = tile[int(threadIdx.x) + index];
}

__global__ void dynamic_shared_at(const float* in, float* out, int index) {
  float* buffer_smem = SharedMemory().take<float>("buffer_smem", kThreads);
  buffer_smem[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = buffer_smem[int(threadIdx.x) + index];
}

__global__ void takes_too_much(const float* in, float* out) {
  SharedMemory smem;
  float* first_smem = smem.take<float>("first_smem", kThreads);
  float* second_smem = smem.take<float>("second_smem", kThreads);  // fault: the launch gave one
  first_smem[threadIdx.x] = second_smem[threadIdx.x] = in[threadIdx.x];
  out[threadIdx.x] = 0.f;
}

__global__ void copies_from_outside(const float* in, float* out, int index) {
  float* stage_smem = SharedMemory().take<float>("stage_smem", kCopied);
  cp_async_16(stage_smem + threadIdx.x * 4, in + threadIdx.x * 4 + index, true);
  cp_async_commit();
  cp_async_wait<0>();
  out[threadIdx.x] = stage_smem[threadIdx.x * 4];
}

__global__ void atomic_at(const float* in, float* out, int index) {
  atomicAdd(out + index, in[threadIdx.x]);
}

// Blocks from `first` on fault; one of them takes longer than the others to come to it.
__global__ void later_blocks_fault(const float* in, float* out, int first, int slow) {
  const int block = blockIdx.x;
  float x = 0.f;
  const int times = block == slow ? 40000 : block >= first ? 5000 : 0;
  for (int i = 0; i < times; ++i) x += in[(i + threadIdx.x) % kThreads];
  out[block * kThreads + threadIdx.x] = x + in[block < first ? threadIdx.x : 1 << 20];  // fault
}

// --- never written

__global__ void reads_unwritten_shared(const float* in, float* out) {
  __shared__ float tile[kThreads];
  if (threadIdx.x != 5) tile[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x];  // fault: tile[5]
}

__global__ void reads_unwritten_global(const float*, float* out) {
  out[threadIdx.x] += 1.f;  // fault: `out` starts without a value
}

// --- barriers that not all reach

__global__ void divergent_barriers(const float* in, float* out) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();  // fault: another one
  }
  out[threadIdx.x] = in[threadIdx.x];
}

__global__ void ended_before_barrier(const float* in, float* out) {
  if (threadIdx.x == 17) return;  // fault
  __syncthreads();
  out[threadIdx.x] = in[threadIdx.x];
}

__global__ void ended_before_shuffle(const float* in, float* out) {
  const float x = in[threadIdx.x];
  if (threadIdx.x == 40) return;  // fault
  out[threadIdx.x] = __shfl_xor_sync(kFullMask, x, 1);
}

__global__ void divergent_shuffles(const float* in, float* out) {
  const float x = in[threadIdx.x];
  float y;
  if (threadIdx.x % 2 == 0) {
    y = __shfl_xor_sync(kFullMask, x, 1);
  } else {
    y = __shfl_xor_sync(kFullMask, x, 1);  // fault: another one
  }
  out[threadIdx.x] = y;
}

__global__ void partial_mask(const float* in, float* out) {
  float x = in[threadIdx.x];
  if (threadIdx.x % 32 < 16) x += __shfl_xor_sync(0xffffu, x, 1);  // not what the model does
  out[threadIdx.x] = x;
}

__global__ void wrong_width(const float* in, float* out) {
  out[threadIdx.x] = __shfl_xor_sync(kFullMask, in[threadIdx.x], 1, 12);  // fault: no power of two
}

// --- addresses

__global__ void misaligned_global(const float* in, float* out) {
  const float4 x = *reinterpret_cast<const float4*>(in + 2);  // fault: 8-byte aligned
  out[threadIdx.x] = x.x;
}

__global__ void misaligned_shared(const float* in, float* out) {
  float* buffer_smem = SharedMemory().take<float>("buffer_smem", 2 * kThreads);
  buffer_smem[threadIdx.x] = buffer_smem[threadIdx.x + kThreads] = in[threadIdx.x];
  __syncthreads();
  const float2 x = *reinterpret_cast<const float2*>(buffer_smem + threadIdx.x);  // fault
  out[threadIdx.x] = x.x + x.y;
}

__global__ void misaligned_copy(const float* in, float* out) {
  float* stage_smem = SharedMemory().take<float>("stage_smem", kCopied + 4);
  cp_async_16(stage_smem + threadIdx.x * 4 + 2, in + threadIdx.x * 4, true);  // fault
  cp_async_commit();
  cp_async_wait<0>();
  out[threadIdx.x] = 0.f;
}

__global__ void misaligned_ldmatrix(const float*, float* out) {
  fp16_t* rows_smem = SharedMemory().take<fp16_t>("rows_smem", kThreads * 8 + 4);
  for (int i = threadIdx.x; i < kThreads * 8 + 4; i += kThreads) {
    rows_smem[i] = from_float<fp16_t>(0.f);
  }
  __syncthreads();
  uint32_t r[4];
  ldmatrix_x4(r, rows_smem + threadIdx.x * 8 + 4);  // fault
  out[threadIdx.x] = __uint_as_float(r[0]);
}

__global__ void misaligned_quad(const float* in, float* out) {
  const float quad[4] = {in[threadIdx.x], 0.f, 0.f, 0.f};
  atomic_add_quad(out + 2, quad);  // fault: 8-byte aligned
}

// --- turns: the first element of `in` is a turn, 0

__global__ void turn_never_comes(const float* in, float* out) {
  turn_wait(reinterpret_cast<const int*>(in), 1);  // fault: no block before passes one on
  out[threadIdx.x] = 0.f;
}

__global__ void turn_not_waited_for(float* in, float* out) {
  turn_pass(reinterpret_cast<int*>(in));  // fault
  out[threadIdx.x] = 0.f;
}

__global__ void turn_passed_twice(float* in, float* out) {
  int* const turn = reinterpret_cast<int*>(in);
  if (threadIdx.x == 0) *turn = 0;  // again, after an earlier launch
  __syncthreads();
  if (threadIdx.x < 32) turn_wait(turn, 0);
  if (threadIdx.x < 32) turn_pass(turn);
  if (threadIdx.x < 32) turn_pass(turn);  // fault
  out[threadIdx.x] = 0.f;
}

__global__ void different_turns(const float* in, float* out) {
  const int* const turns = reinterpret_cast<const int*>(in);
  turn_wait(threadIdx.x % 32 == 5 ? turns + 1 : turns, 0);  // fault: a warp waits for one turn
  out[threadIdx.x] = 0.f;
}

__global__ void byte_of_shared(const float* in, float* out) {
  unsigned char* bytes_smem = SharedMemory().take<unsigned char>("bytes_smem", kThreads);
  bytes_smem[threadIdx.x] = static_cast<unsigned char>(in[threadIdx.x]);  // not what the model does
  __syncthreads();
  out[threadIdx.x] = bytes_smem[threadIdx.x];
}

__global__ void reads_through(const float* pointer, float* out) {
  out[threadIdx.x] = pointer[threadIdx.x];
}

__global__ void writes_through(const float* in, float* pointer) {
  pointer[threadIdx.x] = in[threadIdx.x];
}

__global__ void throws(const float*, float*) {
  if (threadIdx.x == 3) test::throw_exception();
}

__global__ void does_nothing(const float*, float*) {}

__global__ void has_static_shared(const float* in, float* out) {
  __shared__ float big[8 * 1024];
  big[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = big[threadIdx.x];
}

__global__ void has_too_much_static_shared(const float* in, float* out) {
  __shared__ float huge[12 * 1024 + 1];
  huge[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  out[threadIdx.x] = huge[threadIdx.x];
}

constexpr int kSmem = kThreads * 4, kCopySmem = kCopied * 4;

__global__ void left_to_the_student(const float*, float* out) {
  out[threadIdx.x] = 0.f;
  not_implemented("06: divide once");
}

#define PLANTED(KERNEL, NAME, SMEM, ...)                                    \
  FLASHSTEPS_TEST_KERNEL(NAME) {                                            \
    launch(KERNEL, {1, kThreads, SMEM}, static_cast<const float*>(args.in), \
           static_cast<float*>(args.out) __VA_OPT__(, ) __VA_ARGS__);       \
  }
PLANTED(read_after_write, read_after_write, 0)
PLANTED(write_after_read, write_after_read, 0)
PLANTED(write_after_write, write_after_write, 0)
PLANTED(warp_read_after_write, warp_read_after_write, kSmem)
PLANTED(warp_write_after_read, warp_write_after_read, kSmem)
PLANTED(warp_write_after_all_read, warp_write_after_all_read, kSmem)
PLANTED(wide_read_after_write, wide_read_after_write, kSmem)
PLANTED(shuffle_is_no_barrier, shuffle_is_no_barrier, kSmem)
PLANTED(warp_barrier_for_block, warp_barrier_for_block, 0)
PLANTED(ldmatrix_without_barrier, ldmatrix_without_barrier, kThreads * 16)
PLANTED(atomic_and_plain, atomic_and_plain, 0)
PLANTED(copy_kernel<CopyFault::no_commit>, copy_no_commit, kCopySmem)
PLANTED(copy_kernel<CopyFault::no_wait>, copy_no_wait, kCopySmem)
PLANTED(copy_kernel<CopyFault::too_early>, copy_too_early, kCopySmem)
PLANTED(copy_kernel<CopyFault::no_barrier>, copy_no_barrier, kCopySmem)
PLANTED(copy_kernel<CopyFault::overwrites>, copy_overwrites, kCopySmem)
PLANTED(copy_kernel<CopyFault::never_waited>, copy_never_waited, kCopySmem)
PLANTED(global_read_at, global_read_at, 0, args.n)
PLANTED(global_write_at, global_write_at, 0, args.n)
PLANTED(global_vector_read_at, global_vector_read_at, 0, args.n)
PLANTED(static_shared_at, static_shared_at, 0, args.n)
PLANTED(dynamic_shared_at, dynamic_shared_at, kSmem, args.n)
PLANTED(takes_too_much, takes_too_much, kSmem)
PLANTED(copies_from_outside, copies_from_outside, kCopySmem, args.n)
PLANTED(atomic_at, atomic_at, 0, args.n)
PLANTED(reads_unwritten_shared, reads_unwritten_shared, 0)
PLANTED(reads_unwritten_global, reads_unwritten_global, 0)
PLANTED(divergent_barriers, divergent_barriers, 0)
PLANTED(ended_before_barrier, ended_before_barrier, 0)
PLANTED(ended_before_shuffle, ended_before_shuffle, 0)
PLANTED(divergent_shuffles, divergent_shuffles, 0)
PLANTED(partial_mask, partial_mask, 0)
PLANTED(wrong_width, wrong_width, 0)
PLANTED(misaligned_global, misaligned_global, 0)
PLANTED(misaligned_shared, misaligned_shared, 2 * kSmem)
PLANTED(misaligned_copy, misaligned_copy, kCopySmem + 16)
PLANTED(misaligned_ldmatrix, misaligned_ldmatrix, kThreads * 16 + 8)
PLANTED(misaligned_quad, misaligned_quad, 0)
PLANTED(turn_never_comes, turn_never_comes, 0)
PLANTED(different_turns, different_turns, 0)
PLANTED(byte_of_shared, byte_of_shared, kThreads)
PLANTED(reads_through, reads_through, 0)
PLANTED(writes_through, writes_through, 0)
PLANTED(throws, throws, 0)
PLANTED(left_to_the_student, left_to_the_student, 0)
#undef PLANTED

FLASHSTEPS_TEST_KERNEL(turn_not_waited_for) {
  launch(turn_not_waited_for, {1, kThreads}, static_cast<float*>(args.in),
         static_cast<float*>(args.out));
}
FLASHSTEPS_TEST_KERNEL(turn_passed_twice) {
  launch(turn_passed_twice, {1, kThreads}, static_cast<float*>(args.in),
         static_cast<float*>(args.out));
}

// The faulty blocks begin at n.
FLASHSTEPS_TEST_KERNEL(later_blocks_fault_first_slow) {
  launch(later_blocks_fault, {args.blocks, kThreads}, static_cast<const float*>(args.in),
         static_cast<float*>(args.out), args.n, args.n);
}
FLASHSTEPS_TEST_KERNEL(later_blocks_fault_second_slow) {
  launch(later_blocks_fault, {args.blocks, kThreads}, static_cast<const float*>(args.in),
         static_cast<float*>(args.out), args.n, args.n + 1);
}

// Host code that does what only kernels can.
FLASHSTEPS_TEST_KERNEL(host_reads_device) {
  *static_cast<float*>(args.extra) = static_cast<const float*>(args.in)[args.n];
}
FLASHSTEPS_TEST_KERNEL(host_writes_device) {
  static_cast<float*>(args.out)[args.n] = 1.f;
}
FLASHSTEPS_TEST_KERNEL(host_writes_extra) {
  *static_cast<float*>(args.extra) = 1.f;
}

// Launches that CUDA refuses; n is what is too much.
FLASHSTEPS_TEST_KERNEL(threads) {
  launch(does_nothing, {1, args.n}, static_cast<const float*>(args.in),
         static_cast<float*>(args.out));
}
FLASHSTEPS_TEST_KERNEL(blocks) {
  launch(does_nothing, {int64_t{args.n} * 1024, 32}, static_cast<const float*>(args.in),
         static_cast<float*>(args.out));
}
FLASHSTEPS_TEST_KERNEL(dynamic_bytes) {
  launch(does_nothing, {1, 32, args.n}, static_cast<const float*>(args.in),
         static_cast<float*>(args.out));
}
FLASHSTEPS_TEST_KERNEL(static_and_dynamic_bytes) {
  launch(has_static_shared, {1, 32, args.n}, static_cast<const float*>(args.in),
         static_cast<float*>(args.out));
}
FLASHSTEPS_TEST_KERNEL(static_bytes) {
  launch(has_too_much_static_shared, {1, 32}, static_cast<const float*>(args.in),
         static_cast<float*>(args.out));
}

}  // namespace
}  // namespace flashsteps::inline FLASHSTEPS_TARGET
#endif
