// The oracle is right, the inputs are what they claim to be, and the comparison catches what is
// wrong.
#include <gtest/gtest.h>

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "common/attention/layout.h"
#include "common/attention/work.h"
#include "common/reference/compare.h"
#include "common/reference/float16.h"
#include "common/reference/inputs.h"
#include "common/reference/npy.h"
#include "common/reference/reference.h"

namespace flashsteps {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr DType kTypes[] = {DType::fp16, DType::bf16};

// --- the 16-bit types
// ------------------------------------------------------------------------------------

// Eigen's conversions, the independent witness.
double eigen_value(uint16_t bits, DType type) {
  return type == DType::fp16
             ? double(float(Eigen::half(Eigen::half_impl::raw_uint16_to_half(bits))))
             : double(float(Eigen::bfloat16(Eigen::bfloat16_impl::raw_uint16_to_bfloat16(bits))));
}

uint16_t eigen_bits(float value, DType type) {
  return type == DType::fp16 ? Eigen::half(value).x : Eigen::bfloat16(value).value;
}

TEST(Float16, EveryPatternHasEigensValueAndComesBack) {
  for (const DType type : kTypes) {
    for (int pattern = 0; pattern < 65536; ++pattern) {
      const auto bits = uint16_t(pattern);
      const double value = from_bits(bits, type);
      if (std::isnan(eigen_value(bits, type))) {
        EXPECT_TRUE(std::isnan(value)) << pattern;
        EXPECT_TRUE(std::isnan(from_bits(to_bits(value, type), type)));
        continue;
      }
      ASSERT_EQ(value, eigen_value(bits, type)) << name_of(type) << " " << pattern;
      ASSERT_EQ(std::signbit(value), pattern >= 32768);
      ASSERT_EQ(to_bits(value, type), bits) << name_of(type) << " " << pattern;
      ASSERT_EQ(round_to(value, type), value);
    }
  }
}

TEST(Float16, RoundsToNearestAndTiesToEven) {
  for (const DType type : kTypes) {
    const int infinity = type == DType::fp16 ? 0x7c00 : 0x7f80;
    for (int pattern = 0; pattern + 1 < infinity; ++pattern) {
      const auto below = uint16_t(pattern), above = uint16_t(pattern + 1);
      const double middle = (from_bits(below, type) + from_bits(above, type)) / 2;
      const uint16_t even = pattern % 2 == 0 ? below : above;
      for (const int sign : {0, 0x8000}) {
        const double s = sign ? -1 : 1;
        ASSERT_EQ(to_bits(s * middle, type), even | sign) << pattern;
        ASSERT_EQ(to_bits(s * std::nextafter(middle, 0), type), below | sign) << pattern;
        ASSERT_EQ(to_bits(s * std::nextafter(middle, kInfinity), type), above | sign) << pattern;
        ASSERT_EQ(eigen_bits(float(s * middle), type), even | sign) << pattern;
        ASSERT_EQ(round_to(s * middle, type), from_bits(uint16_t(even | sign), type));
      }
    }
  }
}

TEST(Float16, OverflowsHalfwayBeyondTheLargest) {
  for (const DType type : kTypes) {
    const double largest = largest_finite(type);
    const double halfway = largest + ulp(largest, type) / 2;
    EXPECT_EQ(round_to(std::nextafter(halfway, 0), type), largest);
    EXPECT_EQ(round_to(halfway, type), kInfinity);
    EXPECT_EQ(round_to(-halfway, type), -kInfinity);
    EXPECT_EQ(round_to(1e300, type), kInfinity);
    EXPECT_EQ(from_bits(to_bits(-kInfinity, type), type), -kInfinity);
    EXPECT_TRUE(std::isnan(round_to(kNaN, type)));
  }
  EXPECT_EQ(largest_finite(DType::fp16), 65504);
  EXPECT_EQ(round_to(133120, DType::bf16), 133120);  // P01
}

TEST(Float16, UlpIsTheDistanceToTheNextValue) {
  for (const DType type : kTypes) {
    const int infinity = type == DType::fp16 ? 0x7c00 : 0x7f80;
    for (int pattern = 0; pattern + 1 < infinity; ++pattern) {
      const double value = from_bits(uint16_t(pattern), type);
      ASSERT_EQ(ulp(value, type), from_bits(uint16_t(pattern + 1), type) - value) << pattern;
      ASSERT_EQ(ulp(-value, type), ulp(value, type));
    }
    EXPECT_TRUE(std::isnan(ulp(kNaN, type)));
    EXPECT_TRUE(std::isnan(ulp(kInfinity, type)));
  }
}

// --- problems and tensors made by hand
// ----------------------------------------------------------------------

Problem problem(int heads, int kv_heads, int seqlen_q, int seqlen_k, int head_dim,
                bool causal = false, DType dtype = DType::fp16) {
  Problem p{.batch = 1,
            .heads = heads,
            .kv_heads = kv_heads,
            .seqlen_q = seqlen_q,
            .seqlen_k = seqlen_k,
            .head_dim = head_dim,
            .dtype = dtype,
            .causal = causal,
            .scale = default_scale(head_dim)};
  set_packed_strides(p);
  return p;
}

// Element (b, h, i, c) of a tensor is value(b, h, i, c).
using Value = std::function<double(int, int, int, int)>;

std::vector<uint16_t> tensor(const TensorLayout& t, DType type, const Value& value) {
  std::vector<uint16_t> bits(size_t(t.extent()), 0xffff);
  for (int b = 0; b < t.batch; ++b) {
    for (int h = 0; h < t.heads; ++h) {
      for (int i = 0; i < t.seqlen; ++i) {
        for (int c = 0; c < t.head_dim; ++c)
          bits[t.offset(b, h, i) + c] = to_bits(value(b, h, i, c), type);
      }
    }
  }
  return bits;
}

Value constant(double x) {
  return [x](int, int, int, int) { return x; };
}

Inputs inputs_of(const Problem& p, const Value& q, const Value& k, const Value& v) {
  return {tensor(layout_q(p), p.dtype, q), tensor(layout_k(p), p.dtype, k),
          tensor(layout_v(p), p.dtype, v)};
}

const Value kRowIndex = [](int, int, int j, int) { return double(j); };
const Value kHeadIndex = [](int, int g, int, int) { return double(g); };

double oracle_O(const Problem& p, const Oracle& oracle, int b, int h, int row, int c) {
  return oracle
      .O[((int64_t{b} * p.heads + h) * int64_t(oracle.rows.size()) + row) * p.head_dim + c];
}

// --- the oracle
// ----------------------------------------------------------------------------------------------

TEST(Oracle, CausalIsAlignedBottomRight) {  // P09
  const Problem p = problem(1, 1, 3, 128, 128, true);
  const Oracle oracle =
      make_oracle(p, inputs_of(p, constant(0), constant(1), kRowIndex), all_rows(p));
  const double O[] = {62.5, 63.0, 63.5}, keys[] = {126, 127, 128};
  for (int i = 0; i < 3; ++i) {
    EXPECT_DOUBLE_EQ(oracle_O(p, oracle, 0, 0, i, 77), O[i]);
    EXPECT_DOUBLE_EQ(oracle.L[i], std::log(keys[i]));
  }
  EXPECT_NEAR(oracle.L[0], 4.8363, 5e-5);
}

TEST(Oracle, RowsThatSeeNoKey) {  // P07, P10
  const Problem p = problem(1, 1, 5, 2, 8, true);
  const Oracle oracle =
      make_oracle(p, inputs_of(p, constant(0), constant(1), kRowIndex), all_rows(p));
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(oracle_O(p, oracle, 0, 0, i, 0), 0);
    EXPECT_EQ(oracle.L[i], -kInfinity);
  }
  EXPECT_DOUBLE_EQ(oracle_O(p, oracle, 0, 0, 3, 0), 0);
  EXPECT_DOUBLE_EQ(oracle_O(p, oracle, 0, 0, 4, 0), 0.5);
  EXPECT_DOUBLE_EQ(oracle.L[4], std::log(2.0));
}

