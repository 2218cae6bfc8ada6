// The oracle of the backward pass is right: it is the derivative of the forward pass, by central
// differences. And the comparison with it catches what is wrong.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "common/attention/layout.h"
#include "common/attention/work.h"
#include "common/reference/compare.h"
#include "common/reference/float16.h"
#include "common/reference/gradients.h"
#include "common/reference/inputs.h"

namespace flashsteps {
namespace {

Problem problem(int heads, int kv_heads, int seqlen_q, int seqlen_k, int head_dim,
                bool causal = false, DType dtype = DType::fp16) {
  Problem p;
  p.heads = heads;
  p.kv_heads = kv_heads;
  p.seqlen_q = seqlen_q;
  p.seqlen_k = seqlen_k;
  p.head_dim = head_dim;
  p.causal = causal;
  p.dtype = dtype;
  p.scale = default_scale(head_dim);
  set_packed_strides(p);
  return p;
}

// The exact gradients, from exact O and L.
GradientOracles exact_gradients(const Problem& p, const GradientStrides& strides,
                                const Inputs& inputs, const std::vector<uint16_t>& d_o,
                                const Variation& variation = {}) {
  const RowStatistics statistics =
      row_statistics(p, strides, d_o, make_oracle(p, inputs, all_rows(p), variation));
  return make_gradient_oracles(p, strides, inputs, d_o, statistics, all_gradient_rows(p),
                               variation);
}

// --- the derivative
// ------------------------------------------------------------------------------------

// The loss is the sum of dO o O: every element of O has a weight of its own.
double loss(const Problem& p, const Inputs& inputs, const std::vector<uint16_t>& d_o,
            const Variation& variation) {
  const Oracle oracle = make_oracle(p, inputs, all_rows(p), variation);
  double sum = 0;
  for (size_t e = 0; e < d_o.size(); ++e) sum += from_bits(d_o[e], p.dtype) * oracle.O[e];
  return sum;
}

// Moves every value to a grid of 2^-5 within (-1, 1), so that steps of 2^-8 are exact in fp16.
void to_grid(std::vector<uint16_t>& bits) {
  for (uint16_t& x : bits) {
    const double value = std::clamp(from_bits(x, DType::fp16), -0.9, 0.9);
    x = to_bits(std::nearbyint(value * 32) / 32, DType::fp16);
  }
}

// Differences over h and 2 h, so that what is left of the error is of order h^4.
std::vector<double> differences(const Problem& p, Inputs inputs, const std::vector<uint16_t>& d_o,
                                std::vector<uint16_t> Inputs::*tensor,
                                const Variation& variation = {}) {
  std::vector<double> result;
  for (uint16_t& x : inputs.*tensor) {
    const uint16_t before = x;
    const auto difference = [&](double h) {
      double side[2];
      for (int s = 0; s < 2; ++s) {
        const double moved = from_bits(before, p.dtype) + (s == 0 ? h : -h);
        x = to_bits(moved, p.dtype);
        EXPECT_EQ(from_bits(x, p.dtype), moved);
        side[s] = loss(p, inputs, d_o, variation);
      }
      x = before;
      return (side[0] - side[1]) / (2 * h);
    };
    result.push_back((4 * difference(0x1p-8) - difference(0x1p-7)) / 3);
  }
  return result;
}

void expect_close(const char* name, const std::vector<double>& got,
                  const std::vector<double>& want) {
  ASSERT_EQ(got.size(), want.size()) << name;
  double most = 0;
  for (size_t e = 0; e < got.size(); ++e) {
    EXPECT_NEAR(got[e], want[e], 1e-8) << name << " element " << e;
    most = std::max(most, std::fabs(want[e]));
  }
  EXPECT_GT(most, 1e-3) << name << " is nothing but zeros";
}

TEST(GradientOracle, IsTheDerivativeOfTheForwardPass) {
  struct Shape {
    int batch, heads, kv_heads, seqlen_q, seqlen_k;
    bool causal;
    float scale;
  };
  for (const Shape& s : {Shape{1, 2, 1, 3, 4, false, 0.35f}, Shape{1, 2, 2, 4, 3, true, 0.35f},
                         Shape{2, 1, 1, 3, 5, true, -1.5f}, Shape{1, 4, 2, 2, 6, true, 2.f}}) {
    SCOPED_TRACE(testing::Message() << "Nq " << s.seqlen_q << " Nk " << s.seqlen_k);
    Problem p = problem(s.heads, s.kv_heads, s.seqlen_q, s.seqlen_k, 8, s.causal);
    p.batch = s.batch;
    p.scale = s.scale;
    set_packed_strides(p);
    const GradientStrides strides = strides_of_tensors(p);
    Inputs inputs = make_inputs(p, InputKind::normal, 3);
    for (auto* tensor : {&inputs.q, &inputs.k, &inputs.v}) to_grid(*tensor);
    const std::vector<uint16_t> d_o = make_d_o(p, strides, 3);
    const GradientOracles oracles = exact_gradients(p, strides, inputs, d_o);
    expect_close("dQ", oracles.dq.values, differences(p, inputs, d_o, &Inputs::q));
    expect_close("dK", oracles.dk.values, differences(p, inputs, d_o, &Inputs::k));
    expect_close("dV", oracles.dv.values, differences(p, inputs, d_o, &Inputs::v));
  }
}

// What labs vary, each alone and all of it together: the derivative of the varied forward pass.
TEST(GradientOracle, OfVariationsIsTheirDerivative) {
  const Variation variations[] = {
      {.window = 2}, {.softcap = 0.7f}, {.distance = .25f}, {.sink = true}, {3, 2.f, .25f, true}};
  for (const Variation& variation : variations) {
    for (const bool causal : {false, true}) {
      SCOPED_TRACE(testing::Message() << "window " << variation.window << " softcap "
                                      << variation.softcap << " distance " << variation.distance
                                      << " sink " << variation.sink << " causal " << causal);
      Problem p = problem(2, 1, 4, 5, 8, causal);
      p.scale = 0.8f;
      const GradientStrides strides = strides_of_tensors(p);
      Inputs inputs = make_inputs(p, InputKind::normal, 4);
      for (auto* tensor : {&inputs.q, &inputs.k, &inputs.v}) to_grid(*tensor);
      const std::vector<uint16_t> d_o = make_d_o(p, strides, 4);
      const GradientOracles oracles = exact_gradients(p, strides, inputs, d_o, variation);
      expect_close("dQ", oracles.dq.values, differences(p, inputs, d_o, &Inputs::q, variation));
      expect_close("dK", oracles.dk.values, differences(p, inputs, d_o, &Inputs::k, variation));
      expect_close("dV", oracles.dv.values, differences(p, inputs, d_o, &Inputs::v, variation));
      // The varied O and L, rounded, are what a backward pass is given.
      const Outputs given = reference_outputs(p, inputs, variation);
      const Oracle forward = make_oracle(p, inputs, all_rows(p), variation);
      for (size_t e = 0; e < given.o.size(); ++e)
        ASSERT_NEAR(from_bits(given.o[e], p.dtype), forward.O[e], 1e-3);
    }
  }
}

// With O and L as a stage gives them, rounded, the gradients are the exact ones but for that.
TEST(GradientOracle, TakesOAndLAsGiven) {
  const Problem p = problem(4, 2, 70, 90, 16, true, DType::bf16);
  const GradientStrides strides = strides_of_tensors(p);
  const Inputs inputs = make_inputs(p, InputKind::normal, 2);
  BackwardInputs backward{.d_o = make_d_o(p, strides, 2), .forward = reference_outputs(p, inputs)};
  const GradientOracles exact = exact_gradients(p, strides, inputs, backward.d_o);
  const auto given = [&] {
    return make_gradient_oracles(p, strides, inputs, backward.d_o,
                                 row_statistics(p, strides, backward), all_gradient_rows(p));
  };
  const GradientOracles rounded = given();
  double most = 0;
  for (size_t e = 0; e < exact.dq.values.size(); ++e) {
    ASSERT_NEAR(rounded.dq.values[e], exact.dq.values[e], 0.02);
    most = std::max(most, std::fabs(rounded.dq.values[e] - exact.dq.values[e]));
  }
  EXPECT_GT(most, 1e-5);  // O was rounded to 8 bits
  for (size_t e = 0; e < exact.dv.values.size(); ++e)
    ASSERT_NEAR(rounded.dv.values[e], exact.dv.values[e], 1e-5);  // dV takes L alone

  // L larger by ln 2: half of P, and so half of dV.
  for (float& l : backward.forward.l) l += std::log(2.f);
  const GradientOracles half = given();
  for (size_t e = 0; e < exact.dv.values.size(); ++e)
    ASSERT_NEAR(2 * half.dv.values[e], exact.dv.values[e], 1e-5);
}

TEST(GradientOracle, RowsThatSeeNoKey) {  // P07, P10
  const Problem p = problem(2, 1, 5, 2, 8, true);
  const GradientStrides strides = strides_of_tensors(p);
  const Inputs inputs = make_inputs(p, InputKind::normal, 1);
  std::vector<uint16_t> d_o = make_d_o(p, strides, 1);
  const GradientOracles before = exact_gradients(p, strides, inputs, d_o);
  for (int h = 0; h < 2; ++h) {
    for (int e = 0; e < 3 * 8; ++e) {
      EXPECT_EQ(before.dq.values[h * 40 + e], 0);
      d_o[h * 40 + e] = to_bits(1000, p.dtype);
    }
  }
  const GradientOracles after = exact_gradients(p, strides, inputs, d_o);
  EXPECT_EQ(after.dk.values, before.dk.values);
  EXPECT_EQ(after.dv.values, before.dv.values);
}

TEST(GradientOracle, NoKeysAndNoQueries) {  // P14
  for (const auto& [seqlen_q, seqlen_k] : {std::pair{0, 3}, {3, 0}, {0, 0}}) {
    const Problem p = problem(2, 2, seqlen_q, seqlen_k, 8);
    const GradientStrides strides = strides_of_tensors(p);
    const Inputs inputs = make_inputs(p, InputKind::normal, 1);
    const GradientOracles oracles = exact_gradients(p, strides, inputs, make_d_o(p, strides, 1));
    EXPECT_EQ(oracles.dq.values, std::vector<double>(size_t(2 * seqlen_q * 8), 0.0));
    EXPECT_EQ(oracles.dk.values, std::vector<double>(size_t(2 * seqlen_k * 8), 0.0));
    EXPECT_EQ(oracles.dv.values, std::vector<double>(size_t(2 * seqlen_k * 8), 0.0));
  }
}

TEST(GradientOracle, GroupsAreSums) {  // P24
  const Problem grouped = problem(6, 2, 9, 7, 8), plain = problem(6, 6, 9, 7, 8);
  const Inputs inputs = make_inputs(grouped, InputKind::normal, 5);
  Inputs repeated = inputs;
  repeated.k.clear();
  repeated.v.clear();
  for (int h = 0; h < 6; ++h) {
    const int begin = h / 3 * 56;
    repeated.k.insert(repeated.k.end(), inputs.k.begin() + begin, inputs.k.begin() + begin + 56);
    repeated.v.insert(repeated.v.end(), inputs.v.begin() + begin, inputs.v.begin() + begin + 56);
  }
  const std::vector<uint16_t> d_o = make_d_o(grouped, strides_of_tensors(grouped), 5);
  const GradientOracles sums = exact_gradients(grouped, strides_of_tensors(grouped), inputs, d_o);
  const GradientOracles parts = exact_gradients(plain, strides_of_tensors(plain), repeated, d_o);
  for (int e = 0; e < 2 * 56; ++e) {
    double dk = 0, dv = 0;
    for (int h = 0; h < 3; ++h) {
      dk += parts.dk.values[(e / 56 * 3 + h) * 56 + e % 56];
      dv += parts.dv.values[(e / 56 * 3 + h) * 56 + e % 56];
    }
    EXPECT_NEAR(sums.dk.values[e], dk, 1e-12);
    EXPECT_NEAR(sums.dv.values[e], dv, 1e-12);
  }
}

// Long sequences are taken in parts, and rows may be selected: both give what the whole gives.
TEST(GradientOracle, SelectedRowsAreThoseOfTheWhole) {
  const Problem p = problem(2, 1, 1100, 700, 8, true);
  const GradientStrides strides = strides_of_tensors(p);
  const Inputs inputs = make_inputs(p, InputKind::normal, 8);
  const BackwardInputs backward{.d_o = make_d_o(p, strides, 8),
                                .forward = reference_outputs(p, inputs)};
  const RowStatistics statistics = row_statistics(p, strides, backward);
  const GradientOracles whole =
      make_gradient_oracles(p, strides, inputs, backward.d_o, statistics, all_gradient_rows(p));
  const GradientRows rows = {sampled_rows(1100, 130, 4), sampled_rows(700, 66, 5)};
  const GradientOracles some =
      make_gradient_oracles(p, strides, inputs, backward.d_o, statistics, rows);
  ASSERT_EQ(some.dq.blocks.size(), 2u * 3);
  ASSERT_EQ(some.dk.blocks.size(), 2u);
  for (int h = 0; h < 2; ++h) {
    for (int r = 0; r < 130; ++r) {
      for (int c = 0; c < 8; ++c) {
        EXPECT_NEAR(some.dq.values[(h * 130 + r) * 8 + c],
                    whole.dq.values[(h * 1100 + rows.query[r]) * 8 + c], 1e-12);
      }
    }
  }
  for (int r = 0; r < 66; ++r) {
    for (int c = 0; c < 8; ++c) {
      EXPECT_NEAR(some.dk.values[r * 8 + c], whole.dk.values[rows.key[r] * 8 + c], 1e-12);
      EXPECT_NEAR(some.dv.values[r * 8 + c], whole.dv.values[rows.key[r] * 8 + c], 1e-12);
    }
  }
}

// P and dS are rounded to 16 bits, and so are the gradients; nothing else is.
TEST(GradientOracle, Ref16HasTheThreeRoundingsAndNoOther) {
  // K = 0, two keys: P = 1/2 exactly. dO = 1 and V = 0 and v: dP = 0 and 8 v, D = 4 v, dS = -+ 2 v.
  for (const DType dtype : {DType::fp16, DType::bf16}) {
    const Problem p = problem(1, 1, 1, 2, 8, false, dtype);
    const double v = 1 + 0x1p-7;
    Inputs inputs{std::vector<uint16_t>(8, to_bits(1.5, dtype)), std::vector<uint16_t>(16, 0),
                  std::vector<uint16_t>(16, 0)};
    std::fill(inputs.v.begin() + 8, inputs.v.end(), to_bits(v, dtype));
    Problem unit = p;
    unit.scale = 1;
    const GradientStrides strides = strides_of_tensors(unit);
    const GradientOracles oracles =
        exact_gradients(unit, strides, inputs, std::vector<uint16_t>(8, to_bits(1, dtype)));
    EXPECT_EQ(oracles.dv.values, std::vector<double>(16, 0.5));
    EXPECT_EQ(oracles.dv.blocks[0].ref16_error, 0);
    EXPECT_EQ(oracles.dk.values[8], 3 * v);  // dS Q = 2 v * 1.5, which bf16 does not hold
    EXPECT_EQ(oracles.dk.blocks[0].max, 3 * v);
    EXPECT_EQ(oracles.dk.blocks[0].ref16_error, std::fabs(round_to(3 * v, dtype) - 3 * v));
    EXPECT_EQ(oracles.dk.blocks[0].ref16_error > 0, dtype == DType::bf16);
  }
  // Three keys: P = 1/3 is rounded before P^T dO.
  const Problem p = problem(1, 1, 1, 3, 8);
  Inputs inputs{std::vector<uint16_t>(8, 0), std::vector<uint16_t>(24, to_bits(1, p.dtype)),
                std::vector<uint16_t>(24, to_bits(1, p.dtype))};
  const GradientStrides strides = strides_of_tensors(p);
  const GradientOracles oracles =
      exact_gradients(p, strides, inputs, std::vector<uint16_t>(8, to_bits(1, p.dtype)));
  EXPECT_NEAR(oracles.dv.blocks[0].ref16_error, std::fabs(round_to(1.0 / 3, p.dtype) - 1.0 / 3),
              1e-15);
}

// With one key P is 1 and dP = D: the gradient is 0, and a kernel may be off by what fp32 sums of
// dO o V and dO o O may differ, and by no more.
TEST(GradientOracle, KnowsWhatFp32Costs) {
  const Problem p = problem(1, 1, 1, 1, 64);
  const GradientStrides strides = strides_of_tensors(p);
  const Inputs inputs = make_inputs(p, InputKind::normal, 2);
  const std::vector<uint16_t> d_o = make_d_o(p, strides, 2);
  const GradientOracles oracles = exact_gradients(p, strides, inputs, d_o);
  const auto norm = [&](const std::vector<uint16_t>& bits) {
    double sum = 0;
    for (const uint16_t x : bits) sum += from_bits(x, p.dtype) * from_bits(x, p.dtype);
    return std::sqrt(sum);
  };
  const auto largest = [&](const std::vector<uint16_t>& bits) {
    double most = 0;
    for (const uint16_t x : bits) most = std::max(most, std::fabs(from_bits(x, p.dtype)));
    return most;
  };
  const double of_ds = 0x1p-20 * norm(d_o) * 2 * norm(inputs.v);
  EXPECT_NEAR(oracles.dq.blocks[0].fp32_error, p.scale * of_ds * largest(inputs.k), 1e-12);
  EXPECT_NEAR(oracles.dk.blocks[0].fp32_error, p.scale * of_ds * largest(inputs.q), 1e-12);
  EXPECT_EQ(oracles.dv.blocks[0].fp32_error, 0);
  EXPECT_LT(oracles.dq.blocks[0].fp32_error, 1e-3);
  EXPECT_LT(oracles.dq.blocks[0].max, 1e-12);
}

TEST(GradientOracle, RefusesWrongSizesAndRows) {
  const Problem p = problem(1, 1, 4, 5, 8);
  const GradientStrides strides = strides_of_tensors(p);
  const Inputs inputs = make_inputs(p, InputKind::normal, 1);
  BackwardInputs backward{.d_o = make_d_o(p, strides, 1), .forward = reference_outputs(p, inputs)};
  const RowStatistics statistics = row_statistics(p, strides, backward);
  const auto make = [&](const GradientRows& rows) {
    return make_gradient_oracles(p, strides, inputs, backward.d_o, statistics, rows);
  };
  EXPECT_NO_THROW(make({{0, 3}, {0, 4}}));
  EXPECT_THROW(make({{0, 4}, {}}), std::invalid_argument);
  EXPECT_THROW(make({{}, {0, 5}}), std::invalid_argument);
  EXPECT_THROW(make({{1, 1}, {}}), std::invalid_argument);
  backward.d_o.pop_back();
  EXPECT_THROW(make({}), std::invalid_argument);
  EXPECT_THROW(row_statistics(p, strides, backward), std::invalid_argument);
  backward.d_o.push_back(0);
  backward.forward.l.pop_back();
  EXPECT_THROW(row_statistics(p, strides, backward), std::invalid_argument);
  GradientStrides overlapping = strides;
  overlapping.d_k.row = 0;
  EXPECT_THROW(make_d_o(p, overlapping, 1), std::invalid_argument);
}

TEST(GradientRows, AllWhereThatIsCheapAndNeverFewerThan64) {
  const Problem cheap = problem(2, 2, 300, 500, 64);
  EXPECT_EQ(affordable_gradient_rows(cheap, 1).query, all_gradient_rows(cheap).query);
  EXPECT_EQ(affordable_gradient_rows(cheap, 1).key, all_gradient_rows(cheap).key);
  EXPECT_EQ(all_gradient_rows(cheap).key.size(), 500u);
  Problem dear = problem(16, 4, 16384, 8192, 128);
  for (const int batch : {1, 16, 1024}) {
    dear.batch = batch;
    set_packed_strides(dear);
    const GradientRows rows = affordable_gradient_rows(dear, 1);
    for (const auto& [its, seqlen] : {std::pair{rows.query, 16384}, {rows.key, 8192}}) {
      EXPECT_GE(its.size(), 64u);
      EXPECT_EQ(its.size() % 64, 0u);
      EXPECT_LT(its.size(), size_t(seqlen));
      EXPECT_LT(its.back(), seqlen);
    }
  }
  EXPECT_NE(affordable_gradient_rows(dear, 1).query, affordable_gradient_rows(dear, 2).query);
}

TEST(MakeDO, DiffersFromTheInputsAndByHead) {
  Problem p = problem(2, 2, 5, 5, 64);
  const GradientStrides packed = strides_of_tensors(p);
  const Inputs inputs = make_inputs(p, InputKind::normal, 1);
  const std::vector<uint16_t> d_o = make_d_o(p, packed, 1);
  EXPECT_EQ(d_o.size(), size_t(2 * 5 * 64));
  for (const auto* other : {&inputs.q, &inputs.k, &inputs.v}) EXPECT_NE(d_o, *other);
  EXPECT_EQ(std::count_if(d_o.begin(), d_o.end(), [](uint16_t x) { return (x & 0x7fff) == 0; }), 0);
  EXPECT_FALSE(std::equal(d_o.begin(), d_o.begin() + 320, d_o.begin() + 320));
  GradientStrides gaps = packed;
  gaps.d_o = {.batch = 4096, .head = 1024, .row = 128};
  const std::vector<uint16_t> spread = make_d_o(p, gaps, 1);
  EXPECT_EQ(spread[1024 + 128 + 3], d_o[320 + 64 + 3]);
  EXPECT_EQ(spread[64], 0xffff);
}

// --- the comparison
// ------------------------------------------------------------------------------------

struct Fixture {
  Problem p;
  GradientStrides strides;
  GradientOracles oracles;
  Gradients gradients;

