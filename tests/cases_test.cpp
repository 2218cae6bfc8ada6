// Inputs that broke other attention kernels, with the right values worked out by hand, so that an
// error shared by the stages and the oracle would show. The numbers P01 … are those of
// docs/cases.md.
#include <algorithm>
#include <cmath>
#include <limits>

#include "common/reference/float16.h"
#include "stage_suite.h"

namespace flashsteps {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

class Cases : public StageTest {
 protected:
  // All elements of a tensor by a function of (batch, head, row, column), rounded to the problem's
  // type.
  template <typename F>
  static std::vector<uint16_t> fill(const Problem& p, const TensorLayout& layout, F&& f) {
    std::vector<uint16_t> bits(layout.extent(), 0xFFFF);
    for (int b = 0; b < layout.batch; ++b) {
      for (int h = 0; h < layout.heads; ++h) {
        for (int i = 0; i < layout.seqlen; ++i) {
          for (int c = 0; c < layout.head_dim; ++c) {
            bits[layout.offset(b, h, i) + c] = to_bits(f(b, h, i, c), p.dtype);
          }
        }
      }
    }
    return bits;
  }

  void run(const Problem& p, const Inputs& inputs) {
    problem_ = p;
    outputs_ = run_forward(device(), stage(), p, inputs).outputs;
  }

  double o(int b, int h, int i, int c) const {
    return from_bits(outputs_.o[layout_o(problem_).offset(b, h, i) + c], problem_.dtype);
  }
  double lse(int b, int h, int i) const {
    return outputs_.l[(int64_t{b} * problem_.heads + h) * problem_.seqlen_q + i];
  }
  // Every column of a row of O, to the type's rounding.
  void expect_row(int b, int h, int i, double want_o, double want_lse) const {
    const double ulp = problem_.dtype == DType::fp16 ? 0x1p-10 : 0x1p-7;
    for (int c = 0; c < problem_.head_dim; ++c) {
      ASSERT_LE(std::abs(o(b, h, i, c) - want_o), ulp * std::abs(want_o))
          << "row " << i << " column " << c;
    }
    if (std::isinf(want_lse)) {
      ASSERT_EQ(lse(b, h, i), want_lse) << "row " << i;
    } else {
      ASSERT_LE(std::abs(lse(b, h, i) - want_lse), 1e-5 * std::max(1.0, std::abs(want_lse)))
          << "row " << i;
    }
  }

