/// \file
/// Times that were recorded on a card (docs/results), for what `count --card` shows beside a bound.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "common/attention/card.h"
#include "common/attention/problem.h"
#include "common/stage/stage.h"

namespace flashsteps::cli {

/// One stage's time on one problem, as a file has it.
struct RecordedTime {
  std::string file;    ///< name without directory
  std::string commit;  ///< that was measured; empty where the file does not say
  std::string stage;   ///< "05"
  Tiles tiles;         ///< {} where the file has none
  bool one_block_per_head = false;
  bool deterministic = false;
  /// Sizes, type and mask. Strides and scale are not set.
  Problem problem;
  double median_us = 0;
};

/// Where the results of this repository lie: docs/results of the repository that the program's own
/// file is in, or else the current directory; nothing where neither has it (a handout has none).
std::optional<std::filesystem::path> find_results();

/// Reads every time of a stage on this card from the .json files of a directory, in order of the
/// files' names: reports of `attention bench` and `ladder`, and those of python/bench_peers.py.
/// Files without times, and other cards' files, are passed over.
///
/// \throws std::invalid_argument with one line for a directory that cannot be read, or a file that is
/// not JSON or has a time that cannot be understood
std::vector<RecordedTime> read_recorded(const std::filesystem::path& directory, const Card& card);

/// Those of this stage as `variant`, in `tiles`, on this problem in all but batch and heads (with
/// as many query heads to a KV head), in the same order.
std::vector<RecordedTime> matching(const std::vector<RecordedTime>& times, const Stage& stage,
                                   const Problem& problem, Tiles tiles, const Variant& variant);

}  // namespace flashsteps::cli