TEST(Oracle, NoKeysAndNoQueries) {  // P14
  for (const bool causal : {false, true}) {
    const Problem p = problem(2, 1, 3, 0, 8, causal);
    const Oracle oracle =
        make_oracle(p, inputs_of(p, constant(1), constant(1), constant(1)), all_rows(p));
    for (const double x : oracle.O) EXPECT_EQ(x, 0);
    for (const double x : oracle.L) EXPECT_EQ(x, -kInfinity);
    const Problem none = problem(2, 1, 0, 3, 8, causal);
    EXPECT_TRUE(
        make_oracle(none, inputs_of(none, constant(1), constant(1), constant(1)), all_rows(none))
            .O.empty());
  }
}

TEST(Oracle, QueryHeadsShareKvHeadsInOrder) {  // P16
  const Problem p = problem(4, 2, 2, 5, 8);
  const Oracle oracle =
      make_oracle(p, inputs_of(p, constant(0), constant(1), kHeadIndex), all_rows(p));
  const double wanted[] = {0, 0, 1, 1};
  for (int h = 0; h < 4; ++h) EXPECT_DOUBLE_EQ(oracle_O(p, oracle, 0, h, 1, 3), wanted[h]);
}

TEST(Oracle, ScaleZeroIsTheMean) {  // P04
  for (const bool causal : {false, true}) {
    Problem p = problem(1, 1, 65, 65, 8, causal);
    p.scale = 0;
    const Oracle oracle =
        make_oracle(p, inputs_of(p, constant(3), constant(-2), kRowIndex), all_rows(p));
    for (int i = 0; i < 65; ++i) {
      const double keys = causal ? i + 1 : 65;
      EXPECT_DOUBLE_EQ(oracle_O(p, oracle, 0, 0, i, 0), (keys - 1) / 2);
      EXPECT_DOUBLE_EQ(oracle.L[i], std::log(keys));
    }
  }
}

TEST(Oracle, VeryLowEqualScores) {  // P02
  const Problem p = problem(1, 1, 1, 3, 64);
  const Oracle oracle =
      make_oracle(p, inputs_of(p, constant(50), constant(-50), kRowIndex), all_rows(p));
  EXPECT_DOUBLE_EQ(oracle_O(p, oracle, 0, 0, 0, 0), 1);
  EXPECT_NEAR(oracle.L[0], -19998.901, 1e-3);
}

TEST(Oracle, HugeEqualScores) {  // P01
  const Problem p = problem(1, 1, 1, 1, 64, false, DType::bf16);
  const Oracle oracle = make_oracle(
      p, inputs_of(p, constant(133120), constant(133120), constant(133120)), all_rows(p));
  EXPECT_DOUBLE_EQ(oracle_O(p, oracle, 0, 0, 0, 0), 133120);
  EXPECT_NEAR(oracle.L[0] / (64 * 133120.0 * 133120.0 / 8), 1, 1e-12);
}

TEST(Oracle, SharpScoresStayFinite) {  // P03
  const Problem p = problem(1, 1, 4, 64, 64);
  const Oracle a = make_oracle(p, inputs_of(p, constant(50), constant(50), kRowIndex), all_rows(p));
  EXPECT_DOUBLE_EQ(oracle_O(p, a, 0, 0, 2, 5), 31.5);
  EXPECT_DOUBLE_EQ(a.L[2], 20000 + std::log(64.0));
  const Oracle b =
      make_oracle(p, inputs_of(p, constant(0), constant(1), constant(60000)), all_rows(p));
  EXPECT_NEAR(oracle_O(p, b, 0, 0, 2, 5), 60000, 1e-9);
}

