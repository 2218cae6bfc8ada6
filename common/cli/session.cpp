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
  for (const Stage* stage : selection.stages)
    tiles_of(*stage, problem, variant_for(options, *stage));
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

const Ledger* StageRun::ledger() const {
  const std::optional<Ledger>* ledger = run ? &run->ledger : backward ? &backward->ledger : nullptr;
  return ledger && *ledger ? &**ledger : nullptr;
}

std::string source_of_forward(const Stage* forward_stage) {
  return forward_stage ? fmt::format("stage {}", forward_stage->id) : "the reference";
}

const Stage* forward_stage_for(const Options& options, const Problem& p, const DeviceInfo& device) {
  if (!options.forward_stage) return last_forward_stage(p, device);
  if (const auto reason = why_not(*options.forward_stage, p, device))
    throw DeviceError(fmt::format("stage {} {}", *options.forward_stage, *reason));
  return find_stage(*options.forward_stage, device.target);
}

namespace {

// O and L for backward stages: of a forward stage's run that there is, of one made for it, or of
// the reference.
GivenToBackward given_to_backward(const Options& options, OpenedDevice& device, const Task& task,
                                  const std::vector<StageRun>& runs, Progress& progress) {
  const Problem& p = task.problem;
  GivenToBackward given{.tensors = {.d_o = task.d_o, .forward = {}},
                        .forward_stage = forward_stage_for(options, p, device.info)};
  if (!given.forward_stage) {
    progress.say("computing O and L by the reference");
    given.tensors.forward = reference_outputs(p, task.inputs);
    return given;
  }
  for (const StageRun& run : runs) {
    if (run.stage != given.forward_stage || !run.run) continue;
    given.tensors.forward = run.run->outputs;
    return given;
  }
  progress.say(fmt::format("running {} for O and L", given.forward_stage->id));
  const auto fail = [&](const char* what) {
    return DeviceFault(
        fmt::format("stage {}, which gives O and L: {}", given.forward_stage->id, what));
  };
  try {
    given.tensors.forward =
        run_forward(*device.device, *given.forward_stage, p, task.inputs).outputs;
  } catch (const DeviceFault& fault) {
    throw fail(fault.what());
#ifdef FLASHSTEPS_HAS_MODEL
  } catch (const model::Fault& fault) {
    throw fail(fault.what());
#endif
  }
  return given;
}

}  // namespace

