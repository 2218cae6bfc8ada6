// Every backward stage, on every target, keeps every convention of docs/notation.md, and sums dQ in
// both ways. Each case compares all of dQ, dK and dV with the oracle.
#include <set>

#include "conformance_cases.h"

namespace flashsteps {
namespace {

class BackwardConformance : public StageTest {
 protected:
  void expect_right(const BackwardCase& c, const Variant& variant) const {
    EXPECT_EQ(c.verdict(stage(), variant), "")
        << stage_label(stage()) << ", dQ " << name_of_variant(variant);
  }
  void expect_right(const BackwardCase& c) const {
    for (const Variant& variant : kBackwardVariants) expect_right(c, variant);
  }
};

TEST_P(BackwardConformance, KeepsEveryConvention) {
  const int seeds = full_tier() ? 3 : 1;
  for (const Case& c : kCases) {
    for (const DType dtype : {DType::fp16, DType::bf16}) {
      SCOPED_TRACE(std::string(c.name) + " " + name_of(dtype));
      Problem p = c.problem;
      p.dtype = dtype;
      for (int seed = 1; seed <= seeds; ++seed) expect_right(BackwardCase(p, c.kind, seed));
    }
  }
}

// Lengths around the edges of the tiles, where loops and masks go wrong.
TEST_P(BackwardConformance, LengthsAroundTileEdges) {
  int number = 0;
  for (const int seqlen_k : {1, 7, 8, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 193}) {
    for (const int seqlen_q : {1, 32, 33, 63, 64, 65, 129}) {
      for (const bool causal : {false, true}) {
        SCOPED_TRACE(testing::Message()
                     << "Nq " << seqlen_q << " Nk " << seqlen_k << " causal " << causal);
        const Problem p = problem_of(1, 1, 1, seqlen_q, seqlen_k, 64, causal,
                                     seqlen_k % 2 ? DType::fp16 : DType::bf16);
        expect_right(BackwardCase(p, InputKind::moving_max, seqlen_q * 1000 + seqlen_k),
                     kBackwardVariants[number++ / 2 % 2]);
      }
    }
  }
}

TEST_P(BackwardConformance, LongerSequence) {
  const int length = stage().target == Target::model ? 320 : 2048;
  for (const bool causal : {false, true}) {
    const Problem p = problem_of(1, 2, 1, length, length, 64, causal, DType::bf16);
    expect_right(BackwardCase(p, InputKind::moving_max, 5));
  }
}

// The batch may exceed 65535, the limit of a grid's y and z (case P18); on a card only, for its
// size.
TEST_P(BackwardConformance, BatchBeyondGridLimits) {
  if (stage().target == Target::model) GTEST_SKIP() << "65536 heads take the model too long";
  for (const bool many_heads : {false, true}) {
    const Problem p = problem_of(many_heads ? 1 : 65536, many_heads ? 65536 : 1, 1, 16, 16, 64);
    expect_right(BackwardCase(p, InputKind::normal, 3));
  }
}

// dO and the gradients may lie otherwise than the tensors that they belong to (case P22): the same
// bits come out as from packed ones.
TEST_P(BackwardConformance, StridesOfItsOwn) {
  for (const auto& [heads, kv_heads, causal] : {std::tuple{4, 1, false}, {2, 2, true}}) {
    const Problem p = problem_of(2, heads, kv_heads, 32, 70, 128, causal);
    const BackwardCase packed(p, InputKind::normal, 3);
    const Gradients want = packed.run(stage(), {.deterministic = true}).gradients;
    EXPECT_EQ(packed.judge(want), "");
    Problem other = p;
    set_packed_strides(other, Layout::bshd);
    const GradientStrides bshd = strides_of_tensors(other), bhsd = strides_of_tensors(p);
    const GradientStrides gaps = {with_gaps(bhsd.d_o), with_gaps(bshd.d_q), with_gaps(bhsd.d_k),
                                  with_gaps(bshd.d_v)};
    for (const GradientStrides& strides :
         {bshd, gaps, GradientStrides{bshd.d_o, bhsd.d_q, bhsd.d_k, bhsd.d_v}}) {
      const BackwardCase c(p, strides, packed.inputs, 3);
      const Gradients got = c.run(stage(), {.deterministic = true}).gradients;
      EXPECT_EQ(c.judge(got), "");
      const auto expect_equal = [](const char* name, const TensorLayout& t,
                                   const std::vector<uint16_t>& x, const TensorLayout& packed_t,
                                   const std::vector<uint16_t>& packed_x) {
        for (int b = 0; b < t.batch; ++b) {
          for (int h = 0; h < t.heads; ++h) {
            for (int i = 0; i < t.seqlen; ++i) {
              for (int c = 0; c < t.head_dim; ++c) {
                ASSERT_EQ(x[t.offset(b, h, i) + c], packed_x[packed_t.offset(b, h, i) + c])
                    << name << " b " << b << " h " << h << " i " << i << " c " << c;
              }
            }
          }
        }
      };
      expect_equal("dQ", layout_dq(p, strides), got.dq, layout_dq(p, bhsd), want.dq);
      expect_equal("dK", layout_dk(p, strides), got.dk, layout_dk(p, bhsd), want.dk);
      expect_equal("dV", layout_dv(p, strides), got.dv, layout_dv(p, bhsd), want.dv);
    }
  }
}

// Stages that are built for several tile sizes are right with each of them.
TEST_P(BackwardConformance, EveryTileSize) {
  for (const int d : {64, 128}) {
    const Problem any = problem_of(1, 1, 1, 1, 1, d);
    const std::vector<Tiles> candidates = tile_candidates(stage(), any);
    EXPECT_THROW(tiles_of(stage(), any, {.tiles = {7, 9}}), std::invalid_argument);
    if (candidates.size() < 2) continue;  // all other tests are of this one
    EXPECT_EQ(candidates.front(), stage().tiles(any));
    std::set<std::string> names;
    for (const Tiles tiles : candidates)
      EXPECT_TRUE(names.insert(name_of(tiles)).second) << name_of(tiles) << " twice";
    for (const auto& [seqlen_q, seqlen_k] :
         {std::pair{150, 150}, {129, 257}, {257, 65}, {1, 193}}) {
      for (const bool causal : {false, true}) {
        const Problem p =
            problem_of(1, 2, 1, seqlen_q, seqlen_k, d, causal, causal ? DType::bf16 : DType::fp16);
        const BackwardCase c(p, InputKind::moving_max, 7);
        for (const Tiles tiles : candidates) {
          SCOPED_TRACE(testing::Message() << "tiles " << name_of(tiles) << " Nq " << seqlen_q
                                          << " Nk " << seqlen_k << " causal " << causal);
          for (Variant variant : kBackwardVariants) {
            variant.tiles = tiles;
            expect_right(c, variant);
          }
        }
      }
    }
  }
}

#ifdef FLASHSTEPS_HAS_MODEL
// On a card with the shared memory of a consumer's (case P39): stages whose tiles would not fit
// there take smaller ones.
TEST_P(BackwardConformance, OnASmallerCard) {
  if (stage().target != Target::model) GTEST_SKIP() << "the model imitates the smaller card";
  struct Restore {
    model::Options before = model::options();
    ~Restore() { model::set_options(before); }
  } restore;
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
      const BackwardCase c(p, InputKind::moving_max, 13);
      expect_right(c);
      for (const Tiles tiles : tile_candidates(stage(), p)) {
        SCOPED_TRACE(name_of(tiles));
        expect_right(c, {.tiles = tiles});
      }
    }
  }
}
#endif

