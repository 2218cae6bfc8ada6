// A card does what Device promises; every launch is checked, and a fault is told.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "common/gpu/cuda_support.h"
#include "common/stage/device.h"
#include "tests/device_kernels.h"

namespace flashsteps {
namespace {

class DeviceOnCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (*why_no_cuda() != '\0') GTEST_SKIP() << "no usable card: " << why_no_cuda();
    device_ = make_cuda_device();
  }
  std::string error_of(const std::function<void()>& action) {
    try {
      action();
    } catch (const DeviceError& error) {
      return error.what();
    }
    return "";
  }
  std::unique_ptr<Device> device_;
};

TEST_F(DeviceOnCuda, cuda_info) {
  const DeviceInfo info = device_->info();
  EXPECT_FALSE(info.name.empty());
  EXPECT_GE(info.capability, kOldestCapability);
  EXPECT_GT(info.multiprocessors, 0);
  EXPECT_GT(info.shared_memory_per_block, 48 * 1024);
  EXPECT_GT(info.memory_bytes, int64_t{1} << 30);
  EXPECT_FALSE(info.driver.empty());
  EXPECT_FALSE(info.runtime.empty());
}

TEST_F(DeviceOnCuda, cuda_memory_is_poisoned_and_copied) {
  const int64_t count = 1000;
  DeviceBuffer buffer(*device_, "x", DType::bf16, count);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 256, 0u);
  std::vector<uint16_t> host(count, 0);
  buffer.download(host.data());
  EXPECT_EQ(host, std::vector<uint16_t>(count, 0xffff));
  std::vector<uint16_t> sent(count);
  std::iota(sent.begin(), sent.end(), uint16_t{1});
  buffer.upload(sent.data());
  buffer.download(host.data());
  EXPECT_EQ(host, sent);
  buffer.poison();
  buffer.download(host.data());
  EXPECT_EQ(host, std::vector<uint16_t>(count, 0xffff));
}

TEST_F(DeviceOnCuda, cuda_empty_tensors_have_an_address) {
  DeviceBuffer empty(*device_, "x", DType::fp32, 0);
  EXPECT_NE(empty.data(), nullptr);
  empty.upload(nullptr);
  empty.download(nullptr);
  empty.poison();
}

TEST_F(DeviceOnCuda, cuda_out_of_memory_is_told_and_survived) {
  const int64_t count = device_->info().memory_bytes;  // of four bytes each
  const std::string message = error_of([&] { DeviceBuffer(*device_, "S", DType::fp32, count); });
  EXPECT_NE(message.find("not enough device memory for S: needs"), std::string::npos) << message;
  EXPECT_NE(message.find("are free"), std::string::npos) << message;
  EXPECT_NO_THROW(DeviceBuffer(*device_, "x", DType::fp32, 1000));
  EXPECT_THROW(DeviceBuffer(*device_, "x", DType::fp32, -1), std::invalid_argument);
  EXPECT_THROW(DeviceBuffer(*device_, "x", DType::fp32, INT64_MAX), std::invalid_argument);
}

TEST_F(DeviceOnCuda, cuda_launches_are_checked) {
  const int most = int(device_->info().shared_memory_per_block);
  EXPECT_EQ(error_of([&] { launch_with(1, 32, 0); }), "");
  EXPECT_EQ(error_of([&] { launch_with(1, 32, most - 1024); }), "");
  EXPECT_EQ(error_of([&] { launch_with(1, 32, 100); }), "")
      << "a smaller request after a larger one";
  EXPECT_EQ(error_of([&] { launch_with(0, 32, 0); }), "") << "no blocks: nothing to launch";
  const std::string smem = error_of([&] { launch_with(1, 32, most - 1023); });
  EXPECT_NE(smem.find("needy_kernel needs " + std::to_string(most + 1) + " bytes of shared memory"),
            std::string::npos)
      << smem;
  EXPECT_NE(smem.find(std::to_string(most) + " are available"), std::string::npos) << smem;
  EXPECT_NE(error_of([&] { launch_with(1, 1025, 0); }).find("a block of 1025 threads"),
            std::string::npos);
  EXPECT_NE(error_of([&] { launch_with(int64_t{1} << 31, 32, 0); }).find("a grid of 2147483648"),
            std::string::npos);
  EXPECT_EQ(error_of([&] { device_->synchronize(); }), "")
      << "refused launches leave no error behind";
}

TEST_F(DeviceOnCuda, cuda_tells_what_the_last_kernel_takes) {
  const int most = int(device_->info().shared_memory_per_block);
  launch_with(1, 64, 4096);
  const KernelResources taken = last_launched_kernel();
  EXPECT_EQ(taken.name, "needy_kernel");
  EXPECT_EQ(taken.threads, 64);
  EXPECT_GT(taken.registers_per_thread, 0);
  EXPECT_LE(taken.registers_per_thread, 255);
  EXPECT_EQ(taken.local_bytes, 0);
  EXPECT_EQ(taken.shared_memory, 1024 + 4096);
  EXPECT_GT(taken.blocks_per_multiprocessor, 1);
  launch_with(0, 32, 0);  // launches nothing
  EXPECT_EQ(last_launched_kernel().threads, 64);
  launch_with(1, 32, most - 1024);
  EXPECT_EQ(last_launched_kernel().blocks_per_multiprocessor, 1);
  device_->synchronize();
}

// The context of the process is lost, so the process is one of its own.
TEST_F(DeviceOnCuda, cuda_faults_are_told) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        try {
          DeviceBuffer buffer(*device_, "x", DType::fp32, 1);
          store_to(reinterpret_cast<void*>(uintptr_t{64}));
          device_->synchronize();
        } catch (const DeviceFault&
                     fault) {  // its buffer was released on the way, without a second throw
          std::fprintf(stderr, "%s\n", fault.what());
          std::exit(3);
        }
        std::exit(0);
      },
      testing::ExitedWithCode(3), "illegal memory access.*compute-sanitizer");
}

}  // namespace
}  // namespace flashsteps
