// A machine that cannot run a stage is told what it lacks and what to do, in one line; a card does
// what Device promises. (Cases P28, P38, P43 and P44 of the list of inputs that broke others.)
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "common/gpu/cuda_support.h"
#include "common/stage/device.h"

namespace flashsteps {
namespace {

using Probe = CudaCard::Probe;

CudaFacts facts_of(std::vector<CudaCard> cards) {
  CudaFacts facts;
  facts.driver_version = 13000;
  facts.runtime_version = 13000;
  facts.architectures = "80-real 80-virtual 90a-real";
  facts.cards = std::move(cards);
  return facts;
}

const CudaCard kH200 = {"NVIDIA H200", 90, Probe::loaded, ""};
const CudaCard kT4 = {"Tesla T4", 75, Probe::loaded, ""};

TEST(CudaSupport, UsableCardNeedsNoReason) {
  EXPECT_EQ(usable_card(facts_of({kH200})), 0);
  EXPECT_EQ(why_no_usable_card(facts_of({kH200})), "");
  EXPECT_EQ(usable_card(facts_of({{"A100", 80, Probe::loaded, ""}})), 0);
}

TEST(CudaSupport, FirstUsableCardIsTaken) {
  EXPECT_EQ(usable_card(facts_of({kT4, kH200})), 1);
  EXPECT_EQ(why_no_usable_card(facts_of({kT4, kH200})), "");
}

TEST(CudaSupport, BuiltWithoutCuda) {
  CudaFacts facts;
  facts.built_with_cuda = false;
  EXPECT_EQ(usable_card(facts), -1);
  EXPECT_EQ(why_no_usable_card(facts),
            "this program was built without CUDA; where nvcc is installed, configure with "
            "-DFLASHSTEPS_CUDA=ON");
}

TEST(CudaSupport, NoDriver) {
  CudaFacts facts = facts_of({});
  facts.driver_version = 0;
  EXPECT_EQ(why_no_usable_card(facts),
            "no CUDA driver was found; install the NVIDIA driver, or give the container access to "
            "the card");
}

TEST(CudaSupport, DriverOlderThanToolkitNamesBothVersions) {
  CudaFacts facts = facts_of({});
  facts.driver_version = 12040;
  facts.count_error =
      "CUDA driver version is insufficient for CUDA runtime version (cudaErrorInsufficientDriver)";
  EXPECT_EQ(why_no_usable_card(facts),
            "the driver supports CUDA 12.4, but this program was built with CUDA 13.0; update the "
            "driver, or build "
            "with a toolkit no newer than CUDA 12.4");
  EXPECT_EQ(usable_card(facts), -1);
}

TEST(CudaSupport, OlderMinorVersionOfTheDriverIsUsable) {
  CudaFacts facts = facts_of({kH200});
  facts.runtime_version = 13010;
  EXPECT_EQ(why_no_usable_card(facts), "");
  EXPECT_EQ(usable_card(facts), 0);
}

TEST(CudaSupport, PtxNewerThanDriverNamesBothVersions) {
  CudaFacts facts =
      facts_of({{"NVIDIA GeForce RTX 5090", 120, Probe::ptx_too_new, "unsupported toolchain"}});
  facts.runtime_version = 13010;
  EXPECT_EQ(why_no_usable_card(facts),
            "the driver (CUDA 13.0) cannot compile the PTX of this program (CUDA 13.1) for NVIDIA "
            "GeForce RTX 5090 "
            "(compute capability 12.0): update the driver, or configure with "
            "-DCMAKE_CUDA_ARCHITECTURES=120-real");
}

TEST(CudaSupport, NoCardVisible) {
  EXPECT_EQ(why_no_usable_card(facts_of({})),
            "no card is visible to CUDA; see nvidia-smi and CUDA_VISIBLE_DEVICES");
}

TEST(CudaSupport, CudaDoesNotStart) {
  CudaFacts facts = facts_of({});
  facts.count_error = "system not yet initialized (cudaErrorSystemNotReady)";
  EXPECT_EQ(why_no_usable_card(facts),
            "CUDA does not start: system not yet initialized (cudaErrorSystemNotReady) (driver for "
            "CUDA 13.0, "
            "runtime 13.0); see nvidia-smi");
}

TEST(CudaSupport, CardBelowTheOldestCapability) {
  EXPECT_EQ(why_no_usable_card(facts_of({kT4})),
            "Tesla T4 (compute capability 7.5) is too old: the kernels need 8.0 or newer, for "
            "cp.async and bf16");
  EXPECT_EQ(usable_card(facts_of({kT4, kT4})), -1);
  EXPECT_NE(why_no_usable_card(facts_of({kT4, kT4})).find("the first of 2 cards"),
            std::string::npos);
}

TEST(CudaSupport, NoCodeForTheCardNamesBoth) {
  EXPECT_EQ(why_no_usable_card(facts_of({{"NVIDIA GB10", 121, Probe::no_code, "no kernel image"}})),
            "this program has no code for NVIDIA GB10 (compute capability 12.1): it was built for "
            "80-real 80-virtual "
            "90a-real; configure with -DCMAKE_CUDA_ARCHITECTURES=121");
}

TEST(CudaSupport, CardInUseOrBroken) {
  const std::string busy = why_no_usable_card(
      facts_of({{"NVIDIA H200", 90, Probe::unavailable, "busy or unavailable"}}));
  EXPECT_NE(busy.find("not available to this process: busy or unavailable"), std::string::npos)
      << busy;
  const std::string broken = why_no_usable_card(
      facts_of({{"NVIDIA H200", 90, Probe::failed_otherwise, "uncorrectable ECC error"}}));
  EXPECT_EQ(broken, "NVIDIA H200 (compute capability 9.0) cannot be used: uncorrectable ECC error");
}

TEST(CudaSupport, StageOfOneArchitecture) {
  DeviceInfo card;
  card.name = "NVIDIA A100";
  card.capability = 80;
  EXPECT_EQ(why_capability_unfit(80, false, card), "");
  EXPECT_EQ(why_capability_unfit(90, true, card),
            "needs compute capability 9.0, found 8.0 (NVIDIA A100)");
  EXPECT_EQ(why_capability_unfit(90, false, card),
            "needs compute capability 9.0 or newer, found 8.0 (NVIDIA A100)");
  card.name = "NVIDIA B200";
  card.capability = 100;
  EXPECT_EQ(why_capability_unfit(80, false, card), "");
  EXPECT_EQ(why_capability_unfit(90, true, card),
            "needs compute capability 9.0, found 10.0 (NVIDIA B200)");
}

TEST(CudaSupport, LaunchLimitsSayNeededAndAvailable) {
  LaunchLimits limits;
  limits.capability = 90;
  limits.max_block = 512;
  limits.static_smem = 1024;
  limits.max_smem = 232448;
  EXPECT_EQ(why_launch_refused("k", 1, 512, 231424, limits), "");
  EXPECT_EQ(why_launch_refused("k", 2147483647, 1, 0, limits), "");
  EXPECT_EQ(why_launch_refused("k", 1, 128, 231425, limits),
            "k needs 232449 bytes of shared memory a block; 232448 are available at compute "
            "capability 9.0");
  EXPECT_EQ(why_launch_refused("k", 1, 513, 0, limits),
            "k: a block of 513 threads was asked for; 1 to 512 are allowed");
  EXPECT_EQ(why_launch_refused("k", 2147483648, 128, 0, limits),
            "k: a grid of 2147483648 blocks was asked for; 1 to 2147483647 are allowed");
  EXPECT_NE(why_launch_refused("k", -1, 128, 0, limits), "");
  EXPECT_NE(why_launch_refused("k", 1, 0, 0, limits), "");
  EXPECT_NE(why_launch_refused("k", 1, 32, -1, limits), "");
}

TEST(CudaSupport, OutOfMemorySaysAskedFreeAndTotal) {
  EXPECT_EQ(out_of_memory_message("S", int64_t{1} << 40, int64_t{3} << 29, int64_t{141} << 30),
            "not enough device memory for S: needs 1.00 TiB, 1.50 GiB of 141.0 GiB are free; use a "
            "smaller batch "
            "or sequence");
}

TEST(CudaSupport, FailuresSayWhatToDo) {
  const std::string fault = cuda_failure_message(CudaFailure::fault, "running on the card",
                                                 "an illegal memory access", "90a-real");
  EXPECT_NE(fault.find("compute-sanitizer"), std::string::npos) << fault;
  EXPECT_NE(fault.find("every later call"), std::string::npos) << fault;
  const std::string no_code =
      cuda_failure_message(CudaFailure::no_code, "launch of k", "no kernel image", "90a-real");
  EXPECT_NE(no_code.find("built for 90a-real"), std::string::npos) << no_code;
  EXPECT_EQ(cuda_failure_message(CudaFailure::other, "launch of k", "words", ""),
            "launch of k: words");
}

TEST(CudaSupport, EveryMessageIsOneLine) {
  for (const Probe probe :
       {Probe::no_code, Probe::ptx_too_new, Probe::unavailable, Probe::failed_otherwise}) {
    const std::string message = why_no_usable_card(facts_of({{"card", 90, probe, "words"}}));
    EXPECT_FALSE(message.empty());
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
  }
}

TEST(CudaSupport, SizesAndVersions) {
  EXPECT_EQ(size_name(0), "0 bytes");
  EXPECT_EQ(size_name(1023), "1023 bytes");
  EXPECT_EQ(size_name(49152), "48.0 KiB");
  EXPECT_EQ(size_name(int64_t{1} << 30), "1.00 GiB");
  EXPECT_EQ(cuda_version_name(12040), "12.4");
  EXPECT_EQ(capability_name(120), "12.0");
}

TEST(CudaSupport, KernelNames) {
  EXPECT_EQ(short_kernel_name(
                "void flashsteps::cuda_target::(anonymous namespace)::scores_kernel<__half, "
                "64>(flashsteps::Problem, __half const*)"),
            "scores_kernel<__half, 64>");
  EXPECT_EQ(short_kernel_name("flashsteps::k(int (*)(int))"), "k");
  EXPECT_EQ(short_kernel_name("void a::k<b::c<(int)3>, 1>(int)"), "k<b::c<(int)3>, 1>");
  EXPECT_EQ(short_kernel_name("k"), "k");
}

TEST(CudaSupport, ProbeAgreesWithTheDevice) {
  const std::string reason = why_no_cuda();
  if (reason.empty()) {
    EXPECT_EQ(make_cuda_device()->info().target, Target::cuda);
    return;
  }
  try {
    make_cuda_device();
    FAIL() << "a device was made, although " << reason;
  } catch (const DeviceError& error) {
    EXPECT_EQ(error.what(), reason);
  }
}

TEST(CudaSupport, NothingWasLaunchedWithoutACard) {
  const std::string reason = why_no_cuda();
  if (reason.empty()) GTEST_SKIP() << "there is a usable card";
  try {
    last_launched_kernel();
    FAIL() << "a kernel was launched, although " << reason;
  } catch (const DeviceError& error) {
    EXPECT_EQ(error.what(), reason);
  }
}

// Runs in a process of its own, where CUDA has not started yet; on a machine with a card it is
// hidden.
TEST(CudaSupportDeathTest, HiddenCardsAreNoCards) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        setenv("CUDA_VISIBLE_DEVICES", "", 1);
        std::fprintf(stderr, "reason: %s\n", why_no_cuda());
        std::exit(*why_no_cuda() == '\0' ? 1 : 0);
      },
      testing::ExitedWithCode(0),
      "reason: (no card is visible|no CUDA driver|this program was built without)");
}

}  // namespace
}  // namespace flashsteps
