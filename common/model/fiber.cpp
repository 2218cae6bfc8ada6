#include "common/model/fiber.h"

#include <sys/mman.h>

#include "common/stage/device.h"

namespace flashsteps::model {

StackPool::StackPool(int count) : bytes_(size_t(count) * (kStack + kGuard)) {
  void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED)
    throw DeviceError("the CPU model has no room for the stacks of a block's threads");
  begin_ = reinterpret_cast<uintptr_t>(p);
  for (int i = 0; i < count; ++i)
    mprotect(reinterpret_cast<void*>(low(i) - kGuard), kGuard, PROT_NONE);
}

StackPool::~StackPool() {
  munmap(reinterpret_cast<void*>(begin_), bytes_);
}

}  // namespace flashsteps::model
