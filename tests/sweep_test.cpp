// Lengths one by one: every stage of the forward pass with every number of keys from 1 to 260, and
// with numbers of queries on both sides of its row blocks, so that no remainder of a tile is left
// out. A kernel that hangs at one of them is named, too.
#include <array>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>
#include <utility>

#include "common/reference/parallel.h"
#include "stage_suite.h"

namespace flashsteps {
namespace {

constexpr int kMostKeys = 260;
constexpr std::array kQueries = {1, 63, 64, 65, 128, 192, 300};
constexpr int kMostQueries = kQueries.back();

// Heads have keys and values of their own, and what lies behind a head's last row is NaN: a
// tile that reaches beyond the last key shows, whatever it takes there. Strides are those of the
// longest sequences, so that one piece of device memory serves all lengths.
Problem sweep_problem(int seqlen_q, int seqlen_k, int head_dim, bool causal, DType dtype,
                      int heads = 2) {
  Problem p = problem_of(1, heads, heads, kMostQueries + 8, kMostKeys + 8, head_dim, causal, dtype);
  p.seqlen_q = seqlen_q;
  p.seqlen_k = seqlen_k;
  return p;
}

std::string described(const Problem& p) {
  return std::string("Nq ") + std::to_string(p.seqlen_q) + " Nk " + std::to_string(p.seqlen_k) +
         " d " + std::to_string(p.head_dim) + " " + name_of(p.dtype) +
         (p.causal ? " causal" : " no mask");
}

// Ends the process with a word about what hangs: a kernel that waits for ever cannot be stopped in
// another way, and the test's own time limit would not say which it was.
class Watchdog {
 public:
  explicit Watchdog(std::chrono::seconds patience) : patience_(patience) {}

  void begin(std::string what) {
    const std::scoped_lock lock(mutex_);
    what_ = std::move(what);
    ++begun_;
    changed_.notify_all();
  }
  void end() { begin(""); }

 private:
  void watch(std::stop_token stop) {
    std::unique_lock lock(mutex_);
    while (!stop.stop_requested()) {
      const int64_t seen = begun_;
      if (changed_.wait_for(lock, stop, patience_, [&] { return begun_ != seen; })) continue;
      if (stop.stop_requested() || what_.empty()) continue;
      std::fprintf(stderr, "no end after %lld s: %s\n", static_cast<long long>(patience_.count()),
                   what_.c_str());
      std::_Exit(1);
    }
  }

  const std::chrono::seconds patience_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::string what_;
  int64_t begun_ = 0;
  std::jthread thread_{[this](std::stop_token stop) { watch(stop); }};  // the last to be made
};

// Runs a stage at many lengths in the same device memory.
class Lengths {
 public:
  Lengths(Device& device, const Stage& stage, int head_dim, bool causal, DType dtype)
      : device_(device),
        stage_(stage),
        largest_(sweep_problem(kMostQueries, kMostKeys, head_dim, causal, dtype)),
        buffers_(device, stage, largest_) {}

  // Empty where no element was written that is not the problem's, else a line.
  std::string run(const Problem& p, Tiles tiles, const Inputs& inputs, Outputs& outputs) {
    Inputs padded = inputs;
    padded.q.resize(size_t(layout_q(largest_).extent()), 0xffff);
    padded.k.resize(size_t(layout_k(largest_).extent()), 0xffff);
    padded.v.resize(size_t(layout_v(largest_).extent()), 0xffff);
    buffers_.upload(padded);
    buffers_.poison_outputs();
    ForwardArgs args = buffers_.args();
    args.tiles = tiles;
    stage_.forward(p, args, nullptr);
    device_.synchronize();
    if (stage_.lse) {
      stage_.lse(p, args, nullptr);
      device_.synchronize();
    }
    outputs = buffers_.download();
    const size_t o = size_t(layout_o(p).extent()), l = size_t(p.rows());
    for (size_t i = o; i < outputs.o.size(); ++i) {
      if (outputs.o[i] != 0xffff) return "an element behind O was written";
    }
    for (size_t i = l; i < outputs.l.size(); ++i) {
      if (!std::isnan(outputs.l[i])) return "an element behind L was written";
    }
    outputs.o.resize(o);
    outputs.l.resize(l);
    return "";
  }

 private:
  Device& device_;
  const Stage& stage_;
  Problem largest_;
  ForwardBuffers buffers_;
};

class Sweep : public StageTest {
 protected:
  // The tiles that the stage takes for these lengths, and those that it would take for longer ones.
  std::vector<Tiles> tile_sizes(const Problem& p) const {
    const std::vector<Tiles> candidates = tile_candidates(stage(), p);
    return candidates.empty() ? std::vector<Tiles>{{}} : candidates;
  }

