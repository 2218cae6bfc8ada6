#include "common/cli/session.h"

#include <fmt/format.h>

#include "common/gpu/cuda_support.h"
#include "common/stage/registry.h"
#ifdef FLASHSTEPS_HAS_MODEL
#include "common/model/model.h"
#endif

namespace flashsteps::cli {
std::optional<std::string> why_not(std::string_view id, const Problem& problem,
                                   const DeviceInfo& device) {
  const Stage* stage = find_stage(id, device.target);
  if (!stage) {
    return std::string("was not built for ") +
           (device.target == Target::model ? "the CPU model" : "cards");
  }
  return flashsteps::why_not(*stage, problem, device);
}

Selection select(const Options& options, const Problem& problem, const DeviceInfo& device) {
  Selection selection;
  for (const std::string& id : select_stages(options.stages)) {
    const auto reason = why_not(id, problem, device);
    if (!reason) {
      selection.stages.push_back(find_stage(id, device.target));
    } else if (options.stages == "all") {
      selection.left_out.push_back({id, *reason});
    } else {
      throw DeviceError(fmt::format("stage {} {}", id, *reason));
    }
  }
  if (selection.stages.empty()) {
    std::string reasons;
    for (const LeftOut& stage : selection.left_out)
      reasons += fmt::format("; {} {}", stage.id, stage.reason);
    throw DeviceError("no stage can run here" + reasons);
  }
  for (const Stage* stage : selection.stages) tiles_of(*stage, problem, options.variant);
  return selection;
}

void print_left_out(const Selection& selection) {
  for (const LeftOut& stage : selection.left_out)
    print("left out: {} {}\n", stage.id, stage.reason);
}

void add_left_out(const Selection& selection, Json& report) {
  for (const LeftOut& stage : selection.left_out) {
    report["left_out"].push_back({{"stage", stage.id}, {"reason", stage.reason}});
  }
}

std::vector<StageRun> run_stages(const Options& options, OpenedDevice& device, const Task& task,
                                 Selection& selection, Progress& progress) {
  std::vector<StageRun> runs;
  std::vector<const Stage*> done;
  for (const Stage* stage : selection.stages) {
    progress.say(fmt::format("running {} {} ({} of {})", stage->id, stage->name, runs.size() + 1,
                             selection.stages.size()));
    StageRun run{.stage = stage, .run = {}, .fault = {}};
    try {
      run.run = run_forward(*device.device, *stage, task.problem, task.inputs, options.variant);
    } catch (const DeviceFault& fault) {
      // The card does nothing more for this process.
      run.fault = fault.what();
      for (size_t i = runs.size() + 1; i < selection.stages.size(); ++i) {
        selection.left_out.push_back({selection.stages[i]->id, "was not run after the fault"});
      }
      done.push_back(stage);
      runs.push_back(std::move(run));
      break;
    } catch (const DeviceError& error) {
      if (options.stages != "all") throw;
      selection.left_out.push_back({stage->id, error.what()});
      continue;
#ifdef FLASHSTEPS_HAS_MODEL
    } catch (const model::Fault& fault) {
      run.fault = fault.what();
#endif
    }
    done.push_back(stage);
    runs.push_back(std::move(run));
  }
  selection.stages = std::move(done);
  progress.clear();
  return runs;
}

Yardstick make_yardstick(const Options& options, const Task& task) {
  const bool with_files = options.expect_o || options.expect_lse;
  // Files hold every row, so every row is compared.
  const std::vector<int> rows =
      with_files ? all_rows(task.problem) : affordable_rows(task.problem, options.seed);
  Yardstick yardstick{.oracle = make_oracle(task.problem, task.inputs, rows), .files = {}};
  if (with_files) yardstick.files = expected_from_files(options, task.problem, yardstick.oracle);
  return yardstick;
}

void print_yardstick(const Problem& p, const Yardstick& yardstick) {
  const size_t rows = yardstick.oracle.rows.size();
  if (rows == size_t(p.seqlen_q)) {
    print("checked  every row, against double precision{}\n\n",
          yardstick.files ? " and against the files" : "");
  } else {
    print(
        "checked  {} random rows of {} of every head, against double precision; all rows for "
        "NaN\n\n",
        rows, p.seqlen_q);
  }
}

std::string Verdict::describe() const {
  if (!oracle) return fault;
  if (!oracle->ok) return oracle->describe();
  return files && !files->ok ? "against the files: " + files->describe() : "";
}

Verdict judge(const Problem& p, const Yardstick& yardstick, const StageRun& run) {
  Verdict verdict{.oracle = {}, .files = {}, .fault = run.fault};
  if (!run.run) return verdict;
  verdict.oracle = compare(p, yardstick.oracle, run.run->outputs);
  if (yardstick.files) verdict.files = compare(p, *yardstick.files, run.run->outputs);
  return verdict;
}

void add_verdict(const Verdict& verdict, Json& stage) {
  if (verdict.oracle) {
    stage["check"] = check_json(*verdict.oracle);
  } else {
    stage["check"] = {{"ok", false}, {"fault", verdict.fault}};
  }
  if (verdict.files) stage["check_expected"] = check_json(*verdict.files);
}

}  // namespace flashsteps::cli
