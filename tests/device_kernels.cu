#include "tests/device_kernels.h"

#include "common/gpu/gpu.h"

namespace {

using namespace flashsteps;

__global__ void store_kernel(int* address) {
  *address = 1;
}

__device__ uint64_t nanoseconds_now() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__global__ void busy_kernel(int64_t nanoseconds) {
  const uint64_t start = nanoseconds_now();
  while (int64_t(nanoseconds_now() - start) < nanoseconds) {
  }
}

// `out` is null: it only keeps the compiler from leaving the shared memory out.
__global__ void needy_kernel(int* out, int dynamic_bytes) {
  __shared__ int declared[256];
  declared[threadIdx.x % 256] = dynamic_bytes;
  int last = 0;
  if (dynamic_bytes >= int(sizeof(int))) {
    int* dynamic = dynamic_smem<int>() + dynamic_bytes / int(sizeof(int)) - 1;
    *dynamic = dynamic_bytes;
    last = *dynamic;
  }
  if (out) *out = declared[last % 256];
}

}  // namespace

void store_to(void* address) {
  launch(store_kernel, {1, 1, 0, nullptr}, static_cast<int*>(address));
}
void busy_for(int64_t nanoseconds) {
  launch(busy_kernel, {1, 1, 0, nullptr}, nanoseconds);
}
void launch_with(int64_t grid, int block, int dynamic_smem) {
  launch(needy_kernel, {grid, block, dynamic_smem, nullptr}, static_cast<int*>(nullptr),
         dynamic_smem);
}
