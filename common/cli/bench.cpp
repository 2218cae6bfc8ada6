// The commands that measure: bench, and ladder, which measures what the device can (times on a
// card, counts on the model).
#include <fmt/format.h>

#include <algorithm>

#include "common/attention/work.h"
#include "common/cli/commands.h"
#include "common/cli/session.h"
#include "common/cli/table.h"
#include "common/gpu/cuda_support.h"
#include "common/stage/ledger_json.h"
#include "common/timing/timing.h"

namespace flashsteps::cli {
namespace {

using Align = Table::Align;

std::string ms_cell(double ms) {
  return fmt::format("{:.4g}", ms);
}

std::string share_cell(double tflops, const Ceilings& ceilings) {
  return ceilings.matmul_tflops ? fmt::format("{:.1f} %", 100 * tflops / *ceilings.matmul_tflops)
                                : "-";
}

void print_ceilings(const Ceilings& ceilings) {
  if (ceilings.copy_tb_per_s) print("ceiling  copy {:.2f} TB/s", *ceilings.copy_tb_per_s);
  if (ceilings.matmul_tflops) {
    print(", bf16 product {:.0f} TFLOP/s by {}\n", *ceilings.matmul_tflops, ceilings.matmul_source);
  } else {
    print(", no product: {}\n", ceilings.matmul_source);
  }
}

int64_t flops_of(const Stage& stage, const Problem& p) {
  return is_backward(stage) ? backward_flops(p) : forward_flops(p);
}

// What must be said below a stage's row.
void add_time_notes(Table& table, int64_t flops, const TimeResult& time, const Ceilings& ceilings) {
  const std::string above = above_ceiling_note(tflops_of(flops, time.median_ms), ceilings);
  if (!above.empty()) table.add_note(above);
  if (time.host_bound)
    table.add_note("the host could not queue launches fast enough; its cost may be in the time");
}

OpenedDevice open_card(const Options& options) {
  OpenedDevice device = open_device(options);
  if (device.info.target == Target::model) {
    throw DeviceError(
        "what runs on the CPU model is not timed; count shows what it moves and computes" +
        (device.why.empty() ? "" : " (" + device.why + ")"));
  }
  return device;
}

// Where the timed backward passes have their O and L from.
std::string source_of_timed_forward(const Stage* forward) {
  return forward ? source_of_forward(forward) : "no stage: O is random, and L what is expected";
}

// Times the selected stages on one problem, prints a table, and returns the report's "stages".
Json time_stages(const Options& options, OpenedDevice& device, const Problem& p,
                 const Ceilings& ceilings, Selection& selection, Progress& progress) {
  Json stages = Json::array();
  Table table({{"stage", Align::left},
               {"name", Align::left},
               {"tiles"},
               {"ms"},
               {"p10"},
               {"p90"},
               {"TFLOP/s"},
               {"of ceiling"},
               {"ms for L"}});
  const Stage* const forward = forward_stage_for(options, p, device.info);
  bool any_backward = false;
  for (const Stage* stage : selection.stages) {
    const Variant variant = variant_for(options, *stage);
    const int64_t flops = flops_of(*stage, p);
    progress.say(fmt::format("timing {} {}", stage->id, stage->name));
    TimeResult time;
    std::optional<TimeResult> lse;
    try {
      if (is_backward(*stage)) {
        any_backward = true;
        time = time_backward(*device.device, *stage, p, forward, {.seed = options.seed}, variant);
      } else {
        time = time_forward(*device.device, *stage, p, {.seed = options.seed}, variant);
        lse = time_lse(*device.device, *stage, p, {.seed = options.seed});
      }
    } catch (const DeviceFault&) {
      throw;
    } catch (const DeviceError& error) {
      if (options.stages != "all") throw;
      selection.left_out.push_back({stage->id, error.what()});
      continue;
    }
    const double tflops = tflops_of(flops, time.median_ms);
    table.add({stage->id, stage->name, tiles_cell(tiles_of(*stage, p, variant)),
               ms_cell(time.median_ms), ms_cell(time.p10_ms), ms_cell(time.p90_ms),
               fmt::format("{:.1f}", tflops), share_cell(tflops, ceilings),
               lse ? ms_cell(lse->median_ms) : "-"});
    add_time_notes(table, flops, time, ceilings);
    Json json = stage_json(*stage, p, variant);
    json["time"] = time_json(flops, time, ceilings);
    if (is_backward(*stage)) json["forward"] = forward ? forward->id : "none";
    if (lse)
      json["lse_time"] = {
          {"median_ms", lse->median_ms}, {"p10_ms", lse->p10_ms}, {"p90_ms", lse->p90_ms}};
    stages.push_back(json);
  }
  progress.clear();
  print_problem(options, p, false);
  print("{}", table.str());
  if (any_backward)
    print("\nO and L for the backward pass by {}\n", source_of_timed_forward(forward));
  print_left_out(selection);
  return stages;
}

// Leaves in the selection the stages that are built for more than one tile size.
void keep_tunable(const Options& options, const Problem& p, Selection& selection) {
  std::vector<const Stage*> tunable;
  for (const Stage* stage : selection.stages) {
    const std::vector<Tiles> candidates = tile_candidates(*stage, p);
    if (candidates.size() > 1) {
      tunable.push_back(stage);
      continue;
    }
    const std::string why = candidates.empty()
                                ? "has no tiles"
                                : "is built for one tile size, " + tiles_cell(candidates.front());
    if (options.stages != "all")
      throw std::invalid_argument(fmt::format("--tune: stage {} {}", stage->id, why));
    selection.left_out.push_back({stage->id, why});
  }
  if (tunable.empty())
    throw std::invalid_argument("--tune: no stage of this program is built for several tile sizes");
  selection.stages = std::move(tunable);
}

// Times every tile size of the selected stages on one problem, each stage's in turn, and shows what
// its kernel takes beside its time. Returns the report's "stages".
Json tune_stages(const Options& options, OpenedDevice& device, const Problem& p,
                 const Ceilings& ceilings, Selection& selection, Progress& progress) {
  Json stages = Json::array();
  Table table({{"stage", Align::left},
               {"tiles"},
               {"ms"},
               {"p10"},
               {"p90"},
               {"TFLOP/s"},
               {"of ceiling"},
               {"of the fastest"},
               {"registers"},
               {"spilled"},
               {"shared memory"},
               {"blocks per SM"},
               {"warps per SM"}});
  for (const Stage* stage : selection.stages) {
    const std::vector<Tiles> candidates = tile_candidates(*stage, p);
    progress.say(
        fmt::format("timing {} {} at {} tile sizes", stage->id, stage->name, candidates.size()));
    std::vector<Variant> variants;
    for (const Tiles tiles : candidates) {
      variants.push_back(variant_for(options, *stage));
      variants.back().tiles = tiles;
    }
    const std::vector same(candidates.size(), stage);
    const TimingOptions timing{.seed = options.seed};
    const int64_t flops = flops_of(*stage, p);
    const InterleavedResult times =
        is_backward(*stage) ? time_backward_interleaved(*device.device, same, p,
                                                        forward_stage_for(options, p, device.info),
                                                        timing, variants)
                            : time_forward_interleaved(*device.device, same, p, timing, variants);
    size_t fastest = 0;
    for (size_t i = 1; i < candidates.size(); ++i) {
      if (times.speedup(i, fastest) > 1) fastest = i;
    }
    Json json = stage_json(*stage, p, variant_for(options, *stage));
    for (size_t i = 0; i < candidates.size(); ++i) {
      const TimeResult& time = times.time[i];
      const KernelResources& kernel = times.kernel[i];
      const double tflops = tflops_of(flops, time.median_ms);
      const int warps = kernel.blocks_per_multiprocessor * kernel.threads / 32;
      table.add({i == 0 ? stage->id : "", name_of(candidates[i]), ms_cell(time.median_ms),
                 ms_cell(time.p10_ms), ms_cell(time.p90_ms), fmt::format("{:.1f}", tflops),
                 share_cell(tflops, ceilings), fmt::format("{:.2f}", times.speedup(i, fastest)),
                 std::to_string(kernel.registers_per_thread),
                 kernel.local_bytes > 0 ? fmt::format("{} B", kernel.local_bytes) : "no",
                 with_commas(kernel.shared_memory),
                 std::to_string(kernel.blocks_per_multiprocessor), std::to_string(warps)});
      add_time_notes(table, flops, time, ceilings);
      Json candidate = {{"tiles", tiles_json(candidates[i])},
                        {"time", time_json(flops, time, ceilings)},
                        {"kernel",
                         {{"name", kernel.name},
                          {"threads", kernel.threads},
                          {"registers_per_thread", kernel.registers_per_thread},
                          {"local_bytes_per_thread", kernel.local_bytes},
                          {"shared_memory", kernel.shared_memory},
                          {"blocks_per_multiprocessor", kernel.blocks_per_multiprocessor}}}};
      candidate["time"]["speed_of_fastest"] = times.speedup(i, fastest);
      json["candidates"].push_back(candidate);
    }
    json["fastest"] = tiles_json(candidates[fastest]);
    table.add_note(fmt::format("{} chooses {}; fastest here: {}", stage->id,
                               name_of(candidates.front()), name_of(candidates[fastest])));
    stages.push_back(json);
  }
  progress.clear();
  print_problem(options, p, false);
  print("{}", table.str());
  print(
      "\nspilled: bytes of local memory that a thread needs beside its registers; shared memory: "
      "bytes of a block;\nblocks per SM: how many fit at once, by registers, shared memory and "
      "threads.\n");
  print_left_out(selection);
  return stages;
}

// Stages that keep S in global memory (01 to 03) would need too much of it.
bool stores_scores(const Stage& stage, const Problem& p) {
  const WorkspaceList list = stage.workspaces(p);
  return std::any_of(list.buffer, list.buffer + list.size, [](const WorkspaceBuffer& buffer) {
    return std::string_view(buffer.name) == "S";
  });
}

// The setting in which FlashAttention's papers time: batch * seqlen = 16384, heads * head_dim =
// 2048.
int bench_sweep(const Options& options, OpenedDevice& device, const Ceilings& ceilings,
                Json report) {
  constexpr int kTokens = 16384, kLongestStored = 4096;
  Progress progress;
  std::vector<int> head_dims = {64, 128};
  if (options.head_dim) head_dims = {*options.head_dim};
  std::vector<bool> masks = {false, true};
  if (options.causal) masks = {true};
  struct Cell {
    Options options;
    Problem problem;
    Selection selection;
  };
  std::vector<Cell> cells;  // all of them are looked at before the first is timed
  for (const int head_dim : head_dims) {
    for (const bool causal : masks) {
      for (int seqlen = 512; seqlen <= kTokens; seqlen *= 2) {
        Options cell = options;
        cell.head_dim = head_dim;
        cell.causal = causal;
        cell.heads = kSweepWidth / head_dim;
        cell.batch = kTokens / seqlen;
        cell.seqlen_q = cell.seqlen_k = seqlen;
        cell.dtype = options.dtype.value_or(DType::bf16);
        const Problem p = problem_for(cell, Target::cuda);
        Selection selection = select(cell, p, device.info);
        std::erase_if(selection.stages, [&](const Stage* stage) {
          return seqlen > kLongestStored && stores_scores(*stage, p);
        });
        if (!selection.stages.empty()) cells.push_back({cell, p, std::move(selection)});
      }
    }
  }
  report["sweep"] = Json::array();
  for (Cell& cell : cells) {
    Json json = {{"problem", problem_json(cell.options, cell.problem, false)}};
    print("\n");
    json["stages"] =
        time_stages(cell.options, device, cell.problem, ceilings, cell.selection, progress);
    add_left_out(cell.selection, json);
    report["sweep"].push_back(json);
  }
  write_report(options, report);
  return 0;
}

// One table of what the model counted, in units that a person compares: the ladder of the forward
// pass, or the stages of the backward pass.
Table counts_table(const Options& options, const Task& task, const Runs& runs,
                   const Yardstick& yardstick, bool backward, bool& all_ok, Json& stages) {
  std::vector<Table::Column> columns = {{"stage", Align::left},
                                        {"name", Align::left},
                                        {"check", Align::left},
                                        {"read"},
                                        {"written"},
                                        {"shared"},
                                        {"conflicts"},
                                        {"barriers"},
                                        {"MMA FLOPs"},
                                        {"exp"},
                                        {"div"},
                                        {"blocks"}};
  if (backward) columns.insert(columns.begin() + 5, {"atomics"});
  Table table(columns);
  for (const StageRun& run : runs.stages) {
    if (is_backward(*run.stage) != backward) continue;
    const Verdict verdict = judge(task, yardstick, runs, run);
    all_ok &= verdict.ok();
    std::vector<std::string> row = {run.stage->id, run.stage->name, verdict.ok() ? "ok" : "FAILED"};
    Json json = stage_json(*run.stage, task.problem, variant_for(options, *run.stage));
    add_verdict(verdict, json);
    if (const Ledger* its = run.ledger()) {
      const Ledger& ledger = *its;
      row.push_back(human_bytes(Ledger::total(ledger.global_read)));
      row.push_back(human_bytes(Ledger::total(ledger.global_written)));
      if (backward) row.push_back(human_bytes(ledger.atomic_bytes));
      for (std::string cell : {human_bytes(ledger.shared_read + ledger.shared_written),
                               human_count(ledger.bank_conflicts), human_count(ledger.barriers),
                               human_count(ledger.mma_flops), human_count(ledger.exp),
                               human_count(ledger.div), human_count(ledger.grid_blocks)}) {
        row.push_back(std::move(cell));
      }
      json["counts"] = ledger;
      if (run.run && run.run->lse_ledger) json["lse_counts"] = *run.run->lse_ledger;
    }
    table.add(row);
    if (!verdict.ok()) table.add_note(verdict.describe());
    stages.push_back(json);
  }
  return table;
}

// A report's "backward" is apart from its "stages": the ladder is the forward pass.
int ladder_on_model(const Options& options, const Task& task, const Runs& runs,
                    const Yardstick& yardstick, const Selection& selection, Json report) {
  bool all_ok = true;
  Json backward = Json::array();
  const Table table = counts_table(options, task, runs, yardstick, false, all_ok, report["stages"]);
  const Table its_table = counts_table(options, task, runs, yardstick, true, all_ok, backward);
  const bool any_forward = !report["stages"].empty(), any_backward = !backward.empty();
  if (any_backward) report["backward"] = std::move(backward);
  write_report(options, report);
  if (any_forward) print("{}", table.str());
  if (any_backward) print("{}the backward pass\n{}", any_forward ? "\n" : "", its_table.str());
  print(
      "\nread, written: bytes of global memory that threads asked for; shared: bytes of shared "
      "memory, both ways.\n"
      "The kernel that computes L for the first stages is not in these counts. What runs on the "
      "model is not timed.\n");
  print_left_out(selection);
  return all_ok ? 0 : 1;
}

int ladder_on_card(const Options& options, OpenedDevice& device, const Task& task, const Runs& runs,
                   const Yardstick& yardstick, const Selection& selection, Json report,
                   Progress& progress) {
  const Problem& p = task.problem;
  bool all_ok = true;
  std::vector<Verdict> verdicts;
  std::vector<const Stage*> forward, backward;
  std::vector<Variant> backward_variants;
  bool fault = false;
  for (const StageRun& run : runs.stages) {
    verdicts.push_back(judge(task, yardstick, runs, run));
    all_ok &= verdicts.back().ok();
    fault |= !run.run && !run.backward;
    (is_backward(*run.stage) ? backward : forward).push_back(run.stage);
    if (is_backward(*run.stage)) backward_variants.push_back(variant_for(options, *run.stage));
  }
  // Not after a fault: the card then does nothing more.
  const bool timed = !fault && forward_flops(p) > 0;
  Ceilings ceilings;
  InterleavedResult times, backward_times;
  if (timed) {
    progress.say("timing all stages in turn");
    ceilings = measure_ceilings(*device.device, {.seed = options.seed});
    if (!forward.empty())
      times = time_forward_interleaved(*device.device, forward, p, {.seed = options.seed});
    if (!backward.empty()) {
      backward_times =
          time_backward_interleaved(*device.device, backward, p, runs.given->forward_stage,
                                    {.seed = options.seed}, backward_variants);
    }
    progress.clear();
    report["ceilings"] = ceilings_json(ceilings);
    print_ceilings(ceilings);
  }
  // The ladder of the forward pass, or the stages of the backward pass, with their times.
  const auto table_of = [&](bool of_backward, const InterleavedResult& its, Json& stages) {
    std::vector<Table::Column> columns = {{"stage", Align::left},
                                          {"name", Align::left},
                                          {"check", Align::left},
                                          {"ms"},
                                          {"p10"},
                                          {"p90"},
                                          {"TFLOP/s"},
                                          {"of ceiling"}};
    if (!of_backward) columns.push_back({"x the one before"});
    Table table(columns);
    size_t i = 0;  // among these
    for (size_t r = 0; r < runs.stages.size(); ++r) {
      const Stage& stage = *runs.stages[r].stage;
      if (is_backward(stage) != of_backward) continue;
      const int64_t flops = flops_of(stage, p);
      std::vector<std::string> row = {stage.id, stage.name, verdicts[r].ok() ? "ok" : "FAILED"};
      Json json = stage_json(stage, p, variant_for(options, stage));
      add_verdict(verdicts[r], json);
      if (timed) {
        const TimeResult& time = its.time[i];
        const double tflops = tflops_of(flops, time.median_ms);
        for (std::string cell :
             {ms_cell(time.median_ms), ms_cell(time.p10_ms), ms_cell(time.p90_ms),
              fmt::format("{:.1f}", tflops), share_cell(tflops, ceilings)}) {
          row.push_back(std::move(cell));
        }
        json["time"] = time_json(flops, time, ceilings);
        if (!of_backward && i > 0) {
          row.push_back(fmt::format("{:.2f}", its.speedup(i, i - 1)));
          json["time"]["speedup_over_previous"] = its.speedup(i, i - 1);
        }
      }
      table.add(row);
      if (!verdicts[r].ok()) table.add_note(verdicts[r].describe());
      if (timed) add_time_notes(table, flops, its.time[i], ceilings);
      stages.push_back(json);
      ++i;
    }
    return table;
  };
  Json backward_json = Json::array();
  const Table table = table_of(false, times, report["stages"]);
  const Table its_table = table_of(true, backward_times, backward_json);
  if (!backward.empty()) report["backward"] = std::move(backward_json);
  write_report(options, report);
  if (!forward.empty()) print("\n{}", table.str());
  if (!backward.empty()) print("\nthe backward pass\n{}", its_table.str());
  print_left_out(selection);
  return all_ok ? 0 : 1;
}

}  // namespace

int bench(const Options& options) {
  OpenedDevice device = open_card(options);
  std::optional<Selection> selection;
  const Problem p = problem_for(options, device.info.target);
  if (!options.sweep) selection = select(options, p, device.info);
  if (options.tune) keep_tunable(options, p, *selection);
  Progress progress;
  progress.say("measuring the ceilings");
  const Ceilings ceilings = measure_ceilings(*device.device, {.seed = options.seed});
  progress.clear();
  Json report = new_report(device);
  report["ceilings"] = ceilings_json(ceilings);
  print_device(device);
  print_ceilings(ceilings);
  if (options.sweep) return bench_sweep(options, device, ceilings, std::move(report));

  report["problem"] = problem_json(options, p, false);
  report["stages"] = (options.tune ? tune_stages : time_stages)(options, device, p, ceilings,
                                                                *selection, progress);
  add_left_out(*selection, report);
  write_report(options, report);
  return 0;
}

int ladder(const Options& options) {
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
  add_left_out(selection, report);
  print_device(device);
  print_problem(options, p, true);
  print_yardstick(p, yardstick, runs);
  if (device.info.target == Target::model) {
    return ladder_on_model(options, task, runs, yardstick, selection, std::move(report));
  }
  return ladder_on_card(options, device, task, runs, yardstick, selection, std::move(report),
                        progress);
}

}  // namespace flashsteps::cli
