/// \file
/// What the commands do alike: choose the stages that can run here, run them, and show how they
/// compare.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/cli/options.h"
#include "common/cli/progress.h"
#include "common/cli/report.h"
#include "common/cli/task.h"
#include "common/reference/compare.h"
#include "common/reference/gradients.h"
#include "common/reference/reference.h"
#include "common/stage/run.h"

namespace flashsteps::cli {

/// A stage that `--stage all` leaves out, and why.
struct LeftOut {
  std::string id;
  std::string reason;
};

struct Selection {
  std::vector<const Stage*> stages;
  std::vector<LeftOut> left_out;
};

/// Why the stage with this id cannot run here; nothing where it can.
std::optional<std::string> why_not(std::string_view id, const Problem& problem,
                                   const DeviceInfo& device);

/// The stages that the options name. Leaves out what cannot run here where they name `all`.
///
/// \throws std::invalid_argument where a stage does not have what --tiles or --grid ask for
///
/// \throws DeviceError where a stage that was named cannot run, or no stage can
Selection select(const Options& options, const Problem& problem, const DeviceInfo& device);

void print_left_out(const Selection& selection);
void add_left_out(const Selection& selection, Json& report);

/// One stage's run. Where the model found the kernel at fault there is neither of the two runs, but
/// the model's line.
struct StageRun {
  const Stage* stage = nullptr;
  std::optional<ForwardRun> run;
  std::optional<BackwardRun> backward;
  std::string fault;

  /// What the stage's own kernels moved and computed; nothing on a card, or after a fault.
  const Ledger* ledger() const;
};

/// What backward stages were given beside Q, K and V, and from where.
struct GivenToBackward {
  BackwardInputs tensors;
  const Stage* forward_stage = nullptr;  ///< nullptr: O and L are the reference's
};

/// "stage 08", or "the reference".
std::string source_of_forward(const Stage* forward_stage);

struct Runs {
  std::vector<StageRun> stages;
  std::optional<GivenToBackward> given;  ///< where a backward stage is among them
};

/// Runs the selected stages one after the other. One that turns out to need more memory than is
/// free is left out where `all` was asked for. Before the first backward stage the forward stage
/// that gives it O and L is run, unless it was.
///
/// \throws DeviceError where the forward stage cannot run
Runs run_stages(const Options& options, OpenedDevice& device, const Task& task,
                Selection& selection, Progress& progress);

/// The stage that gives backward stages their O and L: the one of --forward-stage, else
/// last_forward_stage(), which may be none.
///
/// \throws DeviceError where --forward-stage names a stage that cannot run here
const Stage* forward_stage_for(const Options& options, const Problem& problem,
                               const DeviceInfo& device);

/// What runs are held to: the oracles, and the files of --expect-… where they are given.
struct Yardstick {
  Oracle oracle;
  std::optional<Oracle> files;
  std::optional<GradientOracles> gradients;
  std::optional<GradientOracles> gradient_files;
};

Yardstick make_yardstick(const Options& options, const Task& task, const Runs& runs);
/// "checked  every row, against double precision", and where O and L of backward stages are from.
void print_yardstick(const Problem& problem, const Yardstick& yardstick, const Runs& runs);

/// How a run compares. Without outputs there is no comparison, and nothing is right. A backward
/// stage is right where its gradients are and what it was given is, too.
struct Verdict {
  std::optional<Comparison>
      oracle;  ///< of O and L: a forward stage's, or those given to a backward stage
  std::optional<Comparison> files;
  std::optional<GradientComparison> gradients;
  std::optional<GradientComparison> gradient_files;
  const Stage* forward_stage = nullptr;  ///< of a backward stage: where its O and L are from
  bool is_backward = false;
  std::string fault;

  bool ok() const;
  /// One line that says what is wrong; empty where all is right.
  std::string describe() const;
};

Verdict judge(const Task& task, const Yardstick& yardstick, const Runs& runs, const StageRun& run);
/// Adds "check", and "check_expected" for the files, to a stage's entry.
void add_verdict(const Verdict& verdict, Json& stage);

}  // namespace flashsteps::cli
