// Where wgmma finds its operands and leaves its sums, and where TMA puts a box, as the PTX ISA says
// it: for every number of columns, both types, operands along k, along m and n, and in registers.
// The kernels are bare, so the same cases can run on a card.
#include <Eigen/Core>
#include <bit>

#include "tests/model_test_support.h"

namespace flashsteps::test {
namespace {

constexpr int kM = 64, kK = 64;

/// An operand in shared memory, as the PTX ISA draws it ("Canonical layouts", 128-byte swizzle): in
/// units of 16 bytes, 8 units make a row of 128 bytes, 8 rows an atom in which the unit's number is
/// XORed with the row's. \param rows of 64 elements, one after the other
class Image {
 public:
  explicit Image(int rows) : halves_(size_t(rows) * 64) {}
  /// Element `along` (0 to 63) of row `row`.
  void set(int row, int along, uint16_t value) {
    const int atom = row / 8, line = row % 8, unit = along / 8 ^ line;
    halves_[size_t(atom * 8 + line) * 64 + size_t(unit) * 8 + size_t(along % 8)] = value;
  }
  const std::vector<uint16_t>& halves() const { return halves_; }

 private:
  std::vector<uint16_t> halves_;
};

template <typename T>
uint16_t bits_of(int x) {
  return std::bit_cast<uint16_t>(T(float(x)));
}

// Whole numbers, so that every sum is exact; no two rows or columns are alike.
int a_value(int m, int k) {
  return (m * 7 + k * 13 + m * k % 5) % 9 - 4;
}
int b_value(int k, int n) {
  return (k * 11 + n * 5 + k * n % 7) % 11 - 5;
}

template <typename T>
class Wgmma : public testing::Test {
 protected:
  static constexpr bool kHalf = std::is_same_v<T, Eigen::half>;

