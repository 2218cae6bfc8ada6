// Gradients worked out by hand, identities that hold for all gradients, and inputs that broke other
// attention kernels (the numbers P01 … are those of docs/cases.md), so that an error shared by the
// stages and the oracle would show.
#include <algorithm>
#include <cmath>

#include "common/reference/float16.h"
#include "stage_suite.h"

namespace flashsteps {
namespace {

class BackwardCases : public StageTest {
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

  // Q, K, V and dO by functions of (batch, head, row, column); O and L are those of the reference.
  template <typename Q, typename K, typename V, typename DO>
  static BackwardCase case_of(const Problem& p, Q&& q, K&& k, V&& v, DO&& d_o) {
    const GradientStrides strides = strides_of_tensors(p);
    return {p, strides,
            Inputs{fill(p, layout_q(p), q), fill(p, layout_k(p), k), fill(p, layout_v(p), v)},
            fill(p, layout_do(p, strides), d_o)};
  }

  void run(const BackwardCase& c, const Variant& variant) {
    problem_ = c.problem;
    strides_ = c.strides;
    gradients_ = c.run(stage(), variant).gradients;
  }

  double dq(int b, int h, int i, int c) const {
    return value(layout_dq(problem_, strides_), gradients_.dq, b, h, i, c);
  }
  double dk(int b, int g, int j, int c) const {
    return value(layout_dk(problem_, strides_), gradients_.dk, b, g, j, c);
  }
  double dv(int b, int g, int j, int c) const {
    return value(layout_dv(problem_, strides_), gradients_.dv, b, g, j, c);
  }

  // Relative to what is rounded: P, dS and the result, three roundings; and `absolute` for what is
  // 0.
  void expect_near(double got, double want, double absolute = 1e-6) const {
    const double unit = problem_.dtype == DType::fp16 ? 0x1p-11 : 0x1p-8;
    ASSERT_LE(std::abs(got - want), 3 * unit * std::abs(want) + absolute);
  }

  Problem problem_;
  GradientStrides strides_;
  Gradients gradients_;

