#include "common/cli/commands.h"

#include <fmt/format.h>

#include <cmath>

#include "common/attention/work.h"
#include "common/cli/progress.h"
#include "common/cli/report.h"
#include "common/cli/session.h"
#include "common/cli/table.h"
#include "common/cli/task.h"
#include "common/reference/compare.h"
#include "common/stage/ledger_json.h"
#include "common/stage/registry.h"
#include "common/stage/run.h"

namespace flashsteps::cli {
namespace {

using Align = Table::Align;

std::vector<std::string> check_row(const char* id, const char* name,
                                   const std::optional<Comparison>& c) {
  if (!c) return {id, name, "-", "-", "-", "-", "FAILED"};
  const auto number = [](double x) { return fmt::format("{:.2e}", x); };
  return {id,
          name,
          number(c->max_abs_error),
          number(c->bound),
          number(c->lse_max_abs_error),
          number(c->lse_bound),
          c->ok ? "ok" : "FAILED"};
}

}  // namespace

int list(const Options& options) {
  OpenedDevice device = open_device(options);
  const Problem p = problem_for(options, device.info.target);
  Json report = new_report(device);
  report["problem"] = problem_json(options, p, false);
  report["stages"] = Json::array();
  Table table({{"stage", Align::left},
               {"name", Align::left},
               {"tiles"},
               {"memory"},
               {"idea", Align::left}});
  for (const std::string& id : select_stages(options.stages)) {
    const Stage* stage = find_stage(id, device.info.target);
    const auto reason = why_not(id, p, device.info);
    if (!stage)
      stage = find_stage(id, device.info.target == Target::model ? Target::cuda : Target::model);
    const Tiles tiles = stage->tiles(p);
    table.add({stage->id, stage->name,
               tiles.Br > 0 ? fmt::format("{} x {}", tiles.Br, tiles.Bc) : "-",
               human_bytes(device_bytes(*stage, p)), stage->summary});
    if (reason) table.add_note("cannot run here: " + *reason);
    Json json = stage_json(*stage, p);
    json["summary"] = stage->summary;
    json["file"] = stage->file;
    json["device_bytes"] = device_bytes(*stage, p);
    if (reason) json["left_out"] = *reason;
    report["stages"].push_back(json);
  }
  write_report(options, report);
  print_device(device);
  print_problem(options, p, false);
  print("\n{}", table.str());
  return 0;
}

int check(const Options& options) {
  OpenedDevice device = open_device(options);
  const Task task = make_task(options, device.info.target);
  const Problem& p = task.problem;
  Selection selection = select(options, p, device.info);

  Progress progress;
  progress.say("computing the reference");
  const Yardstick yardstick = make_yardstick(options, task);
  const std::vector<StageRun> runs = run_stages(options, device, task, selection, progress);

  Json report = new_report(device);
  report["problem"] = problem_json(options, p, true);
  report["stages"] = Json::array();
  Table table({{"stage", Align::left},
               {"name", Align::left},
               {"O error"},
               {"bound"},
               {"L error"},
               {"bound"},
               {"result", Align::left}});
  bool all_ok = true;
  for (const StageRun& run : runs) {
    const Verdict verdict = judge(p, yardstick, run);
    all_ok &= verdict.ok();
    table.add(check_row(run.stage->id, run.stage->name, verdict.oracle));
    if (verdict.files) table.add(check_row("", "  against the files", verdict.files));
    if (!verdict.ok()) table.add_note(verdict.describe());
    if (run.run) write_outputs(options, p, run.run->outputs);
    report["stages"].push_back(stage_json(*run.stage, p));
    add_verdict(verdict, report["stages"].back());
  }
  add_left_out(selection, report);
  write_report(options, report);
  print_device(device);
  print_problem(options, p, true);
  print_yardstick(p, yardstick);
  print("{}", table.str());
  print_left_out(selection);
  return all_ok ? 0 : 1;
}

int count(const Options& options) {
  OpenedDevice device = open_model(options);
  const Task task = make_task(options, device.info.target);
  const Problem& p = task.problem;
  Selection selection = select(options, p, device.info);
  Progress progress;
  const std::vector<StageRun> runs = run_stages(options, device, task, selection, progress);

  Json report = new_report(device);
  report["problem"] = problem_json(options, p, true);
  report["stages"] = Json::array();
  std::vector<std::string> ids, lse_ids;
  std::vector<Ledger> ledgers, lse_ledgers;
  bool all_ok = true;
  std::string faults;
  for (const StageRun& run : runs) {
    Json json = stage_json(*run.stage, p);
    if (run.run && run.run->ledger) {
      ids.push_back(run.stage->id);
      ledgers.push_back(*run.run->ledger);
      json["counts"] = *run.run->ledger;
      if (run.run->lse_ledger) {
        lse_ids.push_back(run.stage->id);
        lse_ledgers.push_back(*run.run->lse_ledger);
        json["lse_counts"] = *run.run->lse_ledger;
      }
    } else {
      all_ok = false;
      faults += fmt::format("{}: {}\n", run.stage->id, run.fault);
      json["fault"] = run.fault;
    }
    report["stages"].push_back(json);
  }
  add_left_out(selection, report);
  write_report(options, report);
  print_device(device);
  print_problem(options, p, true);
  if (!ids.empty()) print("\n{}", ledger_table(ids, ledgers, false));
  if (!lse_ids.empty()) {
    print("\nand for L, by the common kernel:\n{}", ledger_table(lse_ids, lse_ledgers, true));
  }
  print("{}", faults);
  print_left_out(selection);
  return all_ok ? 0 : 1;
}

}  // namespace flashsteps::cli
