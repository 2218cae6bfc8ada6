// A warp-specialised kernel of Hopper without faults raises no alarm, whatever the seed and the
// number of workers, and counts and gives the same; and each of its synchronisations, taken out, is
// named on every seed.
#include <cmath>
#include <cstdlib>
#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include "common/attention/layout.h"
#include "common/model/float16.h"
#include "common/stage/ledger_json.h"
#include "common/stage/registry.h"
#include "common/stage/run.h"
#include "tests/model_test_support.h"

namespace flashsteps::test {
namespace {

constexpr int kD = 64, kTilesQ = 5, kTilesK = 5, kRowsQ = 128 * kTilesQ, kRowsK = 64 * kTilesK;

/// The kernel's inputs and outputs.
struct Products {
  std::vector<uint16_t> Q = random_halves(kRowsQ * kD, 1), K = random_halves(kRowsK * kD, 2),
                        V = random_halves(kRowsK * kD, 3);
  DeviceBuffer Q_gmem = buffer("Q", Q, DType::fp16), K_gmem = buffer("K", K, DType::fp16),
               V_gmem = buffer("V", V, DType::fp16);
  DeviceBuffer O{model_device(), "O", DType::fp16, kRowsQ* kD};
  DeviceBuffer maxima{model_device(), "maxima", DType::fp32, kTilesQ * 128};

