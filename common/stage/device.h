/// \file
/// A device to run stages on: the CPU model, or a card. Programs and tests hold one of these and
/// need not know which it is.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "common/stage/stage.h"

namespace flashsteps {

/// The device cannot do what was asked (no card, driver too old, no code for this card, not enough
/// memory): a program prints the message in one line and exits with 3.
class DeviceError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// What a device is and has.
struct DeviceInfo {
  Target target = Target::model;
  std::string name;    ///< "NVIDIA H200" or "CPU model"
  int capability = 0;  ///< major * 10 + minor; for the model, that of the card it imitates
  int multiprocessors = 0;
  int64_t shared_memory_per_block = 0;  ///< opt-in maximum, bytes
  int64_t memory_bytes = 0;
  std::string driver;   ///< CUDA version that the driver supports, "13.0"; empty on the model
  std::string runtime;  ///< CUDA runtime version; empty on the model
};

/// Memory and launches on one device. Not thread-safe.
class Device {
 public:
  virtual ~Device() = default;
  virtual DeviceInfo info() const = 0;

  /// Device memory for `count` elements, at least 256-byte aligned, every byte 0xFF (a NaN in every
  /// type), so that what is read before it is written shows. `name` is the tensor's name in the
  /// ledger and in messages. \throws DeviceError when there is not enough memory
  virtual void* allocate(const char* name, DType type, int64_t count) = 0;
  virtual void release(void* pointer) = 0;
  virtual void upload(void* to_device, const void* from_host, size_t bytes) = 0;
  virtual void download(void* to_host, const void* from_device, size_t bytes) = 0;
  /// Sets every byte to 0xFF again (on the model: never written again, too).
  virtual void poison(void* pointer, size_t bytes) = 0;
  /// Waits for all launched work; throws what went wrong in it.
  virtual void synchronize() = 0;
};

/// Owns device memory.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(Device& device, const char* name, DType type, int64_t count)
      : device_(&device),
        data_(device.allocate(name, type, count)),
        bytes_(size_of(type) * size_t(count)) {}
  DeviceBuffer(DeviceBuffer&& other) noexcept { swap(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~DeviceBuffer() {
    if (data_) device_->release(data_);
  }

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  void upload(const void* from) { device_->upload(data_, from, bytes_); }
  void download(void* to) const { device_->download(to, data_, bytes_); }
  void poison() { device_->poison(data_, bytes_); }

 private:
  void swap(DeviceBuffer& other) {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
  }
  Device* device_ = nullptr;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

/// The CPU model as a device. Only where the build has the model (FLASHSTEPS_HAS_MODEL).
std::unique_ptr<Device> make_model_device();

/// The current card. Only where the build has CUDA (FLASHSTEPS_HAS_CUDA).
/// \throws DeviceError with advice when there is no card that this binary can use
std::unique_ptr<Device> make_cuda_device();

}  // namespace flashsteps
