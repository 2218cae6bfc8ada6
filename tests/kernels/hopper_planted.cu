// Kernels of Hopper with one planted fault each; a comment or the fault's name says where it is.
// They run on the CPU model alone: on a card their behaviour is undefined.
#include "tests/kernels/hopper_names.h"
#include "tests/kernels/test_kernels.h"

#ifdef FLASHSTEPS_MODEL_TARGET
namespace flashsteps::inline FLASHSTEPS_TARGET {
namespace {

constexpr int kD = 64, kTile = 64 * kD, kTileBytes = kTile * 2;  // of 64 rows
using T = fp16_t;

// --- one warpgroup: A by TMA, B by ordinary stores, D = A B^T to `out` and by TMA

enum class Fault {
  none,
  load_before_arrival,  // no fault: an mbarrier counts bytes that come before they are announced
  proxy_fence_after_barrier,  // no fault: it lies on the way from the stores to wgmma
  // mbarriers
  mbarrier_not_initialised,
  mbarrier_initialised_twice,
  mbarrier_without_fence,
  mbarrier_fenced_by_another,
  mbarrier_without_barrier,
  mbarrier_of_no_arrivals,
  mbarrier_misaligned,
  mbarrier_overwritten,
  parity_of_two,
  no_arrival,
  arrival_too_many,
  no_expect,
  expects_too_little,
  expects_too_little_after_load,
  expects_too_much,
  wrong_parity,
  no_wait_for_load,
  wait_by_one_warp,
  load_never_waited_for,
  // TMA loads
  load_misaligned,
  load_past_shared_memory,
  load_past_buffer,
  load_of_no_head,
  load_by_empty_map,
  load_over_ordinary_stores,
  stores_over_load,
  // proxies
  no_proxy_fence_for_wgmma,
  proxy_fence_before_stores,
  no_proxy_fence_for_store,
  no_barrier_for_wgmma,
  // wgmma
  no_wgmma_fence,
  sums_touched_after_fence,
  sums_read_after_fence,
  operand_touched_after_fence,
  no_commit,
  no_wait,
  waits_for_all_but_one,
  sums_written_in_flight,
  operand_written_in_flight,
  operand_lost_in_flight,
  other_shape_in_flight,
  wait_names_other_sums,
  operand_of_sums_in_flight,
  wgmma_never_waited_for,
  wgmma_of_three_warps,
  wgmma_at_two_lines,
  wgmma_of_two_minds,
  wgmma_of_two_groups,
  descriptor_past_shared_memory,
  descriptor_misaligned,
  descriptor_of_no_swizzle,
  descriptor_of_base_offset,
  reads_unwritten,
  reads_unloaded,
  overwrites_operand_in_flight,
  // TMA stores
  store_without_barrier,
  store_overwritten,
  store_overwritten_by_another,
  store_not_committed,
  store_never_waited_for,
  store_past_buffer,
  // named barriers, registers, warps
  barrier_zero,
  barrier_of_part_of_a_warp,
  barrier_of_too_many,
  registers_no_multiple_of_8,
  registers_too_many,
  registers_of_part,
  registers_shrink_up,
  lanes_differ,
};

__device__ [[gnu::noinline]] void multiply_by_lost_operand(float (&d)[kD / 8][4],
                                                           uint64_t B_descriptor) {
  uint32_t a[4] = {threadIdx.x, 0, 0, 0};
  wgmma_fence();
  wgmma<T, kD>(d, a, B_descriptor, true);  // fault: ends before the wait
}

__device__ [[gnu::noinline]] float use_stack(float x) {
  volatile float y[64];
  for (int i = 0; i < 64; ++i) y[i] = x + i;
  return y[5];
}

template <Fault kFault>
__global__ void tile_kernel(const __grid_constant__ TensorMap A_map,
                            const __grid_constant__ TensorMap D_map, float* out) {
  SharedMemory smem;
  T* A_smem = smem.take<T>("A_smem", kTile);
  T* B_smem = smem.take<T>("B_smem", kTile);
  T* D_smem = smem.take<T>("D_smem", kTile);
  mbarrier_t* full = smem.take<mbarrier_t>("full", 2);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const auto is = [](Fault fault) { return kFault == fault; };

  if (thread == 0) {
    if (!is(Fault::mbarrier_not_initialised)) {
      mbarrier_init(full, is(Fault::mbarrier_of_no_arrivals) ? 0 : 1);
    }
    if (is(Fault::mbarrier_initialised_twice)) mbarrier_init(full, 1);
    if (is(Fault::mbarrier_misaligned)) {
      mbarrier_init(reinterpret_cast<mbarrier_t*>(reinterpret_cast<char*>(full) + 4), 1);
    }
    if (is(Fault::mbarrier_overwritten)) *full = 0;
    if (!is(Fault::mbarrier_without_fence) && !is(Fault::mbarrier_fenced_by_another)) {
      fence_mbarrier_init();
    }
  }
  if (is(Fault::mbarrier_fenced_by_another) && thread == 1) fence_mbarrier_init();
  if (is(Fault::load_over_ordinary_stores)) {
    for (int i = thread; i < kTile; i += 128) A_smem[i] = from_float<T>(1.f);
  }
  if (!is(Fault::mbarrier_without_barrier)) __syncthreads();

  if (is(Fault::barrier_zero)) named_barrier_sync(0, 128);
  if (is(Fault::barrier_of_part_of_a_warp)) named_barrier_sync(1, 100);
  if (is(Fault::barrier_of_too_many)) named_barrier_sync(1, 256);
  if (is(Fault::registers_no_multiple_of_8)) shrink_registers<100>();
  if (is(Fault::registers_too_many)) grow_registers<264>();
  if (is(Fault::registers_of_part) && warp < 3) shrink_registers<64>();
  if (is(Fault::registers_shrink_up)) {
    shrink_registers<64>();
    shrink_registers<72>();
  }
  if (is(Fault::lanes_differ)) warp_uniform(thread / 16);

  // B is the unit matrix.
  if (is(Fault::proxy_fence_before_stores)) fence_proxy_async();
  if (!is(Fault::reads_unwritten)) {
    for (int i = thread; i < kTile; i += 128) {
      B_smem[swizzle<kD>(i / kD, i % kD)] = from_float<T>(i / kD == i % kD ? 1.f : 0.f);
    }
  }
  if (!is(Fault::no_proxy_fence_for_wgmma) && !is(Fault::proxy_fence_after_barrier) &&
      !is(Fault::proxy_fence_before_stores) && !is(Fault::load_over_ordinary_stores)) {
    fence_proxy_async();
  }
  if (thread == 0 && !is(Fault::reads_unloaded)) {
    constexpr int kBytes =
        is(Fault::no_expect) ? 0
        : is(Fault::expects_too_little) || is(Fault::expects_too_little_after_load)
            ? kTileBytes - 128
        : is(Fault::expects_too_much) ? kTileBytes + 128
                                      : kTileBytes;
    constexpr bool kLoadFirst =
        is(Fault::load_before_arrival) || is(Fault::expects_too_little_after_load);
    if (!is(Fault::no_arrival) && !kLoadFirst) mbarrier_arrive_expect_tx(full, kBytes);
    T* to = is(Fault::load_misaligned)           ? A_smem + 256
            : is(Fault::load_past_shared_memory) ? A_smem + 3 * kTile
                                                 : A_smem;
    if (is(Fault::load_by_empty_map)) {
      tma_load(to, TensorMap(), full, 0, 0, 0, 0);
    } else {
      tma_load(to, A_map, full, 0, is(Fault::load_past_buffer) ? 64 : 0,
               is(Fault::load_of_no_head) ? 1 : 0, 0);
    }
    if (kLoadFirst) mbarrier_arrive_expect_tx(full, kBytes);
    if (is(Fault::arrival_too_many)) mbarrier_arrive(full);  // the bytes may be on their way
  }
  if (is(Fault::stores_over_load) && thread == 5) A_smem[7] = from_float<T>(0.f);
  if (is(Fault::load_never_waited_for)) return;
  if (is(Fault::parity_of_two)) mbarrier_wait(full, 2);
  if (!is(Fault::no_wait_for_load) && !is(Fault::wait_by_one_warp) && !is(Fault::reads_unloaded)) {
    mbarrier_wait(full, is(Fault::wrong_parity) ? 1 : 0);
  }
  if (!is(Fault::no_barrier_for_wgmma)) __syncthreads();  // B is there
  if (is(Fault::wait_by_one_warp) && warp == 1) mbarrier_wait(full, 0);
  if (is(Fault::proxy_fence_after_barrier)) fence_proxy_async();

  float D_rmem[kD / 8][4] = {}, other_rmem[kD / 16][4];
  uint32_t a[4] = {1, 2, 3, 4};
  if (is(Fault::wgmma_of_three_warps) && warp == 2) return;
  const uint64_t A_descriptor = matrix_descriptor(A_smem, 1, 1024);
  uint64_t B_descriptor = matrix_descriptor(B_smem, 1, 1024);
  if (is(Fault::descriptor_past_shared_memory)) B_descriptor += 3 * kTileBytes >> 4;
  if (is(Fault::descriptor_misaligned)) B_descriptor += 256 >> 4;
  if (is(Fault::descriptor_of_no_swizzle)) B_descriptor &= ~(uint64_t{3} << 62);
  if (is(Fault::descriptor_of_base_offset)) B_descriptor |= uint64_t{1} << 49;
  if (is(Fault::wgmma_of_two_minds) && warp == 1) B_descriptor += 32 >> 4;
  if (!is(Fault::no_wgmma_fence)) wgmma_fence();
  if (is(Fault::sums_touched_after_fence)) D_rmem[3][1] = 0.f;
  if (is(Fault::sums_read_after_fence)) out[thread] = D_rmem[2][2];
  if (is(Fault::operand_touched_after_fence)) {
    a[2] = lane;
    wgmma<T, kD>(D_rmem, a, B_descriptor, true);
  }
  if (is(Fault::operand_written_in_flight)) wgmma<T, kD>(D_rmem, a, B_descriptor, true);
  if (is(Fault::operand_lost_in_flight)) {
    multiply_by_lost_operand(D_rmem, B_descriptor);
    out[thread] = use_stack(out[thread]);
  }
  if (is(Fault::wgmma_at_two_lines) && warp == 3) {
    wgmma<T, kD>(D_rmem, A_descriptor, B_descriptor, false);
  } else {
    for (int c = 0; c < kD / 16; ++c) {
      wgmma<T, kD>(D_rmem, A_descriptor + (c * 32 >> 4), B_descriptor + (c * 32 >> 4), c > 0);
      if (is(Fault::wgmma_of_two_groups) && warp == 1) wgmma_commit();
    }
  }
  if (is(Fault::other_shape_in_flight)) {
    wgmma<T, kD / 2>(reinterpret_cast<float(&)[kD / 16][4]>(D_rmem), A_descriptor, B_descriptor,
                     true);
  }
  if (is(Fault::operand_of_sums_in_flight)) {
    wgmma<T, kD / 2>(other_rmem, reinterpret_cast<uint32_t(&)[4]>(D_rmem[0]), B_descriptor, false);
  }
  if (!is(Fault::no_commit)) wgmma_commit();
  if (is(Fault::sums_written_in_flight)) D_rmem[1][1] *= 2.f;
  if (is(Fault::operand_written_in_flight)) a[1] = lane;
  if (is(Fault::overwrites_operand_in_flight) && thread == 77) B_smem[5] = from_float<T>(2.f);
  if (is(Fault::wgmma_never_waited_for)) return;
  if (is(Fault::waits_for_all_but_one)) {
    wgmma_wait<1>();
  } else if (is(Fault::wait_names_other_sums)) {
    wgmma_wait<0>(other_rmem);
  } else if (!is(Fault::no_wait)) {
    wgmma_wait<0>(D_rmem);
  }
  for (int n = 0; n < kD / 8; ++n) {
    for (int half = 0; half < 2; ++half) {
      const int row = warp * 16 + half * 8 + lane / 4, col = n * 8 + 2 * (lane % 4);
      store_pair(D_smem + swizzle<kD>(row, col), D_rmem[n][2 * half], D_rmem[n][2 * half + 1]);
      store_pair(out + row * kD + col, D_rmem[n][2 * half], D_rmem[n][2 * half + 1]);
    }
  }
  if (!is(Fault::no_proxy_fence_for_store)) fence_proxy_async();
  if (!is(Fault::store_without_barrier)) __syncthreads();  // D is there
  if (thread == 0) {
    tma_store(D_map, D_smem, 0, is(Fault::store_past_buffer) ? 64 : 0, 0, 0);
    if (!is(Fault::store_not_committed)) tma_store_commit();
    if (is(Fault::store_overwritten)) D_smem[9] = from_float<T>(0.f);
    if (!is(Fault::store_never_waited_for)) tma_store_wait_read<0>();
  }
  // Nothing tells the other thread that the wait is over.
  if (is(Fault::store_overwritten_by_another) && thread == 70) D_smem[9] = from_float<T>(0.f);
}

TensorMap tile_map(const void* base, int rows) {
  return make_tensor_map(static_cast<const T*>(base), kD, rows, 1, 1, Strides{kTile, kTile, kD}, kD,
                         64);
}

// in: A, extra: D by TMA, out: D, all 64 x 64.
template <Fault kFault>
void run_tile(const test::KernelArgs& args) {
  const bool past = kFault == Fault::load_past_buffer || kFault == Fault::store_past_buffer;
  launch(tile_kernel<kFault>, {1, 128, 3 * kTileBytes + 128}, tile_map(args.in, past ? 128 : 64),
         tile_map(args.extra, past ? 128 : 64), static_cast<float*>(args.out));
}

#define PLANTED(NAME)                     \
  FLASHSTEPS_TEST_KERNEL(hopper_##NAME) { \
    run_tile<Fault::NAME>(args);          \
  }
PLANTED(none)
PLANTED(proxy_fence_after_barrier)
PLANTED(wait_by_one_warp)
PLANTED(sums_read_after_fence)
PLANTED(reads_unloaded)
PLANTED(mbarrier_not_initialised)
PLANTED(mbarrier_initialised_twice)
PLANTED(mbarrier_without_fence)
PLANTED(mbarrier_fenced_by_another)
PLANTED(mbarrier_without_barrier)
PLANTED(mbarrier_of_no_arrivals)
PLANTED(mbarrier_misaligned)
PLANTED(mbarrier_overwritten)
PLANTED(parity_of_two)
PLANTED(no_arrival)
PLANTED(arrival_too_many)
PLANTED(no_expect)
PLANTED(expects_too_little)
PLANTED(expects_too_little_after_load)
PLANTED(load_before_arrival)
PLANTED(expects_too_much)
PLANTED(wrong_parity)
PLANTED(no_wait_for_load)
PLANTED(load_never_waited_for)
PLANTED(load_misaligned)
PLANTED(load_past_shared_memory)
PLANTED(load_past_buffer)
PLANTED(load_of_no_head)
PLANTED(load_by_empty_map)
PLANTED(load_over_ordinary_stores)
PLANTED(stores_over_load)
PLANTED(no_proxy_fence_for_wgmma)
PLANTED(proxy_fence_before_stores)
PLANTED(no_proxy_fence_for_store)
PLANTED(no_barrier_for_wgmma)
PLANTED(no_wgmma_fence)
PLANTED(sums_touched_after_fence)
PLANTED(operand_touched_after_fence)
PLANTED(no_commit)
PLANTED(no_wait)
PLANTED(waits_for_all_but_one)
PLANTED(sums_written_in_flight)
PLANTED(operand_written_in_flight)
PLANTED(operand_lost_in_flight)
PLANTED(other_shape_in_flight)
PLANTED(wait_names_other_sums)
PLANTED(operand_of_sums_in_flight)
PLANTED(wgmma_never_waited_for)
PLANTED(wgmma_of_three_warps)
PLANTED(wgmma_at_two_lines)
PLANTED(wgmma_of_two_minds)
PLANTED(wgmma_of_two_groups)
PLANTED(descriptor_past_shared_memory)
PLANTED(descriptor_misaligned)
PLANTED(descriptor_of_no_swizzle)
PLANTED(descriptor_of_base_offset)
PLANTED(reads_unwritten)
PLANTED(overwrites_operand_in_flight)
PLANTED(store_without_barrier)
PLANTED(store_overwritten)
PLANTED(store_overwritten_by_another)
PLANTED(store_not_committed)
PLANTED(store_never_waited_for)
PLANTED(store_past_buffer)
PLANTED(barrier_zero)
PLANTED(barrier_of_part_of_a_warp)
PLANTED(barrier_of_too_many)
PLANTED(registers_no_multiple_of_8)
PLANTED(registers_too_many)
PLANTED(registers_of_part)
PLANTED(registers_shrink_up)
PLANTED(lanes_differ)
#undef PLANTED

// A warpgroup is 128 threads: here are 64.
__global__ void wgmma_of_two_warps_kernel(float* out) {
  T* tile_smem = SharedMemory().take<T>("tile_smem", kTile);
  float d[1][4];
  wgmma_fence();
  wgmma<T, 8>(d, matrix_descriptor(tile_smem, 1, 1024), matrix_descriptor(tile_smem, 1, 1024),
              false);
  out[threadIdx.x] = d[0][0];
}
FLASHSTEPS_TEST_KERNEL(hopper_wgmma_of_two_warps) {
  launch(wgmma_of_two_warps_kernel, {1, 64, kTileBytes}, static_cast<float*>(args.out));
}

// A named barrier orders its participants, and nobody else: warps 0 and 1 meet, warps 1 and 2 met
// before.
__global__ void barrier_for_others_kernel(float* out) {
  float* buffer_smem = SharedMemory().take<float>("buffer_smem", 32);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp > 0) named_barrier_sync(2, 64);
  if (warp == 0) buffer_smem[lane] = 1.f;
  if (warp < 2) named_barrier_sync(1, 64);
  if (warp > 0) out[threadIdx.x] = buffer_smem[lane];  // fault: of warp 2
}
FLASHSTEPS_TEST_KERNEL(hopper_barrier_for_others) {
  launch(barrier_for_others_kernel, {1, 96, 128}, static_cast<float*>(args.out));
}

// An arrival does not wait, so it learns nothing.
__global__ void arrival_learns_nothing_kernel(float* out) {
  float* buffer_smem = SharedMemory().take<float>("buffer_smem", 32);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp == 0) {
    buffer_smem[lane] = 1.f;
    named_barrier_sync(1, 64);
  } else {
    named_barrier_arrive(1, 64);
    out[lane] = buffer_smem[lane];  // fault
  }
}
FLASHSTEPS_TEST_KERNEL(hopper_arrival_learns_nothing) {
  launch(arrival_learns_nothing_kernel, {1, 64, 128}, static_cast<float*>(args.out));
}

