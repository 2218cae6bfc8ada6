// The statistics of timings by hand, the plan within its bounds, and no time without a card.
#include "common/timing/timing.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "common/attention/work.h"
#include "common/timing/statistics.h"
#include "tests/timing_fakes.h"

namespace flashsteps {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

TEST(Statistics, Percentiles) {
  EXPECT_DOUBLE_EQ(median({3, 1, 2}), 2);
  EXPECT_DOUBLE_EQ(median({4, 1, 2, 3}), 2.5);
  EXPECT_DOUBLE_EQ(median({7}), 7);
  // numpy.percentile([15, 20, 35, 40, 50], [10, 40, 90]) is 17, 29, 46.
  const std::vector<double> values = {50, 15, 40, 20, 35};
  EXPECT_DOUBLE_EQ(percentile(values, 0.1), 17);
  EXPECT_DOUBLE_EQ(percentile(values, 0.4), 29);
  EXPECT_DOUBLE_EQ(percentile(values, 0.9), 46);
  EXPECT_DOUBLE_EQ(percentile(values, 0), 15);
  EXPECT_DOUBLE_EQ(percentile(values, 1), 50);
}

TEST(Statistics, RefusesWhatHasNoMedian) {
  EXPECT_THROW(median({}), std::invalid_argument);
  EXPECT_THROW(median({1, kNaN, 2}), std::invalid_argument);
  EXPECT_THROW(median({1, INFINITY}), std::invalid_argument);
  EXPECT_THROW(percentile({1}, -0.1), std::invalid_argument);
  EXPECT_THROW(percentile({1}, 1.1), std::invalid_argument);
  EXPECT_THROW(percentile({1}, kNaN), std::invalid_argument);
}

TEST(Statistics, RatioIsTakenRoundByRound) {
  // The card slows down twofold during the run; the ratio does not notice, though the ratio of
  // medians would.
  EXPECT_DOUBLE_EQ(median_ratio({2, 2, 4, 4, 4}, {1, 1, 2, 2, 2}), 2);
  EXPECT_DOUBLE_EQ(median_ratio({1, 10, 1}, {1, 1, 2}), 1);
  EXPECT_THROW(median_ratio({1, 2}, {1}), std::invalid_argument);
  EXPECT_THROW(median_ratio({1}, {0}), std::invalid_argument);
  EXPECT_THROW(median_ratio({}, {}), std::invalid_argument);
}

TEST(Statistics, SpeedupNamesItsDirection) {
  InterleavedResult result;
  result.round_ms = {{1, 1, 1}, {2, 3, 4}};
  EXPECT_DOUBLE_EQ(result.speedup(0, 1), 3);  // stage 0 is three times as fast as stage 1
  EXPECT_DOUBLE_EQ(result.speedup(1, 0), 1. / 3);
  EXPECT_THROW(result.speedup(0, 2), std::out_of_range);
}

TEST(Statistics, Summary) {
  const TimeResult result = summarize({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, 8);
  EXPECT_DOUBLE_EQ(result.median_ms, 6);
  EXPECT_DOUBLE_EQ(result.p10_ms, 2);
  EXPECT_DOUBLE_EQ(result.p90_ms, 10);
  EXPECT_EQ(result.reps, 11);
  EXPECT_EQ(result.launches, 8);
}

TEST(MeasurementPlan, LastsLongEnoughWithinItsBounds) {
  const TimingOptions options;
  // 0.1 ms: 200 launches make 20 ms, 20 measurements make 400 ms.
  MeasurementPlan plan = plan_measurements(0.1, options);
  EXPECT_EQ(plan.launches, 200);
  EXPECT_EQ(plan.reps, 20);
  plan = plan_measurements(3, options);
  EXPECT_EQ(plan.launches, 7);
  EXPECT_EQ(plan.reps, 19);
  // A slow stage: one launch, and no fewer measurements than min_reps, whatever the budget says.
  plan = plan_measurements(1000, options);
  EXPECT_EQ(plan.launches, 1);
  EXPECT_EQ(plan.reps, options.min_reps);
  // A fast one: no more launches than a stream holds, no more measurements than max_reps.
  for (const double ms : {1e-3, 1e-9, 0.}) {
    plan = plan_measurements(ms, options);
    EXPECT_EQ(plan.launches, options.max_launches);
    EXPECT_EQ(plan.reps, options.max_reps);
  }
}

TEST(RotatingSets, ExceedTheCacheWithinMemory) {
  const int64_t mib = 1 << 20, gib = 1 << 30;
  EXPECT_EQ(rotating_sets(100 * mib, 140 * mib, 50 * mib, 30 * gib), 2)
      << "never the same set twice running";
  EXPECT_EQ(rotating_sets(10 * mib, 14 * mib, 50 * mib, 30 * gib), 6) << "60 MiB exceed 50";
  EXPECT_EQ(rotating_sets(1, 1, 50 * mib, 30 * gib), 256) << "bounded";
  EXPECT_EQ(rotating_sets(10 * mib, 20 * mib, 50 * mib, 40 * mib), 2) << "bounded by memory";
  EXPECT_EQ(rotating_sets(8 * gib, 12 * gib, 50 * mib, 1 * gib), 1)
      << "one, even where memory seems short";
}

TEST(Tflops, CountsVisiblePairsOnly) {
  Problem p;
  p.batch = 2;
  p.heads = 3;
  p.head_dim = 64;
  p.seqlen_q = p.seqlen_k = 4096;
  // 4 * 2 * 3 * 64 * 4096^2 FLOPs in 1 ms
  EXPECT_NEAR(forward_tflops(p, 1), 25.769803776, 1e-9);
  p.causal = true;  // 8,390,656 pairs
  EXPECT_NEAR(forward_tflops(p, 1), 12.888047616, 1e-9);
  EXPECT_NEAR(tflops_of(backward_flops(p), 1), 2.5 * 12.888047616, 1e-9);
}

TEST(Ceilings, FiguresAboveAreFlagged) {
  Ceilings ceilings;
  EXPECT_EQ(above_ceiling_note(1e9, ceilings), "") << "nothing to compare with";
  ceilings.matmul_tflops = 700;
  EXPECT_EQ(above_ceiling_note(700, ceilings), "");
  const std::string note = above_ceiling_note(701, ceilings);
  EXPECT_NE(note.find("701"), std::string::npos) << note;
  EXPECT_NE(note.find("700"), std::string::npos) << note;
}

/// A device that is no card, and on which nothing may be done.
class NoCard : public Device {
 public:
  DeviceInfo info() const override { return {}; }
  void* allocate(const char*, DType, int64_t) override { throw std::logic_error("used"); }
  void release(void*) override {}
  void upload(void*, const void*, size_t) override { throw std::logic_error("used"); }
  void download(void*, const void*, size_t) override { throw std::logic_error("used"); }
  void poison(void*, size_t) override { throw std::logic_error("used"); }
  void synchronize() override { throw std::logic_error("used"); }
};

TEST(Timing, TheModelHasNoTime) {
  NoCard model;
  const Stage stage =
      fake_stage([](const Problem&, const ForwardArgs&, Stream) { FAIL() << "was run"; });
  EXPECT_THROW(time_forward(model, stage, small_problem()), DeviceError);
  EXPECT_THROW(time_lse(model, stage, small_problem()), DeviceError);
  EXPECT_THROW(time_forward_interleaved(model, {&stage, &stage}, small_problem()), DeviceError);
  const Stage backward =
      fake_backward_stage([](const Problem&, const GradientStrides&, const BackwardArgs&, Stream) {
        FAIL() << "was run";
      });
  EXPECT_THROW(time_backward(model, backward, small_problem(), &stage), DeviceError);
  EXPECT_THROW(time_backward_interleaved(model, {&backward}, small_problem(), nullptr),
               DeviceError);
  EXPECT_THROW(measure_ceilings(model), DeviceError);
}

}  // namespace
}  // namespace flashsteps