TEST(Oracle, PaddedHeadDimNeedsTheTrueScale) {  // P05: zeros beside the channels change nothing at
                                                // the same scale
  const Problem p = problem(1, 1, 9, 11, 40);
  const Inputs inputs = make_inputs(p, InputKind::normal, 3);
  Problem padded = problem(1, 1, 9, 11, 64);
  padded.scale = p.scale;
  const auto pad = [&](const TensorLayout& t, const std::vector<uint16_t>& from) -> Value {
    return [&from, t](int b, int h, int i, int c) {
      return c < t.head_dim ? from_bits(from[t.offset(b, h, i) + c], DType::fp16) : 0.0;
    };
  };
  const Inputs wide = inputs_of(padded, pad(layout_q(p), inputs.q), pad(layout_k(p), inputs.k),
                                pad(layout_v(p), inputs.v));
  const Oracle narrow = make_oracle(p, inputs, all_rows(p)),
               padded_oracle = make_oracle(padded, wide, all_rows(p));
  for (int i = 0; i < 9; ++i) {
    EXPECT_NEAR(narrow.L[i], padded_oracle.L[i], 1e-12);
    for (int c = 0; c < 40; ++c)
      EXPECT_NEAR(oracle_O(p, narrow, 0, 0, i, c), oracle_O(padded, padded_oracle, 0, 0, i, c),
                  1e-12);
  }
}

// The definition, element by element in long double, with no matrix and no library.
void expect_definition(const Problem& p, const Inputs& inputs, const Variation& variation = {}) {
  const Oracle oracle = make_oracle(p, inputs, all_rows(p), variation);
  const auto at = [&](const std::vector<uint16_t>& t, const TensorLayout& layout, int b, int h,
                      int i, int c) {
    return static_cast<long double>(eigen_value(t[layout.offset(b, h, i) + c], p.dtype));
  };
  for (int b = 0; b < p.batch; ++b) {
    for (int h = 0; h < p.heads; ++h) {
      const int g = h / (p.heads / p.kv_heads);
      for (int i = 0; i < p.seqlen_q; ++i) {
        std::vector<long double> weight(size_t(p.seqlen_k), 0.0L);
        long double sum = variation.sink ? 1 : 0;
        for (int j = 0; j < p.seqlen_k; ++j) {
          const int behind = i + p.seqlen_k - p.seqlen_q - j;
          if (p.causal && behind < 0) continue;
          if (variation.window && behind >= variation.window) continue;
          long double score = 0;
          for (int c = 0; c < p.head_dim; ++c) {
            score += at(inputs.q, layout_q(p), b, h, i, c) * at(inputs.k, layout_k(p), b, g, j, c);
          }
          score *= static_cast<long double>(p.scale);
          if (variation.softcap != 0) {
            const long double cap = variation.softcap;
            score = cap * std::tanh(score / cap);
          }
          score -= static_cast<long double>(variation.distance) * std::abs(behind);
          weight[j] = std::exp(score);
          sum += weight[j];
        }
        const int64_t row = (int64_t{b} * p.heads + h) * p.seqlen_q + i;
        if (sum == 0) {
          ASSERT_EQ(oracle.L[row], -kInfinity);
        } else {
          ASSERT_NEAR(oracle.L[row], double(std::log(sum)), 1e-12);
        }
        for (int c = 0; c < p.head_dim; ++c) {
          long double o = 0;
          for (int j = 0; j < p.seqlen_k && sum > 0; ++j)
            o += weight[j] / sum * at(inputs.v, layout_v(p), b, g, j, c);
          ASSERT_NEAR(oracle.O[row * p.head_dim + c], double(o), 1e-12)
              << b << " " << h << " " << i << " " << c;
        }
      }
    }
  }
}

TEST(Oracle, IsTheDefinition) {
  for (const DType dtype : kTypes) {
    for (const bool causal : {false, true}) {
      for (const Layout layout : {Layout::bhsd, Layout::bshd}) {
        Problem p = problem(4, 2, 70, 67, 24, causal, dtype);
        p.batch = 2;
        set_packed_strides(p, layout);
        expect_definition(p, make_inputs(p, InputKind::moving_max, 11));
        // With gaps, which hold NaN.
        p.q.row += 8;
        p.q.head = p.q.row * 70;
        p.q.batch = p.q.head * 4 + 16;
        p.scale = -0.3f;
        expect_definition(p, make_inputs(p, InputKind::normal, 12));
      }
    }
  }
}

// What labs ask for beside the stages, each alone and all of it together.
TEST(Oracle, VariationsAreTheDefinition) {
  const Variation variations[] = {{.window = 1},     {.window = 20},       {.window = 1000},
                                  {.softcap = 0.5f}, {.softcap = 15},      {.distance = .125},
                                  {.sink = true},    {20, 2.f, .25f, true}};
  for (const Variation& variation : variations) {
    for (const bool causal : {false, true}) {
      for (const auto& [seqlen_q, seqlen_k] : {std::pair{70, 67}, {20, 90}, {90, 20}}) {
        SCOPED_TRACE(testing::Message()
                     << "window " << variation.window << " softcap " << variation.softcap
                     << " causal " << causal << " Nq " << seqlen_q << " Nk " << seqlen_k);
        const Problem p = problem(4, 2, seqlen_q, seqlen_k, 24, causal);
        expect_definition(p, make_inputs(p, InputKind::normal, 13), variation);
      }
    }
  }
}

TEST(Oracle, LayoutsAgree) {  // P17
  Problem p = problem(3, 3, 5, 5, 8);
  p.batch = 2;
  const Value q = [](int b, int h, int i, int c) { return 0.1 * b - 0.2 * h + 0.3 * i - 0.05 * c; };
  const Value v = [](int b, int h, int i, int) { return 100 * b + 10 * h + i; };
  set_packed_strides(p, Layout::bhsd);
  const Oracle a = make_oracle(p, inputs_of(p, q, q, v), all_rows(p));
  set_packed_strides(p, Layout::bshd);
  const Oracle b = make_oracle(p, inputs_of(p, q, q, v), all_rows(p));
  EXPECT_EQ(a.O, b.O);
  EXPECT_EQ(a.L, b.L);
}

