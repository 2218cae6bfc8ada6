/// \file
/// Running one stage on a device, from host inputs to host outputs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "common/attention/problem.h"
#include "common/attention/tensors.h"
#include "common/stage/device.h"
#include "common/stage/ledger.h"
#include "common/stage/stage.h"

namespace flashsteps {

/// Why this device cannot run the stage on this problem, in one line that says what is needed and
/// what was found; nothing where it can. Memory is compared with all that the device has:
/// allocation may still fail.
std::optional<std::string> why_not(const Stage& stage, const Problem& problem,
                                   const DeviceInfo& device);

/// Bytes of device memory that Q, K, V, O, L and the stage's workspaces take.
int64_t device_bytes(const Stage& stage, const Problem& problem);

/// The device memory of one forward pass: Q, K, V, O, L and the stage's workspaces under their
/// names. All of it holds NaN until it is written.
class ForwardBuffers {
 public:
  /// \throws DeviceError when there is not enough memory
  ForwardBuffers(Device& device, const Stage& stage, const Problem& problem);

  /// \throws std::invalid_argument for inputs of the wrong size
  void upload(const Inputs& inputs);
  /// Fills O, L and the workspaces with NaN again.
  void poison_outputs();
  Outputs download() const;
  const ForwardArgs& args() const { return args_; }

 private:
  DeviceBuffer q_, k_, v_, o_, l_;
  DeviceBuffer workspace_[4];
  int workspaces_ = 0;
  int64_t o_extent_ = 0;
  int64_t l_count_ = 0;
  ForwardArgs args_;
};

/// What a run gave. The ledgers are there where the device is the model: the stage's own, and that
/// of the common kernel that computed L where the stage leaves L to it.
struct ForwardRun {
  Outputs outputs;
  std::optional<Ledger> ledger;
  std::optional<Ledger> lse_ledger;
};

/// Runs the stage once: outputs and workspaces poisoned, forward, then L where it is computed
/// apart.
///
/// \throws std::invalid_argument for a problem that validate() refuses, or inputs of the wrong size
///
/// \throws DeviceError when the device cannot do it
///
/// \throws model::Fault when the model finds the kernel at fault
ForwardRun run_forward(Device& device, const Stage& stage, const Problem& problem,
                       const Inputs& inputs);

}  // namespace flashsteps
