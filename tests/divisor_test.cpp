// Division by a multiplication (common/gpu/divisor.h) is division, for all indices.
#include "common/gpu/divisor.h"

#include <gtest/gtest.h>

#include <random>
#include <stdexcept>

#include "common/stage/device.h"

namespace flashsteps {
namespace {

constexpr int64_t kLimit = int64_t{1} << 31;  // of indices and of divisors

// n / d steps up at the multiples of d alone, and quotient(n, d) does not fall as n grows: so it is
// right everywhere if it is at each multiple and just before. Checks these, or `samples` of them
// where there are more, always the last ones.
void expect_division(int64_t d, int64_t samples, std::mt19937_64& random) {
  const Divisor divisor = divisor_of(d);
  ASSERT_EQ(divisor.value, d);
  const int64_t steps = (kLimit - 1) / d;
  const auto check = [&](int64_t n) {
    if (n >= 0 && n < kLimit) {
      ASSERT_EQ(quotient(int(n), divisor), n / d) << n << " / " << d;
    }
  };
  for (int64_t s = 0; s < std::min(steps, samples); ++s) {
    const int64_t step = steps <= samples ? s + 1 : steps - int64_t(random() % steps);
    check(step * d - 1);
    check(step * d);
  }
  for (const int64_t n : {int64_t{0}, steps * d - 1, steps * d, kLimit - 1}) check(n);
}

TEST(Divisor, DividesEveryIndex) {
  std::mt19937_64 random(1);
  for (int64_t d = 1; d <= 3000; ++d) expect_division(d, 2000, random);
  for (int shift = 11; shift <= 31; ++shift) {  // around the powers of two, where the shift changes
    for (int64_t d = (int64_t{1} << shift) - 3; d <= (int64_t{1} << shift) + 3; ++d) {
      if (d < kLimit) expect_division(d, 2000, random);
    }
  }
  for (int i = 0; i < 3000; ++i)
    expect_division(1 + int64_t(random() % (kLimit - 1)), 2000, random);
}

// Small divisors without a gap, at the end of the range, where an error of the magic number is
// largest.
TEST(Divisor, DividesTheLargestIndices) {
  for (int64_t d = 1; d <= 300; ++d) {
    const Divisor divisor = divisor_of(d);
    for (int64_t n = kLimit - 5000; n < kLimit; ++n) ASSERT_EQ(quotient(int(n), divisor), n / d);
  }
}

TEST(Divisor, RefusesWhatItCannotDivideBy) {
  for (const int64_t d : {int64_t{0}, int64_t{-1}, kLimit, int64_t{1} << 40}) {
    EXPECT_THROW(divisor_of(d), std::invalid_argument) << d;
  }
}

TEST(Divisor, CountsFitAnIndex) {
  for (const int64_t count : {int64_t{0}, int64_t{1}, kLimit - 1}) {
    EXPECT_EQ(index_count(count), count);
  }
  for (const int64_t count : {int64_t{-1}, kLimit, int64_t{1} << 40}) {
    EXPECT_THROW(index_count(count), DeviceError) << count;
  }
}

}  // namespace
}  // namespace flashsteps