TEST(Oracle, GroupedEqualsRepeated) {
  const Problem grouped = problem(6, 2, 33, 40, 16, true);
  const Problem repeated = problem(6, 6, 33, 40, 16, true);
  const Inputs inputs = make_inputs(grouped, InputKind::normal, 2);
  const auto repeat = [&](const std::vector<uint16_t>& from) {
    return tensor(layout_k(repeated), DType::fp16, [&](int b, int h, int i, int c) {
      return from_bits(from[layout_k(grouped).offset(b, h / 3, i) + c], DType::fp16);
    });
  };
  const Oracle a = make_oracle(grouped, inputs, all_rows(grouped));
  const Oracle b =
      make_oracle(repeated, {inputs.q, repeat(inputs.k), repeat(inputs.v)}, all_rows(repeated));
  EXPECT_EQ(a.O, b.O);
  EXPECT_EQ(a.L, b.L);
}

TEST(Oracle, HalvesMergeByL) {
  const Problem whole = problem(1, 1, 20, 64, 16), half = problem(1, 1, 20, 32, 16);
  const Inputs inputs = make_inputs(whole, InputKind::moving_max, 5);
  const auto part = [&](const std::vector<uint16_t>& t, int first) {
    return std::vector<uint16_t>(t.begin() + first * 16, t.begin() + (first + 32) * 16);
  };
  const Oracle all = make_oracle(whole, inputs, all_rows(whole));
  const Oracle a =
      make_oracle(half, {inputs.q, part(inputs.k, 0), part(inputs.v, 0)}, all_rows(half));
  const Oracle b =
      make_oracle(half, {inputs.q, part(inputs.k, 32), part(inputs.v, 32)}, all_rows(half));
  for (int i = 0; i < 20; ++i) {
    const double l = std::log(std::exp(a.L[i]) + std::exp(b.L[i]));
    EXPECT_NEAR(all.L[i], l, 1e-12);
    for (int c = 0; c < 16; ++c) {
      EXPECT_NEAR(all.O[i * 16 + c],
                  std::exp(a.L[i] - l) * a.O[i * 16 + c] + std::exp(b.L[i] - l) * b.O[i * 16 + c],
                  1e-12);
    }
  }
}

TEST(Oracle, RealTensors) {
  const auto bits = [](const char* name) {
    return read_npy(std::string("tests/data/ocr1s_") + name + ".npy", 4).fp16;
  };
  Problem p = problem(2, 2, 161, 161, 16);
  p.scale = 0.2581988897471611f;
  const Oracle oracle = make_oracle(p, {bits("q"), bits("k"), bits("v")}, all_rows(p));
  const NpyArray o = read_npy("tests/data/ocr1s_o.npy", 4),
                 l = read_npy("tests/data/ocr1s_lse.npy", 3);
  ASSERT_EQ(size_t(o.size()), oracle.O.size());
  ASSERT_EQ(size_t(l.size()), oracle.L.size());
  // The files are rounded to fp32, and computed with a scale that is not.
  for (int64_t i = 0; i < o.size(); ++i) ASSERT_NEAR(oracle.O[i], o.value(i), 4e-6) << i;
  for (int64_t i = 0; i < l.size(); ++i) ASSERT_NEAR(oracle.L[i], l.value(i), 6e-6) << i;
}

TEST(Oracle, Ref16HasTheTwoRoundingsAndNoOther) {
  // Four keys: P = 1/4 is exact, and O = 257/4 fits fp16 but not bf16, where 64.25 rounds to 64.
  for (const DType dtype : kTypes) {
    const Problem p = problem(1, 1, 1, 4, 8, false, dtype);
    const Value v = [](int, int, int j, int) { return j == 0 ? 1.0 : j == 1 ? 256.0 : 0.0; };
    const Oracle oracle = make_oracle(p, inputs_of(p, constant(0), constant(1), v), all_rows(p));
    EXPECT_EQ(oracle.blocks[0].o_max, 64.25);
    EXPECT_EQ(oracle.blocks[0].ref16_error, dtype == DType::fp16 ? 0 : 0.25);
  }
  // Eleven equal values, so that O needs no rounding: 11 * fp16(1/11) misses 1 by more than half an
  // ulp of O.
  const Problem p = problem(1, 1, 1, 11, 8);
  const double v = 2 - 0x1p-10;
  const Oracle oracle =
      make_oracle(p, inputs_of(p, constant(0), constant(1), constant(v)), all_rows(p));
  const double rounded = round_to(v * 11 * round_to(1.0 / 11, DType::fp16), DType::fp16);
  EXPECT_EQ(rounded, v - 0x1p-10);
  EXPECT_NEAR(oracle.blocks[0].ref16_error, 0x1p-10, 1e-15);
}

TEST(Oracle, BlocksKnowTheirMaxima) {
  const Problem p = problem(2, 2, 100, 3, 8);
  // Rows 0 to 63 have scores 1 and values 1; the rest the double. The second head is negative.
  const Value q = [](int, int h, int i, int) {
    return (h ? -1.0 : 1.0) * (i < 64 ? 1 : 2) / std::sqrt(8.0);
  };
  const Oracle oracle = make_oracle(
      p, inputs_of(p, q, constant(1), [](int, int h, int, int) { return h ? -3.0 : 5.0; }),
      all_rows(p));
  ASSERT_EQ(oracle.blocks.size(), 4u);
  for (int block = 0; block < 4; ++block) {
    EXPECT_NEAR(oracle.blocks[block].score_max, block % 2 ? 2 : 1, 2e-3);
    EXPECT_NEAR(oracle.blocks[block].o_max, block < 2 ? 5 : 3, 1e-12);
  }
}

