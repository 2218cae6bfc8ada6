// A kernel without faults raises no alarm, whatever the seed and the number of workers, and counts
// and gives the same; the same seed gives the same run; and each of its synchronisations, taken
// out, is noticed.
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <set>

#include "common/stage/ledger_json.h"
#include "tests/model_test_support.h"

namespace flashsteps::test {
namespace {

constexpr int kD = 64, kBlocks = 3, kTiles = 4, kRowsQ = 64 * kBlocks, kRowsK = 32 * kTiles;

/// The kernel's inputs and outputs.
struct RowMax {
  std::vector<uint16_t> Q = random_halves(kRowsQ * kD, 1), K = random_halves(kRowsK * kD, 2);
  DeviceBuffer Q_gmem = buffer("Q", Q, DType::fp16), K_gmem = buffer("K", K, DType::fp16);
  DeviceBuffer row_max{model_device(), "row_max", DType::fp32, kRowsQ};
  DeviceBuffer sums = buffer("sums", std::vector<float>{0.f});
  DeviceBuffer visits = buffer("visits", std::vector<int>{0});

  // Small whole numbers: products and sums are exact in any order.
  static std::vector<uint16_t> random_halves(int count, int seed) {
    static constexpr uint16_t kHalves[] = {0xc000, 0xbc00, 0, 0x3c00, 0x4000};  // -2, -1, 0, 1, 2
    std::mt19937 random(seed);
    std::vector<uint16_t> values(count);
    for (uint16_t& v : values) v = kHalves[random() % 5];
    return values;
  }
  static int value(uint16_t half) {
    const int magnitude = (half & 0x7fff) == 0x3c00 ? 1 : (half & 0x7fff) == 0x4000 ? 2 : 0;
    return half & 0x8000 ? -magnitude : magnitude;
  }
  KernelArgs args() {
    return {Q_gmem.data(), row_max.data(), K_gmem.data(), {sums.data(), visits.data()},
            kTiles,        kBlocks};
  }
  std::vector<float> expected() const {
    std::vector<float> right(kRowsQ, -INFINITY);
    for (int i = 0; i < kRowsQ; ++i) {
      for (int j = 0; j < kRowsK; ++j) {
        int s = 0;
        for (int c = 0; c < kD; ++c) s += value(Q[i * kD + c]) * value(K[j * kD + c]);
        right[i] = std::max(right[i], float(s));
      }
    }
    return right;
  }
};

std::string text_of(const Ledger& ledger) {
  return nlohmann::ordered_json(ledger).dump();
}

TEST(CleanKernel, NoAlarmAndEqualCountsOverSeedsAndWorkers) {
  const std::vector<float> right = RowMax().expected();
  std::string counts;
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    for (const int workers : {1, 2}) {
      const WithOptions options(seed, workers);
      RowMax run;
      model::take_ledger();
      ASSERT_NO_THROW(run_on_model("row_max", run.args())) << "seed " << seed;
      const std::string now = text_of(model::take_ledger());
      if (counts.empty()) counts = now;
      ASSERT_EQ(now, counts) << "seed " << seed << " workers " << workers;
      ASSERT_EQ(download<float>(run.row_max), right) << "seed " << seed;
      ASSERT_EQ(download<int>(run.visits)[0], kBlocks);
    }
  }
  EXPECT_NE(counts.find("\"mma\""), std::string::npos) << counts;
}

TEST(CleanKernel, NoAlarmAtAnyRateOfPreemption) {
  for (const double preempt : {0.0, 0.01, 0.3, 1.0}) {
    model::Options o;
    o.preempt = preempt;
    const WithOptions options(o);
    RowMax run;
    ASSERT_NO_THROW(run_on_model("row_max", run.args())) << preempt;
    EXPECT_EQ(download<float>(run.row_max), run.expected());
  }
}

// The order of atomic additions shows in the last bits of a sum of floats of very different size.
TEST(CleanKernel, SameSeedSameRun) {
  constexpr int kN = 200;  // blocks: enough that they overlap on several workers
  std::vector<float> values(kN * 64);
  std::mt19937 random(5);
  for (float& v : values) v = std::ldexp(float(random() % 1000) - 500, int(random() % 40) - 20);
  const auto sum = [&](uint64_t seed, int workers) {
    const WithOptions options(seed, workers);
    DeviceBuffer in = buffer("in", values), total = buffer("sum", std::vector<float>{0.f});
    DeviceBuffer counts = buffer("counts", std::vector<int>{0, 0});
    run_on_model("atomics",
                 {.in = in.data(), .out = total.data(), .extra = counts.data(), .n = kN});
    return download<float>(total)[0];
  };
  std::set<float> sums;
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    const float once = sum(seed, 1);
    for (const int workers : {1, 2, 3}) ASSERT_EQ(sum(seed, workers), once) << "seed " << seed;
    sums.insert(once);
  }
  EXPECT_GT(sums.size(), 1u) << "the seed changes nothing";
}

