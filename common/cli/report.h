/// \file
/// Results as JSON and as text.
#pragma once

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "common/cli/options.h"
#include "common/cli/recorded.h"
#include "common/cli/task.h"
#include "common/reference/compare.h"
#include "common/stage/bound.h"
#include "common/stage/ledger.h"
#include "common/timing/timing.h"

namespace flashsteps::cli {

using Json = nlohmann::ordered_json;

/// Prints to stdout.
template <typename... Args>
void print(fmt::format_string<Args...> format, Args&&... args) {
  fmt::print(format, std::forward<Args>(args)...);
}

/// The JSON object of a run: device, commit (absent where git did not know it), problem, and no
/// stages yet.
Json new_report(const OpenedDevice& device);
/// As the report's "problem".
Json problem_json(const Options& options, const Problem& problem, bool has_inputs);
/// As an entry of the report's "stages": id, name and, where the stage has any, the tiles that it
/// runs with; "grid" where it is not the usual one.
Json stage_json(const Stage& stage, const Problem& problem, const Variant& variant = {});
/// {"Br": …, "Bc": …}
Json tiles_json(Tiles tiles);
/// "128x64", or "-" where a stage has no tiles.
std::string tiles_cell(Tiles tiles);
/// As a stage's "check".
Json check_json(const Comparison& comparison);
Json check_json(const GradientComparison& comparison);
/// \param flops of the pass that was timed
Json time_json(int64_t flops, const TimeResult& time, const Ceilings& ceilings);
Json ceilings_json(const Ceilings& ceilings);

/// Writes the report where --json asks for it.
void write_report(const Options& options, const Json& report);

/// "device   CPU model (no usable card: …)" and "problem  batch 1, …", each a line.
void print_device(const OpenedDevice& device);
void print_problem(const Options& options, const Problem& problem, bool has_inputs);

/// The ledgers of several stages side by side, a count a line. A tensor that a stage does not touch
/// shows as "-".
///
/// \param tiles of each stage, shown in the first line; empty: no such line
///
/// \param skip_zero leaves out counts that are 0 for all; those of Hopper's instructions are left
/// out in any case
std::string ledger_table(const std::vector<std::string>& ids, const std::vector<Tiles>& tiles,
                         const std::vector<Ledger>& ledgers, bool skip_zero);

/// A bound as a stage's "bound", and the card's figures as the report's "card".
Json bound_json(const Card& card, const TimeBound& bound);
Json card_json(const Card& card);

/// What each part of the card would need for each stage, a part a line, the bound, and which part
/// it comes from. A stage without a bound shows as "-".
std::string bound_table(const std::vector<std::string>& ids,
                        const std::vector<std::optional<TimeBound>>& bounds);

/// A recorded time, and the bound of its problem where there is one.
struct Recorded {
  RecordedTime time;
  std::optional<TimeBound> bound;
};

/// As a stage's "recorded".
Json recorded_json(const std::vector<Recorded>& times);

/// A recorded time a line: of which problem, the bound of that problem, the time, and their ratio.
std::string recorded_table(const std::vector<Recorded>& times);

}  // namespace flashsteps::cli
