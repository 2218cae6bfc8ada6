// Formulas as papers print them, put to numbers: the rows of docs/claims.md that are settled by
// arithmetic alone.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>

namespace flashsteps {
namespace {

// One row of S in two blocks of two keys, head_dim 1. The second block raises the maximum by 3.
constexpr std::array<double, 2> kS1 = {1., -0.5}, kS2 = {4., 2.};
constexpr std::array<double, 2> kV1 = {1., 2.}, kV2 = {-1., 0.5};

struct Block {
  double m, l, O_unnormalised;  // O_unnormalised = sum of exp(S - m) V
};

Block block_of(const std::array<double, 2>& S, const std::array<double, 2>& V, double m) {
  const double p0 = std::exp(S[0] - m), p1 = std::exp(S[1] - m);
  return {m, p0 + p1, p0 * V[0] + p1 * V[1]};
}

class TwoBlocks : public testing::Test {
 protected:
  const Block first = block_of(kS1, kV1, 1.);
  const Block second = block_of(kS2, kV2, 4.);  // its maximum is that of both
  const double factor = std::exp(first.m - second.m);
  const double l = factor * first.l + second.l;
  // Softmax over all four keys, the definition.
  const double right = [] {
    double sum = 0., O = 0.;
    for (int j = 0; j < 2; ++j) {
      sum += std::exp(kS1[j]) + std::exp(kS2[j]);
      O += std::exp(kS1[j]) * kV1[j] + std::exp(kS2[j]) * kV2[j];
    }
    return O / sum;
  }();
};

// FlashAttention-2, section 2.3.1, prints O2 = diag(l1 / l2)^-1 O1 + P2 V2.
TEST_F(TwoBlocks, NormalisedOutputNeedsTheFactorAndNoInverse) {
  const double O1 = first.O_unnormalised / first.l;
  const double P2V2 = second.O_unnormalised / l;
  EXPECT_NEAR(first.l * factor / l * O1 + P2V2, right, 1e-15);
  EXPECT_GT(std::abs(1. / (first.l / l) * O1 + P2V2 - right), 0.1);  // as printed
  EXPECT_GT(std::abs(first.l / l * O1 + P2V2 - right), 0.1);         // without the inverse alone
}

// The same paper's Algorithm 1, line 10, prints O = diag(exp(m_old - m_new))^-1 O + P V.
TEST_F(TwoBlocks, UnnormalisedOutputIsMultipliedByTheFactor) {
  EXPECT_NEAR((factor * first.O_unnormalised + second.O_unnormalised) / l, right, 1e-15);
  EXPECT_GT(std::abs((first.O_unnormalised / factor + second.O_unnormalised) / l - right),
            0.1);  // as printed
}

// At the first tile m_old is -inf and O is 0: the factor gives 0, its inverse NaN.
TEST_F(TwoBlocks, TheInverseFailsAtTheFirstTile) {
  const double m_old = -std::numeric_limits<double>::infinity(), O = 0.;
  EXPECT_EQ(std::exp(m_old - first.m) * O, 0.);
  EXPECT_TRUE(std::isnan(1. / std::exp(m_old - first.m) * O));
}

}  // namespace
}  // namespace flashsteps
