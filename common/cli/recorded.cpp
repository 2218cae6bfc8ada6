#include "common/cli/recorded.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <system_error>

#include "common/attention/layout.h"

namespace flashsteps::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

// The results of the repository that this directory lies in: the nearest one above with a `lab`.
std::optional<fs::path> results_above(const fs::path& start) {
  std::error_code error;
  for (fs::path directory = start; directory.has_relative_path();
       directory = directory.parent_path()) {
    if (!fs::is_regular_file(directory / "lab", error)) continue;
    const fs::path results = directory / "docs" / "results";
    return fs::is_directory(results, error) ? std::optional(results) : std::nullopt;
  }
  return std::nullopt;
}

Problem problem_of(const Json& json) {
  Problem p;
  p.batch = json.at("batch");
  p.heads = json.at("heads");
  p.kv_heads = json.at("kv_heads");
  p.seqlen_q = json.at("seqlen_q");
  p.seqlen_k = json.at("seqlen_k");
  p.head_dim = json.at("head_dim");
  p.causal = json.at("causal");
  const std::string dtype = json.at("dtype");
  if (dtype != name_of(DType::fp16) && dtype != name_of(DType::bf16))
    throw std::invalid_argument("dtype is " + dtype);
  p.dtype = dtype == name_of(DType::fp16) ? DType::fp16 : DType::bf16;
  if (p.batch < 1 || p.heads < 1 || p.kv_heads < 1 || p.heads % p.kv_heads != 0)
    throw std::invalid_argument("batch, heads and kv_heads are of no problem");
  return p;
}

// The tiles and the grid of a run. bench_peers.py names the grid in the run's name, the programs in
// a field.
RecordedTime run_of(const Json& json, double median_ms) {
  if (!(median_ms > 0) || !std::isfinite(median_ms))
    throw std::invalid_argument(fmt::format("a median of {} ms", median_ms));
  RecordedTime time;
  time.stage = json.at("stage");
  time.median_us = median_ms * 1e3;
  if (json.contains("tiles"))
    time.tiles = {json.at("tiles").at("Br").get<int>(), json.at("tiles").at("Bc").get<int>()};
  time.one_block_per_head =
      json.value("grid", "") == "bh" || json.value("name", "") == time.stage + ":bh";
  time.deterministic = json.value("deterministic", false);
  return time;
}

// Adds the times of a problem's stages; peers are of no stage, and what the host slowed is no time
// of the card's.
void read_stages(const Json& stages, const Json& problem, std::vector<RecordedTime>& times) {
  for (const Json& stage : stages) {
    // bench_peers.py has a run's figures beside its name, the programs in an object of their own.
    const Json& figures = stage.contains("time") ? stage.at("time") : stage;
    if (!stage.contains("stage") || !figures.contains("median_ms")) continue;
    if (figures.value("host_bound", false)) continue;
    times.push_back(run_of(stage, figures.at("median_ms")));
    times.back().problem = problem_of(problem);
  }
}

// bench_peers.py writes cells with their runs, bench --sweep a list of problems with their stages,
// bench and ladder one problem.
void read_report(const Json& report, std::vector<RecordedTime>& times) {
  for (const char* list : {"cells", "sweep"}) {
    if (!report.contains(list)) continue;
    for (const Json& part : report.at(list)) read_report(part, times);
  }
  for (const char* list : {"runs", "stages", "backward"}) {
    if (report.contains(list)) read_stages(report.at(list), report.value("problem", Json()), times);
  }
}

}  // namespace

std::optional<fs::path> find_results() {
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  if (!error) {
    if (const auto found = results_above(program.parent_path())) return found;
  }
  const fs::path here = fs::current_path(error);
  return error ? std::nullopt : results_above(here);
}

std::vector<RecordedTime> read_recorded(const fs::path& directory, const Card& card) {
  std::vector<fs::path> files;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    if (entry.path().extension() == ".json") files.push_back(entry.path());
  }
  if (error) {
    throw std::invalid_argument(
        fmt::format("{} cannot be read: {}", directory.string(), error.message()));
  }
  std::sort(files.begin(), files.end());
  std::vector<RecordedTime> times;
  for (const fs::path& file : files) {
    const size_t before = times.size();
    try {
      std::ifstream stream(file);
      const Json report = Json::parse(stream);
      if (!report.contains("device") || report.at("device").value("name", "") != card.device_name)
        continue;
      read_report(report, times);
      for (size_t i = before; i < times.size(); ++i) {
        times[i].file = file.filename().string();
        times[i].commit = report.value("commit", "");
      }
    } catch (const std::exception& failure) {
      throw std::invalid_argument(
          fmt::format("{} is no file of results: {}", file.string(), failure.what()));
    }
  }
  return times;
}

std::vector<RecordedTime> matching(const std::vector<RecordedTime>& times, const Stage& stage,
                                   const Problem& p, Tiles tiles, const Variant& variant) {
  std::vector<RecordedTime> found;
  for (const RecordedTime& time : times) {
    const Problem& its = time.problem;
    if (time.stage == stage.id && time.tiles == tiles &&
        time.one_block_per_head == variant.one_block_per_head &&
        time.deterministic == variant.deterministic && its.seqlen_q == p.seqlen_q &&
        its.seqlen_k == p.seqlen_k && its.head_dim == p.head_dim && its.dtype == p.dtype &&
        its.causal == p.causal && its.heads / its.kv_heads == p.heads / p.kv_heads) {
      found.push_back(time);
    }
  }
  return found;
}

}  // namespace flashsteps::cli