TEST(CleanKernel, SitesAreFoundByLineAndKind) {
  RowMax run;
  model::record_sites(true);
  run_on_model("row_max", run.args());
  model::record_sites(false);
  std::map<model::SiteKind, int> found;
  for (const model::Site& s : model::sites()) {
    EXPECT_TRUE(s.file == "tests/kernels/clean.cu" || s.file == "common/gpu/tile.h") << s.file;
    ++found[s.kind];
  }
  using enum model::SiteKind;
  const std::map<model::SiteKind, int> right = {{barrier, 2},  {warp_barrier, 1}, {shuffle, 2},
                                                {copy, 1},     {commit, 2},       {wait, 1},
                                                {ldmatrix, 2}, {mma, 2},          {atomic, 2}};
  EXPECT_EQ(found, right);
}

TEST(CleanKernel, EverySynchronisationIsNeeded) {
  RowMax first;
  model::record_sites(true);
  run_on_model("row_max", first.args());
  model::record_sites(false);
  int mutants = 0;
  for (const model::Site& site : model::sites()) {
    using enum model::SiteKind;
    if (site.kind != barrier && site.kind != warp_barrier && site.kind != commit &&
        site.kind != wait && site.kind != copy) {
      continue;
    }
    ++mutants;
    for (uint64_t seed = 1; seed <= 20; ++seed) {
      const WithOptions options(seed, 1);
      RowMax run;
      model::skip_site(site);
      const std::optional<model::Fault> fault = fault_of("row_max", run.args());
      model::skip_site(std::nullopt);
      ASSERT_TRUE(fault) << to_string(site.kind) << " at line " << site.line << ", seed " << seed;
      const std::string text = fault->what();
      EXPECT_TRUE(text.find("Q_smem") != std::string::npos ||
                  text.find("K_smem") != std::string::npos ||
                  text.find("max_smem") != std::string::npos)
          << text;
      if (seed == 1)
        std::printf("%s:%d %s: %s\n", site.file.c_str(), site.line, to_string(site.kind),
                    text.c_str());
    }
  }
  EXPECT_EQ(mutants, 7);
}

TEST(CleanKernel, ArithmeticThatIsTakenOutChangesTheResult) {
  RowMax first;
  model::record_sites(true);
  run_on_model("row_max", first.args());
  model::record_sites(false);
  for (const model::Site& site : model::sites()) {
    using enum model::SiteKind;
    if (site.kind != shuffle && site.kind != mma && site.kind != ldmatrix && site.kind != atomic)
      continue;
    RowMax run;
    model::skip_site(site);
    run_on_model("row_max", run.args());
    model::skip_site(std::nullopt);
    const bool same = download<float>(run.row_max) == run.expected() &&
                      download<int>(run.visits) == download<int>(first.visits) &&
                      download<float>(run.sums) == download<float>(first.sums);
    EXPECT_FALSE(same) << to_string(site.kind) << " at line " << site.line;
  }
}

}  // namespace
}  // namespace flashsteps::test
