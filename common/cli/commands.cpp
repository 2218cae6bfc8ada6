#include "common/cli/commands.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "common/attention/work.h"
#include "common/cli/progress.h"
#include "common/cli/recorded.h"
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

std::vector<std::string> check_row(const char* id, const char* name, const std::string& tiles,
                                   const std::optional<Comparison>& c) {
  if (!c) return {id, name, tiles, "-", "-", "-", "-", "FAILED"};
  const auto number = [](double x) { return fmt::format("{:.2e}", x); };
  return {id,
          name,
          tiles,
          number(c->max_abs_error),
          number(c->bound),
          number(c->lse_max_abs_error),
          number(c->lse_bound),
          c->ok ? "ok" : "FAILED"};
}

std::vector<std::string> check_row(const char* id, const char* name, const std::string& tiles,
                                   const std::optional<GradientComparison>& c, bool ok) {
  std::vector<std::string> row = {id, name, tiles};
  for (const TensorComparison* tensor :
       {c ? &c->dq : nullptr, c ? &c->dk : nullptr, c ? &c->dv : nullptr}) {
    row.push_back(tensor ? fmt::format("{:.2e}", tensor->max_abs_error) : "-");
    row.push_back(tensor ? fmt::format("{:.2e}", tensor->bound) : "-");
  }
  row.push_back(ok ? "ok" : "FAILED");
  return row;
}

// The times that were recorded on the card of the bound, and where they were looked for.
struct Records {
  std::string where;  // empty: there is no such place
  std::vector<RecordedTime> times;
};

Records read_records(const Options& options) {
  if (options.results)
    return {options.results->string(), read_recorded(*options.results, *options.card)};
  const auto found = find_results();
  if (!found) return {};
  return {"docs/results", read_recorded(*found, *options.card)};
}

// The recorded times of a stage on this problem with any number of heads, each beside its bound.
std::vector<Recorded> recorded_beside_bounds(const Options& options, const Records& records,
                                             const Stage& stage, const Problem& p,
                                             const Ledger& ledger, bool has_bound) {
  const Variant variant = variant_for(options, stage);
  std::vector<Recorded> beside;
  for (const RecordedTime& time :
       matching(records.times, stage, p, tiles_of(stage, p, variant), variant)) {
    beside.push_back({time, std::nullopt});
    if (has_bound) {
      beside.back().bound = time_bound_of_more_heads(*options.card, stage, p, ledger, time.problem);
    }
  }
  return beside;
}

// "512, 1024, 4096"
template <typename List>
std::string joined(const List& list) {
  return fmt::format("{}", fmt::join(list, ", "));
}

void print_records(const Options& options, const Records& records, const Problem& p,
                   const std::vector<Recorded>& found, const std::vector<std::string>& without) {
  const Card& card = *options.card;
  if (records.where.empty()) {
    print(
        "\nno recorded times: this program lies in no repository with docs/results (--results "
        "names "
        "a directory)\n");
    return;
  }
  if (!found.empty()) {
    print("\n{}: times recorded in {}, each beside the bound of its own batch and heads\n{}",
          card.device_name, records.where, recorded_table(found));
  }
  if (without.empty()) return;
  print(
      "{}no recorded time in {} of {} on {} with seqlen {} x {}, head_dim {}, {}, {}, these "
      "tiles\n",
      found.empty() ? "\n" : "", records.where, joined(without), card.device_name, p.seqlen_q,
      p.seqlen_k, p.head_dim, name_of(p.dtype), p.causal ? "causal" : "no mask");
  // What could be asked for instead.
  std::set<int> lengths, head_dims;
  std::set<std::string> dtypes;
  for (const RecordedTime& time : records.times) {
    if (std::find(without.begin(), without.end(), time.stage) == without.end()) continue;
    lengths.insert(time.problem.seqlen_k);
    head_dims.insert(time.problem.head_dim);
    dtypes.insert(name_of(time.problem.dtype));
  }
  if (!lengths.empty()) {
    print("  recorded of {}: {}; head_dim {}; seqlen {}\n", without.size() == 1 ? "it" : "them",
          joined(dtypes), joined(head_dims), joined(lengths));
  }
}

}  // namespace

