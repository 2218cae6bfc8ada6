// Every planted fault is diagnosed, by its kind and by the name of the array, on 20 of 20 seeds;
// what CUDA refuses to launch is refused with the numbers.
#include <algorithm>
#include <cmath>

#include "tests/model_test_support.h"

namespace flashsteps::test {
namespace {

using model::Fault;
using enum model::FaultKind;

constexpr int kThreads = 64;

struct Planted {
  const char* kernel;
  std::vector<model::FaultKind> kinds;  // which, depends on who is first
  std::vector<const char*> words;       // all in the message
  int n = 0;
};

void PrintTo(const Planted& p, std::ostream* out) {
  *out << p.kernel << "/" << p.n;
}

class PlantedFault : public testing::TestWithParam<Planted> {};

TEST_P(PlantedFault, IsDiagnosedOn20Of20Seeds) {
  const Planted& p = GetParam();
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    const WithOptions options(seed, 1);
    DeviceBuffer in = buffer("in", ramp(kThreads * 4));
    DeviceBuffer out(model_device(), "out", DType::fp32, kThreads);
    model::take_ledger();
    const std::optional<Fault> fault =
        fault_of(p.kernel, {.in = in.data(), .out = out.data(), .n = p.n});
    ASSERT_TRUE(fault) << "not noticed at seed " << seed;
    const std::string text = fault->what();
    EXPECT_NE(std::find(p.kinds.begin(), p.kinds.end(), fault->kind()), p.kinds.end()) << text;
    for (const char* word : p.words)
      EXPECT_NE(text.find(word), std::string::npos) << word << " is not in: " << text;
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
    EXPECT_EQ(model::take_ledger().launches, 0) << "a faulty launch counts nothing";
    if (seed == 1) std::printf("%s\n", text.c_str());

    // The same seed, the same run: on two workers too.
    const WithOptions again(seed, 2);
    const std::optional<Fault> repeated =
        fault_of(p.kernel, {.in = in.data(), .out = out.data(), .n = p.n});
    ASSERT_TRUE(repeated);
    EXPECT_EQ(repeated->what(), text);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Turns, PlantedFault,
    testing::Values(
        Planted{
            "turn_never_comes", {deadlock}, {"waits at turn_wait", "for turn 1", "turn 0 is on"}},
        Planted{"turn_not_waited_for", {turn}, {"turn_pass", "has not waited for"}},
        Planted{"turn_passed_twice", {turn}, {"turn_pass", "has not waited for"}},
        Planted{"different_turns", {turn}, {"lanes of the warp wait for different turns"}},
        Planted{"misaligned_quad", {misaligned}, {"atomic_add_quad", "not a multiple of 16"}}));

INSTANTIATE_TEST_SUITE_P(
    Barriers, PlantedFault,
    testing::Values(
        Planted{"read_after_write", {race}, {"read_after_write block (0,0,0) thread", "tile+"}},
        Planted{"write_after_read", {race}, {"tile+"}},
        Planted{"write_after_write", {race}, {"overwrites tile+", "written by thread"}},
        Planted{"warp_read_after_write", {race}, {"buffer_smem["}},
        Planted{"warp_write_after_read", {race}, {"buffer_smem["}},
        Planted{"warp_write_after_all_read", {race}, {"overwrites buffer_smem[", "read by warp"}},
        Planted{"wide_read_after_write", {race}, {"reads buffer_smem["}},
        Planted{"shuffle_is_no_barrier", {race}, {"reads buffer_smem["}},
        Planted{"warp_barrier_for_block", {race}, {"tile+"}},
        Planted{"ldmatrix_without_barrier", {race}, {"ldmatrix reads rows_smem["}},
        Planted{"atomic_and_plain", {race}, {"sum+0 bytes"}},
        Planted{"divergent_barriers", {divergence}, {"__syncthreads", "tests/kernels/planted.cu:"}},
        Planted{"ended_before_barrier",
                {deadlock},
                {"threads 17 ended",
                 "threads 0-16 18-63 wait at __syncthreads (tests/kernels/planted.cu:"}},
        Planted{"ended_before_shuffle",
                {deadlock},
                {"threads 0-31 40 ended", "wait at __shfl_xor_sync (tests/kernels/planted.cu:"}},
        Planted{"divergent_shuffles", {divergence}, {"__shfl_xor_sync (tests/kernels/planted.cu:"}},
        Planted{"partial_mask", {mask}, {"__shfl_xor_sync", "0x0000ffff"}},
        Planted{"wrong_width", {mask}, {"width 12", "allowed"}}));

INSTANTIATE_TEST_SUITE_P(
    Copies, PlantedFault,
    testing::Values(
        Planted{"copy_no_commit",
                {in_flight},
                {"reads stage_smem[", "cp.async of thread",
                 "tests/kernels/planted.cu:", "not committed"}},
        Planted{"copy_no_wait",
                {in_flight},
                {"reads stage_smem[", "tests/kernels/planted.cu:", "no wait covers it"}},
        Planted{"copy_too_early", {in_flight}, {"reads stage_smem[", "no wait covers it"}},
        Planted{"copy_no_barrier", {race, in_flight}, {"stage_smem[", "cp.async"}},
        Planted{"copy_overwrites", {race, in_flight}, {"stage_smem[", "cp.async"}},
        Planted{"copy_never_waited", {never_waited}, {"stage_smem[", "tests/kernels/planted.cu:"}},
        Planted{"copies_from_outside", {out_of_bounds}, {"in[", "in has 256 fp32 elements"}, 1024},
        Planted{"misaligned_copy", {misaligned}, {"cp.async", "stage_smem["}}));

INSTANTIATE_TEST_SUITE_P(
    Bounds, PlantedFault,
    testing::Values(
        Planted{"global_read_at",
                {out_of_bounds},
                {"reads 4 bytes at in[256]; in has 256 fp32 elements"},
                256 - 63},
        Planted{"global_read_at", {out_of_bounds}, {"reads 4 bytes at in[-1]"}, -1},
        Planted{"global_read_at", {out_of_bounds}, {"reads 4 bytes at in["}, 100'000'000},
        Planted{"global_read_at", {out_of_bounds}, {"reads 4 bytes at in[-"}, -100'000'000},
        Planted{"global_write_at",
                {out_of_bounds},
                {"writes 4 bytes at out[64]; out has 64 fp32 elements"},
                1},
        Planted{"global_write_at", {out_of_bounds}, {"writes 4 bytes at out[-1]"}, -1},
        Planted{"global_vector_read_at", {out_of_bounds}, {"reads 16 bytes at in[256]"}, 256},
        Planted{"atomic_at", {out_of_bounds}, {"atomicAdd on 4 bytes at out[64]"}, 64},
        Planted{"static_shared_at", {out_of_bounds}, {"tile+256 bytes", "tile has 256 bytes"}, 1},
        Planted{"static_shared_at", {out_of_bounds}, {"tile-4 bytes"}, -1},
        Planted{"dynamic_shared_at",
                {out_of_bounds},
                {"reads 4 bytes at buffer_smem[64]", "256 bytes of dynamic shared memory"},
                1},
        Planted{"dynamic_shared_at",
                {out_of_bounds},
                {"reads 4 bytes at dynamic shared memory-4 bytes"},
                -1},
        Planted{"takes_too_much", {out_of_bounds}, {"second_smem", "256 bytes"}}));

INSTANTIATE_TEST_SUITE_P(
    Values, PlantedFault,
    testing::Values(Planted{"reads_unwritten_shared",
                            {uninitialised},
                            {"thread 5 (warp 0 lane 5)", "tile+20 bytes"}},
                    Planted{"reads_unwritten_global", {uninitialised}, {"reads 4 bytes at out["}},
                    Planted{"atomic_at", {uninitialised}, {"atomicAdd on 4 bytes at out[3]"}, 3},
                    Planted{"misaligned_global", {misaligned}, {"reads 16 bytes of in"}},
                    Planted{"misaligned_shared", {misaligned}, {"reads 8 bytes of buffer_smem["}},
                    Planted{"misaligned_ldmatrix", {misaligned}, {"ldmatrix", "rows_smem["}},
                    Planted{"byte_of_shared", {unsupported}, {"1 byte of bytes_smem["}},
                    Planted{
                        "throws", {exception}, {"thread 3 (warp 0 lane 3)", "thrown by the test"}},
                    Planted{"left_to_the_student",
                            {missing_part},
                            {"NOT IMPLEMENTED: 06: divide once (tests/kernels/planted.cu:"}}));

// Of several faulty blocks the first is told, whichever comes to its fault first.
TEST(Faults, TheFirstFaultyBlockIsTold) {
  constexpr int kBlocks = 12, kFirst = 5;
  DeviceBuffer in = buffer("in", ramp(kThreads));
  DeviceBuffer out(model_device(), "out", DType::fp32, kBlocks * kThreads);
  for (const char* kernel : {"later_blocks_fault_first_slow", "later_blocks_fault_second_slow"}) {
    for (const int workers : {1, 2, 3, 4}) {
      const WithOptions options(1, workers);
      const std::optional<Fault> fault =
          fault_of(kernel, {.in = in.data(), .out = out.data(), .n = kFirst, .blocks = kBlocks});
      ASSERT_TRUE(fault);
      EXPECT_NE(std::string(fault->what()).find("block (5,0,0)"), std::string::npos)
          << fault->what() << ", " << workers << " workers";
    }
  }
}

TEST(Faults, HostMemoryAndNullPointers) {
  std::vector<float> host = ramp(kThreads);
  DeviceBuffer in = buffer("in", host);
  DeviceBuffer out(model_device(), "out", DType::fp32, kThreads);
  const auto check = [](const std::optional<Fault>& fault, const char* word) {
    ASSERT_TRUE(fault);
    EXPECT_EQ(fault->kind(), host_memory) << fault->what();
    EXPECT_NE(std::string(fault->what()).find(word), std::string::npos) << fault->what();
  };
  check(fault_of("reads_through", {.in = host.data(), .out = out.data()}),
        "reads 4 bytes of host memory");
  check(fault_of("writes_through", {.in = in.data(), .out = host.data()}),
        "writes 4 bytes of host memory");
  check(fault_of("reads_through", {.in = nullptr, .out = out.data()}), "a null pointer");
  // Constants of the program may be read, but not written.
  static const float constants[kThreads] = {1.f, 2.f, 3.f};
  float* const unwritable = const_cast<float*>(constants);
  EXPECT_FALSE(fault_of("reads_through", {.in = unwritable, .out = out.data()}));
  EXPECT_EQ(download<float>(out)[1], 2.f);
  check(fault_of("writes_through", {.in = in.data(), .out = unwritable}),
        "writes 4 bytes of host memory");
}

TEST(Faults, HostCodeThatTouchesDeviceMemory) {
  std::vector<float> host(kThreads, 1.f);
  DeviceBuffer in = buffer("in", host);
  DeviceBuffer out(model_device(), "out", DType::fp32, kThreads);
  float extra = 0.f;
  const KernelArgs args{.in = in.data(), .out = out.data(), .extra = &extra, .n = 3};
  const auto check = [&](const char* kernel, const char* words) {
    const std::optional<Fault> fault = fault_of(kernel, args);
    ASSERT_TRUE(fault) << kernel;
    EXPECT_EQ(fault->kind(), host_memory);
    EXPECT_NE(std::string(fault->what()).find(words), std::string::npos) << fault->what();
  };
  for (const bool after_a_launch : {false, true}) {
    if (after_a_launch) run_on_model("reads_through", args);
    check("host_reads_device", "host code: HOST MEMORY: reads 4 bytes of the device buffer in");
    check("host_writes_device", "host code: HOST MEMORY: writes 4 bytes of the device buffer out");
    EXPECT_FALSE(fault_of("host_writes_extra", args));
  }
  // Watched, it writes to its stack and to its static variables alone.
  const auto here = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  static float statics, elsewhere;
  KernelArgs own = args, other = args;
  own.extra = &statics;
  other.extra = &elsewhere;
  const auto begin = reinterpret_cast<uintptr_t>(&statics);
  model::watch_host_code(
      model::HostMemory{here - 65536, here + 4096, begin, begin + sizeof(statics)});
  EXPECT_FALSE(fault_of("host_writes_extra", args));
  EXPECT_FALSE(fault_of("host_writes_extra", own));
  const std::optional<Fault> fault = fault_of("host_writes_extra", other);
  check("host_reads_device", "of the device buffer in");
  model::watch_host_code(std::nullopt);
  ASSERT_TRUE(fault);
  EXPECT_NE(std::string(fault->what()).find("writes 4 bytes at 0x"), std::string::npos);
  EXPECT_EQ(statics, 1.f);
  EXPECT_EQ(elsewhere, 0.f);
  EXPECT_FALSE(fault_of("host_writes_extra", other));
}

TEST(Faults, ReleasedBuffers) {
  DeviceBuffer out(model_device(), "out", DType::fp32, kThreads);
  void* stale = nullptr;
  {
    DeviceBuffer gone = buffer("gone", ramp(kThreads));
    stale = gone.data();
  }
  const std::optional<Fault> fault = fault_of("reads_through", {.in = stale, .out = out.data()});
  ASSERT_TRUE(fault);
  EXPECT_EQ(fault->kind(), out_of_bounds);
  EXPECT_NE(std::string(fault->what()).find("reads 4 bytes at gone["), std::string::npos);
  EXPECT_NE(std::string(fault->what()).find("], which has been released"), std::string::npos)
      << fault->what();
}

TEST(Faults, PoisonForgetsWhatWasWritten) {
  DeviceBuffer in = buffer("in", ramp(kThreads));
  DeviceBuffer out(model_device(), "out", DType::fp32, kThreads);
  const KernelArgs args{.in = in.data(), .out = out.data()};
  EXPECT_FALSE(fault_of("reads_through", args));
  EXPECT_EQ(download<float>(out), ramp(kThreads));
  in.poison();
  const std::optional<Fault> fault = fault_of("reads_through", args);
  ASSERT_TRUE(fault);
  EXPECT_EQ(fault->kind(), uninitialised);
  for (const uint32_t bits : download<uint32_t>(in)) EXPECT_EQ(bits, 0xffffffffu);
  // A kernel's writes, and part of an upload, make memory readable; the rest of it stays unwritten.
  model_device().upload(in.data(), ramp(kThreads).data(), 10 * sizeof(float));
  const std::optional<Fault> partly = fault_of("reads_through", args);
  ASSERT_TRUE(partly);
  EXPECT_NE(std::string(partly->what()).find("in["), std::string::npos);
  EXPECT_FALSE(fault_of("writes_through", {.in = out.data(), .out = in.data()}));
  EXPECT_FALSE(fault_of("reads_through", args));
}

TEST(Faults, TheModelGoesOnAfterAFault) {
  DeviceBuffer in = buffer("in", ramp(kThreads * 4));
  DeviceBuffer out(model_device(), "out", DType::fp32, kThreads);
  for (int i = 0; i < 10; ++i) {
    EXPECT_TRUE(fault_of("ended_before_barrier", {.in = in.data(), .out = out.data()}));
    EXPECT_FALSE(fault_of("reads_through", {.in = in.data(), .out = out.data()}));
  }
}

void expect_refused(const char* kernel, int n, const std::string& why) {
  DeviceBuffer in = buffer("in", ramp(kThreads));
  DeviceBuffer out(model_device(), "out", DType::fp32, kThreads);
  try {
    run_on_model(kernel, {.in = in.data(), .out = out.data(), .n = n});
    ADD_FAILURE() << kernel << " was not refused";
  } catch (const DeviceError& e) {
    EXPECT_NE(std::string(e.what()).find(why), std::string::npos) << e.what();
  }
}

TEST(Refused, Launches) {
  expect_refused("threads", 1056,
                 "launch of does_nothing: blocks of 1056 threads; 1 to 1024 are allowed");
  expect_refused("threads", 48,
                 "blocks of 48 threads; the CPU model takes whole warps, multiples of 32");
  expect_refused("threads", 0, "blocks of 0 threads");
  expect_refused("blocks", 2'097'152, "a grid of 2147483648 blocks; 0 to 2147483647 are allowed");
  expect_refused("dynamic_bytes", -1, "-1 bytes of dynamic shared memory");
  expect_refused("dynamic_bytes", 227 * 1024 + 1,
                 "needs 232449 bytes of shared memory per block (232449 dynamic, 0 static), the "
                 "card has 232448");
  expect_refused("static_and_dynamic_bytes", 227 * 1024 - 32 * 1024 + 1,
                 "(199681 dynamic, 32768 static)");
  expect_refused("static_bytes", 0, "49156 bytes of static shared memory; CUDA allows 49152");
}

TEST(Refused, ACardWithLessSharedMemory) {
  model::Options small;
  small.shared_memory_per_block = 99 * 1024;
  const WithOptions options(small);
  expect_refused("dynamic_bytes", 100 * 1024, "the card has 101376");
}

TEST(Refused, Options) {
  const auto refused = [](auto change) {
    model::Options o;
    change(o);
    EXPECT_THROW(model::set_options(o), std::invalid_argument);
  };
  refused([](model::Options& o) { o.workers = -1; });
  refused([](model::Options& o) { o.shared_memory_per_block = 256 * 1024 + 1; });
  refused([](model::Options& o) { o.multiprocessors = 0; });
  refused([](model::Options& o) { o.preempt = 1.5; });
  refused([](model::Options& o) { o.preempt = NAN; });
}

TEST(Refused, CopiesThatLeaveABuffer) {
  DeviceBuffer b(model_device(), "b", DType::fp16, 100);
  std::vector<char> host(300);
  EXPECT_THROW(model_device().upload(b.data(), host.data(), 201), std::invalid_argument);
  EXPECT_THROW(model_device().download(host.data(), static_cast<char*>(b.data()) + 100, 101),
               std::invalid_argument);
  EXPECT_THROW(model_device().poison(host.data(), 1), std::invalid_argument);
  EXPECT_THROW(model_device().release(static_cast<char*>(b.data()) + 2), std::invalid_argument);
  EXPECT_THROW(model_device().allocate("b", DType::fp16, -1), std::invalid_argument);
}

}  // namespace
}  // namespace flashsteps::test
