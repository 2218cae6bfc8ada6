#include "common/model/shared_shadow.h"

#include <sys/mman.h>

#include "common/stage/device.h"

namespace flashsteps::model {
namespace {

// Pages of zeros, which cost nothing until they are touched.
void* pages(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED)
    throw DeviceError("the CPU model has no room for its record of shared memory");
  return p;
}

}  // namespace

SharedShadow::SharedShadow(size_t bytes)
    : granules_((bytes + kGranule - 1) / kGranule),
      writes_(static_cast<WriteRecord*>(pages(granules_ * sizeof(WriteRecord)))),
      reads_(static_cast<ReadRecord*>(pages(granules_ * kReaders * sizeof(ReadRecord)))) {}

SharedShadow::~SharedShadow() {
  munmap(writes_, granules_ * sizeof(WriteRecord));
  munmap(reads_, granules_ * kReaders * sizeof(ReadRecord));
}

void SharedShadow::clear() {
  madvise(writes_, granules_ * sizeof(WriteRecord), MADV_DONTNEED);
  madvise(reads_, granules_ * kReaders * sizeof(ReadRecord), MADV_DONTNEED);
}

}  // namespace flashsteps::model
