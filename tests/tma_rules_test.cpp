// What TMA cannot take is refused by the rule that it breaks: each rule just inside and just
// outside, its whole message, and what a person who runs a program sees of it.
#include "common/gpu/tma_rules.h"

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <string>
#include <utility>

namespace flashsteps {
namespace {

// A tensor that breaks no rule; each test changes one thing of it.
struct Tensor {
  uintptr_t base = 4096;
  int head_dim = 64, rows = 100, heads = 3, batch = 2;
  Strides strides{.batch = 19200, .head = 6400, .row = 64};
  int box_cols = 64, box_rows = 64;
};

std::string why_not(const Tensor& t) {
  return why_not_tma(reinterpret_cast<const void*>(t.base), t.head_dim, t.rows, t.heads, t.batch,
                     t.strides, t.box_cols, t.box_rows);
}

// With one member set to this value.
template <typename T>
std::string why_not(T Tensor::*member, T value) {
  Tensor tensor;
  tensor.*member = value;
  return why_not(tensor);
}

std::string why_not(int64_t Strides::*stride, int64_t value) {
  Tensor tensor;
  tensor.strides.*stride = value;
  return why_not(tensor);
}

TEST(TmaRules, TakesATensorThatBreaksNone) {
  EXPECT_EQ(why_not(Tensor{}), "");
}

TEST(TmaRules, BaseIsAlignedTo16Bytes) {
  for (const uintptr_t base : {16, 32, 4096 + 16}) EXPECT_EQ(why_not(&Tensor::base, base), "");
  for (const uintptr_t base : {2, 8, 15, 17, 4096 + 8}) {
    EXPECT_EQ(why_not(&Tensor::base, base), "TMA needs a tensor that is aligned to 16 bytes")
        << base;
  }
}

TEST(TmaRules, EveryExtentIsAtLeastOne) {
  const std::pair<const char*, int Tensor::*> extents[] = {{"head_dim", &Tensor::head_dim},
                                                           {"row", &Tensor::rows},
                                                           {"head", &Tensor::heads},
                                                           {"batch", &Tensor::batch}};
  for (const auto& [name, extent] : extents) {
    EXPECT_EQ(why_not(extent, 1), "") << name;
    EXPECT_EQ(why_not(extent, 0),
              std::string("TMA needs at least one entry along ") + name + "; 0 were given");
    EXPECT_EQ(why_not(extent, -1),
              std::string("TMA needs at least one entry along ") + name + "; -1 were given");
  }
}

TEST(TmaRules, StridesAreMultiplesOf8Below2To39) {
  constexpr int64_t kMost = (int64_t{1} << 39) - 8;
  struct Dimension {
    const char* name;
    int64_t Strides::*stride;
    int Tensor::*extent;
  };
  for (const auto& [name, stride, extent] : {Dimension{"row", &Strides::row, &Tensor::rows},
                                             Dimension{"head", &Strides::head, &Tensor::heads},
                                             Dimension{"batch", &Strides::batch, &Tensor::batch}}) {
    for (const int64_t inside : {int64_t{0}, int64_t{8}, int64_t{72}, kMost})
      EXPECT_EQ(why_not(stride, inside), "") << name << " " << inside;
    for (const int64_t outside : {int64_t{-8}, int64_t{1}, int64_t{4}, int64_t{7}, int64_t{9},
                                  int64_t{68}, kMost - 4, kMost + 8, INT64_MIN}) {
      EXPECT_EQ(why_not(stride, outside),
                std::string("TMA needs a ") + name +
                    " stride that is a multiple of 8 elements, from 0 to 2^39; " +
                    std::to_string(outside) + " was given");
    }
    // Along a dimension of one entry no stride is ever used; of two it is.
    Tensor tensor;
    tensor.strides.*stride = 9;
    tensor.*extent = 1;
    EXPECT_EQ(why_not(tensor), "") << name;
    tensor.*extent = 2;
    EXPECT_NE(why_not(tensor), "") << name;
  }
}

TEST(TmaRules, BoxesAre64ColumnsWide) {
  EXPECT_EQ(why_not(&Tensor::box_cols, 64), "");
  for (const int cols : {0, 56, 63, 65, 72, 128}) {
    EXPECT_EQ(why_not(&Tensor::box_cols, cols), "the 128-byte swizzle needs boxes of 64 columns; " +
                                                    std::to_string(cols) + " were given");
  }
}

TEST(TmaRules, BoxesHave1To256Rows) {
  for (const int rows : {1, 2, 255, 256}) EXPECT_EQ(why_not(&Tensor::box_rows, rows), "") << rows;
  for (const int rows : {-1, 0, 257}) {
    EXPECT_EQ(why_not(&Tensor::box_rows, rows),
              "TMA copies boxes of 1 to 256 rows; " + std::to_string(rows) + " were given");
  }
}

#ifdef FLASHSTEPS_HAS_MODEL
// What a program says and returns: the rule in one line, exit status 3; where all stages were asked
// for, the stage is left out with that reason. The stages of the ladder get only tensors that
// validate() let pass and memory could hold, which break no rule; so the program that runs has a
// stage of its own, tests/kernels/hopper_tma_rules.cu, which breaks the rule that seqlen_q numbers.
TEST(TmaRules, AreWhatAProgramPrints) {
  const char* bin = std::getenv("FLASHSTEPS_BIN");
  ASSERT_TRUE(bin);
  // Exit status, and what was printed to both streams.
  const auto run = [&](const std::string& command, const char* stages, int rule) {
    const std::string line = std::string("'") + bin + "/../tests/tma_rules_program' " + command +
                             " --stage " + stages +
                             " --device model --head-dim 64 --heads 2 --seqlen-k 40 --seqlen-q " +
                             std::to_string(rule) + " 2>&1";
    std::FILE* pipe = popen(line.c_str(), "r");
    if (!pipe) return std::pair(-1, "cannot start " + line);
    std::string said;
    char buffer[256];
    while (const size_t size = std::fread(buffer, 1, sizeof(buffer), pipe))
      said.append(buffer, size);
    const int status = pclose(pipe);
    return std::pair(WIFEXITED(status) ? WEXITSTATUS(status) : -1, said);
  };
  const char* const told[] = {
      "TMA needs a tensor that is aligned to 16 bytes",
      "TMA needs at least one entry along head_dim; 0 were given",
      "TMA needs a row stride that is a multiple of 8 elements, from 0 to 2^39; 68 was given",
      "TMA needs a head stride that is a multiple of 8 elements, from 0 to 2^39; -8 was given",
      "TMA needs a batch stride that is a multiple of 8 elements, from 0 to 2^39; 549755813888 was "
      "given",
      "the 128-byte swizzle needs boxes of 64 columns; 32 were given",
      "TMA copies boxes of 1 to 256 rows; 257 were given"};
  for (const std::string command : {"check", "count"}) {
    SCOPED_TRACE(command);
    const auto [status, said] = run(command, "98", 100);  // breaks no rule, and computes nothing
    EXPECT_EQ(status, command == "check" ? 1 : 0) << said;
    EXPECT_EQ(said.find("TMA"), std::string::npos) << said;
    for (int rule = 1; rule <= int(std::size(told)); ++rule) {
      const auto [named, refusal] = run(command, "98", rule);
      EXPECT_EQ(named, 3) << rule;
      EXPECT_EQ(refusal, std::string("tma_rules_program: ") + told[rule - 1] + "\n");
      const auto [all, report] = run(command, "all", rule);
      EXPECT_EQ(all, 0) << rule;
      EXPECT_NE(report.find(std::string("left out: 98 ") + told[rule - 1] + "\n"),
                std::string::npos)
          << report;
    }
  }
}
#endif

}  // namespace
}  // namespace flashsteps
