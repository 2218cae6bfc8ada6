/// \file
/// How long a stage takes on a card (docs/method.md). Includes no CUDA header. What runs on the CPU
/// model is never timed: there, and in a build without CUDA, every function that measures throws
/// DeviceError.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/attention/problem.h"
#include "common/gpu/cuda_support.h"
#include "common/stage/device.h"
#include "common/stage/stage.h"

namespace flashsteps {

/// How to measure. One *measurement* is a number of launches back to back between two device
/// events; its result is milliseconds for each launch.
struct TimingOptions {
  double warmup_ms = 50;       ///< of launches before anything is measured
  double measurement_ms = 20;  ///< a measurement has enough launches to last as long
  int max_launches = 256;  ///< of one measurement: what a stream queues without blocking the host
  double budget_ms = 400;  ///< for all measurements of one stage; min_reps are made in any case
  int min_reps = 3;        ///< measurements
  int max_reps = 50;
  int rounds = 5;              ///< of time_forward_interleaved and time_backward_interleaved
  double memory_share = 0.25;  ///< of the card's free memory, for rotated inputs
  uint64_t seed = 1;           ///< of the random inputs
};

/// Milliseconds for one pass.
struct TimeResult {
  double median_ms = 0;
  double p10_ms = 0;  ///< 10th percentile of the measurements
  double p90_ms = 0;
  int reps = 0;      ///< measurements
  int launches = 0;  ///< of forward, in each measurement
  /// The host could not queue the launches fast enough, so that its own cost may be part of the
  /// time.
  bool host_bound = false;
};

/// Several stages, timed in turn on the same inputs, round by round.
struct InterleavedResult {
  std::vector<TimeResult> time;  ///< for each stage, over all rounds
  /// [stage][round]: median of the round's measurements
  std::vector<std::vector<double>> round_ms;
  /// What the kernel takes that each stage launches last.
  std::vector<KernelResources> kernel;

  /// How many times as fast stage `a` is as stage `b`: the median over the rounds of ms(b) / ms(a).
  double speedup(size_t a, size_t b) const;
};

/// What this card reaches, measured as stages are: in the same run, on random data, with the same
/// pauses.
struct Ceilings {
  std::optional<double> copy_tb_per_s;  ///< device-to-device copy, bytes read plus bytes written
  std::optional<double> matmul_tflops;  ///< bf16 8192 x 8192 x 8192 product by cuBLAS
  std::string matmul_source;            ///< "cuBLAS 13.0.2 (libcublas.so.13)", or why there is none
};

/// Times `stage.forward` (without the common lse kernel) on random normal inputs. Inputs and
/// outputs rotate over so many sets that they exceed the card's L2 cache; the stage's workspaces do
/// not.
///
/// \throws DeviceError where the device is the CPU model or has too little memory
///
/// \throws std::invalid_argument where no query sees a key, the stage does not have the variant, or
/// the options make no sense
TimeResult time_forward(Device& device, const Stage& stage, const Problem& problem,
                        const TimingOptions& options = {}, const Variant& variant = {});

/// Times `stage.lse` on the workspaces that one forward pass left; nothing where the stage has
/// none.
std::optional<TimeResult> time_lse(Device& device, const Stage& stage, const Problem& problem,
                                   const TimingOptions& options = {});

/// Times several stages, interleaved: every round times each of them, so that they share what the
/// card's clock and temperature do. The stages share one set of workspaces. A stage may occur more
/// than once, as several variants.
///
/// \param variants how each stage is run; empty: as they choose
InterleavedResult time_forward_interleaved(Device& device, const std::vector<const Stage*>& stages,
                                           const Problem& problem,
                                           const TimingOptions& options = {},
                                           const std::vector<Variant>& variants = {});

/// Times `stage.backward`, all of its kernels, as time_forward_interleaved() times forward passes.
/// Inputs (dO among them) are random normal; O and L are those of `forward`, computed before.
///
/// \param forward nullptr where this program has none: O is then random, and L ln(visible keys) +
/// scale^2 head_dim / 2, which is about what such inputs give
///
/// \throws as time_forward
InterleavedResult time_backward_interleaved(Device& device, const std::vector<const Stage*>& stages,
                                            const Problem& problem, const Stage* forward,
                                            const TimingOptions& options = {},
                                            const std::vector<Variant>& variants = {});

/// The same of one stage.
TimeResult time_backward(Device& device, const Stage& stage, const Problem& problem,
                         const Stage* forward, const TimingOptions& options = {},
                         const Variant& variant = {});

/// Measures the two ceilings. cuBLAS is looked for at run time: FLASHSTEPS_CUBLAS (a file or a
/// directory), the loader's path, CUDA_HOME and /usr/local/cuda.
Ceilings measure_ceilings(Device& device, const TimingOptions& options = {});

/// TFLOP/s: so many FLOPs over `ms`.
double tflops_of(int64_t flops, double ms);

/// tflops_of() one forward pass: 4 * batch * heads * head_dim * pairs, where pairs counts the
/// visible (query, key) pairs.
double forward_tflops(const Problem& problem, double ms);

/// What must be said beside a figure above the measured product ceiling; empty below it, or without
/// a ceiling.
std::string above_ceiling_note(double tflops, const Ceilings& ceilings);

}  // namespace flashsteps