  explicit Fixture(const Problem& problem, bool gaps = false) : p(problem) {
    strides = strides_of_tensors(p);
    if (gaps) {
      for (Strides* s : {&strides.d_q, &strides.d_k, &strides.d_v})
        *s = {.batch = 4 * s->batch, .head = 3 * s->head, .row = 2 * s->row};
    }
    const Inputs inputs = make_inputs(p, InputKind::normal, 4);
    const BackwardInputs backward{.d_o = make_d_o(p, strides, 4),
                                  .forward = reference_outputs(p, inputs)};
    oracles = make_gradient_oracles(p, strides, inputs, backward.d_o,
                                    row_statistics(p, strides, backward), all_gradient_rows(p));
    const auto fill = [&](const TensorLayout& t, const GradientOracle& oracle) {
      std::vector<uint16_t> bits(size_t(t.extent()), uint16_t{0xffff});
      for (int64_t e = 0; e < int64_t(oracle.values.size()); ++e) {
        const int64_t row = e / t.head_dim, bh = row / t.seqlen;
        bits[t.offset(int(bh / t.heads), int(bh % t.heads), row % t.seqlen) + e % t.head_dim] =
            to_bits(oracle.values[e], p.dtype);
      }
      return bits;
    };
    gradients = {fill(layout_dq(p, strides), oracles.dq), fill(layout_dk(p, strides), oracles.dk),
                 fill(layout_dv(p, strides), oracles.dv)};
  }
  GradientComparison compared() const { return compare(p, strides, oracles, gradients); }
};

TEST(CompareGradients, PassesTheRoundedOracle) {
  for (const DType dtype : {DType::fp16, DType::bf16}) {
    for (const bool gaps : {false, true}) {
      const GradientComparison c = Fixture(problem(4, 2, 70, 90, 16, true, dtype), gaps).compared();
      EXPECT_TRUE(c.ok()) << c.describe();
      EXPECT_EQ(c.describe(), "");
      EXPECT_EQ(c.dq.rows_checked, 4 * 70);
      EXPECT_EQ(c.dk.rows_checked, 2 * 90);
      EXPECT_GT(c.dv.max_abs_error, 0);
      EXPECT_GT(c.dv.bound, c.dv.max_abs_error);
    }
  }
}

TEST(CompareGradients, NaNAndInfinitiesNeverPass) {  // P48
  const Fixture right(problem(2, 2, 70, 90, 8));
  for (auto tensor : {&Gradients::dq, &Gradients::dk, &Gradients::dv}) {
    for (const uint16_t bad : {0x7e00, 0xffff, 0x7c00, 0xfc00}) {
      Fixture f = right;
      (f.gradients.*tensor)[8 * 75 + 5] = bad;
      EXPECT_FALSE(f.compared().ok());
      EXPECT_NE(f.compared().describe(), "");
    }
  }
  Fixture f = right;
  f.oracles.dk.values[7] = std::numeric_limits<double>::quiet_NaN();
  EXPECT_FALSE(f.compared().ok());
  Fixture g = right;
  g.oracles.dk.blocks[0].ref16_error = std::numeric_limits<double>::infinity();
  EXPECT_FALSE(g.compared().ok()) << "where nothing is known nothing may pass";
}

TEST(CompareGradients, TheBoundIsTheDocumentedOne) {
  const Fixture right(problem(2, 2, 130, 70, 8));
  const int row = 130 + 65;  // head 1, second block
  const GradientOracle::Block& block = right.oracles.dq.blocks[3 + 1];
  const double bound = 2 * block.ref16_error + 2 * ulp(block.max, DType::fp16) + block.fp32_error;
  EXPECT_GT(block.fp32_error, 0);
  const double wanted = right.oracles.dq.values[row * 8 + 2];
  double inside = wanted, outside = wanted;
  for (uint16_t bits = to_bits(wanted, DType::fp16);; ++bits) {
    outside = from_bits(bits, DType::fp16);
    if (std::fabs(outside - wanted) > bound) break;
    inside = outside;
  }
  Fixture f = right;
  f.gradients.dq[row * 8 + 2] = to_bits(inside, DType::fp16);
  EXPECT_TRUE(f.compared().ok());
  EXPECT_DOUBLE_EQ(f.compared().dq.bound, bound);
  f.gradients.dq[row * 8 + 2] = to_bits(outside, DType::fp16);
  const GradientComparison c = f.compared();
  EXPECT_FALSE(c.ok());
  EXPECT_EQ(c.dq.first->head, 1);
  EXPECT_EQ(c.dq.first->row, 65);
  EXPECT_EQ(c.dq.first->column, 2);
  EXPECT_EQ(c.dq.out_of_bounds, 1);
  EXPECT_NE(c.describe().find("dQ[b=0 h=1 i=65 c=2] is "), std::string::npos) << c.describe();
  EXPECT_TRUE(c.dk.ok && c.dv.ok);
}

// dQ without one tile of keys, dK and dV without one tile of queries, each right but for that and
// in one block of rows only.
TEST(CompareGradients, ADroppedTileFails) {
  const Problem p = problem(1, 1, 512, 512, 64, true);
  const GradientStrides strides = strides_of_tensors(p);
  const Inputs inputs = make_inputs(p, InputKind::normal, 4);
  const BackwardInputs backward{.d_o = make_d_o(p, strides, 4),
                                .forward = reference_outputs(p, inputs)};
  const RowStatistics statistics = row_statistics(p, strides, backward);
  const Fixture right(p);
  // Queries 448 to 511 are the last tile of all keys; without them these rows of dK and dV change.
  RowStatistics without = statistics;
  for (int i = 448; i < 512; ++i) without.L[i] = std::numeric_limits<double>::infinity();  // P = 0
  const GradientOracles some =
      make_gradient_oracles(p, strides, inputs, backward.d_o, without, all_gradient_rows(p));
  for (const auto& [gradient, oracle] :
       {std::pair{&Gradients::dk, &GradientOracles::dk}, {&Gradients::dv, &GradientOracles::dv}}) {
    for (const int first : {0, 192}) {  // a block of keys
      Fixture f = right;
      for (int e = first * 64; e < (first + 64) * 64; ++e)
        (f.gradients.*gradient)[e] = to_bits((some.*oracle).values[e], p.dtype);
      EXPECT_FALSE(f.compared().ok()) << "keys from " << first;
    }
  }
  // dQ of the last queries, which see all keys, without keys 0 to 63: what those add is taken off.
  Problem few = p;  // only the first 64 keys, the same weights
  few.causal = false;
  few.seqlen_k = 64;
  Inputs first_keys = inputs;
  first_keys.k.resize(64 * 64);
  first_keys.v.resize(64 * 64);
  set_packed_strides(few);
  const GradientOracles lost = make_gradient_oracles(
      few, strides_of_tensors(few), first_keys, backward.d_o, statistics, all_gradient_rows(few));
  Fixture f = right;
  for (int e = 448 * 64; e < 512 * 64; ++e)
    f.gradients.dq[e] = to_bits(right.oracles.dq.values[e] - lost.dq.values[e], p.dtype);
  EXPECT_FALSE(f.compared().ok());
}

TEST(CompareGradients, WhatIsZeroIsExactlyZero) {
  const Fixture right(problem(1, 1, 5, 2, 8, true));
  EXPECT_TRUE(right.compared().ok());
  Fixture f = right;
  f.gradients.dq[2 * 8] = 1;  // the smallest subnormal, in a row that sees no key
  EXPECT_FALSE(f.compared().ok());
  Fixture none(problem(1, 1, 0, 3, 8));
  EXPECT_TRUE(none.compared().ok());
  none.gradients.dv[4] = 1;
  EXPECT_FALSE(none.compared().ok());
}

TEST(CompareGradients, WritesBetweenRowsFail) {
  const Fixture right(problem(2, 1, 5, 6, 8), true);
  for (auto tensor : {&Gradients::dq, &Gradients::dk, &Gradients::dv}) {
    Fixture f = right;
    (f.gradients.*tensor)[8 + 3] = 0;
    const GradientComparison c = f.compared();
    EXPECT_FALSE(c.ok());
    EXPECT_NE(c.describe().find("1 elements between the rows"), std::string::npos) << c.describe();
  }
}

TEST(CompareGradients, RowsOutsideTheSampleMustBeWritten) {
  const Problem p = problem(2, 1, 200, 150, 8);
  const GradientStrides strides = strides_of_tensors(p);
  const Inputs inputs = make_inputs(p, InputKind::normal, 4);
  const BackwardInputs backward{.d_o = make_d_o(p, strides, 4),
                                .forward = reference_outputs(p, inputs)};
  Fixture f(p);
  f.oracles = make_gradient_oracles(p, strides, inputs, backward.d_o,
                                    row_statistics(p, strides, backward), {{3, 100}, {5, 149}});
  EXPECT_TRUE(f.compared().ok()) << f.compared().describe();
  EXPECT_EQ(f.compared().dq.rows_checked, 4);
  f.gradients.dv[8 * 70] = 0xffff;
  EXPECT_EQ(f.compared().dv.nan_elements, 1);
  EXPECT_FALSE(f.compared().ok());
}

TEST(CompareGradients, RefusesWrongSizes) {
  Fixture f(problem(2, 1, 5, 6, 8));
  f.gradients.dk.pop_back();
  EXPECT_THROW(f.compared(), std::invalid_argument);
  Fixture g(problem(2, 1, 5, 6, 8));
  g.oracles.dk.heads = 2;
  EXPECT_THROW(g.compared(), std::invalid_argument);
}

}  // namespace
}  // namespace flashsteps
