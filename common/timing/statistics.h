/// \file
/// The statistics of measurements, and how many to make. Pure functions.
#pragma once

#include <cstdint>
#include <vector>

#include "common/timing/timing.h"

namespace flashsteps {

/// The value below which a share `p` (0 to 1) of the values lie, interpolated linearly between
/// neighbours (Hyndman and Fan's type 7, as numpy.percentile).
///
/// \throws std::invalid_argument where there are no values, one is not finite, or p is not in [0,
/// 1]
double percentile(std::vector<double> values, double p);

/// percentile(values, 0.5).
double median(std::vector<double> values);

/// The median over rounds of numerator[r] / denominator[r].
/// \throws std::invalid_argument where the two differ in length or a denominator is not positive
double median_ratio(const std::vector<double>& numerator, const std::vector<double>& denominator);

/// Median and percentiles of measurements in milliseconds.
TimeResult summarize(const std::vector<double>& ms, int launches);

/// How many launches make a measurement, and how many measurements are made.
struct MeasurementPlan {
  int launches = 1;
  int reps = 1;
};

/// Both from an estimate of one launch, in milliseconds.
MeasurementPlan plan_measurements(double one_ms, const TimingOptions& options);

/// How many sets of inputs to rotate over: enough that their inputs exceed the cache, at least two,
/// at most 256; fewer where memory allows only fewer, but never less than one.
///
/// \param input_bytes read from one set
///
/// \param set_bytes memory that one set takes, outputs included
///
/// \param cache_bytes of the cache
///
/// \param memory_bytes that all sets may take
int rotating_sets(int64_t input_bytes, int64_t set_bytes, int64_t cache_bytes,
                  int64_t memory_bytes);

}  // namespace flashsteps
