// The ledger of each stage equals the formulas of its lesson, to the byte and to the count. Here as
// in the lessons: for one (batch, head), N = Nq = Nk a multiple of the tiles, Tr = N / Br, Tc = N /
// Bc, true head_dim d, tile width D.
#include <functional>
#include <map>

#include "stage_suite.h"

#ifdef FLASHSTEPS_HAS_MODEL
namespace flashsteps {
namespace {

constexpr int64_t e = 2;  // bytes of a 16-bit element
constexpr int64_t f = 4;  // bytes of an fp32 element

// What a stage's lesson predicts for one (batch, head). Counts that a stage does not name are not
// compared.
struct Prediction {
  BytesByTensor read, written;
  int64_t launches = 0, grid_blocks = 0, barriers = 0, warp_barriers = 0, shuffles = 0,
          mma_flops = 0, exp = 0, div = 0, div_in_loop = 0, bank_conflicts = 0, tiles_visited = 0,
          tiles_masked = 0, shared_read = 0, shared_written = 0, warp_exchange_bytes = 0,
          atomic_bytes = 0;
};

// Standard attention's softmax kernel: three passes over S by one warp a row; two reductions of
// five shuffles; the exponentials are computed twice, to sum them and to normalise.
void add_softmax(Prediction& p, int64_t N) {
  p.read["S"] += 3 * N * N * f;
  p.written["P"] += N * N * e;
  p.shuffles += 10 * N;
  p.exp += 2 * N * N;
  p.div += N * N;
}

Prediction predict_01(int64_t N, int64_t d, int64_t) {
  Prediction p;
  p.read = {{"Q", N * N * d * e}, {"K", N * N * d * e}, {"P", N * N * d * e}, {"V", N * N * d * e}};
  p.written = {{"S", N * N * f}, {"O", N * d * e}};
  add_softmax(p, N);
  p.launches = 3;
  p.grid_blocks = N * N / 256 + N / 8 + N * d / 256;
  return p;
}

// What the four steps have in common, of one 64 x 64 tile of S and the same of P: tiles of Q, K, V
// and P go to shared memory once.
Prediction predict_02(int64_t N, int64_t d, int64_t D) {
  const int64_t Tr = N / 64, Tc = N / 64;
  Prediction p;
  p.read = {{"Q", Tc * N * d * e}, {"K", Tr * N * d * e}, {"P", N * N * e}, {"V", Tr * N * d * e}};
  p.written = {{"S", N * N * f}, {"O", N * d * e}};
  add_softmax(p, N);
  p.launches = 3;
  p.barriers =
      Tr * Tc + 2 * Tr * Tc;  // one in the scores kernel, two for each tile of the output kernel
  p.shared_written = Tr * Tc * (3 * 64 * D + 64 * 64) * e;
  return p;
}

Prediction predict_02a(int64_t N, int64_t d, int64_t D) {
  Prediction p = predict_02(N, d, D);
  const int64_t tiles = (N / 64) * (N / 64);
  p.grid_blocks = tiles + N / 8 + N / 64;
  // For each of the D columns, a warp loads four times from 2 rows of Q (1 conflict) and four times
  // from 16 rows of K (15), all in the same bank; for each of 64 keys, four times from 2 rows of P.
  // Eight warps.
  p.bank_conflicts = tiles * 8 * (D * (4 * 1 + 4 * 15) + 64 * 4);
  p.shared_read = tiles * 8 * (D * 8 + 64 * (4 + D / 16)) * 32 * e;
  p.warp_exchange_bytes =
      p.shared_read * 7 /
      8;  // one of the eight warps that copied a tile reads what it copied itself
  return p;
}

Prediction predict_02b(int64_t N, int64_t d, int64_t D) {
  Prediction p = predict_02(N, d, D);
  const int64_t tiles = (N / 64) * (N / 64);
  p.grid_blocks = tiles + N / 4 + N / 64;
  p.mma_flops = 4 * N * N * D;
  // A pair load of a fragment meets 8 rows in each bank (7 conflicts): 16 of them for each 16
  // columns of the scores, 8 for each 16 keys of P; a column of V 4 rows (3 conflicts): 4 for each
  // 8 of a warp's D / 2 columns. Four warps.
  p.bank_conflicts = tiles * 4 * (D / 16 * 16 * 7 + 4 * (8 * 7 + D / 16 * 4 * 3));
  const int64_t pairs = tiles * 4 * (D / 16 * 16 + 4 * 8) * 32 * 4,
                columns_of_V = tiles * 4 * 4 * (D / 16 * 4) * 32 * e;
  p.shared_read = pairs + columns_of_V;
  // A quarter of it the warp copied itself, but for V with 64 columns, of which a warp reads 32 and
  // copied half.
  p.warp_exchange_bytes = pairs * 3 / 4 + (D == 64 ? columns_of_V / 2 : columns_of_V * 3 / 4);
  return p;
}

Prediction predict_02c(int64_t N, int64_t d, int64_t D) {
  Prediction p = predict_02b(N, d, D);
  p.bank_conflicts = 0;
  p.warp_exchange_bytes = p.shared_read * 3 / 4;
  return p;
}

Prediction predict_02d(int64_t N, int64_t d, int64_t D) {
  Prediction p = predict_02c(N, d, D);
  const int64_t tiles = (N / 64) * (N / 64);
  p.barriers =
      tiles * (D / 32) + 2 * tiles;  // in the scores kernel one for each chunk of 32 columns
  p.warp_exchange_bytes = 0;         // what cp.async brings was stored by no warp
  return p;
}

Prediction predict_03(int64_t N, int64_t d, int64_t D) {
  const int64_t Br = D == 64 ? 64 : 32;
  const int64_t Tr = N / Br, Tc = N / 64, score_tiles = (N / 64) * (N / 64);
  Prediction p;
  p.read = {{"Q", N / 64 * N * d * e},
            {"K", N / 64 * N * d * e},
            {"S", N * N * f},
            {"V", Tr * N * d * e}};
  p.written = {{"S", N * N * f}, {"O", N * d * e}, {"m", N * f}, {"l", N * f}};
  p.launches = 2;
  p.grid_blocks = score_tiles + Tr;
  p.barriers = score_tiles * (D / 32) + 2 * Tr * Tc;
  p.mma_flops = 4 * N * N * D;
  p.shuffles = Tr * Tc * (Br / 4) *
               6;  // a warp has 4 rows at once: three for the maximum, three for the sum
  p.exp =
      N * N + N * Tc * 8;  // each of a row's 8 lanes also computes the factor for what came before
  p.div = p.div_in_loop = N * Tc * 8;  // 1 / l in each of them, for every tile
  p.tiles_visited = Tr * Tc;
  p.shared_read = score_tiles * 4 * (D / 16 * 4) * 512 +
                  Tr * Tc * 4 * (4 * (Br / 32 + D / 32) * 512 + Br / 2 * 4 * f);
  p.shared_written = score_tiles * 2 * 64 * D * e + Tr * Tc * ((Br * 64 + 64 * D) * e + Br * f);
  // A warp reads half of the P tile, three quarters of it written by other warps; and each row's
  // factor with 4 lanes.
  p.warp_exchange_bytes = Tr * Tc * 4 * (Br / 2) * (64 * e + 4 * f) * 3 / 4;
  return p;
}

// What 04, 05 and 06 have in common: four warps split the 64 keys of a tile, 16 each, and merge
// through shared memory. In the merge every one of the 128 threads owns a part of a row.
Prediction predict_split_k(int64_t N, int64_t D) {
  const int64_t Br = D == 64 ? 64 : 32;
  const int64_t Tr = N / Br, Tc = N / 64;
  Prediction p;
  p.launches = 1;
  p.mma_flops = 4 * N * N * D;
  p.shuffles =
      Tr * Tc * 2 * Br;  // two for the maxima and two for the sums of each 8 rows, in four warps
  p.exp = N * N + Tr * Tc * 128;               // every owner computes e^(m - m_new)
  p.tiles_visited = p.tiles_masked = Tr * Tc;  // no tile is skipped, every one is masked
  // Fragments of Q (all rows), K and V (16 keys); then m and four maxima for each row with 4 lanes,
  // in four warps; then the merge: four maxima and four sums for each owner, four partial sums for
  // each element of O.
  p.shared_read =
      Tr * Tc * (4 * D / 16 * (Br / 16 + 2) * 512 + Br * 5 * 16 * 4 + 128 * 8 * f + 4 * Br * D * f);
  p.shared_written =
      Tr * Tc * (2 * 4 * Br * f + 4 * Br * D * f);  // maxima, sums and P V of each warp
  // Of all that but the fragments, a quarter was stored by the warp that reads it.
  p.warp_exchange_bytes = Tr * Tc * (Br * 5 * 16 * 4 + 128 * 8 * f + 4 * Br * D * f) * 3 / 4;
  return p;
}

Prediction predict_04(int64_t N, int64_t d, int64_t D) {
  const int64_t Br = D == 64 ? 64 : 32;
  const int64_t Tr = N / Br, Tc = N / 64;
  Prediction p = predict_split_k(N, D);
  p.read = {{"K", N * d * e},          {"V", N * d * e},  {"Q", Tc * N * d * e},
            {"O_acc", Tc * N * d * f}, {"m", Tc * N * f}, {"l", Tc * N * f}};
  p.written = {{"O_acc", (Tc + 1) * N * d * f},
               {"m", (Tc + 1) * N * f},
               {"l", (Tc + 1) * N * f},
               {"O", N * d * e}};
  p.grid_blocks = 1;
  p.barriers = 3 * Tr * Tc;
  p.shuffles += Tr * Tc * 8;              // m and l go from a row's first owner to the others
  p.div = p.div_in_loop = Tr * Tc * 128;  // 1 / l_new by every owner
  p.shared_written += Tc * (2 * 64 * D * e + Tr * (Br * D * e + Br * f));
  return p;
}

Prediction predict_05(int64_t N, int64_t d, int64_t D) {
  const int64_t Br = D == 64 ? 64 : 32;
  const int64_t Tr = N / Br, Tc = N / 64;
  Prediction p = predict_split_k(N, D);
  p.read = {{"Q", N * d * e}, {"K", Tr * N * d * e}, {"V", Tr * N * d * e}};
  p.written = {{"O", N * d * e}, {"m", N * f}, {"l", N * f}};
  p.grid_blocks = Tr;
  p.barriers = 3 * Tr * Tc;
  p.div = p.div_in_loop = Tr * Tc * 128;
  p.shared_written += Tr * (Br * D * e + Tc * 2 * 64 * D * e + (Tc + 1) * Br * f);
  return p;
}

Prediction predict_06(int64_t N, int64_t d, int64_t D) {
  const int64_t Tr = N / (D == 64 ? 64 : 32);
  Prediction p = predict_05(N, d, D);
  p.written = {{"O", N * d * e}, {"L", N * f}};
  p.div = Tr * 128;  // 1 / l by every owner, once
  p.div_in_loop = 0;
  return p;
}

// 07 and 08, which differ in the keys of a tile.
Prediction predict_split_q(int64_t N, int64_t d, int64_t D, int64_t Bc) {
  const int64_t Br = 128;
  const int64_t Tr = N / Br, Tc = N / Bc;
  Prediction p;
  p.read = {{"Q", N * d * e}, {"K", Tr * N * d * e}, {"V", Tr * N * d * e}};
  p.written = {{"O", N * d * e}, {"L", N * f}};
  p.launches = 1;
  p.grid_blocks = Tr;
  p.barriers = Tr * Tc * 2;  // those that guard the tiles
  p.warp_barriers = Tr * 4;  // before a warp stores its rows of O
  p.mma_flops = 4 * N * N * D;
  p.shuffles =
      Tr * (Tc + 1) * Br / 4;  // two for each 8 rows: the maxima of each tile, the sums at the end
  p.exp = N * N + Tr * Tc * 4 * Br;  // four lanes compute a row's e^(m - m_new)
  p.div = N * 4;                     // and, at the end, its 1 / l
  p.tiles_visited = p.tiles_masked = Tr * Tc;
  p.shared_read = Tr * Tc * 4 * (D / 16 * (Br / 64 + Bc / 16) + Bc / 16 * D / 16) * 512 + N * d * e;
  p.shared_written = N * D * e + Tr * Tc * 2 * Bc * D * e + N * D * e;
  return p;
}

Prediction predict_07(int64_t N, int64_t d, int64_t D) {
  return predict_split_q(N, d, D, 64);
}

Prediction predict_08(int64_t N, int64_t d, int64_t D) {
  Prediction p = predict_split_q(N, d, D, D == 64 ? 128 : 64);
  p.exp -= N * 4;      // the first tile rescales nothing
  p.tiles_masked = 0;  // without a causal mask; OfCausalTiles has the other case
  return p;
}

const std::map<std::string, std::function<Prediction(int64_t, int64_t, int64_t)>> kPredictions = {
    {"01", predict_01},   {"02a", predict_02a}, {"02b", predict_02b}, {"02c", predict_02c},
    {"02d", predict_02d}, {"03", predict_03},   {"04", predict_04},   {"05", predict_05},
    {"06", predict_06},   {"07", predict_07},   {"08", predict_08},
};

class LedgerTest : public StageTest {};

TEST_P(LedgerTest, EqualsTheLessonsFormulas) {
  if (stage().target != Target::model) GTEST_SKIP() << "the ledger is counted by the model";
  const auto predict = kPredictions.find(stage().id);
  ASSERT_NE(predict, kPredictions.end())
      << "stage " << stage().id << " has no prediction; add its lesson's formulas";
  struct Shape {
    int batch, heads, kv_heads, N, d;
  };
  for (const Shape s :
       {Shape{1, 1, 1, 64, 64}, Shape{2, 2, 1, 128, 64}, Shape{1, 1, 1, 256, 64},
        Shape{1, 2, 2, 128, 128}, Shape{1, 2, 2, 128, 40}, Shape{1, 1, 1, 128, 96}}) {
    SCOPED_TRACE(testing::Message() << "N " << s.N << " d " << s.d);
    const Problem p = problem_of(s.batch, s.heads, s.kv_heads, s.N, s.N, s.d);
    const Tiles tiles = stage().tiles(p);
    if (tiles.Br && (s.N % tiles.Br || s.N % tiles.Bc))
      continue;  // the formulas are for whole tiles
    const Ledger ledger =
        *run_forward(device(), stage(), p, make_inputs(p, InputKind::normal, 1)).ledger;
    const Prediction want = predict->second(s.N, s.d, tile_width(s.d));
    const int64_t n = p.batch_heads();
    const auto times_n = [&](BytesByTensor bytes) {
      for (auto& [tensor, count] : bytes) count *= n;
      return bytes;
    };
    EXPECT_EQ(ledger.global_read, times_n(want.read));
    EXPECT_EQ(ledger.global_written, times_n(want.written));
    EXPECT_EQ(ledger.launches, want.launches);
    EXPECT_EQ(ledger.grid_blocks, n * want.grid_blocks);
    EXPECT_EQ(ledger.barriers, n * want.barriers);
    EXPECT_EQ(ledger.warp_barriers, n * want.warp_barriers);
    EXPECT_EQ(ledger.shuffles, n * want.shuffles);
    EXPECT_EQ(ledger.mma_flops, n * want.mma_flops);
    EXPECT_EQ(ledger.exp, n * want.exp);
    EXPECT_EQ(ledger.div, n * want.div);
    EXPECT_EQ(ledger.div_in_loop, n * want.div_in_loop);
    EXPECT_EQ(ledger.bank_conflicts, n * want.bank_conflicts);
    EXPECT_EQ(ledger.tiles_visited, n * want.tiles_visited);
    EXPECT_EQ(ledger.tiles_masked, n * want.tiles_masked);
    EXPECT_EQ(ledger.shared_read, n * want.shared_read);
    EXPECT_EQ(ledger.shared_written, n * want.shared_written);
    EXPECT_EQ(ledger.warp_exchange_bytes, n * want.warp_exchange_bytes);
    EXPECT_EQ(ledger.atomic_bytes, 0);
  }
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

Prediction predict_09(const BackwardShape& s) {
  const int64_t N = s.N, d = s.d, D = s.D, G = s.group;
  const int64_t Tr = N / s.tiles.Br, Tc = N / s.tiles.Bc;
  const int64_t warps = s.tiles.Bc / 32 * (D / 64);
  Prediction p;
  // A kernel before reads O, dO and L and leaves D and L log2(e); then Q, dO and these two are read
  // once for each tile of keys.
  p.read = {{"O", G * N * d * e},       {"dO", G * (1 + Tc) * N * d * e},
            {"Q", G * Tc * N * d * e},  {"K", N * d * e},
            {"V", N * d * e},           {"L", G * N * f},
            {"L_log2", G * Tc * N * f}, {"D", G * Tc * N * f},
            {"dQ_acc", G * N * d * f}};
  p.written = {{"D", G * N * f},      {"L_log2", G * N * f}, {"dQ_acc", G * N * d * f},
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
    p.read["turns"] = G * Tr * Tc * warps * 4;
    p.written["turns"] = G * N / 64 * 8 * 4;
    p.atomic_bytes += Tc * 4 + G * Tr * Tc * warps * 4;
    p.barriers += 2 * Tc;
    p.warp_barriers += 2 * G * Tr * Tc * warps;
  }
  return p;
}

const std::map<std::string, std::function<Prediction(const BackwardShape&)>> kBackwardPredictions =
    {{"09", predict_09}};

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
      const Prediction want = predict->second(
          {s.N, s.d, tile_width(s.d), s.heads / s.kv_heads, tiles, variant.deterministic});
      const int64_t n = int64_t{s.batch} * s.kv_heads;
      const auto times_n = [&](BytesByTensor bytes) {
        for (auto& [tensor, count] : bytes) count *= n;
        return bytes;
      };
      BytesByTensor written = times_n(want.written);
      if (variant.deterministic) written["turns"] += 4;  // of all blocks: where they take numbers
      EXPECT_EQ(ledger.global_read, times_n(want.read));
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