  // Few are not 0, so that all sums are small whole numbers: exact in 16 bits and in any order.
  static std::vector<uint16_t> random_halves(int count, int seed) {
    static constexpr uint16_t kHalves[] = {0xbc00, 0x3c00};  // -1, 1
    std::mt19937 random(seed);
    std::vector<uint16_t> values(count);
    for (uint16_t& v : values) v = random() % 4 == 0 ? kHalves[random() % 2] : 0;
    return values;
  }
  KernelArgs args() {
    return {Q_gmem.data(), O.data(), K_gmem.data(), {V_gmem.data(), maxima.data()},
            kTilesQ,       kTilesK};
  }
  std::vector<uint16_t> expected() const {
    const auto value = [](uint16_t half) { return int(model::half_to_float(half)); };
    std::vector<uint16_t> right(kRowsQ * kD);
    std::vector<int> S(kRowsK);
    for (int i = 0; i < kRowsQ; ++i) {
      for (int j = 0; j < kRowsK; ++j) {
        S[j] = 0;
        for (int c = 0; c < kD; ++c) S[j] += value(Q[i * kD + c]) * value(K[j * kD + c]);
      }
      for (int c = 0; c < kD; ++c) {
        int sum = 0;
        for (int j = 0; j < kRowsK; ++j) sum += S[j] * value(V[j * kD + c]);
        right[i * kD + c] = model::float_to_half(float(sum));
      }
    }
    return right;
  }
};

std::string text_of(const Ledger& ledger) {
  return nlohmann::ordered_json(ledger).dump();
}

/// How many seeds to try, in the full tier and in the fast one.
uint64_t seeds(uint64_t in_full, uint64_t in_fast) {
  const char* const full = std::getenv("FLASHSTEPS_FULL");
  return full && std::string(full) == "1" ? in_full : in_fast;
}

// What FLASHSTEPS_HOPPER_STAGE registers writes L itself and runs on compute capability 9.0 alone.
TEST(HopperStage, RunsOnOneCapability) {
  const Stage* stage = find_stage("99", Target::model);
  ASSERT_TRUE(stage);
  EXPECT_FALSE(stage->lse);
  Problem p{.batch = 1, .heads = 1, .kv_heads = 1, .seqlen_q = 8, .seqlen_k = 8, .head_dim = 64};
  set_packed_strides(p);
  for (const int capability : {80, 89, 90, 100, 120}) {
    model::Options o;
    o.capability = capability;
    const WithOptions options(o);
    const std::string why = why_not(*stage, p, model_device().info()).value_or("");
    EXPECT_EQ(why, capability == 90
                       ? ""
                       : "needs compute capability 9.0, found " + std::to_string(capability / 10) +
                             "." + std::to_string(capability % 10) + " (CPU model)");
  }
}

TEST(HopperClean, NoAlarmAndEqualCountsOverSeedsAndWorkers) {
  const std::vector<uint16_t> right = Products().expected();
  std::string counts;
  for (uint64_t seed = 1; seed <= seeds(150, 20); ++seed) {
    for (const int workers : {1, 2}) {
      const WithOptions options(seed, workers);
      Products run;
      model::take_ledger();
      ASSERT_NO_THROW(run_on_model("products", run.args())) << "seed " << seed;
      const std::string now = text_of(model::take_ledger());
      if (counts.empty()) counts = now;
      ASSERT_EQ(now, counts) << "seed " << seed << " workers " << workers;
      ASSERT_EQ(download<uint16_t>(run.O), right) << "seed " << seed;
    }
  }
}

// Every count of the kernel, from its source.
TEST(HopperClean, CountsWhatItDoes) {
  const WithOptions options(1, 2);
  Products run;
  model::take_ledger();
  run_on_model("products", run.args());
  const Ledger l = model::take_ledger();
  constexpr int64_t kTileBytes = 64 * kD * 2, kBlocks = 3, kPairs = kTilesQ * kTilesK;
  EXPECT_EQ(l.grid_blocks, kBlocks);
  EXPECT_EQ(l.global_read, (BytesByTensor{{"Q", kTilesQ * 2 * kTileBytes},
                                          {"K", kPairs * kTileBytes},
                                          {"V", kPairs * kTileBytes}}));
  // Two of the blocks have two tiles of Q, and read K and V for each.
  EXPECT_EQ(l.global_unique_read, (BytesByTensor{{"Q", kTilesQ * 2 * kTileBytes},
                                                 {"K", kBlocks * kTilesK * kTileBytes},
                                                 {"V", kBlocks * kTilesK * kTileBytes}}));
  EXPECT_EQ(l.global_written,
            (BytesByTensor{{"O", kTilesQ * 2 * kTileBytes}, {"maxima", kTilesQ * 128 * 4}}));
  EXPECT_EQ(l.tma, kTilesQ * (2 + 2 * kTilesK + 2));  // Q; K and V; O
  EXPECT_EQ(l.wgmma, kPairs * 2 * 8);                 // warpgroups; steps of 16 of both products
  EXPECT_EQ(l.mma_flops, kPairs * 2 * 2 * (2 * 64 * 64 * 64));
  EXPECT_EQ(l.mma, 0);
  // Boxes, O on its way, the maxima.
  EXPECT_EQ(l.shared_written,
            kTilesQ * 2 * kTileBytes + kPairs * 2 * kTileBytes + kTilesQ * (2 * kTileBytes + 512));
  // S reads its rows of Q and the tile of K, O the tile of V; O on its way, and the maxima.
  EXPECT_EQ(l.shared_read, kPairs * 2 * 3 * kTileBytes + kTilesQ * (2 * kTileBytes + 512));
  EXPECT_EQ(l.warp_exchange_bytes, kTilesQ * 512);  // the maxima
  EXPECT_EQ(l.barriers, kBlocks);
  EXPECT_EQ(l.named_barriers, kTilesQ * 4);  // two for O, two for the maxima
  // Of a tile of Q: Q_full, Q_empty; of a pair: full and empty, of K and of V.
  EXPECT_EQ(l.mbarrier_phases, kTilesQ * 2 + kPairs * 4);
  EXPECT_EQ(l.bank_conflicts, 0);
  EXPECT_EQ(l.shuffles + l.ldmatrix + l.cp_async + l.warp_barriers + l.atomic_bytes, 0);
}

// The options name the multiprocessors, and with them the persistent grid.
TEST(HopperClean, OneBlockForEachMultiprocessor) {
  model::Options o;
  o.multiprocessors = 4;
  const WithOptions options(o);
  Products run;
  model::take_ledger();
  run_on_model("products", run.args());
  EXPECT_EQ(model::take_ledger().grid_blocks, 4);
  EXPECT_EQ(download<uint16_t>(run.O), run.expected());
}

// A block's first atomic waits for the blocks before, so the first block takes all tiles; but
// nothing waits for ever, and the result is the same on every machine.
TEST(HopperClean, PersistentBlocksShareAQueue) {
  constexpr int kTiles = 7;
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    for (const int workers : {1, 2, 3}) {
      const WithOptions options(seed, workers);
      DeviceBuffer next = buffer("next", std::vector<int>{0});
      DeviceBuffer values(model_device(), "values", DType::fp32, kTiles * 64);
      DeviceBuffer takers(model_device(), "takers", DType::fp32, 3);
      ASSERT_NO_THROW(run_on_model(
          "queue", {.in = next.data(), .out = values.data(), .extra = takers.data(), .n = kTiles}));
      const std::vector<float> found = download<float>(values);
      for (int i = 0; i < kTiles * 64; ++i) ASSERT_EQ(found[i], 2.f * (i / 64) + i % 64);
      EXPECT_EQ(download<float>(takers), (std::vector<float>{kTiles, 0.f, 0.f}));
      EXPECT_EQ(download<int>(next)[0], kTiles + 3);
    }
  }
}

// What two warpgroups by turns, and products under way beside the threads' own work, need no more.
TEST(HopperClean, NoAlarmOfOverlappedProducts) {
  const std::vector<uint16_t> right = Products().expected();
  std::string counts;
  for (uint64_t seed = 1; seed <= seeds(150, 20); ++seed) {
    const WithOptions options(seed, 1 + int(seed % 2));
    Products run;
    model::take_ledger();
    ASSERT_NO_THROW(run_on_model("overlapped", run.args())) << "seed " << seed;
    const std::string now = text_of(model::take_ledger());
    if (counts.empty()) counts = now;
    ASSERT_EQ(now, counts) << "seed " << seed;
    ASSERT_EQ(download<uint16_t>(run.O), right) << "seed " << seed;
  }
}

TEST(HopperClean, NoAlarmAtAnyRateOfPreemption) {
  for (const double preempt : {0.0, 0.3, 1.0}) {
    model::Options o;
    o.preempt = preempt;
    const WithOptions options(o);
    Products run;
    ASSERT_NO_THROW(run_on_model("products", run.args())) << preempt;
    EXPECT_EQ(download<uint16_t>(run.O), run.expected());
  }
}

std::vector<model::Site> all_sites() {
  Products run;
  model::record_sites(true);
  run_on_model("products", run.args());
  model::record_sites(false);
  return model::sites();
}

TEST(HopperClean, SitesAreFoundByLineAndKind) {
  std::map<model::SiteKind, int> found;
  for (const model::Site& s : all_sites()) {
    if (s.file == "tests/kernels/hopper_clean.cu") ++found[s.kind];
  }
  using enum model::SiteKind;
  const std::map<model::SiteKind, int> right = {
      {barrier, 1}, {mbarrier_init, 6}, {fence, 4},  {arrive, 8}, {expect, 3}, {copy, 3},
      {store, 1},   {named_barrier, 3}, {commit, 3}, {wait, 9},   {wgmma, 2},  {registers, 2}};
  EXPECT_EQ(found, right);
}

TEST(HopperClean, EverySynchronisationIsNeeded) {
  using enum model::SiteKind;
  int mutants = 0, setmaxnreg = 0;
  for (const model::Site& site : all_sites()) {
    if (site.kind == wgmma || site.kind == store) continue;
    // The second setmaxnreg takes registers. Without them a card's compiler would spill, and
    // nothing else depends on them.
    if (site.kind == registers && setmaxnreg++ > 0) continue;
    ++mutants;
    for (uint64_t seed = 1; seed <= seeds(10, 3); ++seed) {
      const WithOptions options(seed, 1);
      Products run;
      model::skip_site(site);
      const std::optional<model::Fault> fault = fault_of("products", run.args());
      model::skip_site(std::nullopt);
      ASSERT_TRUE(fault) << to_string(site.kind) << " at line " << site.line << ", seed " << seed;
      if (seed == 1)
        std::printf("%s:%d %s: %s\n", site.file.c_str(), site.line, to_string(site.kind),
                    fault->what());
    }
  }
  EXPECT_EQ(mutants, 41);
}

TEST(HopperClean, ProductsAndStoresThatAreTakenOutChangeTheResult) {
  using enum model::SiteKind;
  int mutants = 0;
  const std::vector<uint16_t> right = Products().expected();
  for (const model::Site& site : all_sites()) {
    if (site.kind != wgmma && site.kind != store) continue;
    ++mutants;
    Products run;
    model::skip_site(site);
    run_on_model("products", run.args());
    model::skip_site(std::nullopt);
    EXPECT_NE(download<uint16_t>(run.O), right) << to_string(site.kind) << " line " << site.line;
  }
  EXPECT_EQ(mutants, 3);
}

}  // namespace
}  // namespace flashsteps::test