// 384 threads have 168 registers each, and 1024 are left.
__global__ void registers_without_shrink_kernel(float*) {
  if (threadIdx.x < 128) grow_registers<240>();  // fault: nobody has given up any
}
FLASHSTEPS_TEST_KERNEL(hopper_registers_without_shrink) {
  launch(registers_without_shrink_kernel, {1, 384}, static_cast<float*>(args.out));
}

// --- a tile is loaded anew while a part of it is still being read

enum class Part { none, by_thread, by_product, by_second_product, by_store, too_early };

template <Part kPart>
__global__ void reload_kernel(const __grid_constant__ TensorMap in_map,
                              const __grid_constant__ TensorMap rows_map, float* out) {
  SharedMemory smem;
  T* tile_smem = smem.take<T>("tile_smem", kTile);
  mbarrier_t* full = smem.take<mbarrier_t>("full", 1);
  const int thread = threadIdx.x;
  if (thread == 0) {
    mbarrier_init(full, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect_tx(full, kTileBytes);
    tma_load(tile_smem, in_map, full, 0, 0, 0, 0);
  }
  __syncthreads();  // the mbarrier is there
  mbarrier_wait(full, 0);
  __syncthreads();  // all have waited
  if (kPart == Part::by_thread && thread == 70) out[0] = to_float(tile_smem[40 * kD]);
  float d[1][4] = {};
  const uint32_t a[4] = {};
  const bool products = kPart == Part::by_product || kPart == Part::by_second_product;
  for (int i = 0; products && i <= int(kPart == Part::by_second_product); ++i) {
    if (i > 0) wgmma_wait<0>(d);
    wgmma_fence();
    wgmma<T, 8>(d, a, matrix_descriptor(tile_smem + 32 * kD, 1, 1024), true);
    wgmma_commit();
  }
  if (thread == 0) {
    if (kPart == Part::by_store) {
      tma_store(rows_map, tile_smem + 40 * kD, 0, 0, 0, 0);
      tma_store_commit();
    }
    mbarrier_arrive_expect_tx(full, kTileBytes);
    tma_load(tile_smem, in_map, full, 0, 0, 0, 0);  // fault: nothing has ended but in `none`
    if (kPart == Part::by_store) tma_store_wait_read<0>();
  }
  if (products) wgmma_wait<0>(d);
  if (kPart == Part::too_early) {
    __syncthreads();                                 // the second load has begun
    out[thread] = to_float(tile_smem[thread * 32]);  // fault: it may be under way
  }
  mbarrier_wait(full, 1);
}

template <Part kPart>
void run_reload(const test::KernelArgs& args) {
  const TensorMap rows = make_tensor_map(static_cast<const T*>(args.extra), kD, 64, 1, 1,
                                         Strides{kTile, kTile, kD}, kD, 8);
  launch(reload_kernel<kPart>, {1, 128, kTileBytes + 128}, tile_map(args.in, 64), rows,
         static_cast<float*>(args.out));
}
FLASHSTEPS_TEST_KERNEL(hopper_reload) {
  run_reload<Part::none>(args);
}
FLASHSTEPS_TEST_KERNEL(hopper_reload_read_by_thread) {
  run_reload<Part::by_thread>(args);
}
FLASHSTEPS_TEST_KERNEL(hopper_reload_read_by_product) {
  run_reload<Part::by_product>(args);
}
FLASHSTEPS_TEST_KERNEL(hopper_reload_read_by_second_product) {
  run_reload<Part::by_second_product>(args);
}
FLASHSTEPS_TEST_KERNEL(hopper_reload_read_too_early) {
  run_reload<Part::too_early>(args);
}
FLASHSTEPS_TEST_KERNEL(hopper_reload_read_by_store) {
  run_reload<Part::by_store>(args);
}

// --- two warpgroups: one loads tiles by turns into two buffers, the other reads them

enum class Turn {
  none,
  no_empty_wait,
  wrong_empty_parity,
  wrong_full_parity,
  early_arrival,
  no_empty_arrival,
  reads_without_wait,
  one_thread_waits,
  one_arrival_more_than_expected,
  no_sync,
  no_named_arrival,
  other_count,
  too_small_count,
  sync_at_another,
};

template <Turn kTurn>
__global__ void turns_kernel(const __grid_constant__ TensorMap in_map, float* out, int tiles) {
  SharedMemory smem;
  T* tile_smem = smem.take<T>("tile_smem", 2 * kTile);
  float* sum_smem = smem.take<float>("sum_smem", 128);
  mbarrier_t* full = smem.take<mbarrier_t>("full", 2);
  mbarrier_t* empty = smem.take<mbarrier_t>("empty", 2);
  const int thread = threadIdx.x % 128;
  const auto is = [](Turn turn) { return kTurn == turn; };
  if (threadIdx.x == 0) {
    for (int s = 0; s < 2; ++s) {
      mbarrier_init(full + s, 1);
      mbarrier_init(empty + s, is(Turn::one_arrival_more_than_expected) ? 129 : 128);
    }
    fence_mbarrier_init();
  }
  __syncthreads();  // the mbarriers are there
  if (threadIdx.x < 128) {
    if (thread == 0) {
      for (int i = 0; i < tiles; ++i) {
        const int s = i % 2, phase = i / 2 % 2;
        if (!is(Turn::no_empty_wait)) {
          mbarrier_wait(empty + s, is(Turn::wrong_empty_parity) ? phase : 1 ^ phase);
        }
        mbarrier_arrive_expect_tx(full + s, kTileBytes);
        tma_load(tile_smem + s * kTile, in_map, full + s, 0, i * 64, 0, 0);
      }
    }
    if (is(Turn::no_sync)) {
    } else if (is(Turn::other_count)) {
      named_barrier_sync(1, 128);
    } else if (is(Turn::too_small_count)) {
      named_barrier_sync(1, 224);
    } else {
      named_barrier_sync(is(Turn::sync_at_another) ? 2 : 1, 256);  // the sums are there
    }
    out[thread] = sum_smem[thread];
    return;
  }
  float sum = 0.f;
  for (int i = 0; i < tiles; ++i) {
    const int s = i % 2, phase = i / 2 % 2;
    if (!is(Turn::reads_without_wait) && !(is(Turn::one_thread_waits) && thread > 0)) {
      mbarrier_wait(full + s, is(Turn::wrong_full_parity) ? 1 ^ phase : phase);
    }
    if (is(Turn::early_arrival)) mbarrier_arrive(empty + s);
    for (int k = 0; k < 32; ++k) sum += to_float(tile_smem[s * kTile + k * 128 + thread]);
    if (!is(Turn::early_arrival) && !is(Turn::no_empty_arrival)) mbarrier_arrive(empty + s);
  }
  sum_smem[thread] = sum;
  if (!is(Turn::no_named_arrival)) {
    named_barrier_arrive(1, is(Turn::too_small_count) ? 224 : 256);
  }
}

// in: tiles of 64 x 64, out: 128 sums; n: tiles.
template <Turn kTurn>
void run_turns(const test::KernelArgs& args) {
  launch(turns_kernel<kTurn>, {1, 256, 2 * kTileBytes + 512 + 256}, tile_map(args.in, args.n * 64),
         static_cast<float*>(args.out), args.n);
}
#define TURNS(NAME)                      \
  FLASHSTEPS_TEST_KERNEL(turns_##NAME) { \
    run_turns<Turn::NAME>(args);         \
  }
TURNS(none)
TURNS(no_empty_wait)
TURNS(wrong_empty_parity)
TURNS(wrong_full_parity)
TURNS(early_arrival)
TURNS(no_empty_arrival)
TURNS(reads_without_wait)
TURNS(one_thread_waits)
TURNS(one_arrival_more_than_expected)
TURNS(no_sync)
TURNS(no_named_arrival)
TURNS(other_count)
TURNS(too_small_count)
TURNS(sync_at_another)
#undef TURNS

// --- what cuTensorMapEncodeTiled refuses: n says which

FLASHSTEPS_TEST_KERNEL(tensor_maps) {
  const T* base = static_cast<const T*>(args.in);
  Strides strides{kTile, kTile, kD};
  int head_dim = kD, rows = 64, heads = 1, batch = 1, cols = kD, box_rows = 64;
  switch (args.n) {
    case 1:
      base += 4;
      break;
    case 2:
      strides.row = 68;
      break;
    case 3:
      strides.head = -8, heads = 2;
      break;
    case 4:
      strides.batch = int64_t{1} << 40, batch = 2;
      break;
    case 5:
      box_rows = 257;
      break;
    case 6:
      cols = 72;
      break;
    case 7:
      cols = 32;
      break;
    case 8:
      rows = 0;
      break;
    case 9:
      head_dim = 0;
      break;
    case 10:
      base = nullptr;
      break;
    case 11:
      box_rows = 0;
      break;
    case 12:
      heads = -1;
      break;
    case 13:
      batch = 0;
      break;
    case 14:
      cols = 512;
      break;
  }
  make_tensor_map(base, head_dim, rows, heads, batch, strides, cols, box_rows);
}

}  // namespace
}  // namespace flashsteps::inline FLASHSTEPS_TARGET
#endif
