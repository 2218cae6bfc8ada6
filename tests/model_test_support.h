/// \file
/// What the tests of the CPU model share: device buffers made from host values, and a launch by
/// name.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/model/model.h"
#include "common/stage/device.h"
#include "tests/kernels/test_kernels.h"

namespace flashsteps::test {

inline Device& model_device() {
  static const std::unique_ptr<Device> device = make_model_device();
  return *device;
}

/// A device buffer with these values.
template <typename T>
DeviceBuffer buffer(const char* name, const std::vector<T>& values, DType type = DType::fp32) {
  DeviceBuffer b(model_device(), name, type, int64_t(values.size() * sizeof(T)) / size_of(type));
  if (!values.empty()) b.upload(values.data());
  return b;
}

template <typename T>
std::vector<T> download(const DeviceBuffer& b) {
  std::vector<T> values(b.bytes() / sizeof(T));
  b.download(values.data());
  return values;
}

/// 0, 1, 2, …
inline std::vector<float> ramp(int count) {
  std::vector<float> values(count);
  for (int i = 0; i < count; ++i) values[i] = float(i);
  return values;
}

inline void run_on_model(const std::string& kernel, const KernelArgs& args) {
  run_kernel(Target::model, kernel, args);
}

/// The fault that this launch ends with, if any.
inline std::optional<model::Fault> fault_of(const std::string& kernel, const KernelArgs& args) {
  try {
    run_on_model(kernel, args);
  } catch (const model::Fault& fault) {
    return fault;
  }
  return std::nullopt;
}

/// Options for the length of a test; then the defaults again.
class WithOptions {
 public:
  explicit WithOptions(const model::Options& options) { model::set_options(options); }
  WithOptions(uint64_t seed, int workers) {
    model::Options options;
    options.seed = seed;
    options.workers = workers;
    model::set_options(options);
  }
  ~WithOptions() { model::set_options({}); }
};

}  // namespace flashsteps::test
