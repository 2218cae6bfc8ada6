#include "common/timing/statistics.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "common/attention/work.h"

namespace flashsteps {

double percentile(std::vector<double> values, double p) {
  if (values.empty()) throw std::invalid_argument("percentile of no values");
  if (!(p >= 0 && p <= 1)) {
    throw std::invalid_argument(fmt::format("percentile: p is {}; allowed is 0 to 1", p));
  }
  for (double value : values) {
    if (!std::isfinite(value)) {
      throw std::invalid_argument(fmt::format("percentile: {} among the values", value));
    }
  }
  std::sort(values.begin(), values.end());
  const double position = p * double(values.size() - 1);
  const size_t below = size_t(position);
  const size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (position - double(below)) * (values[above] - values[below]);
}

double median(std::vector<double> values) {
  return percentile(std::move(values), 0.5);
}

double median_ratio(const std::vector<double>& numerator, const std::vector<double>& denominator) {
  if (numerator.size() != denominator.size()) {
    throw std::invalid_argument(fmt::format("ratio of {} rounds to {}: give as many of each",
                                            numerator.size(), denominator.size()));
  }
  std::vector<double> ratios;
  for (size_t r = 0; r < numerator.size(); ++r) {
    if (!(denominator[r] > 0)) {
      throw std::invalid_argument(
          fmt::format("ratio to {}: only above 0 is allowed", denominator[r]));
    }
    ratios.push_back(numerator[r] / denominator[r]);
  }
  return median(ratios);
}

TimeResult summarize(const std::vector<double>& ms, int launches) {
  TimeResult result;
  result.median_ms = median(ms);
  result.p10_ms = percentile(ms, 0.1);
  result.p90_ms = percentile(ms, 0.9);
  result.reps = int(ms.size());
  result.launches = launches;
  return result;
}

MeasurementPlan plan_measurements(double one_ms, const TimingOptions& options) {
  // Below the resolution of device events (0.5 us) an estimate says nothing.
  one_ms = std::max(one_ms, 5e-4);
  MeasurementPlan plan;
  plan.launches = int(
      std::clamp(std::ceil(options.measurement_ms / one_ms), 1.0, double(options.max_launches)));
  plan.reps = int(std::clamp(options.budget_ms / (plan.launches * one_ms), double(options.min_reps),
                             double(options.max_reps)));
  return plan;
}

int rotating_sets(int64_t input_bytes, int64_t set_bytes, int64_t cache_bytes,
                  int64_t memory_bytes) {
  constexpr int64_t kMost = 256;
  input_bytes = std::max<int64_t>(input_bytes, 1);
  set_bytes = std::max<int64_t>(set_bytes, 1);
  const int64_t wanted = std::clamp<int64_t>(cache_bytes / input_bytes + 1, 2, kMost);
  return int(std::clamp<int64_t>(memory_bytes / set_bytes, 1, wanted));
}

double InterleavedResult::speedup(size_t a, size_t b) const {
  return median_ratio(round_ms.at(b), round_ms.at(a));
}

double tflops_of(int64_t flops, double ms) {
  return double(flops) / (ms * 1e-3) / 1e12;
}

double forward_tflops(const Problem& problem, double ms) {
  return tflops_of(forward_flops(problem), ms);
}

std::string above_ceiling_note(double tflops, const Ceilings& ceilings) {
  if (!ceilings.matmul_tflops || tflops <= *ceilings.matmul_tflops) return "";
  return fmt::format(
      "{:.0f} TFLOP/s is above the {:.0f} that a large product reached in this run: suspect the "
      "clock, the "
      "FLOP count or the timing before you believe it",
      tflops, *ceilings.matmul_tflops);
}

}  // namespace flashsteps
