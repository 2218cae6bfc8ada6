/// \file
/// From options to a problem and its tensors.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "common/attention/problem.h"
#include "common/attention/tensors.h"
#include "common/cli/options.h"
#include "common/reference/gradients.h"
#include "common/reference/reference.h"
#include "common/stage/device.h"

namespace flashsteps::cli {

/// A device, and why it is this one.
struct OpenedDevice {
  std::unique_ptr<Device> device;
  DeviceInfo info;
  std::string why;  ///< "no usable card: …", or empty where it was asked for
};

/// Opens the device that was asked for; otherwise a card where a usable one is there, else the
/// model.
///
/// \throws DeviceError where there is none
OpenedDevice open_device(const Options& options);

/// The CPU model, whatever device is there, for what only the model can do: `count`.
///
/// \throws DeviceError where another one was asked for, or this build has no model
OpenedDevice open_model(const Options& options);

/// The problem that the options mean, with defaults that suit the command and the device.
///
/// \throws std::invalid_argument where it is not legal
Problem problem_for(const Options& options, Target target);

/// A problem together with its tensors, made or read from files.
struct Task {
  Problem problem;
  Inputs inputs;
  GradientStrides strides;    ///< those of the tensors that the gradients belong to
  std::vector<uint16_t> d_o;  ///< empty where the options name no stage of the backward pass
};

/// \throws std::invalid_argument where the problem is not legal, or files cannot be read or do not
/// fit together
Task make_task(const Options& options, Target target);

/// The values of --expect-o and --expect-lse in the oracle's place; its error bounds stay.
///
/// \throws std::invalid_argument where a file cannot be read, or has another shape
Oracle expected_from_files(const Options& options, const Problem& problem, Oracle oracle);

/// The same of --expect-dq, --expect-dk and --expect-dv.
///
/// \throws std::invalid_argument likewise
GradientOracles expected_from_files(const Options& options, const Task& task,
                                    GradientOracles oracles);

/// Writes O and L as the options ask.
void write_outputs(const Options& options, const Problem& problem, const Outputs& outputs);
/// Writes dQ, dK and dV as the options ask.
void write_gradients(const Options& options, const Task& task, const Gradients& gradients);

}  // namespace flashsteps::cli