// Case P25: nothing is taken from what gradients and workspaces held before. Run twice in the same
// memory, the second time over what the first left; a dQ that is added to would double.
TEST_P(BackwardConformance, TwiceInTheSameMemory) {
  const Problem p = problem_of(1, 4, 2, 100, 150, 64, true);
  const BackwardCase c(p, InputKind::normal, 9);
  for (const Variant& variant : kBackwardVariants) {
    SCOPED_TRACE(name_of_variant(variant));
    BackwardBuffers buffers(device(), stage(), p, c.strides, variant);
    buffers.upload(c.inputs, c.backward);
    buffers.poison_outputs();
    Gradients runs[2];
    for (Gradients& run : runs) {
      stage().backward(p, c.strides, buffers.args(), nullptr);
      device().synchronize();
      run = buffers.download();
      EXPECT_EQ(c.judge(run), "");
    }
    EXPECT_EQ(runs[0].dk, runs[1].dk);
    EXPECT_EQ(runs[0].dv, runs[1].dv);
    if (variant.deterministic) {
      EXPECT_EQ(runs[0].dq, runs[1].dq);
    }
  }
}

// Case P20: the same inputs give the same bits of dK and dV, and of dQ where that is asked for, in
// whatever order blocks and threads run.
TEST_P(BackwardConformance, RunsAreBitwiseEqual) {
#ifdef FLASHSTEPS_HAS_MODEL
  const model::Options before = model::options();
#endif
  const Problem p = problem_of(2, 4, 2, 100, 150, 64, true);
  const BackwardCase c(p, InputKind::normal, 9);
  const int runs = stage().target == Target::cuda ? 100 : full_tier() ? 20 : 4;
  for (const Variant& variant : kBackwardVariants) {
    SCOPED_TRACE(name_of_variant(variant));
    const Gradients first = c.run(stage(), variant).gradients;
    EXPECT_EQ(c.judge(first), "");
    for (int i = 0; i < runs; ++i) {
#ifdef FLASHSTEPS_HAS_MODEL
      model::Options options = before;
      options.seed = before.seed + 1 + i;
      options.workers = 1 + i % 3;
      model::set_options(options);
#endif
      const Gradients again = c.run(stage(), variant).gradients;
      ASSERT_EQ(again.dk, first.dk);
      ASSERT_EQ(again.dv, first.dv);
      if (variant.deterministic) {
        ASSERT_EQ(again.dq, first.dq);
      }
      EXPECT_EQ(c.judge(again), "");
    }
#ifdef FLASHSTEPS_HAS_MODEL
    model::set_options(before);
#endif
  }
}

