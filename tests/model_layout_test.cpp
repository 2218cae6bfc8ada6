// Where the elements of fragments and 16-bit types go, as the PTX ISA says it: ldmatrix, mma,
// conversions, shuffles. The kernels are bare, so the same cases can run on a card.
#include <Eigen/Core>
#include <bit>
#include <random>

#include "tests/model_test_support.h"

namespace flashsteps::test {
namespace {

template <typename T>
DType dtype_of() {
  return std::is_same_v<T, Eigen::half> ? DType::fp16 : DType::bf16;
}
template <typename T>
std::string with_type(const char* name) {
  return std::string(name) + (std::is_same_v<T, Eigen::half> ? "_fp16" : "_bf16");
}
template <typename T>
uint16_t bits_of(float x) {
  return std::bit_cast<uint16_t>(T(x));
}

template <typename T>
class SixteenBit : public testing::Test {};
using Types = testing::Types<Eigen::half, Eigen::bfloat16>;
TYPED_TEST_SUITE(SixteenBit, Types);

TYPED_TEST(SixteenBit, EveryPatternWidensAsEigensDoes) {
  using T = TypeParam;
  std::vector<uint16_t> patterns(65536);
  for (int i = 0; i < 65536; ++i) patterns[i] = uint16_t(i);
  DeviceBuffer in = buffer("in", patterns, dtype_of<T>());
  DeviceBuffer out(model_device(), "out", DType::fp32, 65536);
  run_on_model(with_type<T>("widen"), {.in = in.data(), .out = out.data(), .n = 65536});
  const std::vector<float> values = download<float>(out);
  for (int i = 0; i < 65536; ++i) {
    const float right = static_cast<float>(std::bit_cast<T>(uint16_t(i)));
    if (std::isnan(right)) {
      EXPECT_TRUE(std::isnan(values[i])) << i;
    } else {
      EXPECT_EQ(std::bit_cast<uint32_t>(values[i]), std::bit_cast<uint32_t>(right)) << i;
    }
  }
}

TYPED_TEST(SixteenBit, RoundsToNearestEvenAsEigensDoes) {
  using T = TypeParam;
  // Every value of the type, every tie between neighbours, and the floats just beside each.
  std::vector<float> values;
  for (int i = 0; i < 65536; ++i) {
    const float x = static_cast<float>(std::bit_cast<T>(uint16_t(i)));
    if (!std::isfinite(x)) continue;
    const float next = static_cast<float>(std::bit_cast<T>(uint16_t(i + 1)));
    // Beyond the largest finite value the next one would be one step further.
    const float step =
        std::isfinite(next) ? next - x : x - float(std::bit_cast<T>(uint16_t(i - 1)));
    for (const float y : {x, x + step / 2}) {
      values.insert(values.end(), {y, std::nextafter(y, INFINITY), std::nextafter(y, -INFINITY)});
    }
  }
  std::mt19937 random(1);
  for (int i = 0; i < 100000; ++i) values.push_back(std::bit_cast<float>(uint32_t(random())));
  values.insert(values.end(), {INFINITY, -INFINITY, NAN, -NAN, 0.f, -0.f, 1e-45f, 3e38f, 65519.f});
  if (values.size() % 2 != 0) values.push_back(0.f);
  const int n = int(values.size());

  DeviceBuffer in = buffer("in", values);
  DeviceBuffer out(model_device(), "out", dtype_of<T>(), 2 * n);
  run_on_model(with_type<T>("narrow"), {.in = in.data(), .out = out.data(), .n = n});
  const std::vector<uint16_t> bits = download<uint16_t>(out);
  for (int i = 0; i < n; ++i) {
    ASSERT_EQ(bits[i], bits[n + i]) << "pack2 and from_float differ at " << values[i];
    if (std::isnan(values[i])) {
      ASSERT_EQ(bits[i], 0x7fff) << "a card's NaN";
    } else {
      ASSERT_EQ(bits[i], bits_of<T>(values[i])) << values[i];
    }
  }
}

TYPED_TEST(SixteenBit, MmaIsAMatrixProduct) {
  using T = TypeParam;
  // Asymmetrical: no two elements of A, B or C are alike, so that a swapped pair shows.
  Eigen::Matrix<float, 16, 16> A;
  Eigen::Matrix<float, 16, 8> B, C;
  for (int i = 0; i < 16; ++i) {
    for (int k = 0; k < 16; ++k) A(i, k) = float(T(std::sin(1.f + i * 16 + k)));
    for (int n = 0; n < 8; ++n) B(i, n) = float(T(std::cos(2.f + i * 8 + n)));
    for (int n = 0; n < 8; ++n) C(i, n) = 0.125f * float(i * 8 + n);
  }
  // Fragments by PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type".
  const auto pair = [](float lo, float hi) {
    return bits_of<T>(lo) | uint32_t{bits_of<T>(hi)} << 16;
  };
  std::vector<uint32_t> operands(32 * 6);
  std::vector<float> sums(32 * 4);
  for (int lane = 0; lane < 32; ++lane) {
    const int group = lane >> 2, in_group = lane % 4;
    for (int i = 0; i < 8; i += 2) {  // a0 … a7
      const int row = (i >= 0 && i < 2) || (i >= 4 && i < 6) ? group : group + 8;
      const int col = in_group * 2 + (i >= 4 ? 8 : 0);
      operands[lane * 6 + i / 2] = pair(A(row, col), A(row, col + 1));
    }
    for (int i = 0; i < 4; i += 2) {  // b0 … b3
      const int row = in_group * 2 + (i >= 2 ? 8 : 0);
      operands[lane * 6 + 4 + i / 2] = pair(B(row, group), B(row + 1, group));
    }
    for (int i = 0; i < 4; ++i)
      sums[lane * 4 + i] = C(i < 2 ? group : group + 8, in_group * 2 + i % 2);
  }
  DeviceBuffer in = buffer("in", operands), out = buffer("out", sums);
  run_on_model(with_type<T>("mma"), {.in = in.data(), .out = out.data()});
  const std::vector<float> d = download<float>(out);
  const Eigen::Matrix<double, 16, 8> right = C.cast<double>() + A.cast<double>() * B.cast<double>();
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const double want = right(i < 2 ? lane / 4 : lane / 4 + 8, lane % 4 * 2 + i % 2);
      EXPECT_NEAR(d[lane * 4 + i], want, 1e-5) << "lane " << lane << " d" << i;
    }
  }
}