TEST(Oracle, SelectedRowsAreThoseOfTheWhole) {
  Problem p = problem(2, 1, 300, 90, 16, true);
  const Inputs inputs = make_inputs(p, InputKind::normal, 8);
  const Oracle whole = make_oracle(p, inputs, all_rows(p));
  const std::vector<int> rows = sampled_rows(p, 130, 4);
  const Oracle some = make_oracle(p, inputs, rows);
  ASSERT_EQ(some.blocks.size(), 2u * 3);
  for (int h = 0; h < 2; ++h) {
    for (size_t r = 0; r < rows.size(); ++r) {
      // Another block of rows may add up in another order.
      const double wanted = whole.L[h * 300 + rows[r]];
      const double got = some.L[h * rows.size() + r];
      EXPECT_TRUE(got == wanted || std::fabs(got - wanted) < 1e-12);
      for (int c = 0; c < 16; ++c) {
        EXPECT_NEAR(oracle_O(p, some, 0, h, int(r), c), oracle_O(p, whole, 0, h, rows[r], c),
                    1e-12);
      }
    }
  }
}

TEST(Oracle, RefusesWrongSizesAndRows) {
  const Problem p = problem(1, 1, 4, 4, 8);
  Inputs inputs = make_inputs(p, InputKind::normal, 1);
  for (const std::vector<int>& rows : {std::vector<int>{0, 4}, {-1, 2}, {2, 1}, {1, 1}}) {
    EXPECT_THROW(make_oracle(p, inputs, rows), std::invalid_argument);
  }
  inputs.k.push_back(0);
  EXPECT_THROW(make_oracle(p, inputs, {0}), std::invalid_argument);
}

TEST(SampledRows, AreDifferentAscendingAndSpread) {
  const Problem p = problem(1, 1, 1000, 10, 8);
  std::set<std::vector<int>> samples;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const std::vector<int> rows = sampled_rows(p, 64, seed);
    ASSERT_EQ(rows.size(), 64u);
    EXPECT_TRUE(std::adjacent_find(rows.begin(), rows.end(), std::greater_equal<>()) == rows.end());
    for (int part = 0; part < 64; ++part) {
      EXPECT_GE(rows[part], part * 1000 / 64);
      EXPECT_LT(rows[part], (part + 1) * 1000 / 64 + 1);
    }
    samples.insert(rows);
  }
  EXPECT_GT(samples.size(), 15u);  // random, by the seed
  EXPECT_EQ(sampled_rows(p, 1000, 1), all_rows(p));
  EXPECT_EQ(sampled_rows(p, 5000, 1), all_rows(p));
}

TEST(SampledRows, AllWhereThatIsCheapAndNeverFewerThan64) {
  const Problem cheap = problem(2, 2, 512, 512, 64);
  EXPECT_EQ(affordable_rows(cheap, 1), all_rows(cheap));
  const Problem dear = problem(16, 16, 16384, 16384, 128);
  const size_t rows = affordable_rows(dear, 1).size();
  EXPECT_GE(rows, 64u);
  EXPECT_EQ(rows % 64, 0u);
  EXPECT_LT(rows, 16384u);
  Problem dearest = dear;
  dearest.batch = 1024;
  EXPECT_EQ(affordable_rows(dearest, 1).size(), 64u);
  dearest.seqlen_q = 40;  // fewer than 64: all of them
  set_packed_strides(dearest);
  EXPECT_EQ(affordable_rows(dearest, 1), all_rows(dearest));
}

// --- inputs
// --------------------------------------------------------------------------------------------------

Problem input_problem(DType dtype = DType::fp16) {
  Problem p = problem(4, 2, 130, 200, 64, false, dtype);
  p.batch = 2;
  set_packed_strides(p);
  return p;
}

uint64_t fingerprint(const Inputs& inputs) {  // FNV-1a
  uint64_t hash = 14695981039346656037u;
  for (const auto* tensor : {&inputs.q, &inputs.k, &inputs.v}) {
    for (const uint16_t bits : *tensor) {
      hash = (hash ^ (bits & 0xff)) * 1099511628211u;
      hash = (hash ^ (bits >> 8)) * 1099511628211u;
    }
  }
  return hash;
}

TEST(MakeInputs, SameSeedSameBitsEverywhere) {
  const Problem p = input_problem();
  // Fixed values: another compiler, platform or number of cores that gives other bits is a failure.
  const uint64_t wanted[] = {5232159821102468331u, 9395942669200552744u, 14251518937773387659u,
                             4907884311674204651u, 4113267124051542758u};
  for (const InputKind kind : kInputKinds) {
    EXPECT_EQ(fingerprint(make_inputs(p, kind, 1)), wanted[int(kind)]) << name_of(kind);
    EXPECT_NE(fingerprint(make_inputs(p, kind, 2)), wanted[int(kind)]) << name_of(kind);
  }
}

TEST(MakeInputs, NoZerosAndEveryHeadDiffers) {
  for (const DType dtype : kTypes) {
    const Problem p = input_problem(dtype);
    for (const InputKind kind : kInputKinds) {
      const Inputs inputs = make_inputs(p, kind, 3);
      const std::pair<const std::vector<uint16_t>*, TensorLayout> tensors[] = {
          {&inputs.q, layout_q(p)}, {&inputs.k, layout_k(p)}, {&inputs.v, layout_v(p)}};
      std::set<std::vector<uint16_t>> heads;
      size_t count = 0;
      for (const auto& [bits, t] : tensors) {
        const bool zeros = kind == InputKind::uniform && bits == &inputs.q;
        for (const uint16_t x : *bits) {
          ASSERT_EQ((x & 0x7fff) == 0, zeros) << name_of(kind);
          ASSERT_TRUE(std::isfinite(from_bits(x, dtype)));
        }
        if (zeros) continue;
        for (int b = 0; b < t.batch; ++b) {
          for (int h = 0; h < t.heads; ++h) {
            const auto begin = bits->begin() + t.offset(b, h, 0);
            heads.insert({begin, begin + 64 * t.head_dim});
            ++count;
          }
        }
      }
      EXPECT_EQ(heads.size(), count) << name_of(kind);
    }
  }
}

