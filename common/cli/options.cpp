#include "common/cli/options.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <iostream>
#include <stdexcept>
#include <string_view>

#include "common/attention/validate.h"
#include "common/reference/file.h"
#include "common/stage/registry.h"
#include "common/stage/run.h"

namespace flashsteps::cli {
namespace {

[[noreturn]] void refuse(std::string_view option, std::string_view given,
                         std::string_view allowed) {
  throw std::invalid_argument(fmt::format("{} is '{}'; allowed: {}", option, given, allowed));
}

template <typename T>
T parse_number(const char* option, const std::string& text, T least, T most,
               const std::string& allowed) {
  T value{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || !(value >= least && value <= most))
    refuse(option, text, allowed);
  return value;
}

int parse_int(const char* option, const std::string& text, int least, int most) {
  return parse_number(option, text, least, most,
                      fmt::format("whole numbers from {} to {}", least, most));
}

/// The stage with this id, for whatever target there is.
const Stage& stage_with(std::string_view id) {
  const Stage* stage = find_stage(id, Target::model);
  return stage ? *stage : *find_stage(id, Target::cuda);
}

/// One of several named values.
template <typename T, size_t N>
T parse_name(const char* option, const std::string& text, const T (&values)[N]) {
  std::string allowed;
  for (const T& value : values) {
    if (text == name_of(value)) return value;
    allowed += fmt::format("{}{}", allowed.empty() ? "" : ", ", name_of(value));
  }
  refuse(option, text, allowed);
}

void add_common_options(CLI::App& app, Options& options) {
  using Text = const std::string&;
  constexpr int kMaxInt = 2147483647;
  app.add_option_function<std::string>(
         "--stage",
         [&](Text text) {
           try {
             select_stages(text);
           } catch (const std::invalid_argument& error) {
             throw std::invalid_argument(fmt::format("--stage is '{}': {}", text, error.what()));
           }
           options.stages = text;
         },
         "stages, as in 05 or 02a,03 or all (the default); 02 means its last step")
      ->type_name("LIST");
  const auto integer = [&](const char* name, std::optional<int>& to, int least, int most,
                           const char* help) {
    return app
        .add_option_function<std::string>(
            name, [&to, name, least, most](Text text) { to = parse_int(name, text, least, most); },
            help)
        ->type_name("N");
  };
  integer("--batch", options.batch, 1, kMaxInt, "batch size");
  integer("--heads", options.heads, 1, kMaxInt, "query heads");
  integer("--kv-heads", options.kv_heads, 1, kMaxInt,
          "key and value heads, a divisor of heads (default: heads)");
  CLI::Option* seqlen_q = integer("--seqlen-q", options.seqlen_q, 0, kMaxSeqlen, "queries");
  CLI::Option* seqlen_k = integer("--seqlen-k", options.seqlen_k, 0, kMaxSeqlen, "keys");
  app.add_option_function<std::string>(
         "--seqlen",
         [&](Text text) {
           options.seqlen_q = options.seqlen_k = parse_int("--seqlen", text, 0, kMaxSeqlen);
         },
         "queries and keys")
      ->type_name("N")
      ->excludes(seqlen_q)
      ->excludes(seqlen_k);
  app.add_option_function<std::string>(
         "--head-dim",
         [&](Text text) {
           options.head_dim = parse_int("--head-dim", text, 8, 128);
           if (*options.head_dim % 8 != 0)
             refuse("--head-dim", text, "multiples of 8 from 8 to 128");
         },
         "a multiple of 8 from 8 to 128")
      ->type_name("N");
  app.add_option_function<std::string>(
         "--dtype",
         [&](Text text) {
           options.dtype = parse_name("--dtype", text, {DType::fp16, DType::bf16});
         },
         "fp16 (the default) or bf16")
      ->type_name("TYPE");
  app.add_flag("--causal", options.causal, "query i sees key j when j <= i + seqlen_k - seqlen_q");
  app.add_option_function<std::string>(
         "--scale",
         [&](Text text) {
           const std::string allowed = "any finite number";
           constexpr double kMaxFloat = std::numeric_limits<float>::max();
           options.scale =
               float(parse_number<double>("--scale", text, -kMaxFloat, kMaxFloat, allowed));
         },
         "factor on Q K^T (default: 1/sqrt(head_dim))")
      ->type_name("X");
  app.add_option_function<std::string>(
         "--layout",
         [&](Text text) {
           options.layout = parse_name("--layout", text, {Layout::bhsd, Layout::bshd});
         },
         "axes of Q, K, V, O in memory and in files: bhsd (batch, heads, seqlen, head_dim; the "
         "default) or bshd")
      ->type_name("AXES");
  app.add_option_function<std::string>(
         "--input",
         [&](Text text) {
           options.input = parse_name("--input", text, kInputKinds);
           options.input_given = true;
         },
         "kind of random inputs: normal, moving_max (the default), large_logits, outlier_channels, "
         "uniform")
      ->type_name("KIND");
  app.add_option_function<std::string>(
         "--seed",
         [&](Text text) {
           options.seed = parse_number<uint64_t>("--seed", text, 0, ~uint64_t{0},
                                                 "whole numbers from 0 to 2^64 - 1");
         },
         "of the inputs, and of the model's scheduler (default: 1)")
      ->type_name("N");
  app.add_option_function<std::string>(
         "--device",
         [&](Text text) {
           options.device = parse_name("--device", text, {Target::model, Target::cuda});
         },
         "model or cuda (default: cuda where there is a usable card)")
      ->type_name("DEVICE");
}

Tiles parse_tiles(const std::string& text) {
  const auto refuse_it = [&] { refuse("--tiles", text, "BRxBC, as in 128x64"); };
  Tiles tiles;
  const char* const end = text.data() + text.size();
  const auto br = std::from_chars(text.data(), end, tiles.Br);
  if (br.ec != std::errc() || br.ptr == end || *br.ptr != 'x') refuse_it();
  const auto bc = std::from_chars(br.ptr + 1, end, tiles.Bc);
  if (bc.ec != std::errc() || bc.ptr != end || tiles.Br < 1 || tiles.Bc < 1) refuse_it();
  return tiles;
}

void add_variant(CLI::App& app, Options& options) {
  app.add_option_function<std::string>(
         "--tiles", [&](const std::string& text) { options.variant.tiles = parse_tiles(text); },
         "rows of Q and of K in a tile, for stages that are built for several (07, 08; list --json "
         "names them)")
      ->type_name("BRxBC");
  app.add_option_function<std::string>(
         "--grid",
         [&](const std::string& text) {
           if (text != "bh") refuse("--grid", text, "bh");
           options.variant.one_block_per_head = true;
         },
         "bh: one block for each (batch, head), as 04 has, instead of one for each row tile (05)")
      ->type_name("GRID");
}

void add_backward(CLI::App& app, Options& options) {
  app.add_option_function<std::string>(
         "--forward-stage",
         [&](const std::string& text) {
           try {
             const std::vector<std::string> ids = select_stages(text);
             if (ids.size() != 1) throw std::invalid_argument("one stage is allowed");
             if (is_backward(stage_with(ids.front())))
               throw std::invalid_argument("it is of the backward pass");
             options.forward_stage = ids.front();
           } catch (const std::invalid_argument& error) {
             throw std::invalid_argument(
                 fmt::format("--forward-stage is '{}': {}", text, error.what()));
           }
         },
         "which stage gives backward stages their O and L (default: the last that runs here; the "
         "reference in a program without one)")
      ->type_name("STAGE");
  app.add_flag("--deterministic", options.variant.deterministic,
               "backward stages sum dQ in a fixed order");
}

void add_shared_memory(CLI::App& app, Options& options) {
  constexpr int64_t kMost = 256 * 1024;
  app.add_option_function<std::string>(
         "--shared-memory",
         [&](const std::string& text) {
           options.shared_memory =
               parse_number<int64_t>("--shared-memory", text, 0, kMost,
                                     fmt::format("whole numbers of bytes from 0 to {}", kMost));
         },
         "of a block on the card that the model imitates: 101376 (99 KB) on consumer cards, 166912 "
         "on an A100, 232448 on Hopper (the default)")
      ->type_name("BYTES");
}

void add_path(CLI::App& app, const std::string& name, std::optional<std::filesystem::path>& to,
              bool written, const char* help) {
  app.add_option_function<std::string>(
         name,
         [&to, name, written](const std::string& text) {
           if (written) require_writable(name, text);
           if (text.empty()) refuse(name, text, "the name of a file");
           to = text;
         },
         help)
      ->type_name("FILE");
}

void add_d_o(CLI::App& app, Options& options) {
  add_path(
      app, "--do", options.d_o, false,
      "dO of backward stages from a .npy file, with --q, --k and --v (default: random normal)");
}

void add_input_files(CLI::App& app, Options& options) {
  add_path(app, "--q", options.q, false,
           "Q from a .npy file (float16 or float32), with --k and --v");
  add_path(app, "--k", options.k, false, "K likewise");
  add_path(app, "--v", options.v, false, "V likewise");
}

void require_consistent(const Options& options) {
  const int files = options.q.has_value() + options.k.has_value() + options.v.has_value();
  if (files != 0 && files != 3)
    throw std::invalid_argument("--q, --k and --v are given together or not at all");
  if (files == 3 && options.input_given)
    throw std::invalid_argument("--input has no meaning beside --q, --k and --v");
  if (files == 0 && (options.expect_o || options.expect_lse)) {
    throw std::invalid_argument(
        "--expect-o and --expect-lse belong to given tensors; --q, --k and --v are missing");
  }
  if (files == 0 && options.d_o)
    throw std::invalid_argument("--do belongs to given tensors; --q, --k and --v are missing");
  const bool expects_gradients = options.expect_dq || options.expect_dk || options.expect_dv;
  if (expects_gradients && !options.d_o) {
    throw std::invalid_argument(
        "--expect-dq, --expect-dk and --expect-dv belong to given tensors; --do is missing");
  }
  const std::vector<std::string> stages = select_stages(options.stages);
  const bool writes = options.out || options.lse;
  const bool writes_gradients = options.dq || options.dk || options.dv;
  if (stages.size() != 1 && (writes || writes_gradients)) {
    throw std::invalid_argument(fmt::format("{} write one stage's result; --stage {} means {}",
                                            writes ? "--out and --lse" : "--dq, --dk and --dv",
                                            options.stages, stages.size()));
  }
  const auto is_backward_id = [](const std::string& id) { return is_backward(stage_with(id)); };
  const bool any_backward = std::any_of(stages.begin(), stages.end(), is_backward_id);
  const bool all_backward = std::all_of(stages.begin(), stages.end(), is_backward_id);
  const auto require_pass = [&](bool given, const char* names, bool there, const char* pass) {
    if (given && !there) {
      throw std::invalid_argument(fmt::format("{} of the {} pass; --stage {} means no stage of it",
                                              names, pass, options.stages));
    }
  };
  require_pass(writes, "--out and --lse are", !all_backward, "forward");
  require_pass(options.expect_o || options.expect_lse, "--expect-o and --expect-lse are",
               !all_backward, "forward");
  require_pass(writes_gradients, "--dq, --dk and --dv are", any_backward, "backward");
  require_pass(expects_gradients, "--expect-dq, --expect-dk and --expect-dv are", any_backward,
               "backward");
  require_pass(options.d_o.has_value(), "--do is", any_backward, "backward");
  require_pass(options.forward_stage.has_value(), "--forward-stage is", any_backward, "backward");
  require_pass(options.variant.deterministic, "--deterministic is", any_backward, "backward");
  const std::pair<const char*, const std::optional<std::filesystem::path>*> written[] = {
      {"--json", &options.json}, {"--out", &options.out}, {"--lse", &options.lse},
      {"--dq", &options.dq},     {"--dk", &options.dk},   {"--dv", &options.dv}};
  for (size_t i = 0; i < std::size(written); ++i) {
    for (size_t other = i + 1; other < std::size(written); ++other) {
      const auto& [name, path] = written[i];
      const auto& [other_name, other_path] = written[other];
      if (*path && *other_path && **path == **other_path) {
        throw std::invalid_argument(
            fmt::format("{} and {} name the same file {}", name, other_name, (*path)->string()));
      }
    }
  }
  if (options.variant.one_block_per_head) {
    for (const std::string& id : stages) {
      if (!has_grid_choice(stage_with(id))) {
        throw std::invalid_argument(
            fmt::format("--grid bh is for stage 05 alone: stage {} has one grid (--stage is {})",
                        id, options.stages));
      }
    }
  }
  if (options.shared_memory && options.device == Target::cuda) {
    throw std::invalid_argument(
        "--shared-memory is of the card that the model imitates; --device is cuda");
  }
  if (options.results && !options.card)
    throw std::invalid_argument("--results is of a card's recorded times; --card is missing");
  if (options.tune) {
    if (options.sweep) throw std::invalid_argument("--tune and --sweep exclude each other");
    if (options.variant.tiles != Tiles{})
      throw std::invalid_argument("--tune times all tiles; leave out --tiles");
  }
  const bool shape_given =
      options.batch || options.heads || options.kv_heads || options.seqlen_q || options.seqlen_k;
  if (options.sweep && shape_given) {
    throw std::invalid_argument(
        "--sweep sets batch, heads and lengths itself; leave out those options");
  }
  if (options.sweep && options.head_dim && kSweepWidth % *options.head_dim != 0) {
    refuse("--head-dim", std::to_string(*options.head_dim),
           fmt::format("with --sweep, divisors of {}", kSweepWidth));
  }
}

std::string one_line(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  for (char& c : text) {
    if (c == '\n') c = ' ';
  }
  return text;
}

}  // namespace

Variant variant_for(const Options& options, const Stage& stage) {
  Variant variant = options.variant;
  variant.deterministic &= is_backward(stage);
  return variant;
}

bool names_backward(const Options& options) {
  const std::vector<std::string> ids = select_stages(options.stages);
  return std::any_of(ids.begin(), ids.end(),
                     [](const std::string& id) { return is_backward(stage_with(id)); });
}

std::optional<Options> parse(int argc, char** argv) {
  Options options;
  CLI::App app(
      "FlashAttention-2, step by step: checks, counts and times the stages of the ladder.\n"
      "Exit status: 0 all right, 1 a check failed, 2 bad input, 3 the device cannot do it.");
  app.require_subcommand(0, 1);
  const auto subcommand = [&](Command command, const char* name, const char* help) {
    CLI::App* sub = app.add_subcommand(name, help);
    add_common_options(*sub, options);
    add_path(*sub, "--json", options.json, true, "also writes the results to this file as JSON");
    sub->callback([&options, command] { options.command = command; });
    return sub;
  };
  CLI::App* list = subcommand(Command::list, "list", "shows the stages, and what each needs");
  CLI::App* check =
      subcommand(Command::check, "check", "compares each stage with Eigen in double precision");
  CLI::App* count = subcommand(Command::count, "count",
                               "counts what each stage moves and computes (on the model)");
  CLI::App* bench = subcommand(Command::bench, "bench", "times each stage (on a card)");
  CLI::App* ladder =
      subcommand(Command::ladder, "ladder",
                 "checks every stage, and counts (model) or times (card) it: one table");

  for (CLI::App* sub : {check, count, bench}) add_variant(*sub, options);
  for (CLI::App* sub : {check, count, bench, ladder}) add_backward(*sub, options);
  for (CLI::App* sub : {list, check, count, ladder}) add_shared_memory(*sub, options);
  for (CLI::App* sub : {check, count, ladder}) {
    add_input_files(*sub, options);
    add_d_o(*sub, options);
  }
  for (CLI::App* sub : {check, ladder}) {
    add_path(*sub, "--expect-o", options.expect_o, false, "also compares O with this .npy file");
    add_path(*sub, "--expect-lse", options.expect_lse, false,
             "also compares L with this .npy file");
  }
  add_path(*check, "--out", options.out, true,
           "writes O of the one stage as .npy: float16, or float32 for bf16, which .npy has no "
           "name for");
  add_path(*check, "--lse", options.lse, true, "writes L of the one stage as .npy (float32)");
  const std::pair<const char*, std::optional<std::filesystem::path>*> gradients[] = {
      {"dq", &options.dq}, {"dk", &options.dk}, {"dv", &options.dv}};
  const std::pair<const char*, std::optional<std::filesystem::path>*> expected[] = {
      {"dq", &options.expect_dq}, {"dk", &options.expect_dk}, {"dv", &options.expect_dv}};
  for (const auto& [name, path] : gradients) {
    add_path(*check, fmt::format("--{}", name), *path, true,
             "writes this gradient of the one backward stage as --out does");
  }
  for (const auto& [name, path] : expected) {
    add_path(*check, fmt::format("--expect-{}", name), *path, false,
             "also compares this gradient with this .npy file");
  }
  count
      ->add_option_function<std::string>(
          "--card",
          [&](const std::string& text) {
            try {
              options.card = &find_card(text);
            } catch (const std::invalid_argument& error) {
              throw std::invalid_argument(fmt::format("--card is {}", error.what()));
            }
          },
          "H200, H100, A100, RTX4090 or T4: also shows the least time that each stage could take "
          "there, a bound from its datasheet, and the times that were recorded there; the model "
          "imitates its shared memory")
      ->type_name("CARD");
  count
      ->add_option_function<std::string>(
          "--results",
          [&](const std::string& text) {
            if (std::error_code error; !std::filesystem::is_directory(text, error))
              refuse("--results", text, "a directory of recorded results");
            options.results = text;
          },
          "with --card: the directory of the recorded times (default: the repository's "
          "docs/results)")
      ->type_name("DIR");
  bench->add_flag("--tune", options.tune,
                  "times every tile size that a stage is built for (07, 08), and shows what each "
                  "takes of registers and shared memory");
  bench->add_flag(
      "--sweep", options.sweep,
      "seqlen 512 to 16384 with batch * seqlen = 16384 and heads * head_dim = 2048, bf16; head_dim "
      "64 and "
      "128, without and with the causal mask, unless given. Stages that store S stop at 4096");
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& help) {
    app.exit(help);
    return std::nullopt;
  } catch (const CLI::ParseError& error) {
    throw std::invalid_argument(one_line(error.what()) + " (--help shows what is allowed)");
  }
  if (app.get_subcommands().empty()) {
    throw std::invalid_argument(
        "a command is missing; allowed: list, check, count, bench, ladder (or --help)");
  }
  require_consistent(options);
  return options;
}

}  // namespace flashsteps::cli