TYPED_TEST(SixteenBit, TilesThroughLdmatrixMultiply) {
  using T = TypeParam;
  std::vector<uint16_t> A(16 * 16), B(16 * 8);
  Eigen::Matrix<double, 16, 16> a;
  Eigen::Matrix<double, 16, 8> b;
  std::mt19937 random(3);
  std::uniform_real_distribution<float> uniform(-2, 2);
  for (int i = 0; i < 16 * 16; ++i) {
    A[i] = bits_of<T>(uniform(random));
    a(i / 16, i % 16) = float(std::bit_cast<T>(A[i]));
  }
  for (int i = 0; i < 16 * 8; ++i) {
    B[i] = bits_of<T>(uniform(random));
    b(i / 8, i % 8) = float(std::bit_cast<T>(B[i]));
  }
  DeviceBuffer A_gmem = buffer("A", A, dtype_of<T>()), B_gmem = buffer("B", B, dtype_of<T>());
  DeviceBuffer D(model_device(), "D", DType::fp32, 16 * 8);
  run_on_model(with_type<T>("tile_product"),
               {.in = A_gmem.data(), .out = D.data(), .extra = B_gmem.data()});
  const std::vector<float> d = download<float>(D);
  const Eigen::Matrix<double, 16, 8> right = a * b;
  for (int i = 0; i < 16 * 8; ++i) EXPECT_NEAR(d[i], right(i / 8, i % 8), 1e-4) << i;
}