  /// \param source "k", "mn" or "registers"
  static void check(const std::string& source, int n, bool b_mn, bool accumulate) {
    std::vector<uint16_t> in;
    if (source == "registers") {
      // PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16", A: by thread and step.
      in.resize(kM * kK);
      for (int t = 0; t < 128; ++t) {
        for (int step = 0; step < kK / 16; ++step) {
          for (int i = 0; i < 8; ++i) {
            const int row = t / 32 * 16 + t % 32 / 4 + (i % 4 >= 2 ? 8 : 0);
            const int col = t % 4 * 2 + i % 2 + (i >= 4 ? 8 : 0);
            in[size_t((t * (kK / 16) + step) * 8 + i)] = bits_of<T>(a_value(row, step * 16 + col));
          }
        }
      }
    } else {
      Image A(64);
      for (int m = 0; m < kM; ++m) {
        for (int k = 0; k < kK; ++k) {
          source == "k" ? A.set(m, k, bits_of<T>(a_value(m, k)))
                        : A.set(k, m, bits_of<T>(a_value(m, k)));
        }
      }
      in = A.halves();
    }
    Image B(b_mn ? (n + 63) / 64 * kK : n);
    for (int k = 0; k < kK; ++k) {
      for (int j = 0; j < n; ++j) {
        const uint16_t x = bits_of<T>(b_value(k, j));
        b_mn ? B.set(j / 64 * kK + k, j % 64, x) : B.set(j, k, x);
      }
    }
    in.insert(in.end(), B.halves().begin(), B.halves().end());
    std::vector<float> before(size_t(kM * n));
    for (size_t i = 0; i < before.size(); ++i) before[i] = float(i % 1000);

    DeviceBuffer in_gmem = buffer("in", in, kHalf ? DType::fp16 : DType::bf16);
    DeviceBuffer out = buffer("out", before);
    run_on_model("wgmma_" + source + (kHalf ? "_fp16" : "_bf16"),
                 {.in = in_gmem.data(),
                  .out = out.data(),
                  .n = n,
                  .blocks = (b_mn ? 2 : 0) + (accumulate ? 4 : 0)});
    const std::vector<float> d = download<float>(out);
    for (int t = 0; t < 128; ++t) {
      for (int i = 0; i < n / 2; ++i) {
        const int row = t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8;
        const int col = i / 4 * 8 + t % 4 * 2 + i % 2;
        const size_t at = size_t(t * n / 2 + i);
        int sum = accumulate ? int(before[at]) : 0;
        for (int k = 0; k < kK; ++k) sum += a_value(row, k) * b_value(k, col);
        ASSERT_EQ(d[at], float(sum)) << source << " n " << n << " B along " << (b_mn ? "n" : "k")
                                     << ", thread " << t << " sum " << i;
      }
    }
  }
};
using Types = testing::Types<Eigen::half, Eigen::bfloat16>;
TYPED_TEST_SUITE(Wgmma, Types);

TYPED_TEST(Wgmma, MultipliesForEveryNumberOfColumns) {
  for (const char* source : {"k", "mn", "registers"}) {
    for (int n = 8; n <= 256; n += 8) {
      for (const bool b_mn : {false, true}) {
        const WithOptions options(uint64_t(n), 1);
        ASSERT_NO_FATAL_FAILURE(TestFixture::check(source, n, b_mn, n % 16 == 0));
      }
    }
  }
}

constexpr int kRows = 40, kHeads = 3, kBatch = 2, kCols = 72, kHeld = 80;

/// A tensor whose heads lie within its rows, with 8 elements of padding, and each element's place.
size_t place(int col, int row, int head, int batch) {
  return (size_t(batch * kRows + row) * kHeads + size_t(head)) * kHeld + size_t(col);
}

struct At {
  int col, row, head, batch, rows;
};
// Within, over the end of the rows and of the columns, before the first row, wholly outside.
constexpr At kBoxes[] = {{0, 0, 0, 0, 8},   {0, 8, 2, 1, 32},   {64, 3, 1, 0, 17},
                         {0, 30, 1, 1, 16}, {64, 39, 0, 1, 24}, {-8, -5, 2, 0, 8},
                         {0, 40, 0, 0, 8},  {128, 0, 0, 1, 8}};

/// Which element of the tensor word `i` of a box in shared memory holds, first half; -1: none.
int64_t element_of(const At& at, int i) {
  const int row = i / 32, unit = i % 32 / 4 ^ row % 8, col = at.col + unit * 8 + i % 4 * 2;
  const bool inside = at.row + row >= 0 && at.row + row < kRows && col >= 0 && col < kCols;
  return inside ? int64_t(place(col, at.row + row, at.head, at.batch)) : -1;
}

TEST(Tma, LoadsABoxWithTheSwizzleAndZerosOutside) {
  const size_t count = place(0, 0, 0, kBatch);
  std::vector<uint16_t> tensor(count);
  for (size_t i = 0; i < count; ++i) tensor[i] = uint16_t(i + 1);
  DeviceBuffer in = buffer("in", tensor, DType::fp16);
  for (const At& at : kBoxes) {
    DeviceBuffer where = buffer("at", std::vector<int>{at.col, at.row, at.head, at.batch});
    DeviceBuffer out(model_device(), "out", DType::fp32, at.rows * 32);
    model::take_ledger();
    run_on_model(
        "load_box",
        {.in = in.data(), .out = out.data(), .extra = where.data(), .n = kRows, .blocks = at.rows});
    const Ledger ledger = model::take_ledger();
    const std::vector<uint32_t> words = download<uint32_t>(out);
    int64_t inside = 0;
    for (int i = 0; i < at.rows * 32; ++i) {
      const int64_t element = element_of(at, i);
      const uint32_t want =
          element < 0 ? 0 : tensor[size_t(element)] | uint32_t{tensor[size_t(element) + 1]} << 16;
      ASSERT_EQ(words[size_t(i)], want) << "row " << at.row << " word " << i;
      inside += element >= 0;
    }
    const auto read = ledger.global_read.find("in");
    EXPECT_EQ(read == ledger.global_read.end() ? 0 : read->second, inside * 4);
    EXPECT_EQ(ledger.shared_written, at.rows * 128);
    EXPECT_EQ(ledger.tma, 1);
    EXPECT_EQ(ledger.mbarrier_phases, 1);
  }
}

TEST(Tma, StoresABoxAndNothingOutside) {
  const size_t count = place(0, 0, 0, kBatch);
  for (const At& at : kBoxes) {
    std::vector<uint16_t> tensor(count, 0x1234);
    DeviceBuffer where = buffer("at", std::vector<int>{at.col, at.row, at.head, at.batch});
    DeviceBuffer in = buffer("in", tensor, DType::fp16);
    std::vector<uint32_t> words(size_t(at.rows) * 32);
    for (size_t i = 0; i < words.size(); ++i) words[i] = uint32_t(i * 3 + 1) << 16 | uint32_t(i);
    DeviceBuffer box = buffer("box", words);
    model::take_ledger();
    run_on_model(
        "store_box",
        {.in = in.data(), .out = box.data(), .extra = where.data(), .n = kRows, .blocks = at.rows});
    const Ledger ledger = model::take_ledger();
    int64_t inside = 0;
    for (int i = 0; i < at.rows * 32; ++i) {
      const int64_t element = element_of(at, i);
      if (element < 0) continue;
      tensor[size_t(element)] = uint16_t(words[size_t(i)]);
      tensor[size_t(element) + 1] = uint16_t(words[size_t(i)] >> 16);
      ++inside;
    }
    ASSERT_EQ(download<uint16_t>(in), tensor) << "row " << at.row << " column " << at.col;
    const auto written = ledger.global_written.find("in");
    EXPECT_EQ(written == ledger.global_written.end() ? 0 : written->second, inside * 4);
    EXPECT_EQ(ledger.shared_read, at.rows * 128);
  }
}

}  // namespace
}  // namespace flashsteps::test
