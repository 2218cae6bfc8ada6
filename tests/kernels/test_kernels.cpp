#include "tests/kernels/test_kernels.h"

#include <stdexcept>

namespace flashsteps::test {
namespace {
constinit TestKernel* first = nullptr;
}

TestKernel* register_kernel(TestKernel* kernel) {
  kernel->next = first;
  return first = kernel;
}

void run_kernel(Target target, const std::string& name, const KernelArgs& args) {
  for (const TestKernel* k = first; k; k = k->next) {
    if (k->target == target && name == k->name) return k->launch(args);
  }
  throw std::invalid_argument("no test kernel \"" + name + "\" for this target");
}

void throw_exception() {
  throw std::runtime_error("thrown by the test");
}

}  // namespace flashsteps::test
