/// \file
/// Running one stage on a device, from host inputs to host outputs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

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

/// Bytes of device memory that Q, K, V, O, L and the stage's workspaces take; of a backward stage
/// also dO, dQ, dK and dV, with the strides of O, Q, K and V.
int64_t device_bytes(const Stage& stage, const Problem& problem);

/// The stage that gives a backward stage its O and L where none is named: the last of the forward
/// pass that can run the problem on this device; nullptr where this program has none.
const Stage* last_forward_stage(const Problem& problem, const DeviceInfo& device);

/// Whether the stage can also run with one block for each (batch, head), as 04 does: stage 05, so
/// that the effect of its grid can be told from that of its traffic.
bool has_grid_choice(const Stage& stage);

/// "128x64", as options take it.
std::string name_of(Tiles tiles);

/// All tiles that the stage is built for, its own choice first; none where it has no tiles.
std::vector<Tiles> tile_candidates(const Stage& stage, const Problem& problem);

/// The tiles that the stage runs with as `variant`.
///
/// \throws std::invalid_argument where the stage cannot run so: one line that says what it can
Tiles tiles_of(const Stage& stage, const Problem& problem, const Variant& variant = {});

/// The device memory of one forward pass: Q, K, V, O, L and the stage's workspaces under their
/// names. All of it holds NaN until it is written.
class ForwardBuffers {
 public:
  /// \throws std::invalid_argument where the stage cannot run as `variant`
  ///
  /// \throws DeviceError when there is not enough memory
  ForwardBuffers(Device& device, const Stage& stage, const Problem& problem,
                 const Variant& variant = {});

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
/// \throws std::invalid_argument for a problem that validate() refuses, a variant that the stage
/// does not have, or inputs of the wrong size
///
/// \throws DeviceError when the device cannot do it
///
/// \throws model::Fault when the model finds the kernel at fault
ForwardRun run_forward(Device& device, const Stage& stage, const Problem& problem,
                       const Inputs& inputs, const Variant& variant = {});

/// The device memory of one backward pass: Q, K, V, O, L, dO, dQ, dK, dV and the stage's workspaces
/// under their names. All of it holds NaN until it is written.
class BackwardBuffers {
 public:
  /// \throws std::invalid_argument where the stage cannot run as `variant`
  ///
  /// \throws DeviceError when there is not enough memory
  BackwardBuffers(Device& device, const Stage& stage, const Problem& problem,
                  const GradientStrides& strides, const Variant& variant = {});

  /// \throws std::invalid_argument for tensors of the wrong size
  void upload(const Inputs& inputs, const BackwardInputs& backward);
  /// Fills dQ, dK, dV and the workspaces with NaN again.
  void poison_outputs();
  Gradients download() const;
  const BackwardArgs& args() const { return args_; }

 private:
  DeviceBuffer q_, k_, v_, o_, l_, d_o_, dq_, dk_, dv_;
  DeviceBuffer workspace_[4];
  int workspaces_ = 0;
  BackwardArgs args_;
};

/// What a run gave. The ledger is there where the device is the model.
struct BackwardRun {
  Gradients gradients;
  std::optional<Ledger> ledger;
};

/// Runs a backward stage once, gradients and workspaces poisoned before.
///
/// \param backward dO, and O and L of a forward pass of the same problem
///
/// \throws as run_forward
BackwardRun run_backward(Device& device, const Stage& stage, const Problem& problem,
                         const GradientStrides& strides, const Inputs& inputs,
                         const BackwardInputs& backward, const Variant& variant = {});

}  // namespace flashsteps
