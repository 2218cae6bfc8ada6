// The one main of all programs: `attention`, which is linked with every stage, and each stage's
// own.

#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <new>
#include <stdexcept>

#include "common/cli/commands.h"
#include "common/cli/options.h"
#include "common/gpu/cuda_support.h"
#include "common/stage/device.h"

namespace {

using namespace flashsteps;

enum ExitStatus { kAllRight = 0, kCheckFailed = 1, kBadInput = 2, kDeviceCannot = 3 };

int run(const cli::Options& options) {
  switch (options.command) {
    case cli::Command::list:
      return cli::list(options);
    case cli::Command::check:
      return cli::check(options);
    case cli::Command::count:
      return cli::count(options);
    case cli::Command::bench:
      return cli::bench(options);
    case cli::Command::ladder:
      return cli::ladder(options);
  }
  return kBadInput;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string program =
      std::filesystem::path(argc > 0 ? argv[0] : "attention").filename().string();
  const auto fail = [&](const char* why, ExitStatus status) {
    std::fflush(stdout);
    fmt::print(stderr, "{}: {}\n", program, why);
    return status;
  };
  try {
    const auto options = cli::parse(argc, argv);
    const int status = options ? run(*options) : kAllRight;
    if (std::fflush(stdout) != 0)
      return fail("the results could not be written to standard output", kBadInput);
    return status;
  } catch (const DeviceFault& fault) {
    return fail(fault.what(), kCheckFailed);
  } catch (const DeviceError& error) {
    return fail(error.what(), kDeviceCannot);
  } catch (const std::bad_alloc&) {
    return fail("this machine has too little memory for the problem's tensors", kDeviceCannot);
  } catch (const std::length_error&) {
    return fail("this machine has too little memory for the problem's tensors", kDeviceCannot);
  } catch (const std::exception& error) {
    // Arguments, and files that cannot be read or written.
    return fail(error.what(), kBadInput);
  }
}
