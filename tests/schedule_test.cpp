// Every row block is in the schedule of persistent blocks (common/gpu/schedule.h) once, and all
// blocks have as much work as any other, as nearly as whole row blocks allow.
#include "common/gpu/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <vector>

#include "common/stage/device.h"

namespace flashsteps {
namespace {

Problem problem(int batch, int heads, int tiles_q, bool causal) {
  Problem p;
  p.batch = batch;
  p.heads = p.kv_heads = heads;
  p.seqlen_q = p.seqlen_k = tiles_q;  // as if a row block had one row
  p.causal = causal;
  return p;
}

// The row blocks of each block, in order.
std::vector<std::vector<Schedule::RowBlock>> shares(const Problem& p, int tiles_q, int blocks) {
  const Schedule schedule = schedule_of(p, tiles_q, blocks);
  std::vector<std::vector<Schedule::RowBlock>> all(blocks);
  for (int block = 0; block < blocks; ++block) {
    for (int round = 0;; ++round) {
      const Schedule::RowBlock r = schedule(block, round);
      if (r.bh < 0) {
        EXPECT_EQ(schedule(block, round + 1).bh, -1) << "there is more after the end";
        break;
      }
      all[block].push_back(r);
    }
  }
  return all;
}

// Tiles of keys that a row block takes.
int64_t work(const Problem& p, const Schedule::RowBlock& r) {
  return p.causal ? r.tile + 1 : p.seqlen_k;
}

struct Grid {
  int batch, heads, tiles_q, blocks;
};

std::vector<Grid> grids() {
  std::vector<Grid> all;
  for (const int blocks : {1, 2, 3, 7, 132}) {
    for (const int batch : {1, 2, 3}) {
      for (const int heads : {1, 2, 5, 16, 37, 48, 64}) {
        for (const int tiles_q : {1, 2, 3, 4, 8, 11, 33, 86}) {
          if (blocks <= int64_t{batch} * heads * tiles_q)
            all.push_back({batch, heads, tiles_q, blocks});
        }
      }
    }
  }
  return all;
}

// Calls check(problem, shares, grid) for every grid, with a causal mask and without.
template <typename Check>
void for_all_grids(const Check& check) {
  for (const Grid& g : grids()) {
    for (const bool causal : {false, true}) {
      SCOPED_TRACE(testing::Message()
                   << g.batch << " x " << g.heads << " heads, " << g.tiles_q << " row blocks, "
                   << g.blocks << " blocks, causal " << causal);
      const Problem p = problem(g.batch, g.heads, g.tiles_q, causal);
      check(p, shares(p, g.tiles_q, g.blocks), g);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(Schedule, HasEveryRowBlockOnce) {
  for_all_grids([](const Problem& p, const auto& all, const Grid& g) {
    std::vector<int> seen(p.batch_heads() * g.tiles_q);
    for (const auto& share : all) {
      for (const Schedule::RowBlock& r : share) {
        ASSERT_TRUE(r.bh >= 0 && r.bh < p.batch_heads() && r.tile >= 0 && r.tile < g.tiles_q)
            << r.bh << " " << r.tile;
        ++seen[r.bh * g.tiles_q + r.tile];
      }
    }
    ASSERT_EQ(std::count(seen.begin(), seen.end(), 1), int64_t(seen.size()));
  });
}

// No block has as much as the longest row block more than its part of the work, anywhere.
TEST(Schedule, IsBalanced) {
  for_all_grids([](const Problem& p, const auto& shares, const Grid& g) {
    int64_t all = 0, most = 0;
    for (const auto& share : shares) {
      int64_t sum = 0;
      for (const Schedule::RowBlock& r : share) sum += work(p, r);
      all += sum;
      most = std::max(most, sum);
    }
    ASSERT_LT(most * g.blocks, all + g.blocks * g.tiles_q);
  });
}

// How near to perfect the balance is on 132 multiprocessors: in the papers' causal cells, and where
// there are few heads in a batch, or not even a pair for every block.
TEST(Schedule, KeepsAMultiprocessorBusy) {
  struct Cell {
    int batch, heads, tiles_q, keys_per_row_block, tile_k;
    double least;
  };
  for (const Cell& c : {Cell{1, 32, 86, 192, 128, 0.985}, Cell{2, 32, 43, 192, 128, 0.98},
                        Cell{4, 32, 22, 192, 128, 0.975}, Cell{8, 32, 11, 192, 128, 0.98},
                        Cell{32, 32, 4, 128, 128, 0.98}, Cell{1, 16, 128, 128, 160, 0.97},
                        Cell{8, 16, 16, 128, 128, 0.98}, Cell{2, 2, 64, 128, 128, 0.97},
                        Cell{2, 4, 32, 128, 128, 0.97}, Cell{2, 16, 8, 128, 128, 0.96},
                        Cell{4, 8, 8, 128, 128, 0.96}, Cell{8, 2, 16, 128, 128, 0.96}}) {
    SCOPED_TRACE(testing::Message() << c.batch << " x " << c.heads << " x " << c.tiles_q);
    Problem p = problem(c.batch, c.heads, c.tiles_q, true);
    p.seqlen_k = std::min(c.tiles_q * c.keys_per_row_block, 16384 / c.batch);
    p.head_dim = c.heads == 32 ? 64 : 128;
    double all = 0, most = 0;
    for (const auto& share : shares(p, c.tiles_q, 132)) {
      double sum = 0;
      for (const Schedule::RowBlock& r : share) {
        // A row block takes about the time of a tile to begin and end.
        sum += ((r.tile + 1) * c.keys_per_row_block + c.tile_k - 1) / c.tile_k + 1;
      }
      all += sum;
      most = std::max(most, sum);
    }
    EXPECT_GE(all / 132 / most, c.least);
  }
}

// With a causal mask a long row block is followed by the short one of the same head, and the heads
// at work at the same time are few.
TEST(Schedule, PairsAndSections) {
  Problem p = problem(2, 64, 10, true);
  p.seqlen_k = 4096;  // K and V of a head are a megabyte, and 32 of them make a section
  p.head_dim = 64;
  const auto all = shares(p, 10, 64);
  for (int block = 0; block < 64; ++block) {
    for (int pair = 0; pair < 10; ++pair) {
      const Schedule::RowBlock longer = all[block][2 * pair], shorter = all[block][2 * pair + 1];
      EXPECT_EQ(longer.bh, shorter.bh);
      EXPECT_EQ(longer.tile + shorter.tile, 9);
      EXPECT_GE(longer.tile, 5);
    }
  }
  for (int pair = 0; pair < 10; ++pair) {
    std::map<int, int> heads;
    for (int block = 0; block < 64; ++block) ++heads[all[block][2 * pair].bh];
    // A section of 32 heads has 160 pairs: two rounds and a half.
    EXPECT_EQ(heads.size(), pair % 5 == 2 ? 64u : 32u) << pair;
  }
}

// Heads that share K and V count once.
TEST(Schedule, SectionsOfGroupedHeads) {
  Problem p = problem(1, 64, 10, true);
  p.kv_heads = 16;
  p.seqlen_k = 16384;
  p.head_dim = 64;  // 4 MB: 8 KV heads, which 32 heads read
  EXPECT_EQ(schedule_of(p, 10, 64).section.value, 32u);
  p.kv_heads = 64;
  EXPECT_EQ(schedule_of(p, 10, 64).section.value, 8u);
  p.heads = p.kv_heads = 37;  // a prime number
  EXPECT_EQ(schedule_of(p, 10, 37).section.value, 1u);
  p.seqlen_k = 0;
  EXPECT_EQ(schedule_of(p, 10, 37).section.value, 37u);
}

// The last places of the last round have indices, too.
TEST(Schedule, RefusesMoreRowBlocksThanIndices) {
  const int64_t most = (int64_t{1} << 31) - 1;
  const int blocks = 132;
  const int fit = int((most - 2 * blocks) / 8);
  for (const bool causal : {false, true}) {
    Problem p = problem(1, fit, 8, causal);
    const Schedule schedule = schedule_of(p, 8, blocks);
    const int rounds = int((int64_t{fit} * 8 + blocks - 1) / blocks);
    int64_t last = 0;  // row blocks of the last rounds
    for (int block = 0; block < blocks; ++block) {
      for (int round = rounds - 3; round <= rounds; ++round) {
        const Schedule::RowBlock r = schedule(block, round);
        ASSERT_TRUE(r.bh >= -1 && r.bh < fit && r.tile >= -1 && r.tile < 8)
            << r.bh << " " << r.tile;
        last += r.bh >= 0;
      }
      EXPECT_EQ(schedule(block, rounds).bh, -1);
    }
    EXPECT_EQ(last, int64_t{fit} * 8 - int64_t{rounds - 3} * blocks);
    p.heads = p.kv_heads = fit + 1;
    EXPECT_THROW(schedule_of(p, 8, blocks), DeviceError);
  }
}

}  // namespace
}  // namespace flashsteps