  // Runs problems that differ in their lengths alone in all of these tiles, and compares all of O
  // and L with the oracle. The device runs one at a time; inputs and oracles are made on all cores.
  void expect_right(const std::vector<Problem>& problems, const std::vector<Tiles>& tile_sizes,
                    Watchdog* watchdog) {
    const size_t of_each = tile_sizes.size(), runs = problems.size() * of_each;
    std::vector<Inputs> inputs(problems.size());
    std::vector<Outputs> outputs(runs);
    std::vector<std::string> wrong(runs);
    parallel_for(int64_t(problems.size()), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Problem& p = problems[i];
        inputs[i] = make_inputs(p, InputKind::moving_max, uint64_t(p.seqlen_q * 1000 + p.seqlen_k));
      }
    });
    const auto name_of_run = [&](size_t run) {
      return described(problems[run / of_each]) + " tiles " + name_of(tile_sizes[run % of_each]);
    };
    // On the model memory is no larger than it must be, so that it sees what lies outside.
    std::optional<Lengths> lengths;
    const Problem& any = problems.front();
    if (stage().target == Target::cuda)
      lengths.emplace(device(), stage(), any.head_dim, any.causal, any.dtype);
    for (size_t run = 0; run < runs; ++run) {
      const Problem& p = problems[run / of_each];
      const Inputs& its = inputs[run / of_each];
      const Tiles tiles = tile_sizes[run % of_each];
      if (watchdog) watchdog->begin(stage_label(stage()) + " " + name_of_run(run));
      try {
        if (lengths) {
          wrong[run] = lengths->run(p, tiles, its, outputs[run]);
        } else {
          outputs[run] = run_forward(device(), stage(), p, its, {.tiles = tiles}).outputs;
        }
      } catch (const std::runtime_error& error) {
        wrong[run] = error.what();
      }
    }
    if (watchdog) watchdog->end();
    parallel_for(int64_t(problems.size()), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Oracle oracle = make_oracle(problems[i], inputs[i], all_rows(problems[i]));
        for (size_t run = i * of_each; run < (i + 1) * of_each; ++run) {
          if (wrong[run].empty())
            wrong[run] = compare(problems[i], oracle, outputs[run]).describe();
        }
      }
    });
    int failures = 0;
    for (size_t run = 0; run < runs; ++run) {
      if (wrong[run].empty()) continue;
      if (++failures <= 3) ADD_FAILURE() << name_of_run(run) << ": " << wrong[run];
    }
    EXPECT_EQ(failures, 0) << "of " << runs << " runs";
  }
};

// On a card: 260 x 7 lengths, both types, with and without the mask, for both widths of a tile, in
// every tile size of the stage.
TEST_P(Sweep, EveryNumberOfKeys) {
  if (stage().target == Target::model)
    GTEST_SKIP() << "so many problems take the model too long; it runs a part of them";
  Watchdog watchdog(std::chrono::seconds(30));
  for (const int d : {64, 128}) {
    for (const DType dtype : {DType::fp16, DType::bf16}) {
      for (const bool causal : {false, true}) {
        for (const int seqlen_q : kQueries) {
          std::vector<Problem> problems;
          // Short and long ones in turn, so that every core's part of the oracles is as large.
          for (int i = 0; i < kMostKeys; ++i) {
            const int seqlen_k = i % 2 == 0 ? 1 + i / 2 : kMostKeys - i / 2;
            problems.push_back(sweep_problem(seqlen_q, seqlen_k, d, causal, dtype));
          }
          expect_right(problems, tile_sizes(problems.front()), &watchdog);
          if (HasFailure()) return;  // the next would say the same
        }
      }
    }
  }
}

// On the model: numbers of keys around the multiples of what tiles and copies are made of. Width,
// type and mask go round, so that each pair of lengths is run once, and each number of keys in
// every tile size; in the full tier each pair is run with all eight.
TEST_P(Sweep, KeysAroundMultiples) {
  if (stage().target == Target::cuda) GTEST_SKIP() << "a card runs every number of keys";
  std::vector<int> keys;
  for (const int multiple : {8, 16, 64, 128, 160, 256})
    keys.insert(keys.end(), {multiple - 1, multiple, multiple + 1});
  std::map<std::pair<int, int>, size_t> seen;  // problems of this width and number of keys
  for (size_t kind = 0; kind < 8; ++kind) {
    const int d = kind & 1 ? 128 : 64;
    const bool causal = kind & 2;
    const DType dtype = kind & 4 ? DType::bf16 : DType::fp16;
    const std::vector<Tiles> sizes = tile_sizes(sweep_problem(1, 1, d, causal, dtype));
    std::vector<std::vector<Problem>> in_tiles(sizes.size());
    for (size_t k = 0; k < keys.size(); ++k) {
      for (size_t q = 0; q < kQueries.size(); ++q) {
        if (!full_tier() && (3 * k + q) % 8 != kind) continue;
        const Problem p = sweep_problem(kQueries[q], keys[k], d, causal, dtype, 1);
        in_tiles[seen[{d, keys[k]}]++ % sizes.size()].push_back(p);
      }
    }
    for (size_t t = 0; t < sizes.size(); ++t) {
      if (!in_tiles[t].empty()) expect_right(in_tiles[t], {sizes[t]}, nullptr);
    }
  }
  for (const int d : {64, 128}) {
    for (const int seqlen_k : keys) {
      const size_t problems = seen[{d, seqlen_k}];
      EXPECT_GE(problems, tile_sizes(sweep_problem(1, 1, d, false, DType::fp16)).size())
          << "d " << d << " Nk " << seqlen_k << ": a tile size was left out";
    }
  }
}

FLASHSTEPS_FOR_FORWARD_STAGES(Sweep);

}  // namespace
}  // namespace flashsteps
