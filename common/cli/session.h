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

/// One stage's run. Where the model found the kernel at fault there is no run, but the model's
/// line.
struct StageRun {
  const Stage* stage = nullptr;
  std::optional<ForwardRun> run;
  std::string fault;
};

/// Runs the selected stages one after the other. One that turns out to need more memory than is
/// free is left out where `all` was asked for.
std::vector<StageRun> run_stages(const Options& options, OpenedDevice& device, const Task& task,
                                 Selection& selection, Progress& progress);

/// What runs are held to: the oracle, and the files of --expect-o and --expect-lse where they are
/// given.
struct Yardstick {
  Oracle oracle;
  std::optional<Oracle> files;
};

Yardstick make_yardstick(const Options& options, const Task& task);
/// "checked  every row, against double precision"
void print_yardstick(const Problem& problem, const Yardstick& yardstick);

/// How a run compares. Without outputs there is no comparison, and nothing is right.
struct Verdict {
  std::optional<Comparison> oracle;
  std::optional<Comparison> files;
  std::string fault;

  bool ok() const { return oracle && oracle->ok && (!files || files->ok); }
  /// One line that says what is wrong; empty where all is right.
  std::string describe() const;
};

Verdict judge(const Problem& problem, const Yardstick& yardstick, const StageRun& run);
/// Adds "check", and "check_expected" for the files, to a stage's entry.
void add_verdict(const Verdict& verdict, Json& stage);

}  // namespace flashsteps::cli
