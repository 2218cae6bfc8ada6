// The ledger of each stage equals the formulas of its lesson (common/stage/prediction.cpp), to the
// byte and to the count.
#include <functional>
#include <map>

#include "common/stage/prediction.h"
#include "stage_suite.h"

#ifdef FLASHSTEPS_HAS_MODEL
namespace flashsteps {
namespace {

constexpr int64_t e = 2;  // bytes of a 16-bit element
constexpr int64_t f = 4;  // bytes of an fp32 element

class LedgerTest : public StageTest {};

TEST_P(LedgerTest, EqualsTheLessonsFormulas) {
  if (stage().target != Target::model) GTEST_SKIP() << "the ledger is counted by the model";
  ASSERT_TRUE(has_prediction(stage().id))
      << "stage " << stage().id
      << " has no prediction; add its lesson's formulas to common/stage/prediction.cpp";
  int compared = 0;
  struct Shape {
    int batch, heads, kv_heads, N, d;
  };
  for (const Shape s :
       {Shape{1, 1, 1, 64, 64}, Shape{2, 2, 1, 128, 64}, Shape{1, 1, 1, 256, 64},
        Shape{1, 2, 2, 128, 128}, Shape{1, 2, 2, 128, 40}, Shape{1, 1, 1, 128, 96},
        Shape{1, 2, 1, 384, 64}, Shape{2, 2, 2, 256, 80}, Shape{1, 1, 1, 384, 40}}) {
    SCOPED_TRACE(testing::Message() << "N " << s.N << " d " << s.d);
    const Problem p = problem_of(s.batch, s.heads, s.kv_heads, s.N, s.N, s.d);
    const std::optional<Ledger> predicted = predicted_ledger(stage().id, p);
    const Tiles tiles = stage().tiles(p);
    if (tiles.Br) {  // the formulas are for whole tiles, and know which
      EXPECT_EQ(predicted.has_value(), s.N % tiles.Br == 0 && s.N % tiles.Bc == 0);
    }
    if (!predicted) continue;
    ++compared;
    const Ledger want = *predicted;
    const Ledger ledger =
        *run_forward(device(), stage(), p, make_inputs(p, InputKind::normal, 1)).ledger;
    EXPECT_EQ(ledger.global_read, want.global_read);
    EXPECT_EQ(ledger.global_written, want.global_written);
    EXPECT_EQ(ledger.launches, want.launches);
    EXPECT_EQ(ledger.grid_blocks, want.grid_blocks);
    EXPECT_EQ(ledger.barriers, want.barriers);
    EXPECT_EQ(ledger.warp_barriers, want.warp_barriers);
    EXPECT_EQ(ledger.shuffles, want.shuffles);
    EXPECT_EQ(ledger.mma_flops, want.mma_flops);
    EXPECT_EQ(ledger.named_barriers, want.named_barriers);
    EXPECT_EQ(ledger.mbarrier_phases, want.mbarrier_phases);
    EXPECT_EQ(ledger.tma, want.tma);
    EXPECT_EQ(ledger.wgmma, want.wgmma);
    EXPECT_EQ(ledger.exp, want.exp);
    EXPECT_EQ(ledger.div, want.div);
    EXPECT_EQ(ledger.div_in_loop, want.div_in_loop);
    EXPECT_EQ(ledger.bank_conflicts, want.bank_conflicts);
    EXPECT_EQ(ledger.tiles_visited, want.tiles_visited);
    EXPECT_EQ(ledger.tiles_masked, want.tiles_masked);
    EXPECT_EQ(ledger.shared_read, want.shared_read);
    EXPECT_EQ(ledger.shared_written, want.shared_written);
    EXPECT_EQ(ledger.warp_exchange_bytes, want.warp_exchange_bytes);
    EXPECT_EQ(ledger.atomic_bytes, 0);
  }
  EXPECT_GE(compared, 4);
}

// L by the common kernel: from S (two passes) for 01 and 02, from m and l for 03.
TEST_P(LedgerTest, OfTheKernelThatGivesL) {
  if (stage().target != Target::model) GTEST_SKIP() << "the ledger is counted by the model";
  if (!stage().lse) GTEST_SKIP() << "the stage writes L itself";
  const int64_t N = 128;
  const Problem p = problem_of(1, 2, 2, N, N, 64);
  const Ledger ledger =
      *run_forward(device(), stage(), p, make_inputs(p, InputKind::normal, 1)).lse_ledger;
  const bool from_scores = std::string(stage().id) < "03";
  const BytesByTensor read = from_scores ? BytesByTensor{{"S", 2 * 2 * N * N * f}}
                                         : BytesByTensor{{"m", 2 * N * f}, {"l", 2 * N * f}};
  EXPECT_EQ(ledger.global_read, read);
  EXPECT_EQ(ledger.global_written, (BytesByTensor{{"L", 2 * N * f}}));
  EXPECT_EQ(ledger.exp, from_scores ? 2 * N * N : 0);
}

// Counts do not depend on the order in which threads run, nor on how many workers there are.
TEST_P(LedgerTest, IsTheSameForEverySeedAndWorkerCount) {
  if (stage().target != Target::model) GTEST_SKIP() << "the ledger is counted by the model";
  const Problem p = problem_of(1, 2, 1, 70, 90, 40, true);
  const Inputs inputs = make_inputs(p, InputKind::normal, 1);
  const model::Options before = model::options();
  const Ledger first = *run_forward(device(), stage(), p, inputs).ledger;
  for (int seed = 2; seed <= (full_tier() ? 20 : 4); ++seed) {
    model::Options options = before;
    options.seed = seed;
    options.workers = 1 + seed % 2;
    model::set_options(options);
    EXPECT_EQ(*run_forward(device(), stage(), p, inputs).ledger, first) << "seed " << seed;
  }
  model::set_options(before);
}

// Which tiles are visited and which are masked, with the causal mask: all by the stages up to 07,
// and by 08 exactly those that the arithmetic of the diagonal asks for (common/attention/work.h),
// whatever the lengths.
TEST_P(LedgerTest, OfCausalTiles) {
  if (stage().target != Target::model) GTEST_SKIP() << "the ledger is counted by the model";
  const std::string id = stage().id;
  if (id < "04") GTEST_SKIP() << "the stage has no loop over tiles of keys that it masks";
  for (const bool causal : {true, false}) {
    for (const auto& [seqlen_q, seqlen_k] :
         {std::pair{256, 256}, {300, 300}, {100, 500}, {500, 100}, {1, 333}, {333, 1}}) {
      SCOPED_TRACE(testing::Message()
                   << "Nq " << seqlen_q << " Nk " << seqlen_k << " causal " << causal);
      const Problem p = problem_of(1, 2, 1, seqlen_q, seqlen_k, 64, causal);
      const Ledger ledger =
          *run_forward(device(), stage(), p, make_inputs(p, InputKind::normal, 1)).ledger;
      const Tiles tiles = stage().tiles(p);
      const int64_t all = p.batch_heads() * ((seqlen_q + tiles.Br - 1) / tiles.Br) *
                          ((seqlen_k + tiles.Bc - 1) / tiles.Bc);
      const TileCounts want =
          id < "08" ? TileCounts{all, all} : skipping_tile_counts(p, tiles.Br, tiles.Bc);
      EXPECT_EQ(ledger.tiles_visited, want.visited);
      EXPECT_EQ(ledger.tiles_masked, want.masked);
    }
  }
}

FLASHSTEPS_FOR_FORWARD_STAGES(LedgerTest);

// --- the backward pass
// ------------------------------------------------------------------------------------

// What a lesson's formulas are of: one KV head with the `group` query heads that read it.
struct BackwardShape {
  int64_t N, d, D, group;
  Tiles tiles;
  bool deterministic;
};

Ledger predict_09(const BackwardShape& s) {
  const int64_t N = s.N, d = s.d, D = s.D, G = s.group;
  const int64_t Tr = N / s.tiles.Br, Tc = N / s.tiles.Bc;
  const int64_t warps = s.tiles.Bc / 32 * (D / 64);
  Ledger p;
  // A kernel before reads O, dO and L and leaves D and L log2(e); then Q, dO and these two are read
  // once for each tile of keys.
  p.global_read = {{"O", G * N * d * e},       {"dO", G * (1 + Tc) * N * d * e},
                   {"Q", G * Tc * N * d * e},  {"K", N * d * e},
                   {"V", N * d * e},           {"L", G * N * f},
                   {"L_log2", G * Tc * N * f}, {"D", G * Tc * N * f},
                   {"dQ_acc", G * N * d * f}};
  p.global_written = {{"D", G * N * f},      {"L_log2", G * N * f}, {"dQ_acc", G * N * d * f},
                      {"dQ", G * N * d * e}, {"dK", N * d * e},     {"dV", N * d * e}};
  p.atomic_bytes = G * Tc * N * d * f;
  p.launches = 3;
  p.grid_blocks = Tc + 2 * G * N / 64;  // the kernels before and after have 64 rows a block
  p.barriers = Tc * (2 * Tr * G + (D == 64 ? 2 : 1));
  p.warp_barriers = Tc * warps;
  p.shuffles = G * N * (D / 8) / 32 * (D == 64 ? 3 : 4);  // D: a row is 8 or 16 lanes
  p.mma_flops = 10 * G * N * N * D;                       // five products
  p.exp = G * N * N;
  p.tiles_visited = G * Tr * Tc;
  if (s.deterministic) {
    // A block takes a number; each warp waits for its turn at each tile of dQ, and passes it on.
    p.global_read["turns"] = G * Tr * Tc * warps * 4;
    p.global_written["turns"] = G * N / 64 * 8 * 4;
    p.atomic_bytes += Tc * 4 + G * Tr * Tc * warps * 4;
    p.barriers += 2 * Tc;
    p.warp_barriers += 2 * G * Tr * Tc * warps;
  }
  return p;
}

const std::map<std::string, std::function<Ledger(const BackwardShape&)>> kBackwardPredictions = {
    {"09", predict_09}};

class BackwardLedgerTest : public StageTest {
 protected:
  void SetUp() override {
    StageTest::SetUp();
    if (IsSkipped()) return;
    if (stage().target != Target::model) GTEST_SKIP() << "the ledger is counted by the model";
    if (std::string(stage().file).rfind("tests/", 0) == 0)
      GTEST_SKIP() << "no stage of the ladder: it has no lesson";
  }
};

TEST_P(BackwardLedgerTest, EqualsTheLessonsFormulas) {
  const auto predict = kBackwardPredictions.find(stage().id);
  ASSERT_NE(predict, kBackwardPredictions.end())
      << "stage " << stage().id << " has no prediction; add its lesson's formulas";
  struct Shape {
    int batch, heads, kv_heads, N, d;
  };
  for (const Shape s : {Shape{1, 1, 1, 128, 64}, Shape{2, 2, 2, 256, 64}, Shape{1, 4, 2, 128, 64},
                        Shape{1, 2, 2, 128, 128}, Shape{1, 3, 1, 256, 128}, Shape{1, 2, 2, 128, 40},
                        Shape{1, 1, 1, 128, 96}}) {
    for (const Variant& variant : kBackwardVariants) {
      SCOPED_TRACE(testing::Message() << "N " << s.N << " d " << s.d << " heads " << s.heads << "/"
                                      << s.kv_heads << " " << name_of_variant(variant));
      const Problem p = problem_of(s.batch, s.heads, s.kv_heads, s.N, s.N, s.d);
      const Tiles tiles = stage().tiles(p);
      ASSERT_TRUE(s.N % tiles.Br == 0 && s.N % tiles.Bc == 0) << "the formulas are for whole tiles";
      const Ledger ledger = *BackwardCase(p, InputKind::normal, 1).run(stage(), variant).ledger;
      const Ledger want = predict->second(
          {s.N, s.d, tile_width(s.d), s.heads / s.kv_heads, tiles, variant.deterministic});
      const int64_t n = int64_t{s.batch} * s.kv_heads;
      const auto times_n = [&](BytesByTensor bytes) {
        for (auto& [tensor, count] : bytes) count *= n;
        return bytes;
      };
      BytesByTensor written = times_n(want.global_written);
      if (variant.deterministic) written["turns"] += 4;  // of all blocks: where they take numbers
      EXPECT_EQ(ledger.global_read, times_n(want.global_read));
      EXPECT_EQ(ledger.global_written, written);
      EXPECT_EQ(ledger.atomic_bytes, n * want.atomic_bytes);
      EXPECT_EQ(ledger.launches, want.launches);
      EXPECT_EQ(ledger.grid_blocks, n * want.grid_blocks);
      EXPECT_EQ(ledger.barriers, n * want.barriers);
      EXPECT_EQ(ledger.warp_barriers, n * want.warp_barriers);
      EXPECT_EQ(ledger.shuffles, n * want.shuffles);
      EXPECT_EQ(ledger.mma_flops, n * want.mma_flops);
      EXPECT_EQ(ledger.exp, n * want.exp);
      EXPECT_EQ(ledger.div, 0);
      EXPECT_EQ(ledger.bank_conflicts, 0);
      EXPECT_EQ(ledger.tiles_visited, n * want.tiles_visited);
      EXPECT_EQ(ledger.tiles_masked, n * want.tiles_masked);
    }
  }
}

TEST_P(BackwardLedgerTest, IsTheSameForEverySeedAndWorkerCount) {
  const BackwardCase c(problem_of(1, 4, 2, 70, 190, 40, true), InputKind::normal, 1);
  const model::Options before = model::options();
  for (const Variant& variant : kBackwardVariants) {
    SCOPED_TRACE(name_of_variant(variant));
    const Ledger first = *c.run(stage(), variant).ledger;
    for (int seed = 2; seed <= (full_tier() ? 20 : 4); ++seed) {
      model::Options options = before;
      options.seed = seed;
      options.workers = 1 + seed % 2;
      model::set_options(options);
      EXPECT_EQ(*c.run(stage(), variant).ledger, first) << "seed " << seed;
    }
    model::set_options(before);
  }
}

// With the causal mask exactly those tiles are visited that have a visible pair, and those masked
// that have an invisible one, whatever the lengths: the tiles of the forward pass, by columns.
TEST_P(BackwardLedgerTest, OfCausalTiles) {
  for (const bool causal : {true, false}) {
    for (const auto& [seqlen_q, seqlen_k] :
         {std::pair{256, 256}, {300, 300}, {100, 500}, {500, 100}, {1, 333}, {333, 1}, {64, 130}}) {
      SCOPED_TRACE(testing::Message()
                   << "Nq " << seqlen_q << " Nk " << seqlen_k << " causal " << causal);
      const Problem p = problem_of(1, 2, 1, seqlen_q, seqlen_k, 64, causal);
      const Ledger ledger = *BackwardCase(p, InputKind::normal, 1).run(stage()).ledger;
      const Tiles tiles = stage().tiles(p);
      const TileCounts want = skipping_tile_counts(p, tiles.Br, tiles.Bc);
      EXPECT_EQ(ledger.tiles_visited, want.visited);
      EXPECT_EQ(ledger.tiles_masked, want.masked);
    }
  }
}

FLASHSTEPS_FOR_BACKWARD_STAGES(BackwardLedgerTest);

}  // namespace
}  // namespace flashsteps
#endif
