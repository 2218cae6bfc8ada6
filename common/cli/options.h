/// \file
/// What a person typed, parsed and in range.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "common/attention/card.h"
#include "common/attention/layout.h"
#include "common/attention/problem.h"
#include "common/reference/inputs.h"
#include "common/stage/stage.h"

namespace flashsteps::cli {

enum class Command { list, check, count, bench, ladder };

struct Options {
  Command command = Command::list;
  std::string stages = "all";
  std::optional<Target> device;

  // The problem; what is not given gets a default that depends on the command and the device.
  std::optional<int> batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim;
  std::optional<DType> dtype;
  std::optional<float> scale;
  bool causal = false;
  Layout layout = Layout::bhsd;

  InputKind input = InputKind::moving_max;
  bool input_given = false;
  uint64_t seed = 1;  ///< of the inputs, and of the model's scheduler
  std::optional<std::filesystem::path> q, k, v, expect_o, expect_lse;
  std::optional<std::filesystem::path> d_o, expect_dq, expect_dk, expect_dv;

  Variant variant;  ///< --tiles, --grid, --deterministic; see variant_for
  /// Which stage gives backward stages their O and L; not given: last_forward_stage().
  std::optional<std::string> forward_stage;
  std::optional<int64_t> shared_memory;  ///< of the card that the model imitates, bytes a block
  const Card* card = nullptr;            ///< whose bound count shows; the model imitates it

  /// Where count looks for times recorded on `card`; not given: find_results().
  std::optional<std::filesystem::path> results;

  std::optional<std::filesystem::path> json, out, lse, dq, dk, dv;
  bool sweep = false;
  bool tune = false;
};

/// heads * head_dim of bench --sweep, as in FlashAttention's papers.
inline constexpr int kSweepWidth = 2048;

/// How the options have a stage run: what is of the backward pass alone does not reach stages of
/// the forward pass.
Variant variant_for(const Options& options, const Stage& stage);

/// Whether the options name a stage of the backward pass.
bool names_backward(const Options& options);

/// Parses the command line. Prints and returns nothing where help was asked for.
///
/// \throws std::invalid_argument with one line
std::optional<Options> parse(int argc, char** argv);

}  // namespace flashsteps::cli
