// Bounds from datasheets: the figures are consistent with themselves, each part of a bound is what
// arithmetic says, and a card that lacks an instruction gets none.
#include "common/stage/bound.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <stdexcept>
#include <string>

#include "common/attention/layout.h"

namespace flashsteps {
namespace {

Problem problem(DType dtype = DType::fp16) {
  Problem p;
  p.batch = 2;
  p.heads = 4;
  p.kv_heads = 2;
  p.seqlen_q = 100;
  p.seqlen_k = 300;
  p.head_dim = 64;
  p.dtype = dtype;
  p.scale = 0.125f;
  set_packed_strides(p);
  return p;
}

// What the bound asks of a stage is its pass.
const Stage kForward{};
const Stage kBackward = [] {
  Stage stage{};
  stage.backward = [](const Problem&, const GradientStrides&, const BackwardArgs&, Stream) {};
  return stage;
}();

// Round figures, so that what follows is easy to see.
Card round_card() {
  Card card = find_card("H200");
  card.multiprocessors = 100;
  card.clock_ghz = 1;
  card.memory_gb_per_s = 1000;
  card.tensor_tflops = 100;
  card.fp32_tflops = 10;
  return card;
}

TEST(Cards, AreFoundByNameInAnyCase) {
  for (const Card& card : cards()) EXPECT_EQ(&find_card(card.name), &card);
  EXPECT_STREQ(find_card("rtx4090").name, "RTX4090");
  EXPECT_STREQ(find_card("h200").name, "H200");
  for (const char* wrong : {"", "H20", "H2000", "RTX 4090"}) {
    try {
      find_card(wrong);
      ADD_FAILURE() << wrong << " was accepted";
    } catch (const std::invalid_argument& error) {
      EXPECT_EQ(error.what(),
                "'" + std::string(wrong) + "'; allowed: H200, H100, A100, RTX4090, T4");
    }
  }
}

// Cards are told apart by what the driver calls them, too.
TEST(Cards, HaveTheDriversNames) {
  std::set<std::string> names;
  for (const Card& card : cards()) EXPECT_TRUE(names.insert(card.device_name).second) << card.name;
  EXPECT_STREQ(find_card("H200").device_name, "NVIDIA H200");  // as docs/results has it
}

// Peaks follow from SMs, clock and what an SM does in a cycle (the architectures' whitepapers): a
// mistyped figure shows here.
TEST(Cards, FiguresAgreeWithEachOther) {
  for (const Card& card : cards()) {
    SCOPED_TRACE(card.name);
    const double cycles = card.multiprocessors * card.clock_ghz * 1e9;
    const int fp32_lanes = card.capability >= 86 ? 128 : 64;
    EXPECT_NEAR(card.fp32_tflops, 2e-12 * fp32_lanes * cycles, 0.01 * card.fp32_tflops);
    const int mma_flops = card.capability == 90   ? 4096
                          : card.capability == 80 ? 2048
                          : card.capability == 89 ? 512
                                                  : 1024;
    // Hopper's tensor figure is quoted at 1.83 GHz, its fp32 figure at 1.98.
    const double clock = card.capability == 90 ? 1.83 / card.clock_ghz : 1;
    EXPECT_NEAR(card.tensor_tflops, 1e-12 * mma_flops * cycles * clock, 0.01 * card.tensor_tflops);
    EXPECT_DOUBLE_EQ(card.special_per_s(), 16 * cycles);
    EXPECT_GT(card.memory_gb_per_s, 100);
    EXPECT_LT(card.memory_gb_per_s, 10000);
  }
}

TEST(Bound, EachPartIsWhatArithmeticSays) {
  const Problem p = problem();
  const int64_t q = 2 * 4 * 100 * 64 * 2, kv = 2 * 2 * 300 * 64 * 2, l = 2 * 4 * 100 * 4;
  Ledger ledger;
  ledger.global_read = {{"Q", q}, {"K", 7 * kv}, {"V", 7 * kv}, {"S", 1'000'000}};
  ledger.global_written = {{"O", q}, {"L", l}, {"S", 2'000'000}};
  ledger.atomic_bytes = 500;
  ledger.mma_flops = 200'000'000;
  ledger.exp = 3'000'000;
  ledger.div = 200'000;
  ledger.grid_blocks = 1000;
  const TimeBound bound = time_bound(round_card(), kForward, p, ledger);
  EXPECT_EQ(bound.multiprocessors, 100);
  // Q, K, V, O and L once, at 1e6 bytes a microsecond; S may stay in a cache.
  EXPECT_DOUBLE_EQ(bound.memory_us, double(2 * q + 2 * kv + l) / 1e6);
  EXPECT_DOUBLE_EQ(bound.requested_us, double(2 * q + 14 * kv + l + 3'000'000 + 1000) / 1e6);
  EXPECT_DOUBLE_EQ(bound.mma_us, 2);  // 1e8 FLOPs a microsecond
  EXPECT_EQ(bound.fma_us, 0);
  EXPECT_DOUBLE_EQ(bound.exp_us, 2);  // 1.6e6 a microsecond
  ledger.mma_flops += 1'000'000;
  EXPECT_DOUBLE_EQ(time_bound(round_card(), kForward, p, ledger).bound_us(), 2.01);
  EXPECT_STREQ(time_bound(round_card(), kForward, p, ledger).bound_by(), "MMA");
  ledger.exp += 100'000;
  EXPECT_STREQ(time_bound(round_card(), kForward, p, ledger).bound_by(), "exp");
  ledger.mma_flops = 0;
  ledger.exp = ledger.div = 0;
  // The mathematics' FLOPs, 4 B H d Nq Nk, at 1e7 a microsecond.
  EXPECT_DOUBLE_EQ(time_bound(round_card(), kForward, p, ledger).fma_us,
                   4. * 2 * 4 * 64 * 100 * 300 / 1e7);
  EXPECT_STREQ(time_bound(round_card(), kForward, p, ledger).bound_by(), "FMA");
  Card slow_memory = round_card();
  slow_memory.memory_gb_per_s = 1;
  EXPECT_STREQ(time_bound(slow_memory, kForward, p, ledger).bound_by(), "memory");
  // What was not asked for is not charged.
  ledger.global_read["Q"] = 12;
  EXPECT_DOUBLE_EQ(time_bound(round_card(), kForward, p, ledger).memory_us,
                   double(12 + q + 2 * kv + l) / 1e6);
}

// The backward pass reads six tensors and writes three; what lies between its kernels (D, dQ_acc)
// need not cross. Without MMA its products are 2.5 times those of the forward pass.
TEST(Bound, OfTheBackwardPass) {
  const Problem p = problem();
  const int64_t q = 2 * 4 * 100 * 64 * 2, kv = 2 * 2 * 300 * 64 * 2, l = 2 * 4 * 100 * 4;
  Ledger ledger;
  ledger.global_read = {{"Q", 3 * q},  {"K", kv},    {"V", kv},         {"O", q},
                        {"dO", 4 * q}, {"L", 3 * l}, {"dQ_acc", 2 * q}, {"D", l}};
  ledger.global_written = {{"dQ", q}, {"dK", kv}, {"dV", kv}, {"D", l}, {"dQ_acc", 2 * q}};
  ledger.grid_blocks = 1000;
  const TimeBound bound = time_bound(round_card(), kBackward, p, ledger);
  EXPECT_DOUBLE_EQ(bound.memory_us, double(4 * q + 4 * kv + l) / 1e6);
  EXPECT_DOUBLE_EQ(bound.fma_us, 2.5 * 4. * 2 * 4 * 64 * 100 * 300 / 1e7);
}

TEST(Bound, FewBlocksLeaveMostOfTheCardIdle) {
  Ledger ledger;
  ledger.mma_flops = 100'000'000;
  ledger.exp = 1'600'000;
  ledger.global_read = {{"Q", 1000}};
  ledger.grid_blocks = 100;
  const TimeBound full = time_bound(round_card(), kForward, problem(), ledger);
  ledger.grid_blocks = 8;
  const TimeBound few = time_bound(round_card(), kForward, problem(), ledger);
  EXPECT_EQ(few.multiprocessors, 8);
  EXPECT_DOUBLE_EQ(few.mma_us, full.mma_us * 100 / 8);
  EXPECT_DOUBLE_EQ(few.exp_us, full.exp_us * 100 / 8);
  EXPECT_DOUBLE_EQ(few.memory_us, full.memory_us);
}

// The bound of a problem with more heads, from the ledger of one with fewer, is that of a ledger in
// which all grew.
TEST(Bound, OfMoreHeads) {
  Ledger ledger;
  ledger.global_read = {{"Q", 100'000}, {"K", 700'000}};
  ledger.global_written = {{"O", 300'000}};
  ledger.atomic_bytes = 500;
  ledger.mma_flops = 2'000'000;
  ledger.exp = 300'000;
  ledger.div = 2000;
  ledger.grid_blocks = 16;
  Problem larger = problem();
  larger.batch = 3;
  larger.heads = 12;
  larger.kv_heads = 6;  // two query heads to each, as before; 36 heads for 8: 4.5 times as many
  set_packed_strides(larger);
  Ledger grown;
  grown.global_read = {{"Q", 450'000}, {"K", 3'150'000}};
  grown.global_written = {{"O", 1'350'000}};
  grown.atomic_bytes = 2250;
  grown.mma_flops = 9'000'000;
  grown.exp = 1'350'000;
  grown.div = 9000;
  grown.grid_blocks = 72;
  const auto expect_equal = [&] {
    const TimeBound want = time_bound(round_card(), kForward, larger, grown);
    const TimeBound got =
        time_bound_of_more_heads(round_card(), kForward, problem(), ledger, larger);
    EXPECT_EQ(got.multiprocessors, want.multiprocessors);
    EXPECT_DOUBLE_EQ(got.memory_us, want.memory_us);
    EXPECT_DOUBLE_EQ(got.mma_us, want.mma_us);
    EXPECT_DOUBLE_EQ(got.fma_us, want.fma_us);
    EXPECT_DOUBLE_EQ(got.exp_us, want.exp_us);
    EXPECT_DOUBLE_EQ(got.requested_us, want.requested_us);
  };
  expect_equal();
  ledger.mma_flops = grown.mma_flops = 0;  // then the mathematics' FLOPs, of the larger problem
  expect_equal();
  const auto refused = [&](auto&& change) {
    Problem other = larger;
    change(other);
    EXPECT_THROW(time_bound_of_more_heads(round_card(), kForward, problem(), ledger, other),
                 std::invalid_argument);
  };
  refused([](Problem& p) { ++p.seqlen_q; });
  refused([](Problem& p) { ++p.seqlen_k; });
  refused([](Problem& p) { p.head_dim = 72; });
  refused([](Problem& p) { p.dtype = DType::bf16; });
  refused([](Problem& p) { p.causal = true; });
  refused([](Problem& p) { p.kv_heads = 3; });
}

TEST(Bound, OfNothingIsZero) {
  const TimeBound bound = time_bound(round_card(), kForward, problem(), Ledger{});
  EXPECT_EQ(bound.bound_us(), 0);
  EXPECT_STREQ(bound.bound_by(), "nothing");
  EXPECT_FALSE(std::isnan(bound.mma_us));
  EXPECT_EQ(bound.multiprocessors, 0);
}

TEST(Bound, NoneWhereTheCardLacksAnInstruction) {
  const Card& t4 = find_card("T4");
  Ledger fma;
  EXPECT_FALSE(why_no_bound(t4, problem(), fma));
  EXPECT_NE(why_no_bound(t4, problem(DType::bf16), fma)
                .value_or("")
                .find("bf16 needs compute capability 8.0, it has 7.5"),
            std::string::npos);
  Ledger mma;
  mma.mma = 1;
  EXPECT_NE(why_no_bound(t4, problem(), mma).value_or("").find("mma.m16n8k16"), std::string::npos);
  mma.cp_async = 1;
  EXPECT_NE(why_no_bound(t4, problem(), mma).value_or("").find("cp.async"), std::string::npos);
  for (const char* name : {"H200", "H100", "A100", "RTX4090"})
    EXPECT_FALSE(why_no_bound(find_card(name), problem(DType::bf16), mma)) << name;
}

}  // namespace
}  // namespace flashsteps