  Problem problem_;
  Outputs outputs_;
};

const auto zero = [](int, int, int, int) { return 0.0; };
const auto row_number = [](int, int, int i, int) { return double(i); };
const auto constant(double x) {
  return [x](int, int, int, int) { return x; };
}

// P01: one key and a huge score. Where the maximum is rounded apart from the scaled score, exp2 of
// the residual is infinite.
TEST_P(Cases, P01HugeEqualLogits) {
  const Problem p = problem_of(1, 1, 1, 1, 1, 64, false, DType::bf16);
  const auto all = [&](const TensorLayout& layout) { return fill(p, layout, constant(133120)); };
  run(p, {all(layout_q(p)), all(layout_k(p)), all(layout_v(p))});
  expect_row(0, 0, 0, 133120, 64.0 * 133120 * 133120 / 8);
}

// P02: every valid score is far below any finite stand-in for minus infinity.
TEST_P(Cases, P02AllScoresVeryNegative) {
  for (const DType dtype : {DType::fp16, DType::bf16}) {
    const Problem p = problem_of(1, 1, 1, 1, 3, 64, false, dtype);
    run(p, {fill(p, layout_q(p), constant(50)), fill(p, layout_k(p), constant(-50)),
            fill(p, layout_v(p), row_number)});
    expect_row(0, 0, 0, 1, -20000 + std::log(3));
  }
}

// P03: raw scores, and sums of P V, beyond the largest fp16.
TEST_P(Cases, P03SumsBeyondHalf) {
  Problem p = problem_of(1, 1, 1, 2, 64, 64);
  run(p, {fill(p, layout_q(p), constant(50)), fill(p, layout_k(p), constant(50)),
          fill(p, layout_v(p), row_number)});
  for (int i = 0; i < 2; ++i) expect_row(0, 0, i, 31.5, 20000 + std::log(64));
  run(p, {fill(p, layout_q(p), zero), fill(p, layout_k(p), constant(1)),
          fill(p, layout_v(p), constant(60000))});
  for (int i = 0; i < 2; ++i) expect_row(0, 0, i, 60000, std::log(64));
}

// P04: a scale of exactly 0 is legal: every visible key weighs the same.
TEST_P(Cases, P04ScaleZero) {
  for (const bool causal : {false, true}) {
    Problem p = problem_of(1, 1, 1, 65, 65, 64, causal);
    p.scale = 0;
    Inputs inputs = make_inputs(p, InputKind::normal, 4);
    inputs.v = fill(p, layout_v(p), row_number);
    run(p, inputs);
    for (int i = 0; i < 65; ++i) {
      const int visible = causal ? i + 1 : 65;
      expect_row(0, 0, i, (visible - 1) / 2.0, std::log(visible));
    }
  }
}

// P05: the default scale comes from the true head_dim, not from the tile's width. The first key's
// score is twice the others', so that its weight tells the scale.
TEST_P(Cases, P05ScaleOfTrueHeadDim) {
  for (const int d : {40, 72, 80, 96}) {
    const Problem p = problem_of(1, 1, 1, 1, 9, d);
    run(p, {fill(p, layout_q(p), constant(1)),
            fill(p, layout_k(p), [&](int, int, int i, int) { return i == 0 ? 0.5 : 0.25; }),
            fill(p, layout_v(p), [](int, int, int i, int) { return i == 0 ? 1.0 : 0.0; })});
    const double first = 0.5 * d / std::sqrt(d), other = 0.25 * d / std::sqrt(d);
    const double sum = std::exp(first - other) + 8;
    expect_row(0, 0, 0, std::exp(first - other) / sum, other + std::log(sum));
  }
}

// P06, P11: L is in natural logarithms, and keys of the padding weigh nothing.
TEST_P(Cases, P11PaddingKeysWeighNothing) {
  for (const int seqlen_k : {1, 8, 63, 65, 127, 129, 257}) {
    const Problem p = problem_of(1, 1, 1, 2, seqlen_k, 64);
    run(p, {fill(p, layout_q(p), zero), fill(p, layout_k(p), constant(1)),
            fill(p, layout_v(p), row_number)});
    for (int i = 0; i < 2; ++i) expect_row(0, 0, i, (seqlen_k - 1) / 2.0, std::log(seqlen_k));
  }
}

// P07, P10: causal with more queries than keys; the first rows see no key at all.
TEST_P(Cases, P10CausalMoreQueriesThanKeys) {
  const Problem p = problem_of(1, 1, 1, 5, 2, 64, true);
  run(p, {fill(p, layout_q(p), zero), fill(p, layout_k(p), constant(1)),
          fill(p, layout_v(p), row_number)});
  for (int i = 0; i < 3; ++i) expect_row(0, 0, i, 0, -kInfinity);
  expect_row(0, 0, 3, 0, 0);
  expect_row(0, 0, 4, 0.5, std::log(2));
}

// P09: causal with fewer queries than keys; the mask is aligned bottom-right.
TEST_P(Cases, P09CausalFewerQueriesThanKeys) {
  const Problem p = problem_of(1, 1, 1, 3, 128, 128, true);
  run(p, {fill(p, layout_q(p), zero), fill(p, layout_k(p), constant(1)),
          fill(p, layout_v(p), row_number)});
  for (int i = 0; i < 3; ++i) expect_row(0, 0, i, 62.5 + 0.5 * i, std::log(126 + i));
}

// P13: all of head_dim counts. Q and K are zero in the first 64 channels, and tell the keys apart
// after.
TEST_P(Cases, P13UpperChannelsCount) {
  const Problem p = problem_of(1, 1, 1, 1, 4, 128);
  run(p, {fill(p, layout_q(p), [](int, int, int, int c) { return c < 64 ? 0.0 : 1.0; }),
          fill(p, layout_k(p), [](int, int, int i, int c) { return c < 64 ? 0.0 : i * 0.25; }),
          fill(p, layout_v(p), [](int, int, int i, int) { return i == 3 ? 1.0 : 0.0; })});
  double sum = 0;
  for (int j = 0; j < 4; ++j) sum += std::exp(64 * 0.25 * j / std::sqrt(128));
  expect_row(0, 0, 0, std::exp(64 * 0.25 * 3 / std::sqrt(128)) / sum, std::log(sum));
}

// P14: no keys.
TEST_P(Cases, P14NoKeys) {
  for (const bool causal : {false, true}) {
    const Problem p = problem_of(2, 2, 2, 5, 0, 64, causal);
    run(p, {fill(p, layout_q(p), constant(1)), {}, {}});
    for (int b = 0; b < 2; ++b) {
      for (int i = 0; i < 5; ++i) expect_row(b, 1, i, 0, -kInfinity);
    }
  }
}

// P15: what lies behind the last key in a larger buffer is NaN, and shared memory holds NaN of an
// earlier problem.
TEST_P(Cases, P15NansBehindTheTail) {
  Problem p = problem_of(1, 2, 2, 70, 128, 64);
  const double nan = std::nan("");
  run(p, {fill(p, layout_q(p), constant(nan)), fill(p, layout_k(p), constant(nan)),
          fill(p, layout_v(p), constant(nan))});
  ASSERT_TRUE(std::isnan(o(0, 0, 0, 0)));

  const Problem larger = p;
  p.seqlen_k = 65;  // the strides stay those of 128 rows
  Inputs inputs;
  inputs.q = fill(larger, layout_q(larger), zero);
  inputs.k = fill(larger, layout_k(larger), [&](int, int, int i, int) { return i < 65 ? 1 : nan; });
  inputs.v = fill(larger, layout_v(larger), [&](int, int, int i, int) { return i < 65 ? i : nan; });
  inputs.k.resize(layout_k(p).extent());
  inputs.v.resize(layout_v(p).extent());
  run(p, inputs);
  for (int h = 0; h < 2; ++h) {
    for (int i = 0; i < 70; ++i) expect_row(0, h, i, 32, std::log(65));
  }
}

// P16: query head h reads KV head h / (heads / kv_heads).
TEST_P(Cases, P16GroupedHeads) {
  const Problem p = problem_of(1, 4, 2, 3, 5, 64);
  run(p, {fill(p, layout_q(p), zero), fill(p, layout_k(p), constant(1)),
          fill(p, layout_v(p), [](int, int h, int, int) { return double(h + 1); })});
  for (int h = 0; h < 4; ++h) {
    for (int i = 0; i < 3; ++i) expect_row(0, h, i, h < 2 ? 1 : 2, std::log(5));
  }
}

// P17: both layouts, with every size different.
TEST_P(Cases, P17Layouts) {
  for (const Layout layout : {Layout::bhsd, Layout::bshd}) {
    Problem p = problem_of(2, 3, 3, 5, 5, 8);
    set_packed_strides(p, layout);
    const auto v = [](int b, int h, int i, int) { return 100.0 * b + 10.0 * h + i; };
    run(p,
        {fill(p, layout_q(p), zero), fill(p, layout_k(p), constant(1)), fill(p, layout_v(p), v)});
    for (int b = 0; b < 2; ++b) {
      for (int h = 0; h < 3; ++h) expect_row(b, h, 4, 100.0 * b + 10.0 * h + 2, std::log(5));
    }
  }
}

// P49: the running maximum moves by a lot from tile to tile, upwards and downwards; an inverted
// factor would be infinite.
TEST_P(Cases, P49GrowingAndFallingLogits) {
  for (const bool growing : {true, false}) {
    const Problem p = problem_of(1, 1, 1, 1, 320, 64);
    const auto step = [&](int j) { return (growing ? j / 32 : 9 - j / 32) * 5.0; };  // scaled score
    run(p, {fill(p, layout_q(p), constant(0.5)),
            fill(p, layout_k(p), [&](int, int, int j, int) { return step(j) / 4; }),
            fill(p, layout_v(p), [&](int, int, int j, int) { return j / 32 + 1.0; })});
    double sum = 0, weighted = 0;
    for (int j = 0; j < 320; ++j) {
      sum += std::exp(step(j) - 45);
      weighted += std::exp(step(j) - 45) * (j / 32 + 1.0);
    }
    expect_row(0, 0, 0, weighted / sum, 45 + std::log(sum));
  }
}

// A block that takes one row block after the other starts each afresh: relative to the maximum of
// the heads before, the weights of the later ones would be 0.
TEST_P(Cases, AHeadHasItsOwnMaximum) {
  const bool on_model = stage().target == Target::model;
  const int heads = on_model ? 12 : 600;  // several for each block
  const Problem p = problem_of(1, heads, heads, 3, 65, 64);
  const auto score = [&](int h) {  // scaled
    return on_model ? 4.0 * (11 - h) : 0.25 * ((heads - 1 - h) % 256);
  };
  run(p, {fill(p, layout_q(p), constant(0.5)),
          fill(p, layout_k(p), [&](int, int h, int, int) { return score(h) / 4; }),
          fill(p, layout_v(p), [](int, int, int j, int) { return double(j); })});
  for (int h = 0; h < heads; ++h) {
    for (int i = 0; i < 3; ++i) expect_row(0, h, i, 32, score(h) + std::log(65));
  }
}

// All rows of V equal: O is that row, whatever the scores.
TEST_P(Cases, EqualValues) {
  const Problem p = problem_of(1, 2, 2, 70, 90, 64, true);
  Inputs inputs = make_inputs(p, InputKind::large_logits, 6);
  inputs.v = fill(p, layout_v(p), constant(0.75));
  run(p, inputs);
  for (int h = 0; h < 2; ++h) {
    for (int i = 0; i < 70; ++i) ASSERT_NEAR(o(0, h, i, i % 64), 0.75, 2 * 0.75 * 0x1p-10);
  }
}

// Permuting keys together with values changes nothing but rounding.
TEST_P(Cases, PermutedKeys) {
  const Problem p = problem_of(1, 1, 1, 40, 150, 64);
  const Inputs inputs = make_inputs(p, InputKind::normal, 8);
  run(p, inputs);
  const Outputs straight = outputs_;
  Inputs reversed = inputs;
  for (int j = 0; j < 150; ++j) {
    std::copy_n(inputs.k.begin() + j * 64, 64, reversed.k.begin() + (149 - j) * 64);
    std::copy_n(inputs.v.begin() + j * 64, 64, reversed.v.begin() + (149 - j) * 64);
  }
  run(p, reversed);
  for (int i = 0; i < 40; ++i) {
    ASSERT_NEAR(outputs_.l[i], straight.l[i], 1e-5 * std::max(1.f, std::abs(straight.l[i])));
    for (int c = 0; c < 64; ++c) {
      ASSERT_NEAR(o(0, 0, i, c), from_bits(straight.o[i * 64 + c], p.dtype), 2e-3);
    }
  }
}

// Halves of the keys, merged by their L, give the answer of all keys.
TEST_P(Cases, MergedHalves) {
  const Problem whole = problem_of(1, 1, 1, 20, 192, 64);
  const Inputs inputs = make_inputs(whole, InputKind::moving_max, 12);
  run(whole, inputs);
  const Outputs want = outputs_;
  const Problem half = problem_of(1, 1, 1, 20, 96, 64);
  Outputs part[2];
  for (int s = 0; s < 2; ++s) {
    const auto slice = [&](const std::vector<uint16_t>& x) {
      return std::vector<uint16_t>(x.begin() + s * 96 * 64, x.begin() + (s + 1) * 96 * 64);
    };
    run(half, {inputs.q, slice(inputs.k), slice(inputs.v)});
    part[s] = outputs_;
  }
  for (int i = 0; i < 20; ++i) {
    const double l0 = part[0].l[i], l1 = part[1].l[i];
    const double merged = std::max(l0, l1) + std::log1p(std::exp(-std::abs(l0 - l1)));
    ASSERT_NEAR(merged, want.l[i], 1e-5 * std::max(1.0, std::abs(merged)));
    for (int c = 0; c < 64; ++c) {
      const double o0 = from_bits(part[0].o[i * 64 + c], half.dtype),
                   o1 = from_bits(part[1].o[i * 64 + c], half.dtype);
      ASSERT_NEAR(o0 * std::exp(l0 - merged) + o1 * std::exp(l1 - merged),
                  from_bits(want.o[i * 64 + c], whole.dtype), 4e-3);
    }
  }
}

// Grouped heads equal plain heads on repeated K and V, to the bit.
TEST_P(Cases, GroupedEqualsRepeated) {
  const Problem grouped = problem_of(1, 4, 2, 40, 70, 64, true);
  const Problem plain = problem_of(1, 4, 4, 40, 70, 64, true);
  const Inputs inputs = make_inputs(grouped, InputKind::normal, 2);
  Inputs repeated = inputs;
  repeated.k.clear();
  repeated.v.clear();
  for (int h = 0; h < 4; ++h) {
    const int64_t begin = int64_t{h / 2} * 70 * 64, end = begin + 70 * 64;
    repeated.k.insert(repeated.k.end(), inputs.k.begin() + begin, inputs.k.begin() + end);
    repeated.v.insert(repeated.v.end(), inputs.v.begin() + begin, inputs.v.begin() + end);
  }
  run(grouped, inputs);
  const Outputs want = outputs_;
  run(plain, repeated);
  EXPECT_EQ(outputs_.o, want.o);
  EXPECT_EQ(outputs_.l, want.l);
}

FLASHSTEPS_FOR_FORWARD_STAGES(Cases);

}  // namespace
}  // namespace flashsteps
