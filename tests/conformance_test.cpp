// Every stage, on every target, keeps every convention of docs/notation.md: both types, any
// lengths, masks, grouped heads, strides, scales. Each case compares all of O and L with the
// oracle.
#include <cmath>
#include <set>
#include <tuple>

#include "common/reference/float16.h"
#include "conformance_cases.h"

namespace flashsteps {
namespace {

class Conformance : public StageTest {};

// The cases by group, so that a ctest entry says where it fails and a process is not started for
// each of them.
void expect_right_in_both_types(const Stage& stage, const Case& c, uint64_t seed) {
  for (const DType dtype : {DType::fp16, DType::bf16}) {
    SCOPED_TRACE(std::string(c.name) + " " + name_of(dtype));
    Problem p = c.problem;
    p.dtype = dtype;
    expect_right(stage, p, make_inputs(p, c.kind, seed));
  }
}

TEST_P(Conformance, KeepsEveryConvention) {
  const int seeds = full_tier() ? 3 : 1;
  for (const Case& c : kCases) {
    for (int seed = 1; seed <= seeds; ++seed) expect_right_in_both_types(stage(), c, seed);
  }
}

// Lengths around the edges of the tiles, where loops and masks go wrong.
TEST_P(Conformance, LengthsAroundTileEdges) {
  for (const int seqlen_k : {1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 193}) {
    for (const int seqlen_q : {1, 32, 33, 64, 65}) {
      for (const bool causal : {false, true}) {
        SCOPED_TRACE(testing::Message()
                     << "Nq " << seqlen_q << " Nk " << seqlen_k << " causal " << causal);
        const Problem p = problem_of(1, 1, 1, seqlen_q, seqlen_k, 64, causal,
                                     seqlen_k % 2 ? DType::fp16 : DType::bf16);
        expect_right(stage(), p, make_inputs(p, InputKind::moving_max, seqlen_q * 1000 + seqlen_k));
      }
    }
  }
}

// The real tensors of a text recogniser, whose oracle values were computed elsewhere
// (tests/data/README.md), are checked by the command line's tests; here, a long one by the same
// oracle as all others.
TEST_P(Conformance, LongerSequence) {
  const int length = stage().target == Target::model ? 320 : 2048;
  for (const bool causal : {false, true}) {
    const Problem p = problem_of(1, 2, 1, length, length, 64, causal, DType::bf16);
    expect_right(stage(), p, make_inputs(p, InputKind::moving_max, 5));
  }
}

// A head with a NaN or an infinity leaves the others as they are, bit by bit: blocks that take one
// row block after the other keep nothing of the last one. On the model's three multiprocessors one
// block takes heads 2, 3, 8, 9, 14 and then 15, a clean one after each kind of fault.
TEST_P(Conformance, WhatIsNotFiniteStaysInItsHead) {
  const int heads = stage().target == Target::model ? 18 : 1000;
  for (const bool causal : {false, true}) {
    SCOPED_TRACE(testing::Message() << "causal " << causal);
    const Problem p = problem_of(1, heads, heads, 40, 50, 64, causal, DType::bf16);
    const Inputs clean = make_inputs(p, InputKind::normal, 8);
    Inputs inputs = clean;
    const auto set = [&](std::vector<uint16_t>& tensor, const TensorLayout& layout, int h,
                         double value) {
      tensor[layout.offset(0, h, 7) + h % 64] = to_bits(value, p.dtype);
    };
    for (int h = 0; h < heads; ++h) {
      if (h % 5 == 1) set(inputs.v, layout_v(p), h, std::nan(""));
      if (h % 5 == 2) set(inputs.v, layout_v(p), h, INFINITY);
      if (h % 5 == 3) set(inputs.k, layout_k(p), h, INFINITY);
      if (h % 5 == 4) set(inputs.q, layout_q(p), h, std::nan(""));
    }
    const Outputs want = run_forward(device(), stage(), p, clean).outputs;
    const Outputs outputs = run_forward(device(), stage(), p, inputs).outputs;
    const TensorLayout layout = layout_o(p);
    int64_t differ = 0, not_finite = 0;
    for (int h = 0; h < heads; ++h) {
      for (int i = 0; i < p.seqlen_q; ++i) {
        for (int c = 0; c < p.head_dim; ++c) {
          const int64_t at = layout.offset(0, h, i) + c;
          if (h % 5 == 0) differ += outputs.o[at] != want.o[at];
          if (h % 5 == 1) not_finite += !std::isfinite(from_bits(outputs.o[at], p.dtype));
        }
        const int64_t at = int64_t{h} * p.seqlen_q + i;
        if (h % 5 == 0) differ += outputs.l[at] != want.l[at];
      }
    }
    EXPECT_EQ(differ, 0) << "elements of O and L";
    EXPECT_GT(not_finite, 0) << "the heads with a NaN in V have none";
  }
}

// The batch may exceed 65535, the limit of a grid's y and z (case P18); on a card only, for its
// size.
TEST_P(Conformance, BatchBeyondGridLimits) {
  if (stage().target == Target::model) GTEST_SKIP() << "65536 heads take the model too long";
  for (const bool many_heads : {false, true}) {
    const Problem p = problem_of(many_heads ? 1 : 65536, many_heads ? 65536 : 1, 1, 16, 16, 64);
    const Inputs inputs = make_inputs(p, InputKind::normal, 3);
    const Oracle oracle = make_oracle(p, inputs, {0, 15});
    const ForwardRun run = run_forward(device(), stage(), p, inputs);
    EXPECT_EQ(compare(p, oracle, run.outputs).describe(), "");
  }
}

// Stages that are built for several tile sizes are right with each of them, and run with the one
// that was asked for.
TEST_P(Conformance, EveryTileSize) {
  const int n = stage().target == Target::model ? 1 : 8;
  for (const int d : {64, 128}) {
    const std::vector<Tiles> candidates = tile_candidates(stage(), problem_of(1, 1, 1, 1, 1, d));
    EXPECT_THROW(tiles_of(stage(), problem_of(1, 1, 1, 1, 1, d), {.tiles = {7, 9}}),
                 std::invalid_argument);
    if (candidates.size() < 2) continue;  // all other tests are of this one
    EXPECT_EQ(candidates.front(), stage().tiles(problem_of(1, 1, 1, 1, 1, d)));
    std::set<std::string> names;
    for (const Tiles tiles : candidates)
      EXPECT_TRUE(names.insert(name_of(tiles)).second) << name_of(tiles) << " twice";
    for (const Tiles tiles : candidates) {
      for (const auto& [seqlen_q, seqlen_k] :
           {std::pair{300, 300}, {129, 257}, {257, 65}, {1, 193}}) {
        for (const bool causal : {false, true}) {
          SCOPED_TRACE(testing::Message() << "tiles " << name_of(tiles) << " Nq " << seqlen_q
                                          << " Nk " << seqlen_k << " causal " << causal);
          const Problem p = problem_of(1, 2, 1, n * seqlen_q, n * seqlen_k, d, causal,
                                       causal ? DType::bf16 : DType::fp16);
          const Inputs inputs = make_inputs(p, InputKind::moving_max, 7);
          const ForwardRun run = run_forward(device(), stage(), p, inputs, {.tiles = tiles});
          EXPECT_EQ(compare(p, make_oracle(p, inputs, all_rows(p)), run.outputs).describe(), "");
          if (!causal && run.ledger) {  // without a mask all tiles are visited: as many as there
                                        // are of this size
            const int64_t Tr = (p.seqlen_q + tiles.Br - 1) / tiles.Br,
                          Tc = (p.seqlen_k + tiles.Bc - 1) / tiles.Bc;
            EXPECT_EQ(run.ledger->tiles_visited, p.batch_heads() * Tr * Tc);
          }
        }
      }
    }
  }
}

// 05 can keep 04's grid: as right, and no more blocks than heads. No other stage has that choice.
TEST_P(Conformance, OneBlockForEachHead) {
  const Variant one_block{.tiles = {}, .one_block_per_head = true};
  const Problem p = problem_of(2, 2, 1, 200, 150, 64, true);
  const Inputs inputs = make_inputs(p, InputKind::moving_max, 11);
  if (!has_grid_choice(stage())) {
    EXPECT_THROW(run_forward(device(), stage(), p, inputs, one_block), std::invalid_argument);
    return;
  }
  for (const Problem& problem :
       {p, problem_of(1, 3, 3, 129, 65, 128), problem_of(1, 2, 2, 0, 40, 64)}) {
    const Inputs its = make_inputs(problem, InputKind::moving_max, 11);
    const ForwardRun run = run_forward(device(), stage(), problem, its, one_block);
    EXPECT_EQ(
        compare(problem, make_oracle(problem, its, all_rows(problem)), run.outputs).describe(), "");
    if (run.ledger) {
      EXPECT_EQ(run.ledger->grid_blocks, problem.seqlen_q > 0 ? problem.batch_heads() : 0);
    }
  }
}

#ifdef FLASHSTEPS_HAS_MODEL
// On a card with the shared memory of a consumer's: stages whose tiles would not fit there take
// smaller ones.
TEST_P(Conformance, OnASmallerCard) {
  if (stage().target != Target::model) GTEST_SKIP() << "the model imitates the smaller card";
  struct Restore {
    model::Options before = model::options();
    ~Restore() { model::set_options(before); }
  } restore;
  const Tiles large = stage().tiles(problem_of(1, 1, 1, 1, 1, 128));
  model::Options small = restore.before;
  small.capability = 89;
  small.shared_memory_per_block = 99 * 1024;
  model::set_options(small);
  if (const auto why = why_not(stage(), problem_of(1, 1, 1, 16, 16, 64), device().info()))
    GTEST_SKIP() << *why;
  for (const int d : {64, 128}) {
    for (const bool causal : {false, true}) {
      SCOPED_TRACE(testing::Message() << "d " << d << " causal " << causal);
      const Problem p =
          problem_of(1, 2, 1, 100, 150, d, causal, causal ? DType::bf16 : DType::fp16);
      for (const Tiles tiles : tile_candidates(stage(), p)) {
        const Inputs inputs = make_inputs(p, InputKind::moving_max, 13);
        const ForwardRun run = run_forward(device(), stage(), p, inputs, {.tiles = tiles});
        EXPECT_EQ(compare(p, make_oracle(p, inputs, all_rows(p)), run.outputs).describe(), "")
            << name_of(tiles);
      }
      if (tile_candidates(stage(), p).empty())
        expect_right(stage(), p, make_inputs(p, InputKind::moving_max, 13));
    }
  }
  const std::string id = stage().id;
  if (id == "04" || id == "05" || id == "06") {
    EXPECT_EQ(large, (Tiles{32, 64}));
    EXPECT_EQ(stage().tiles(problem_of(1, 1, 1, 1, 1, 128)), (Tiles{16, 64}));
    EXPECT_EQ(stage().tiles(problem_of(1, 1, 1, 1, 1, 64)), (Tiles{64, 64}));
  }
}
#endif

// The same inputs give the same bits, whatever the memory held before.
TEST_P(Conformance, RunsAreBitwiseEqual) {
  const Problem p = problem_of(2, 2, 1, 100, 150, 64, true);
  const Inputs inputs = make_inputs(p, InputKind::normal, 9);
  const Outputs first = run_forward(device(), stage(), p, inputs).outputs;
  const int runs = stage().target == Target::cuda ? 100 : 3;
  for (int i = 0; i < runs; ++i) {
    const Outputs again = run_forward(device(), stage(), p, inputs).outputs;
    ASSERT_EQ(again.o, first.o);
    ASSERT_EQ(again.l, first.l);
  }
}

// On a card, with more row blocks than multiprocessors, so that blocks run beside and after one
// another in an order that is the card's: 1000 launches, each over memory that holds NaN.
TEST_P(Conformance, LaunchesAreBitwiseEqual) {
  if (stage().target == Target::model) GTEST_SKIP() << "the order of blocks is the model's own";
  for (const auto& [head_dim, causal, dtype] :
       {std::tuple{64, true, DType::bf16}, {128, false, DType::fp16}}) {
    SCOPED_TRACE(testing::Message() << "d " << head_dim << " causal " << causal);
    const Problem p = problem_of(3, 8, 4, 1000, 1100, head_dim, causal, dtype);
    const Inputs inputs = make_inputs(p, InputKind::moving_max, 9);
    ForwardBuffers buffers(device(), stage(), p);
    buffers.upload(inputs);
    const auto launched = [&] {
      buffers.poison_outputs();
      stage().forward(p, buffers.args(), nullptr);
      if (stage().lse) stage().lse(p, buffers.args(), nullptr);
      device().synchronize();
      return buffers.download();
    };
    const Outputs first = launched();
    EXPECT_EQ(compare(p, make_oracle(p, inputs, sampled_rows(p, 128, 9)), first).describe(), "");
    for (int launch = 1; launch < 1000; ++launch) {
      const Outputs again = launched();
      // No EXPECT_EQ: it would print millions of elements.
      ASSERT_TRUE(again.o == first.o) << "O of launch " << launch << " differs from the first";
      ASSERT_TRUE(again.l == first.l) << "L of launch " << launch << " differs from the first";
    }
  }
}

FLASHSTEPS_FOR_FORWARD_STAGES(Conformance);

#ifdef FLASHSTEPS_HAS_MODEL
// Proves which of the two builds of a kernel ran: what runs on the model is in the ledger, and what
// is meant for a card never runs there.
TEST(Targets, AStageRunsWhereItWasBuiltFor) {
  ASSERT_FALSE(all_stages().empty());
  const Problem p = problem_of(1, 1, 1, 16, 16, 64);
  const BackwardCase c(p, InputKind::normal, 1);
  const auto ledger_of = [&](Device& device, const Stage& stage) {
    return is_backward(stage)
               ? run_backward(device, stage, p, c.strides, c.inputs, c.backward).ledger
               : run_forward(device, stage, p, c.inputs).ledger;
  };
  model::take_ledger();
  for (const Stage* stage : all_stages()) {
    if (stage->target == Target::model) {
      const std::optional<Ledger> ledger = ledger_of(*device_for(Target::model), *stage);
      ASSERT_TRUE(ledger.has_value());
      EXPECT_GE(ledger->launches, 1) << stage->id;
    } else if (Device* card = device_for(Target::cuda)) {
      EXPECT_FALSE(ledger_of(*card, *stage).has_value());
      EXPECT_EQ(model::take_ledger().launches, 0) << stage->id;
    } else if (is_backward(*stage)) {
      float host[1024] = {};
      const BackwardArgs args{host, host, host, host, host,
                              host, host, host, host, {host, host, host, host}};
      EXPECT_THROW(stage->backward(p, strides_of_tensors(p), args, nullptr), DeviceError)
          << stage->id;
      EXPECT_EQ(model::take_ledger().launches, 0) << stage->id;
    } else {
      float host[1024] = {};
      const ForwardArgs args{host, host, host, host, host, {host, host, host, host}};
      EXPECT_THROW(stage->forward(p, args, nullptr), DeviceError) << stage->id;
      EXPECT_EQ(model::take_ledger().launches, 0) << stage->id;
    }
  }
}
#endif

}  // namespace
}  // namespace flashsteps