// Lane 8i + r gives the address of row r of matrix i; lane t gets (t / 4, 2 (t % 4)) and the next
// of each matrix, or of its transpose.
void check_ldmatrix(bool transposed) {
  std::vector<uint16_t> rows(32 * 8);
  for (int i = 0; i < 32 * 8; ++i) rows[i] = uint16_t(1000 + i);
  std::vector<int> row_of_lane(32);
  for (int lane = 0; lane < 32; ++lane) row_of_lane[lane] = lane * 11 % 32;  // any order
  DeviceBuffer in = buffer("in", rows, DType::fp16);
  DeviceBuffer order = buffer("order", row_of_lane);
  DeviceBuffer out(model_device(), "out", DType::fp32, 32 * 4);
  run_on_model(transposed ? "ldmatrix_trans" : "ldmatrix",
               {.in = in.data(), .out = out.data(), .extra = order.data()});
  const std::vector<uint32_t> r = download<uint32_t>(out);
  for (int t = 0; t < 32; ++t) {
    for (int i = 0; i < 4; ++i) {
      for (int half = 0; half < 2; ++half) {
        int row = t / 4, col = 2 * (t % 4) + half;
        if (transposed) std::swap(row, col);
        const int want = 1000 + row_of_lane[8 * i + row] * 8 + col;
        EXPECT_EQ(int(r[t * 4 + i] >> (16 * half) & 0xffff), want)
            << "lane " << t << " register " << i;
      }
    }
  }
}

TEST(Ldmatrix, GivesEachLaneItsPair) {
  check_ldmatrix(false);
}
TEST(Ldmatrix, TransposesOnTheWay) {
  check_ldmatrix(true);
}

// As the CUDA C++ Programming Guide defines the warp shuffle functions and votes.
void check_shuffles(const char* kernel, int width) {
  std::vector<int> mine(32);
  for (int lane = 0; lane < 32; ++lane) mine[lane] = 100 + lane * 7;
  for (int n = 1; n < 32; ++n) {
    DeviceBuffer in = buffer("in", mine);
    DeviceBuffer out(model_device(), "out", DType::fp32, 7 * 32);
    run_on_model(kernel, {.in = in.data(), .out = out.data(), .n = n});
    const std::vector<int> got = download<int>(out);
    int any = 0, all = 1;
    unsigned ballot = 0;
    for (int lane = 0; lane < 32; ++lane) {
      const bool yes = mine[lane] % n == 0;
      any |= yes, all &= yes, ballot |= unsigned(yes) << lane;
    }
    for (int lane = 0; lane < 32; ++lane) {
      const int id = lane % width, base = lane - id;
      EXPECT_EQ(got[lane], mine[base + n % width]) << "index " << n << " lane " << lane;
      EXPECT_EQ(got[32 + lane], mine[id - n >= 0 ? lane - n : lane])
          << "up " << n << " lane " << lane;
      EXPECT_EQ(got[64 + lane], mine[id + n < width ? lane + n : lane])
          << "down " << n << " lane " << lane;
      // A later group is out of reach, an earlier one is not.
      EXPECT_EQ(got[96 + lane], mine[(lane ^ n) < base + width ? lane ^ n : lane])
          << "xor " << n << " lane " << lane;
      EXPECT_EQ(got[128 + lane] != 0, any != 0);
      EXPECT_EQ(got[160 + lane] != 0, all != 0);
      EXPECT_EQ(unsigned(got[192 + lane]), ballot);
    }
  }
}

TEST(Shuffles, WholeWarps) {
  check_shuffles("shuffles_32", 32);
}
TEST(Shuffles, GroupsOfEight) {
  check_shuffles("shuffles_8", 8);
}

}  // namespace
}  // namespace flashsteps::test