Runs run_stages(const Options& options, OpenedDevice& device, const Task& task,
                Selection& selection, Progress& progress) {
  Runs runs;
  std::vector<const Stage*> done;
  for (const Stage* stage : selection.stages) {
    StageRun run;
    run.stage = stage;
    const Variant variant = variant_for(options, *stage);
    try {
      if (is_backward(*stage) && !runs.given)
        runs.given = given_to_backward(options, device, task, runs.stages, progress);
      progress.say(fmt::format("running {} {} ({} of {})", stage->id, stage->name,
                               runs.stages.size() + 1, selection.stages.size()));
      if (is_backward(*stage)) {
        run.backward = run_backward(*device.device, *stage, task.problem, task.strides, task.inputs,
                                    runs.given->tensors, variant);
      } else {
        run.run = run_forward(*device.device, *stage, task.problem, task.inputs, variant);
      }
    } catch (const DeviceFault& fault) {
      // The card does nothing more for this process.
      run.fault = fault.what();
      for (size_t i = runs.stages.size() + 1; i < selection.stages.size(); ++i) {
        selection.left_out.push_back({selection.stages[i]->id, "was not run after the fault"});
      }
      done.push_back(stage);
      runs.stages.push_back(std::move(run));
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
    runs.stages.push_back(std::move(run));
  }
  selection.stages = std::move(done);
  progress.clear();
  return runs;
}

Yardstick make_yardstick(const Options& options, const Task& task, const Runs& runs) {
  const Problem& p = task.problem;
  const bool with_files = options.expect_o || options.expect_lse;
  // Files hold every row, so every row is compared.
  const std::vector<int> rows = with_files ? all_rows(p) : affordable_rows(p, options.seed);
  Yardstick yardstick{.oracle = make_oracle(p, task.inputs, rows),
                      .files = {},
                      .gradients = {},
                      .gradient_files = {}};
  if (with_files) yardstick.files = expected_from_files(options, p, yardstick.oracle);
  if (!runs.given) return yardstick;

  const bool with_gradients = options.expect_dq || options.expect_dk || options.expect_dv;
  yardstick.gradients = make_gradient_oracles(
      p, task.strides, task.inputs, runs.given->tensors.d_o,
      row_statistics(p, task.strides, runs.given->tensors),
      with_gradients ? all_gradient_rows(p) : affordable_gradient_rows(p, options.seed));
  if (with_gradients)
    yardstick.gradient_files = expected_from_files(options, task, *yardstick.gradients);
  return yardstick;
}

void print_yardstick(const Problem& p, const Yardstick& yardstick, const Runs& runs) {
  const auto all = [](const std::vector<int>& rows, int seqlen) {
    return rows.size() == size_t(seqlen);
  };
  const auto* gradients = yardstick.gradients ? &*yardstick.gradients : nullptr;
  if (all(yardstick.oracle.rows, p.seqlen_q) &&
      (!gradients ||
       (all(gradients->dq.rows, p.seqlen_q) && all(gradients->dk.rows, p.seqlen_k)))) {
    print("checked  every row, against double precision{}\n",
          yardstick.files || yardstick.gradient_files ? " and against the files" : "");
  } else {
    print("checked  {} random rows of {} of every head", yardstick.oracle.rows.size(), p.seqlen_q);
    if (gradients) {
      print(" (of gradients {} of {} queries, {} of {} keys)", gradients->dq.rows.size(),
            p.seqlen_q, gradients->dk.rows.size(), p.seqlen_k);
    }
    print(", against double precision; all rows for NaN\n");
  }
  if (runs.given)
    print("O and L  for the backward pass by {}\n", source_of_forward(runs.given->forward_stage));
  print("\n");
}

bool Verdict::ok() const {
  if (!oracle || !oracle->ok || (files && !files->ok)) return false;
  return !is_backward ||
         (gradients && gradients->ok() && (!gradient_files || gradient_files->ok()));
}

std::string Verdict::describe() const {
  if (!fault.empty() || !oracle) return fault;
  if (gradients && !gradients->ok()) return gradients->describe();
  if (!oracle->ok) {
    return is_backward ? fmt::format("O and L, which {} gave: {}", source_of_forward(forward_stage),
                                     oracle->describe())
                       : oracle->describe();
  }
  if (files && !files->ok) return "against the files: " + files->describe();
  return gradient_files && !gradient_files->ok()
             ? "against the files: " + gradient_files->describe()
             : "";
}

Verdict judge(const Task& task, const Yardstick& yardstick, const Runs& runs, const StageRun& run) {
  const Problem& p = task.problem;
  Verdict verdict;
  verdict.fault = run.fault;
  verdict.is_backward = is_backward(*run.stage);
  if (run.run) {
    verdict.oracle = compare(p, yardstick.oracle, run.run->outputs);
    if (yardstick.files) verdict.files = compare(p, *yardstick.files, run.run->outputs);
  }
  if (run.backward) {
    verdict.forward_stage = runs.given->forward_stage;
    verdict.oracle = compare(p, yardstick.oracle, runs.given->tensors.forward);
    verdict.gradients = compare(p, task.strides, *yardstick.gradients, run.backward->gradients);
    if (yardstick.gradient_files) {
      verdict.gradient_files =
          compare(p, task.strides, *yardstick.gradient_files, run.backward->gradients);
    }
  }
  return verdict;
}

void add_verdict(const Verdict& verdict, Json& stage) {
  if (!verdict.oracle) {
    stage["check"] = {{"ok", false}, {"fault", verdict.fault}};
  } else if (verdict.gradients) {
    stage["check"] = check_json(*verdict.gradients);
    // Right gradients of a wrong forward pass are none.
    stage["check"]["ok"] = verdict.gradients->ok() && verdict.oracle->ok;
    if (!verdict.oracle->ok && verdict.gradients->ok())
      stage["check"]["error"] = verdict.describe();
    stage["check"]["forward"] = verdict.forward_stage ? verdict.forward_stage->id : "reference";
  } else {
    stage["check"] = check_json(*verdict.oracle);
  }
  if (verdict.files) stage["check_expected"] = check_json(*verdict.files);
  if (verdict.gradient_files) stage["check_expected"] = check_json(*verdict.gradient_files);
}

}  // namespace flashsteps::cli