// Nothing that a backward stage keeps in global memory grows with Nq times Nk.
TEST_P(BackwardConformance, MemoryGrowsWithTheLength) {
  const auto workspace = [&](int seqlen) {
    const WorkspaceList list = stage().workspaces(problem_of(2, 4, 2, seqlen, seqlen, 128));
    int64_t bytes = 0;
    for (int i = 0; i < list.size; ++i)
      bytes += list.buffer[i].count * size_of(list.buffer[i].dtype);
    return bytes;
  };
  // Per row: dQ in fp32, D, and room for something of that size.
  const int64_t most = 4 * (128 + 8) * int64_t{2} * 4;
  for (const int seqlen : {4096, 65536, 1 << 20})
    EXPECT_LE(workspace(seqlen), most * (seqlen + 128)) << seqlen;
}

// What a stage of the backward pass is not.
TEST_P(BackwardConformance, IsNoForwardStage) {
  const Problem p = problem_of(1, 1, 1, 16, 16, 64);
  EXPECT_EQ(stage().forward, nullptr);
  EXPECT_THROW(run_forward(device(), stage(), p, make_inputs(p, InputKind::normal, 1)),
               std::invalid_argument);
  const BackwardCase c(p, InputKind::normal, 1);
  EXPECT_THROW(c.run(stage(), {.tiles = {}, .one_block_per_head = true}), std::invalid_argument);
}

FLASHSTEPS_FOR_BACKWARD_STAGES(BackwardConformance);

}  // namespace
}  // namespace flashsteps