TEST(MakeInputs, ValuesDoNotDependOnStridesAndGapsAreNaN) {
  Problem p = input_problem();
  const Inputs packed = make_inputs(p, InputKind::moving_max, 4);
  const TensorLayout dense = layout_k(p);
  p.k = {.batch = 2 * 200 * 80 + 8, .head = 200 * 80, .row = 80};
  const Inputs gaps = make_inputs(p, InputKind::moving_max, 4);
  const TensorLayout t = layout_k(p);
  std::vector<bool> used(gaps.k.size());
  for (int b = 0; b < 2; ++b) {
    for (int h = 0; h < 2; ++h) {
      for (int i = 0; i < 200; ++i) {
        for (int c = 0; c < 64; ++c) {
          ASSERT_EQ(gaps.k[t.offset(b, h, i) + c], packed.k[dense.offset(b, h, i) + c]);
          used[t.offset(b, h, i) + c] = true;
        }
      }
    }
  }
  for (size_t i = 0; i < used.size(); ++i)
    ASSERT_TRUE(used[i] || std::isnan(from_bits(gaps.k[i], p.dtype)));
  EXPECT_EQ(gaps.q, packed.q);
}

// Scaled scores of one head of the first batch.
std::vector<std::vector<double>> scores(const Problem& p, const Inputs& inputs, int h) {
  std::vector<std::vector<double>> S(size_t(p.seqlen_q), std::vector<double>(size_t(p.seqlen_k)));
  for (int i = 0; i < p.seqlen_q; ++i) {
    for (int j = 0; j < p.seqlen_k; ++j) {
      for (int c = 0; c < p.head_dim; ++c) {
        S[i][j] += p.scale * from_bits(inputs.q[layout_q(p).offset(0, h, i) + c], p.dtype) *
                   from_bits(inputs.k[layout_k(p).offset(0, p.kv_head(h), j) + c], p.dtype);
      }
    }
  }
  return S;
}

// How often the running maximum of a row moves from one tile of 32 keys to the next, averaged over
// rows.
double moves_of_the_maximum(const std::vector<std::vector<double>>& S) {
  double moves = 0;
  for (const auto& row : S) {
    double running = *std::max_element(row.begin(), row.begin() + 32);
    for (size_t tile = 32; tile + 32 <= row.size(); tile += 32) {
      const double tile_max =
          *std::max_element(row.begin() + long(tile), row.begin() + long(tile) + 32);
      moves += tile_max > running;
      running = std::max(running, tile_max);
    }
  }
  return moves / double(S.size());
}

TEST(MakeInputs, MovingMaxRisesInOneHeadAndFallsInTheNext) {
  const Problem p = problem(2, 2, 64, 512, 64);
  const Inputs moving = make_inputs(p, InputKind::moving_max, 6);
  EXPECT_GT(moves_of_the_maximum(scores(p, moving, 0)), 4.5);  // of 15 steps
  EXPECT_LT(moves_of_the_maximum(scores(p, moving, 1)), 1.0);
  const Inputs normal = make_inputs(p, InputKind::normal, 6);
  EXPECT_NEAR(moves_of_the_maximum(scores(p, normal, 0)), 2.4, 0.7);  // 1/2 + 1/3 + … + 1/16
}

TEST(MakeInputs, KindsAreWhatTheySay) {
  const Problem p = problem(1, 1, 200, 200, 64);
  const auto deviation = [&](InputKind kind) {
    double sum = 0;
    for (const auto& row : scores(p, make_inputs(p, kind, 9), 0)) {
      for (const double s : row) sum += s * s;
    }
    return std::sqrt(sum / 40000);
  };
  EXPECT_NEAR(deviation(InputKind::normal), 1, 0.1);
  EXPECT_NEAR(deviation(InputKind::large_logits), 50, 5);
  EXPECT_EQ(deviation(InputKind::uniform), 0);
  const Inputs outliers = make_inputs(p, InputKind::outlier_channels, 9);
  const auto rms = [&](const std::vector<uint16_t>& bits, int c) {
    double sum = 0;
    for (int i = 0; i < 200; ++i) sum += std::pow(from_bits(bits[i * 64 + c], p.dtype), 2);
    return std::sqrt(sum / 200);
  };
  for (int c = 0; c < 64; ++c) {
    const bool outlier = c % 32 == 0;
    EXPECT_NEAR(rms(outliers.q, c) / (outlier ? 4 : 1), 1, 0.25);
    EXPECT_NEAR(rms(outliers.k, c) / (outlier ? 16 : 1), 1, 0.25);
    EXPECT_NEAR(rms(outliers.v, c) / (outlier ? 16 : 1), 1, 0.25);
  }
}

// --- the comparison
// -------------------------------------------------------------------------------------------

// A problem with its oracle, and outputs that are the oracle's, rounded.
struct Fixture {
  explicit Fixture(Problem its_problem, InputKind kind = InputKind::moving_max)
      : p(its_problem),
        inputs(make_inputs(p, kind, 21)),
        oracle(make_oracle(p, inputs, all_rows(p))) {
    outputs.o.assign(size_t(layout_o(p).extent()), 0xffff);
    outputs.l.resize(size_t(p.rows()));
    for (int64_t row = 0; row < p.rows(); ++row) {
      for (int c = 0; c < p.head_dim; ++c)
        o(int(row), c) = to_bits(oracle.O[row * p.head_dim + c], p.dtype);
      outputs.l[row] = float(oracle.L[row]);
    }
  }