int list(const Options& options) {
  // Stages can be listed where nothing can run them.
  OpenedDevice device;
  std::string no_device;
  try {
    device = open_device(options);
  } catch (const DeviceError& error) {
    if (options.device) throw;
    no_device = error.what();
    device.info.target = stages_for(Target::cuda).empty() ? Target::model : Target::cuda;
  }
  const Target target = device.info.target;
  const Problem p = problem_for(options, target);
  Json report = no_device.empty() ? new_report(device)
                                  : Json{{"device", {{"target", "none"}, {"reason", no_device}}}};
  report["problem"] = problem_json(options, p, false);
  report["stages"] = Json::array();
  Table table({{"stage", Align::left},
               {"name", Align::left},
               {"tiles"},
               {"memory"},
               {"idea", Align::left}});
  for (const std::string& id : select_stages(options.stages)) {
    const Stage* stage = find_stage(id, target);
    std::optional<std::string> reason;
    if (no_device.empty()) reason = why_not(id, p, device.info);
    if (!stage) stage = find_stage(id, target == Target::model ? Target::cuda : Target::model);
    Json json = {{"stage", stage->id}, {"name", stage->name}};
    std::string tiles = "-";
    try {
      const std::vector<Tiles> candidates = tile_candidates(*stage, p);
      if (!candidates.empty()) {
        json["tiles"] = tiles_json(candidates.front());
        tiles.clear();
        for (const Tiles candidate : candidates) {
          json["candidates"].push_back(tiles_json(candidate));
          tiles += (tiles.empty() ? "" : ", ") + name_of(candidate);
        }
      }
    } catch (const DeviceError&) {
      tiles = "by card";  // and there is none
    }
    table.add(
        {stage->id, stage->name, tiles, human_bytes(device_bytes(*stage, p)), stage->summary});
    if (reason) table.add_note("cannot run here: " + *reason);
    json["pass"] = is_backward(*stage) ? "backward" : "forward";
    json["summary"] = stage->summary;
    json["file"] = stage->file;
    json["device_bytes"] = device_bytes(*stage, p);
    if (reason) json["left_out"] = *reason;
    report["stages"].push_back(json);
  }
  write_report(options, report);
  if (no_device.empty()) {
    print_device(device);
  } else {
    print("device   none: {}\n", no_device);
  }
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
  const Runs runs = run_stages(options, device, task, selection, progress);
  progress.say("computing the reference");
  const Yardstick yardstick = make_yardstick(options, task, runs);
  progress.clear();

  Json report = new_report(device);
  report["problem"] = problem_json(options, p, true);
  report["stages"] = Json::array();
  Table table({{"stage", Align::left},
               {"name", Align::left},
               {"tiles"},
               {"O error"},
               {"bound"},
               {"L error"},
               {"bound"},
               {"result", Align::left}});
  Table gradients({{"stage", Align::left},
                   {"name", Align::left},
                   {"tiles"},
                   {"dQ error"},
                   {"bound"},
                   {"dK error"},
                   {"bound"},
                   {"dV error"},
                   {"bound"},
                   {"result", Align::left}});
  bool all_ok = true, any_forward = false, any_backward = false;
  for (const StageRun& run : runs.stages) {
    const Stage& stage = *run.stage;
    const Variant variant = variant_for(options, stage);
    const Verdict verdict = judge(task, yardstick, runs, run);
    const std::string tiles = tiles_cell(tiles_of(stage, p, variant));
    all_ok &= verdict.ok();
    Table& its_table = is_backward(stage) ? gradients : table;
    (is_backward(stage) ? any_backward : any_forward) = true;
    if (is_backward(stage)) {
      its_table.add(check_row(stage.id, stage.name, tiles, verdict.gradients,
                              verdict.gradients && verdict.gradients->ok() && verdict.oracle->ok));
      if (verdict.gradient_files) {
        its_table.add(check_row("", "  against the files", "", verdict.gradient_files,
                                verdict.gradient_files->ok()));
      }
    } else {
      its_table.add(check_row(stage.id, stage.name, tiles, verdict.oracle));
      if (verdict.files) its_table.add(check_row("", "  against the files", "", verdict.files));
    }
    if (!verdict.ok()) its_table.add_note(verdict.describe());
    if (run.run) write_outputs(options, p, run.run->outputs);
    if (run.backward) write_gradients(options, task, run.backward->gradients);
    report["stages"].push_back(stage_json(stage, p, variant));
    add_verdict(verdict, report["stages"].back());
  }
  add_left_out(selection, report);
  write_report(options, report);
  print_device(device);
  print_problem(options, p, true);
  print_yardstick(p, yardstick, runs);
  if (any_forward) print("{}", table.str());
  if (any_backward) print("{}{}", any_forward ? "\n" : "", gradients.str());
  print_left_out(selection);
  return all_ok ? 0 : 1;
}

