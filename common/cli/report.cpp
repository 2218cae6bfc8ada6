#include "common/cli/report.h"

#include <set>

#include "common/attention/work.h"
#include "common/cli/commit.h"
#include "common/cli/table.h"
#include "common/gpu/cuda_support.h"
#include "common/reference/file.h"
#include "common/stage/ledger_json.h"
#include "common/stage/registry.h"
#include "common/stage/run.h"

namespace flashsteps::cli {
Json new_report(const OpenedDevice& device) {
  const DeviceInfo& info = device.info;
  Json json_device = {{"target", name_of(info.target)},
                      {"name", info.name},
                      {"capability", capability_name(info.capability)}};
  if (info.multiprocessors > 0) json_device["multiprocessors"] = info.multiprocessors;
  if (info.shared_memory_per_block > 0)
    json_device["shared_memory_per_block"] = info.shared_memory_per_block;
  if (info.target == Target::cuda) {
    json_device["memory_bytes"] = info.memory_bytes;
    json_device["driver"] = info.driver;
    json_device["runtime"] = info.runtime;
  }
  Json report = {{"device", json_device}};
  if (const std::string commit = build_commit(); !commit.empty()) report["commit"] = commit;
  return report;
}

Json problem_json(const Options& options, const Problem& p, bool has_inputs) {
  Json json = {{"batch", p.batch},
               {"heads", p.heads},
               {"kv_heads", p.kv_heads},
               {"seqlen_q", p.seqlen_q},
               {"seqlen_k", p.seqlen_k},
               {"head_dim", p.head_dim},
               {"dtype", name_of(p.dtype)},
               {"causal", p.causal},
               {"scale", p.scale},
               {"layout", name_of(options.layout)},
               {"visible_pairs", visible_pairs(p)},
               {"flops", forward_flops(p)}};
  if (has_inputs && options.q) {
    json["q"] = options.q->string();
    json["k"] = options.k->string();
    json["v"] = options.v->string();
    if (options.d_o) json["do"] = options.d_o->string();
  } else if (has_inputs) {
    json["input"] = name_of(options.input);
    json["seed"] = options.seed;
  }
  return json;
}

Json stage_json(const Stage& stage, const Problem& p, const Variant& variant) {
  Json json = {{"stage", stage.id}, {"name", stage.name}};
  if (const Tiles tiles = tiles_of(stage, p, variant); tiles != Tiles{})
    json["tiles"] = tiles_json(tiles);
  if (variant.one_block_per_head) json["grid"] = "bh";
  if (is_backward(stage)) {
    json["pass"] = "backward";
    json["deterministic"] = variant.deterministic;
    json["flops"] = backward_flops(p);
  }
  return json;
}

Json tiles_json(Tiles tiles) {
  return {{"Br", tiles.Br}, {"Bc", tiles.Bc}};
}

std::string tiles_cell(Tiles tiles) {
  return tiles == Tiles{} ? "-" : name_of(tiles);
}

Json check_json(const Comparison& c) {
  Json json = {{"ok", c.ok},
               {"max_abs_err", c.max_abs_error},
               {"bound", c.bound},
               {"lse_max_abs_err", c.lse_max_abs_error},
               {"lse_bound", c.lse_bound},
               {"rows", c.rows_checked}};
  if (!c.ok) json["error"] = c.describe();
  return json;
}

Json check_json(const GradientComparison& c) {
  Json json = {{"ok", c.ok()}};
  for (const TensorComparison* tensor : {&c.dq, &c.dk, &c.dv}) {
    json[tensor->tensor] = {{"max_abs_err", tensor->max_abs_error},
                            {"bound", tensor->bound},
                            {"rows", tensor->rows_checked}};
  }
  if (!c.ok()) json["error"] = c.describe();
  return json;
}

Json time_json(int64_t flops, const TimeResult& time, const Ceilings& ceilings) {
  const double tflops = tflops_of(flops, time.median_ms);
  Json json = {{"median_ms", time.median_ms},
               {"p10_ms", time.p10_ms},
               {"p90_ms", time.p90_ms},
               {"reps", time.reps},
               {"tflops", tflops}};
  if (ceilings.matmul_tflops) json["percent_of_ceiling"] = 100 * tflops / *ceilings.matmul_tflops;
  if (time.host_bound) json["host_bound"] = true;
  return json;
}

Json ceilings_json(const Ceilings& ceilings) {
  Json json = Json::object();
  if (ceilings.copy_tb_per_s) json["copy_tb_per_s"] = *ceilings.copy_tb_per_s;
  if (ceilings.matmul_tflops) json["matmul_tflops"] = *ceilings.matmul_tflops;
  json["matmul_source"] = ceilings.matmul_source;
  return json;
}

void write_report(const Options& options, const Json& report) {
  if (options.json) write_file(*options.json, {report.dump(2), "\n"});
}

void print_device(const OpenedDevice& device) {
  const DeviceInfo& info = device.info;
  std::string details = fmt::format("capability {}", capability_name(info.capability));
  if (info.multiprocessors > 0) details += fmt::format(", {} SMs", info.multiprocessors);
  if (!info.driver.empty())
    details += fmt::format(", driver {}, runtime {}", info.driver, info.runtime);
  print("device   {} ({}){}\n", info.name, details,
        device.why.empty() ? "" : "; chosen because " + device.why);
}

void print_problem(const Options& options, const Problem& p, bool has_inputs) {
  print("problem  batch {}, heads {}", p.batch, p.heads);
  if (p.kv_heads != p.heads) print(" (KV {})", p.kv_heads);
  print(", seqlen {} x {}, head_dim {}, {}, {}, scale {:.6g}, {}\n", p.seqlen_q, p.seqlen_k,
        p.head_dim, name_of(p.dtype), p.causal ? "causal" : "no mask", p.scale,
        name_of(options.layout));
  if (!has_inputs) return;
  if (options.q) {
    print("inputs   {}, {}, {}", options.q->string(), options.k->string(), options.v->string());
    if (names_backward(options)) {
      print(", dO {}",
            options.d_o ? options.d_o->string() : fmt::format("random, seed {}", options.seed));
    }
    print("\n");
  } else {
    print("inputs   {}, seed {}\n", name_of(options.input), options.seed);
  }
}

std::string ledger_table(const std::vector<std::string>& ids, const std::vector<Tiles>& tiles,
                         const std::vector<Ledger>& ledgers, bool skip_zero) {
  std::vector<Table::Column> columns = {{"", Table::Align::left}};
  for (const std::string& id : ids) columns.push_back({id});
  Table table(columns);
  if (!tiles.empty()) {
    std::vector<std::string> row = {"tiles, Br x Bc"};
    for (const Tiles& of_stage : tiles) row.push_back(tiles_cell(of_stage));
    table.add(row);
  }
  const auto add_bytes = [&](const char* title, BytesByTensor Ledger::*member) {
    std::set<std::string> tensors;
    std::vector<std::string> totals = {title};
    for (const Ledger& ledger : ledgers) {
      for (const auto& [name, bytes] : ledger.*member) tensors.insert(name);
      totals.push_back(with_commas(Ledger::total(ledger.*member)));
    }
    if (skip_zero && tensors.empty()) return;
    table.add(totals);
    for (const std::string& tensor : tensors) {
      std::vector<std::string> row = {"  of " + tensor};
      for (const Ledger& ledger : ledgers) {
        const auto found = (ledger.*member).find(tensor);
        row.push_back(found == (ledger.*member).end() ? "-" : with_commas(found->second));
      }
      table.add(row);
    }
  };
  const auto add_if = [&](bool also_zero, const char* title, int64_t Ledger::*member) {
    bool any = false;
    std::vector<std::string> row = {title};
    for (const Ledger& ledger : ledgers) {
      row.push_back(with_commas(ledger.*member));
      any |= ledger.*member != 0;
    }
    if (any || also_zero) table.add(row);
  };
  const auto add = [&](const char* title, int64_t Ledger::*member) {
    add_if(!skip_zero, title, member);
  };
  // What only Hopper's stages have stays away from tables without one.
  const auto add_hopper = [&](const char* title, int64_t Ledger::*member) {
    add_if(false, title, member);
  };
  add_bytes("global bytes read", &Ledger::global_read);
  add_bytes("global bytes written", &Ledger::global_written);
  add_bytes("global bytes read, once a block", &Ledger::global_unique_read);
  add("global bytes added by atomics", &Ledger::atomic_bytes);
  add("shared bytes read", &Ledger::shared_read);
  add("shared bytes written", &Ledger::shared_written);
  add("shared bytes between warps", &Ledger::warp_exchange_bytes);
  add("bank conflicts", &Ledger::bank_conflicts);
  add("barriers (blocks)", &Ledger::barriers);
  add_hopper("named barriers (completed)", &Ledger::named_barriers);
  add_hopper("mbarrier phases (ended)", &Ledger::mbarrier_phases);
  add("warp barriers (warps)", &Ledger::warp_barriers);
  add("shuffles (warps)", &Ledger::shuffles);
  add("ldmatrix (warps)", &Ledger::ldmatrix);
  add("mma (warps)", &Ledger::mma);
  add_hopper("wgmma (warpgroups)", &Ledger::wgmma);
  add("MMA FLOPs", &Ledger::mma_flops);
  add("cp.async (lanes)", &Ledger::cp_async);
  add_hopper("TMA (boxes)", &Ledger::tma);
  add("exponentials (lanes)", &Ledger::exp);
  add("divisions (lanes)", &Ledger::div);
  add("  in the loop over tiles", &Ledger::div_in_loop);
  add("launches", &Ledger::launches);
  add("blocks", &Ledger::grid_blocks);
  add("tiles visited", &Ledger::tiles_visited);
  add("  masked", &Ledger::tiles_masked);
  return table.str();
}

Json bound_json(const Card& card, const TimeBound& bound) {
  return {{"card", card.name},
          {"us", bound.bound_us()},
          {"by", bound.bound_by()},
          {"multiprocessors", bound.multiprocessors},
          {"memory_us", bound.memory_us},
          {"mma_us", bound.mma_us},
          {"fma_us", bound.fma_us},
          {"exp_us", bound.exp_us},
          {"requested_bytes_us", bound.requested_us}};
}

Json card_json(const Card& card) {
  return {{"name", card.name},
          {"full_name", card.full_name},
          {"capability", capability_name(card.capability)},
          {"multiprocessors", card.multiprocessors},
          {"clock_ghz", card.clock_ghz},
          {"memory_gb_per_s", card.memory_gb_per_s},
          {"tensor_tflops", card.tensor_tflops},
          {"fp32_tflops", card.fp32_tflops},
          {"special_per_s", card.special_per_s()},
          {"shared_memory_per_block", card.shared_memory_per_block}};
}

std::string bound_table(const std::vector<std::string>& ids,
                        const std::vector<std::optional<TimeBound>>& bounds) {
  std::vector<Table::Column> columns = {{"", Table::Align::left}};
  for (const std::string& id : ids) columns.push_back({id});
  Table table(columns);
  const auto add = [&](const char* title, const auto& cell) {
    std::vector<std::string> row = {title};
    for (const auto& bound : bounds) row.push_back(bound ? cell(*bound) : "-");
    table.add(row);
  };
  const auto add_us = [&](const char* title, double TimeBound::*part) {
    add(title,
        [&](const TimeBound& b) { return b.*part > 0 ? fmt::format("{:.3g}", b.*part) : "-"; });
  };
  add("SMs that have a block",
      [](const TimeBound& b) { return std::to_string(b.multiprocessors); });
  add_us("us of memory, each byte once", &TimeBound::memory_us);
  add_us("us of MMA", &TimeBound::mma_us);
  add_us("us of FMA", &TimeBound::fma_us);
  add_us("us of exponentials, divisions", &TimeBound::exp_us);
  add("the bound, us", [](const TimeBound& b) { return fmt::format("{:.3g}", b.bound_us()); });
  add("  set by", [](const TimeBound& b) { return std::string(b.bound_by()); });
  add_us("us of memory, without caches", &TimeBound::requested_us);
  return table.str();
}

Json recorded_json(const std::vector<Recorded>& times) {
  Json list = Json::array();
  for (const auto& [time, bound] : times) {
    Json json = {{"file", time.file}};
    if (!time.commit.empty()) json["commit"] = time.commit;
    json["batch"] = time.problem.batch;
    json["heads"] = time.problem.heads;
    json["kv_heads"] = time.problem.kv_heads;
    json["us"] = time.median_us;
    if (bound) json["bound_us"] = bound->bound_us();
    list.push_back(json);
  }
  return list;
}

std::string recorded_table(const std::vector<Recorded>& times) {
  Table table({{"stage", Table::Align::left},
               {"batch"},
               {"heads"},
               {"bound, us"},
               {"recorded, us"},
               {"recorded / bound"},
               {"file", Table::Align::left}});
  const auto number = [](double x) { return fmt::format("{:.4g}", x); };
  for (const auto& [time, bound] : times) {
    const Problem& p = time.problem;
    std::string heads = std::to_string(p.heads);
    if (p.kv_heads != p.heads) heads += fmt::format(" (KV {})", p.kv_heads);
    const bool beside = bound && bound->bound_us() > 0;
    table.add({time.stage, std::to_string(p.batch), heads, beside ? number(bound->bound_us()) : "-",
               number(time.median_us),
               beside ? fmt::format("{:.2f}", time.median_us / bound->bound_us()) : "-",
               time.file});
  }
  return table.str();
}

}  // namespace flashsteps::cli
