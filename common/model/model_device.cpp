// The CPU model as a Device.
#include <unistd.h>

#include <cstring>

#include "common/model/block.h"
#include "common/model/heap.h"
#include "common/model/model.h"
#include "common/stage/device.h"

namespace flashsteps {
namespace {

class ModelDevice : public Device {
 public:
  DeviceInfo info() const override {
    const model::Options options = model::options();
    DeviceInfo info;
    info.target = Target::model;
    info.name = "CPU model";
    info.capability = options.capability;
    info.multiprocessors = options.multiprocessors;
    info.shared_memory_per_block = options.shared_memory_per_block;
    info.memory_bytes = int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGESIZE);
    return info;
  }

  void* allocate(const char* name, DType type, int64_t count) override {
    void* const memory = reinterpret_cast<void*>(heap_.allocate(name, type, count).begin);
    if (!model::running.block) model::running = model::outside_kernels();
    return memory;
  }
  void release(void* pointer) override { heap_.release(pointer); }
  void upload(void* to_device, const void* from_host, size_t bytes) override {
    model::Buffer& b = heap_.find(to_device, bytes);
    if (bytes == 0) return;
    std::memcpy(to_device, from_host, bytes);
    b.mark_written_range(reinterpret_cast<uintptr_t>(to_device) - b.begin, bytes);
  }
  void download(void* to_host, const void* from_device, size_t bytes) override {
    heap_.find(from_device, bytes);
    if (bytes != 0) std::memcpy(to_host, from_device, bytes);
  }
  void poison(void* pointer, size_t bytes) override {
    model::Buffer& b = heap_.find(pointer, bytes);
    if (bytes == 0) return;
    std::memset(pointer, 0xff, bytes);
    b.mark_unwritten_range(reinterpret_cast<uintptr_t>(pointer) - b.begin, bytes);
  }
  void synchronize() override {}  // launches have ended when they return

 private:
  model::Heap& heap_ = model::Heap::instance();
};

}  // namespace

std::unique_ptr<Device> make_model_device() {
  return std::make_unique<ModelDevice>();
}

}  // namespace flashsteps