int count(const Options& options) {
  Records records;
  if (options.card) records = read_records(options);  // bad files are refused before any work
  OpenedDevice device = open_model(options);
  const Task task = make_task(options, device.info.target);
  const Problem& p = task.problem;
  Selection selection = select(options, p, device.info);
  Progress progress;
  const Runs runs = run_stages(options, device, task, selection, progress);

  Json report = new_report(device);
  report["problem"] = problem_json(options, p, true);
  report["stages"] = Json::array();
  if (options.card) report["card"] = card_json(*options.card);
  std::vector<std::string> ids, lse_ids, without_bound;
  std::vector<Tiles> tiles;
  std::vector<std::optional<TimeBound>> bounds;
  std::vector<Ledger> ledgers, lse_ledgers;
  std::vector<Recorded> recorded;
  std::vector<std::string> without_record;
  bool all_ok = true;
  std::string faults;
  for (const StageRun& run : runs.stages) {
    const Variant variant = variant_for(options, *run.stage);
    Json json = stage_json(*run.stage, p, variant);
    if (const Ledger* ledger = run.ledger()) {
      ids.push_back(run.stage->id);
      tiles.push_back(tiles_of(*run.stage, p, variant));
      ledgers.push_back(*ledger);
      json["counts"] = *ledger;
      if (options.card) {
        bounds.emplace_back();
        if (const auto reason = why_no_bound(*options.card, p, *ledger)) {
          without_bound.push_back(fmt::format("{} {}", run.stage->id, *reason));
          json["no_bound"] = *reason;
        } else {
          bounds.back() = time_bound(*options.card, *run.stage, p, *ledger);
          json["bound"] = bound_json(*options.card, *bounds.back());
        }
        const std::vector<Recorded> its = recorded_beside_bounds(
            options, records, *run.stage, p, *ledger, bounds.back().has_value());
        if (its.empty()) {
          without_record.push_back(run.stage->id);
        } else {
          json["recorded"] = recorded_json(its);
          recorded.insert(recorded.end(), its.begin(), its.end());
        }
      }
      if (run.run && run.run->lse_ledger) {
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
  if (!ids.empty()) print("\n{}", ledger_table(ids, tiles, ledgers, false));
  if (!lse_ids.empty()) {
    print("\nand for L, by the common kernel:\n{}", ledger_table(lse_ids, {}, lse_ledgers, true));
  }
  if (options.card && !ids.empty()) {
    print("\n{}: a bound from datasheet figures, not a time\n{}", options.card->full_name,
          bound_table(ids, bounds));
    for (const std::string& line : without_bound) print("no bound: {}\n", line);
    print_records(options, records, p, recorded, without_record);
  }
  print("{}", faults);
  print_left_out(selection);
  return all_ok ? 0 : 1;
}

}  // namespace flashsteps::cli
