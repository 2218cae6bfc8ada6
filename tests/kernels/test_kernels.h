/// \file
/// Small kernels of the tests, found by name. Their files are compiled for every target of the
/// build, as those of the stages are.
#pragma once

#include <string>

#include "common/stage/stage.h"

namespace flashsteps::test {

/// What a test gives a kernel: device pointers, and sizes; what they mean is the kernel's.
struct KernelArgs {
  void* in = nullptr;
  void* out = nullptr;
  void* extra = nullptr;
  void* more[2] = {};
  int n = 0;
  int blocks = 1;
};

struct TestKernel {
  const char* name;
  Target target;
  void (*launch)(const KernelArgs&);
  TestKernel* next;
};

/// For FLASHSTEPS_TEST_KERNEL. Returns its argument.
TestKernel* register_kernel(TestKernel* kernel);

/// Launches a kernel by its name.
/// \throws std::invalid_argument when there is none
void run_kernel(Target target, const std::string& name, const KernelArgs& args);

/// Throws std::runtime_error("thrown by the test").
void throw_exception();

}  // namespace flashsteps::test

/// Defines the launch of one test kernel; its body sees `args`. In a kernel file alone.
#define FLASHSTEPS_TEST_KERNEL(NAME)                                                            \
  static void launch_##NAME(const flashsteps::test::KernelArgs& args);                          \
  static flashsteps::test::TestKernel record_##NAME = {#NAME, kTarget, launch_##NAME, nullptr}; \
  [[maybe_unused]] static flashsteps::test::TestKernel* const registered_##NAME =               \
      flashsteps::test::register_kernel(&record_##NAME);                                        \
  static void launch_##NAME([[maybe_unused]] const flashsteps::test::KernelArgs& args)
