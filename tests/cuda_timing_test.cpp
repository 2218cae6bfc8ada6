// Timings are what they claim to be: kernels of a known duration are measured to a few per cent,
// what the host costs stays outside, inputs rotate and are random.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "common/gpu/cuda_support.h"
#include "common/reference/float16.h"
#include "common/timing/timing.h"
#include "tests/device_kernels.h"
#include "tests/timing_fakes.h"

namespace flashsteps {
namespace {

class TimingOnCuda : public testing::Test {
 protected:
  void SetUp() override {
    if (*why_no_cuda() != '\0') GTEST_SKIP() << "no usable card: " << why_no_cuda();
    device_ = make_cuda_device();
  }
  std::unique_ptr<Device> device_;
};

void busy_200us(const Problem&, const ForwardArgs&, Stream) {
  busy_for(200'000);
}
void busy_400us(const Problem&, const ForwardArgs&, Stream) {
  busy_for(400'000);
}

TEST_F(TimingOnCuda, cuda_known_durations) {
  const Stage half = fake_stage(busy_200us), whole = fake_stage(busy_400us);
  const TimeResult alone = time_forward(*device_, half, small_problem());
  // The card's clock ticks once a microsecond, and a launch adds one or two.
  EXPECT_GE(alone.median_ms, 0.198);
  EXPECT_LE(alone.median_ms, 0.210);
  EXPECT_LE(alone.p10_ms, alone.median_ms);
  EXPECT_GE(alone.p90_ms, alone.median_ms);
  EXPECT_GE(alone.reps, 3);
  EXPECT_FALSE(alone.host_bound);
  const InterleavedResult both =
      time_forward_interleaved(*device_, {&half, &whole}, small_problem());
  ASSERT_EQ(both.round_ms.size(), 2u);
  EXPECT_EQ(both.round_ms[0].size(), 5u);
  EXPECT_NEAR(both.speedup(0, 1), 2, 0.05);
}

void wait_on_host(int microseconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(microseconds);
  while (std::chrono::steady_clock::now() < end) {
  }
}

TEST_F(TimingOnCuda, cuda_host_cost_is_hidden) {
  const Stage slow_to_launch = fake_stage([](const Problem&, const ForwardArgs&, Stream) {
    wait_on_host(20);
    busy_for(5'000);
  });
  const TimeResult result = time_forward(*device_, slow_to_launch, small_problem());
  EXPECT_LT(result.median_ms, 0.012) << "the 20 us that the host takes to launch are in the time";
  EXPECT_FALSE(result.host_bound);
}

TEST_F(TimingOnCuda, cuda_host_cost_that_cannot_be_hidden_is_told) {
  const Stage slower = fake_stage([](const Problem&, const ForwardArgs&, Stream) {
    wait_on_host(100);
    busy_for(5'000);
  });
  TimingOptions options;
  options.max_reps = 3;
  options.warmup_ms = 1;
  EXPECT_TRUE(time_forward(*device_, slower, small_problem(), options).host_bound);
}

std::set<const void*> queries_seen, outputs_seen;

TEST_F(TimingOnCuda, cuda_inputs_rotate) {
  queries_seen.clear();
  outputs_seen.clear();
  const Stage stage = fake_stage([](const Problem&, const ForwardArgs& args, Stream) {
    queries_seen.insert(args.Q);
    outputs_seen.insert(args.O);
    busy_for(10'000);
  });
  time_forward(*device_, stage, small_problem());
  // 96 KiB of inputs a set: any card's L2 holds more than 40 of them.
  EXPECT_GE(queries_seen.size(), 40u);
  EXPECT_EQ(outputs_seen.size(), queries_seen.size());
}

TEST_F(TimingOnCuda, cuda_inputs_are_random_normal) {
  static Device* device;
  static std::vector<uint16_t> q, k;
  device = device_.get();
  q.clear();
  const Stage stage = fake_stage([](const Problem& p, const ForwardArgs& args, Stream) {
    busy_for(10'000);
    if (!q.empty()) return;
    const size_t count = size_t(2 * 128 * p.head_dim);
    q.resize(count);
    k.resize(count);
    device->download(q.data(), args.Q, 2 * count);
    device->download(k.data(), args.K, 2 * count);
  });
  time_forward(*device_, stage, small_problem());
  ASSERT_FALSE(q.empty());
  EXPECT_NE(q, k);
  for (const auto& bits : {q, k}) {
    double sum = 0, squares = 0;
    int zeros = 0;
    for (const uint16_t b : bits) {
      const double x = from_bits(b, DType::fp16);
      sum += x;
      squares += x * x;
      zeros += x == 0;
    }
    const double n = double(bits.size());  // 16384: standard errors 0.008 and 0.011
    EXPECT_NEAR(sum / n, 0, 0.05);
    EXPECT_NEAR(squares / n, 1, 0.07);
    EXPECT_LE(zeros, 2);
  }
}

TEST_F(TimingOnCuda, cuda_variants_of_one_stage) {
  Stage stage = fake_stage(
      [](const Problem&, const ForwardArgs& args, Stream) { busy_for(args.tiles.Br * 1000); });
  stage.tiles = [](const Problem&) { return Tiles{200, 64}; };
  stage.candidates = [](const Problem&) -> TileList { return {2, {{200, 64}, {400, 64}}}; };
  const InterleavedResult times = time_forward_interleaved(
      *device_, {&stage, &stage}, small_problem(), {}, {{.tiles = {}}, {.tiles = {400, 64}}});
  EXPECT_NEAR(times.speedup(0, 1), 2, 0.05);
  ASSERT_EQ(times.kernel.size(), 2u);
  for (const KernelResources& kernel : times.kernel) {
    EXPECT_EQ(kernel.name, "busy_kernel");
    EXPECT_EQ(kernel.threads, 1);
    EXPECT_GE(kernel.blocks_per_multiprocessor, 1);
  }
  EXPECT_NEAR(time_forward(*device_, stage, small_problem(), {}, {.tiles = {400, 64}}).median_ms,
              0.4, 0.02);
  EXPECT_THROW(time_forward(*device_, stage, small_problem(), {}, {.tiles = {64, 64}}),
               std::invalid_argument);
  EXPECT_THROW(time_forward_interleaved(*device_, {&stage}, small_problem(), {}, {{}, {}}),
               std::invalid_argument);
}

TEST_F(TimingOnCuda, cuda_lse_is_timed_apart) {
  Stage stage = fake_stage(busy_200us);
  EXPECT_FALSE(time_lse(*device_, stage, small_problem()).has_value());
  stage.lse = busy_400us;
  const std::optional<TimeResult> lse = time_lse(*device_, stage, small_problem());
  ASSERT_TRUE(lse.has_value());
  EXPECT_NEAR(lse->median_ms, 0.4, 0.02);
}

int forward_runs = 0;
std::set<const void*> gradients_of_o_seen;
std::set<bool> deterministic_seen;

// Of the backward pass nothing but stage.backward is timed; O and L of every set are made before.
TEST_F(TimingOnCuda, cuda_backward_is_timed_alone) {
  const Stage forward = fake_stage([](const Problem&, const ForwardArgs&, Stream) {
    ++forward_runs;
    busy_for(1'000'000);
  });
  const Stage backward = fake_backward_stage(
      [](const Problem&, const GradientStrides&, const BackwardArgs& args, Stream) {
        gradients_of_o_seen.insert(args.dO);
        deterministic_seen.insert(args.deterministic);
        busy_for(200'000);
      });
  const InterleavedResult times =
      time_backward_interleaved(*device_, {&backward, &backward}, small_problem(), &forward, {},
                                {{}, {.deterministic = true}});
  EXPECT_GE(times.time[0].median_ms, 0.198);
  EXPECT_LE(times.time[0].median_ms, 0.210);
  EXPECT_NEAR(times.speedup(0, 1), 1, 0.05);
  EXPECT_GE(gradients_of_o_seen.size(), 2u);
  EXPECT_EQ(forward_runs, int(gradients_of_o_seen.size()));
  EXPECT_EQ(deterministic_seen, (std::set<bool>{false, true}));
  EXPECT_NEAR(time_backward(*device_, backward, small_problem(), nullptr).median_ms, 0.204, 0.006);
  EXPECT_EQ(forward_runs, int(gradients_of_o_seen.size())) << "no forward stage was given";
}

TEST_F(TimingOnCuda, cuda_nothing_to_time_is_refused) {
  const Stage stage = fake_stage(busy_200us);
  Problem p = small_problem();
  p.seqlen_k = 0;
  EXPECT_THROW(time_forward(*device_, stage, p), std::invalid_argument);
  TimingOptions options;
  options.rounds = 0;
  EXPECT_THROW(time_forward_interleaved(*device_, {&stage}, small_problem(), options),
               std::invalid_argument);
}

TEST_F(TimingOnCuda, cuda_ceilings_are_plausible) {
  const Ceilings ceilings = measure_ceilings(*device_);
  ASSERT_TRUE(ceilings.copy_tb_per_s.has_value());
  EXPECT_GT(*ceilings.copy_tb_per_s, 0.1);
  EXPECT_LT(*ceilings.copy_tb_per_s, 20);
  EXPECT_FALSE(ceilings.matmul_source.empty());
  if (!ceilings.matmul_tflops) GTEST_SKIP() << ceilings.matmul_source;
  EXPECT_GT(*ceilings.matmul_tflops, 20);
  EXPECT_LT(*ceilings.matmul_tflops, 5000);
}

}  // namespace
}  // namespace flashsteps