 private:
  double value(const TensorLayout& t, const std::vector<uint16_t>& bits, int b, int h, int i,
               int c) const {
    return from_bits(bits[t.offset(b, h, i) + c], problem_.dtype);
  }
};

const auto constant(double x) {
  return [x](int, int, int, int) { return x; };
}
const auto row_number = [](int, int, int i, int) { return double(i); };

// Q = 0, so that query i weighs its n keys alike. With V_j = j, dO = 1 and K_j = j / 64: dP_ij = d
// j, D_i = d (n - 1) / 2, and so dQ_i = scale d / 64 times the variance of 0 … n - 1, (n^2 - 1)
// / 12. dV_j is the sum of 1 / n over the queries that see key j; dK = 0.
TEST_P(BackwardCases, UniformWeights) {
  for (const auto& [seqlen_q, seqlen_k, causal] :
       {std::tuple{5, 7, false}, {9, 9, true}, {3, 40, true}, {40, 6, true}, {70, 33, false}}) {
    for (const DType dtype : {DType::fp16, DType::bf16}) {
      for (const Variant& variant : kBackwardVariants) {
        SCOPED_TRACE(testing::Message()
                     << "Nq " << seqlen_q << " Nk " << seqlen_k << " causal " << causal << " "
                     << name_of(dtype) << " " << name_of_variant(variant));
        const Problem p = problem_of(1, 1, 1, seqlen_q, seqlen_k, 64, causal, dtype);
        run(case_of(
                p, constant(0), [](int, int, int j, int) { return j / 64.0; }, row_number,
                constant(1)),
            variant);
        std::vector<double> want_dv(seqlen_k, 0.0);
        for (int i = 0; i < seqlen_q; ++i) {
          const int n = causal ? std::clamp(i + 1 + seqlen_k - seqlen_q, 0, seqlen_k) : seqlen_k;
          for (int j = 0; j < n; ++j) want_dv[j] += 1.0 / n;
          // P is not always exact, and what it lacks is multiplied by differences up to d n.
          const double slack = 0.125 * n * n * (dtype == DType::fp16 ? 0x1p-11 : 0x1p-8);
          const double want = n == 0 ? 0 : 0.125 * (double(n) * n - 1) / 12;
          for (int c = 0; c < 64; ++c) {
            if (n == 0) {
              ASSERT_EQ(dq(0, 0, i, c), 0) << "row " << i;
            } else {
              expect_near(dq(0, 0, i, c), want, slack);
            }
          }
        }
        for (int j = 0; j < seqlen_k; ++j) {
          for (int c = 0; c < 64; ++c) {
            expect_near(dv(0, 0, j, c), want_dv[j]);
            expect_near(dk(0, 0, j, c), 0);
          }
        }
      }
    }
  }
}

// K = 0 weighs all n keys alike, too, whatever Q is. With V_j = j, dO = 1 and Q = 1: dK_j = scale
// Nq d / n (j - (n - 1) / 2); dQ = 0.
TEST_P(BackwardCases, GradientOfEqualKeys) {
  const Problem p = problem_of(1, 1, 1, 48, 8, 64);
  for (const Variant& variant : kBackwardVariants) {
    run(case_of(p, constant(1), constant(0), row_number, constant(1)), variant);
    for (int c = 0; c < 64; ++c) {
      for (int j = 0; j < 8; ++j) expect_near(dk(0, 0, j, c), 0.125 * 48 * 64 / 8 * (j - 3.5));
      for (int i = 0; i < 48; ++i) expect_near(dq(0, 0, i, c), 0);
    }
  }
}

// P04: with a scale of 0 the weights are alike, and nothing reaches Q and K.
TEST_P(BackwardCases, P04ScaleZero) {
  for (const bool causal : {false, true}) {
    Problem p = problem_of(1, 1, 1, 65, 65, 64, causal);
    p.scale = 0;
    const BackwardCase c(p, InputKind::normal, 4);
    for (const Variant& variant : kBackwardVariants) {
      run(c, variant);
      for (int i = 0; i < 65; ++i) {
        for (int col = 0; col < 64; ++col) {
          ASSERT_EQ(dq(0, 0, i, col), 0);
          ASSERT_EQ(dk(0, 0, i, col), 0);
        }
      }
    }
  }
}

// P07, P10, P14: a query that sees no key has dQ = 0 and adds nothing to dK and dV. Its dO is huge,
// so that what it would add shows.
TEST_P(BackwardCases, P10RowsThatSeeNoKey) {
  const Problem p = problem_of(1, 2, 1, 90, 50, 64, true),
                seeing = problem_of(1, 2, 1, 50, 50, 64, true);
  const BackwardCase small(seeing, InputKind::normal, 2);
  const auto from_small = [&](const std::vector<uint16_t>& bits) {
    return [&](int, int h, int i, int c) {
      return i < 40 ? 30000 : from_bits(bits[(h * 50 + i - 40) * 64 + c], seeing.dtype);
    };
  };
  const auto kv = [&](const std::vector<uint16_t>& bits) {
    return [&](int, int, int j, int c) { return from_bits(bits[j * 64 + c], seeing.dtype); };
  };
  const BackwardCase c = case_of(p, from_small(small.inputs.q), kv(small.inputs.k),
                                 kv(small.inputs.v), from_small(small.backward.d_o));
  for (const Variant& variant : kBackwardVariants) {
    SCOPED_TRACE(name_of_variant(variant));
    run(c, variant);
    const Gradients got = gradients_;
    for (int h = 0; h < 2; ++h) {
      for (int i = 0; i < 40; ++i) {
        for (int col = 0; col < 64; ++col) ASSERT_EQ(dq(0, h, i, col), 0) << "row " << i;
      }
    }
    EXPECT_EQ(
        small.judge({.dq = small.run(stage(), variant).gradients.dq, .dk = got.dk, .dv = got.dv}),
        "");
  }
}

TEST_P(BackwardCases, P14NoKeysNoQueries) {
  for (const bool causal : {false, true}) {
    for (const Variant& variant : kBackwardVariants) {
      run(BackwardCase(problem_of(2, 2, 2, 5, 0, 64, causal), InputKind::normal, 1), variant);
      for (int b = 0; b < 2; ++b) {
        for (int i = 0; i < 5; ++i) ASSERT_EQ(dq(b, 1, i, 63), 0);
      }
      run(BackwardCase(problem_of(2, 4, 2, 0, 70, 64, causal), InputKind::normal, 1), variant);
      for (int b = 0; b < 2; ++b) {
        for (int j = 0; j < 70; ++j) {
          for (int c = 0; c < 64; ++c) {
            ASSERT_EQ(dk(b, 1, j, c), 0);
            ASSERT_EQ(dv(b, 1, j, c), 0);
          }
        }
      }
    }
  }
}

// P16, P24: dK and dV of a KV head are sums over the query heads that read it. K = 0 weighs keys
// alike, so dV = sum of dO / n, here with dO = h + 1.
TEST_P(BackwardCases, P24GroupSum) {
  const Problem p = problem_of(1, 6, 2, 3, 5, 64);
  for (const Variant& variant : kBackwardVariants) {
    run(case_of(p, constant(1), constant(0), constant(1),
                [](int, int h, int, int) { return h + 1.0; }),
        variant);
    for (int j = 0; j < 5; ++j) {
      expect_near(dv(0, 0, j, j), 3 * (1 + 2 + 3) / 5.0);
      expect_near(dv(0, 1, j, j), 3 * (4 + 5 + 6) / 5.0);
    }
  }
}

// P24: the same against plain heads on repeated K and V: dQ equal to the bit, dK and dV the sums.
TEST_P(BackwardCases, P24GroupedEqualsRepeated) {
  const Problem grouped = problem_of(1, 4, 2, 40, 70, 64, true);
  const Problem plain = problem_of(1, 4, 4, 40, 70, 64, true);
  const BackwardCase c(grouped, InputKind::normal, 2);
  Inputs repeated = c.inputs;
  repeated.k.clear();
  repeated.v.clear();
  for (int h = 0; h < 4; ++h) {
    const int64_t begin = int64_t{h / 2} * 70 * 64, end = begin + 70 * 64;
    repeated.k.insert(repeated.k.end(), c.inputs.k.begin() + begin, c.inputs.k.begin() + end);
    repeated.v.insert(repeated.v.end(), c.inputs.v.begin() + begin, c.inputs.v.begin() + end);
  }
  run(BackwardCase(plain, strides_of_tensors(plain), repeated, c.backward.d_o),
      {.deterministic = true});
  std::vector<double> want_dk, want_dv;
  for (int g = 0; g < 2; ++g) {
    for (int j = 0; j < 70; ++j) {
      for (int col = 0; col < 64; ++col) {
        want_dk.push_back(dk(0, 2 * g, j, col) + dk(0, 2 * g + 1, j, col));
        want_dv.push_back(dv(0, 2 * g, j, col) + dv(0, 2 * g + 1, j, col));
      }
    }
  }
  const std::vector<uint16_t> want_dq = gradients_.dq;
  run(c, {.deterministic = true});
  EXPECT_EQ(gradients_.dq, want_dq);
  for (size_t e = 0; e < want_dk.size(); ++e) {
    const int g = int(e / (70 * 64)), j = int(e / 64 % 70), col = int(e % 64);
    // Each of the two that were added was rounded on its own.
    expect_near(dk(0, g, j, col), want_dk[e], 4e-3);
    expect_near(dv(0, g, j, col), want_dv[e], 4e-3);
  }
}

// P23: right with and without a mask, at a length of several tiles: every weight of a query goes to
// some key, so that the rows of dV add up to those rows of dO whose queries see a key.
TEST_P(BackwardCases, P23RowsOfDVAddUp) {
  for (const auto& [seqlen_q, seqlen_k] : {std::pair{256, 256}, {100, 60}}) {
    for (const bool causal : {false, true}) {
      SCOPED_TRACE(testing::Message()
                   << "Nq " << seqlen_q << " Nk " << seqlen_k << " causal " << causal);
      const Problem p = problem_of(1, 2, 1, seqlen_q, seqlen_k, 64, causal);
      const BackwardCase c(p, InputKind::moving_max, 6);
      run(c, {});
      for (int col = 0; col < 64; ++col) {
        double sum = 0, want = 0, magnitude = 0;
        for (int j = 0; j < seqlen_k; ++j) {
          sum += dv(0, 0, j, col);
          magnitude += std::abs(dv(0, 0, j, col));
        }
        for (int h = 0; h < 2; ++h) {
          for (int i = 0; i < seqlen_q; ++i) {
            if (!causal || i + 1 + seqlen_k - seqlen_q > 0)
              want +=
                  from_bits(c.backward.d_o[layout_do(p, c.strides).offset(0, h, i) + col], p.dtype);
          }
        }
        // Roundings of P and of dV are independent, but their sum is bounded by that of all of
        // them.
        ASSERT_NEAR(sum, want, 0x1p-10 * magnitude + 0.02) << "column " << col;
      }
    }
  }
}

// Every row of dS adds up to 0: where all keys are one, dQ = scale * (sum of the row) * key = 0.
TEST_P(BackwardCases, RowsOfDSAddUpToZero) {
  const Problem p = problem_of(1, 2, 2, 40, 90, 64, true);
  BackwardCase any(p, InputKind::normal, 4);
  Inputs inputs = any.inputs;
  inputs.k = fill(p, layout_k(p), constant(1));
  const BackwardCase c(p, any.strides, inputs, any.backward.d_o);
  for (const Variant& variant : kBackwardVariants) {
    run(c, variant);
    for (int h = 0; h < 2; ++h) {
      for (int i = 0; i < 40; ++i) ASSERT_NEAR(dq(0, h, i, i % 64), 0, 4e-3) << "row " << i;
    }
  }
}

// All rows of V equal: O does not depend on the weights, so dQ = dK = 0 for any dO.
TEST_P(BackwardCases, EqualValues) {
  for (const DType dtype : {DType::fp16, DType::bf16}) {
    const Problem p = problem_of(1, 2, 2, 70, 90, 64, true, dtype);
    const BackwardCase any(p, InputKind::large_logits, 6);
    Inputs inputs = any.inputs;
    inputs.v = fill(p, layout_v(p), constant(0.75));
    const BackwardCase c(p, any.strides, inputs, any.backward.d_o);
    for (const Variant& variant : kBackwardVariants) {
      run(c, variant);
      EXPECT_EQ(c.judge(gradients_), "");
      for (int h = 0; h < 2; ++h) {
        for (int i = 0; i < 70; ++i) ASSERT_NEAR(dq(0, h, i, i % 64), 0, 1e-4);
        for (int j = 0; j < 90; ++j) ASSERT_NEAR(dk(0, h, j, j % 64), 0, 1e-3);
      }
    }
  }
}

// P19: an accumulator of more than 2^31 elements; offsets are widened before they are multiplied.
TEST_P(BackwardCases, P19OffsetsBeyond32Bits) {
  if (stage().target == Target::model) GTEST_SKIP() << "8 GiB and 132800 heads are for a card";
  const Problem p = problem_of(8300, 16, 16, 1, 1, 128), slice = problem_of(8, 16, 16, 1, 1, 128);
  if (const auto why = why_not(stage(), p, device().info())) GTEST_SKIP() << *why;
  const GradientStrides strides = strides_of_tensors(p);
  const Inputs inputs = make_inputs(p, InputKind::normal, 2);
  const BackwardInputs backward{.d_o = make_d_o(p, strides, 2),
                                .forward = reference_outputs(p, inputs)};
  const Gradients all =
      run_backward(device(), stage(), p, strides, inputs, backward, {.deterministic = true})
          .gradients;
  for (const int first : {0, 8300 - 8}) {
    const auto part = [&](const auto& x, int64_t row) {
      using Vector = std::remove_cvref_t<decltype(x)>;
      return Vector(x.begin() + first * 16 * row, x.begin() + (first + 8) * 16 * row);
    };
    const Inputs some = {part(inputs.q, 128), part(inputs.k, 128), part(inputs.v, 128)};
    const BackwardInputs its{part(backward.d_o, 128),
                             {part(backward.forward.o, 128), part(backward.forward.l, 1)}};
    const Gradients want = run_backward(device(), stage(), slice, strides_of_tensors(slice), some,
                                        its, {.deterministic = true})
                               .gradients;
    EXPECT_EQ(part(all.dq, 128), want.dq) << "from batch " << first;
    EXPECT_EQ(part(all.dk, 128), want.dk) << "from batch " << first;
    EXPECT_EQ(part(all.dv, 128), want.dv) << "from batch " << first;
  }
}

// P21: many blocks with much to add, again and again; a race would differ now and then.
TEST_P(BackwardCases, P21FiftyRuns) {
  if (stage().target == Target::model)
    GTEST_SKIP() << "the model finds races at any size; this one is for a card";
  const Problem p = problem_of(300, 1, 1, 2048, 128, 128);
  const GradientStrides strides = strides_of_tensors(p);
  Inputs inputs = make_inputs(p, InputKind::normal, 2);
  for (auto* tensor : {&inputs.q, &inputs.k, &inputs.v}) {
    for (uint16_t& x : *tensor) x = to_bits(3 * from_bits(x, p.dtype), p.dtype);
  }
  const BackwardInputs backward{.d_o = fill(p, layout_do(p, strides), constant(1)),
                                .forward = reference_outputs(p, inputs)};
  const GradientOracles oracles =
      make_gradient_oracles(p, strides, inputs, backward.d_o, row_statistics(p, strides, backward),
                            affordable_gradient_rows(p, 1));
  Gradients firsts[2];  // the fixed order takes the row blocks the other way round
  for (int i = 0; i < 50; ++i) {
    const Variant variant = kBackwardVariants[i % 2];
    Gradients& first = firsts[i % 2];
    const Gradients run =
        run_backward(device(), stage(), p, strides, inputs, backward, variant).gradients;
    ASSERT_EQ(compare(p, strides, oracles, run).describe(), "") << "run " << i;
    if (i < 2) first = run;
    // No ASSERT_EQ: it would print millions of elements.
    ASSERT_TRUE(run.dk == first.dk) << "dK of run " << i << " differs from the first";
    ASSERT_TRUE(run.dv == first.dv) << "dV of run " << i << " differs from the first";
    if (variant.deterministic) {
      ASSERT_TRUE(run.dq == first.dq) << "dQ of run " << i << " differs from the first";
    }
  }
}

FLASHSTEPS_FOR_BACKWARD_STAGES(BackwardCases);

}  // namespace
}  // namespace flashsteps