  // Of the first batch; `row` counts over heads.
  uint16_t& o(int row, int c) {
    const int h = row / p.seqlen_q % p.heads, b = row / p.seqlen_q / p.heads;
    return outputs.o[layout_o(p).offset(b, h, row % p.seqlen_q) + c];
  }
  Comparison compared() const { return compare(p, oracle, outputs); }
  bool ok() const { return compared().ok; }

  Problem p;
  Inputs inputs;
  Oracle oracle;
  Outputs outputs;
};

TEST(Compare, PassesTheRoundedOracle) {
  for (const DType dtype : kTypes) {
    for (const InputKind kind : kInputKinds) {
      for (const bool causal : {false, true}) {
        const Fixture f(problem(2, 1, 130, 70, 24, causal, dtype),
                        kind);  // with causal, 60 rows see no key
        const Comparison c = f.compared();
        EXPECT_TRUE(c.ok) << c.describe();
        EXPECT_EQ(c.describe(), "");
        EXPECT_EQ(c.rows_checked, 260);
        EXPECT_GT(c.max_abs_error, 0);
        EXPECT_LE(c.max_abs_error, 1.0);
        EXPECT_FALSE(c.first || c.worst);
      }
    }
  }
}

TEST(Compare, NaNNeverPasses) {  // P48
  const Fixture right(problem(1, 1, 70, 70, 8));
  {
    Fixture f = right;
    f.o(69, 7) = 0x7e00;
    const Comparison c = f.compared();
    EXPECT_FALSE(c.ok);
    EXPECT_TRUE(std::isnan(c.max_abs_error));
    EXPECT_EQ(c.out_of_bounds, 1);
    ASSERT_TRUE(c.first);
    EXPECT_EQ(c.first->row, 69);
    EXPECT_EQ(c.first->column, 7);
    EXPECT_NE(c.describe().find("O[b=0 h=0 i=69 c=7] is nan"), std::string::npos) << c.describe();
  }
  {
    Fixture f = right;  // in the reference
    f.oracle.O[3] = kNaN;
    EXPECT_FALSE(f.ok());
  }
  {
    Fixture f = right;  // in both
    f.oracle.O[3] = kNaN;
    f.o(0, 3) = 0x7e00;
    EXPECT_FALSE(f.ok());
  }
  {
    Fixture f = right;  // in the bound alone
    f.oracle.blocks[1].ref16_error = kNaN;
    EXPECT_FALSE(f.ok());
  }
  {
    Fixture f = right;
    f.outputs.l[5] = float(kNaN);
    const Comparison c = f.compared();
    EXPECT_FALSE(c.ok);
    EXPECT_TRUE(std::isnan(c.lse_max_abs_error));
    EXPECT_EQ(c.first->tensor, std::string("L"));
    f.oracle.L[5] = kNaN;  // in both
    EXPECT_FALSE(f.ok());
  }
}

TEST(Compare, NaNInTheInputsFails) {
  Fixture f(problem(1, 1, 70, 70, 8));
  f.inputs.k[100] = 0x7e00;
  f.oracle = make_oracle(f.p, f.inputs, all_rows(f.p));
  EXPECT_FALSE(f.ok());
  std::fill(f.outputs.o.begin(), f.outputs.o.end(), 0x7e00);
  EXPECT_FALSE(f.ok());
}

TEST(Compare, InfinitiesPassOnlyWhereLIsMinusInfinity) {
  const Fixture right(problem(1, 1, 70, 70, 8));
  Fixture f = right;
  f.o(4, 4) = 0x7c00;
  EXPECT_FALSE(f.ok());
  EXPECT_EQ(f.compared().max_abs_error, kInfinity);
  f.oracle.O[4 * 8 + 4] = kInfinity;  // and inf is not like inf
  EXPECT_FALSE(f.ok());
  for (const double l : {kInfinity, -kInfinity}) {
    Fixture g = right;
    g.outputs.l[9] = float(l);
    EXPECT_FALSE(g.ok()) << l;
  }
  Fixture h = right;
  h.outputs.l[9] = float(kInfinity);
  h.oracle.L[9] = kInfinity;
  EXPECT_FALSE(h.ok());
}

TEST(Compare, EmptyRowsAreExact) {
  const Fixture right(problem(1, 1, 70, 40, 8, true));
  ASSERT_TRUE(right.ok());
  for (const float l :
       {0.f, -1e30f, float(kInfinity), -std::numeric_limits<float>::max(), float(kNaN)}) {
    Fixture f = right;
    f.outputs.l[29] = l;
    EXPECT_FALSE(f.ok()) << l;
  }
  Fixture f = right;
  f.o(29, 0) = 0x0001;  // the smallest subnormal
  EXPECT_FALSE(f.ok());
  f.o(29, 0) = 0x8000;  // -0 is 0
  EXPECT_TRUE(f.ok());
  f.outputs.l[30] = float(-kInfinity);  // sees a key
  EXPECT_FALSE(f.ok());
}

TEST(Compare, TheBoundIsTheDocumentedOne) {
  const Fixture right(problem(2, 2, 130, 70, 8));
  const int row = 130 + 65;  // head 1, second block
  const Oracle::Block& block = right.oracle.blocks[3 + 1];
  const double bound = 2 * block.ref16_error + 2 * ulp(block.o_max, DType::fp16);
  const double wanted = right.oracle.O[row * 8 + 2];
  double inside = wanted,
         outside = wanted;  // the last fp16 value within the bound, and the first beyond
  for (uint16_t bits = to_bits(wanted, DType::fp16);; ++bits) {
    outside = from_bits(bits, DType::fp16);
    if (std::fabs(outside - wanted) > bound) break;
    inside = outside;
  }
  Fixture f = right;
  f.o(row, 2) = to_bits(inside, DType::fp16);
  EXPECT_TRUE(f.ok());
  EXPECT_DOUBLE_EQ(f.compared().bound, bound);
  f.o(row, 2) = to_bits(outside, DType::fp16);
  const Comparison c = f.compared();
  EXPECT_FALSE(c.ok);
  EXPECT_EQ(c.first->head, 1);
  EXPECT_EQ(c.first->row, 65);
  EXPECT_DOUBLE_EQ(c.first->bound, bound);
  EXPECT_EQ(c.first->got, outside);
  EXPECT_EQ(c.first->wanted, wanted);

  Fixture g = right;
  const double l_bound = 1e-5 * std::max(1.0, block.score_max);
  g.outputs.l[row] = float(g.oracle.L[row] + 0.9 * l_bound);
  EXPECT_TRUE(g.ok());
  g.outputs.l[row] = float(g.oracle.L[row] + 1.1 * l_bound);
  EXPECT_FALSE(g.ok());
}

// A block of rows that loses one tile of keys and is otherwise right. The reason for a bound by
// blocks: under the causal mask early rows are large (few values are averaged), so that their bound
// would hide what is wrong in late ones.
TEST(Compare, ADroppedKeyTileFails) {
  for (const InputKind kind : {InputKind::normal, InputKind::moving_max}) {
    const Problem p = problem(1, 1, 512, 512, 64, true);
    const Fixture right(p, kind);
    const std::vector<std::vector<double>> S = scores(p, right.inputs, 0);
    for (int row_block = 1; row_block < 8; ++row_block) {
      for (int tile = 0; tile < row_block; ++tile) {
        Fixture f = right;
        for (int i = 64 * row_block; i < 64 * (row_block + 1); ++i) {
          double lost = 0;
          std::vector<double> o(right.oracle.O.begin() + i * 64,
                                right.oracle.O.begin() + (i + 1) * 64);
          for (int j = 64 * tile; j < 64 * (tile + 1); ++j) {
            const double weight = std::exp(S[i][j] - right.oracle.L[i]);
            lost += weight;
            for (int c = 0; c < 64; ++c)
              o[c] -= weight * from_bits(right.inputs.v[j * 64 + c], p.dtype);
          }
          for (int c = 0; c < 64; ++c) f.o(i, c) = to_bits(o[c] / (1 - lost), p.dtype);
        }
        const Comparison c = f.compared();
        EXPECT_FALSE(c.ok) << name_of(kind) << ": tile " << tile << " of rows from "
                           << 64 * row_block;
        ASSERT_TRUE(c.first);
        EXPECT_EQ(c.first->row / 64, row_block);
      }
    }
  }
}

TEST(Compare, SmallRowsAreHeldToASmallBound) {
  // The first block of rows averages values near 1000, the second near 1: an error of 0.1 is within
  // the bound of the first, and must fail in the second.
  const Problem p = problem(1, 1, 128, 2, 8);
  Fixture f(p, InputKind::uniform);
  f.inputs = inputs_of(
      p, [](int, int, int i, int) { return i < 64 ? 4.0 : -4.0; },
      [](int, int, int j, int) { return j ? 4.0 : -4.0; },
      [](int, int, int j, int c) { return j ? 1000.3 + c : 1.1; });
  f.oracle = make_oracle(p, f.inputs, all_rows(p));
  for (int row = 0; row < 128; ++row) {
    for (int c = 0; c < 8; ++c) f.o(row, c) = to_bits(f.oracle.O[row * 8 + c] + 0.1, p.dtype);
    f.outputs.l[row] = float(f.oracle.L[row]);
  }
  const Comparison c = f.compared();
  EXPECT_EQ(c.out_of_bounds, 64 * 8);
  EXPECT_EQ(c.first->row, 64);
}

TEST(Compare, WrongBaseOfLFails) {  // P06
  Fixture f(problem(1, 1, 64, 8, 8), InputKind::uniform);
  ASSERT_TRUE(f.ok());
  EXPECT_NEAR(f.oracle.L[0], 2.0794, 5e-5);
  for (float& l : f.outputs.l) l = float(l / std::log(2.0));
  EXPECT_FALSE(f.ok());
}

TEST(Compare, WritesBetweenRowsFail) {
  Problem p = problem(1, 1, 70, 70, 8);
  p.o.row = 16;
  Fixture f(p);
  ASSERT_TRUE(f.ok());
  f.outputs.o[16 * 5 + 8] = 0;
  const Comparison c = f.compared();
  EXPECT_FALSE(c.ok);
  EXPECT_EQ(c.gap_elements_written, 1);
  EXPECT_NE(c.describe().find("between the rows"), std::string::npos);
}

TEST(Compare, RowsOutsideTheSampleMustBeWritten) {  // P36
  Fixture f(problem(2, 2, 200, 70, 8));
  f.oracle = make_oracle(f.p, f.inputs, sampled_rows(f.p, 64, 5));
  ASSERT_TRUE(f.ok());
  EXPECT_EQ(f.compared().rows_checked, 128);
  int row = 0;
  while (std::binary_search(f.oracle.rows.begin(), f.oracle.rows.end(), row)) ++row;
  Fixture g = f;
  g.o(200 + row, 3) = 0xffff;
  EXPECT_FALSE(g.ok());
  EXPECT_EQ(g.compared().nan_elements, 1);
  g = f;
  g.outputs.l[200 + row] = float(kNaN);
  EXPECT_FALSE(g.ok());
}

TEST(Compare, RefusesWrongSizes) {
  const Fixture right(problem(1, 1, 10, 10, 8));
  Fixture f = right;
  f.outputs.o.pop_back();
  EXPECT_THROW(f.compared(), std::invalid_argument);
  f = right;
  f.outputs.l.push_back(0);
  EXPECT_THROW(f.compared(), std::invalid_argument);
  f = right;
  f.oracle.rows.pop_back();
  EXPECT_THROW(f.compared(), std::invalid_argument);
}

}  // namespace
}  // namespace flashsteps
