// The problem: which ones are legal, where their elements lie, and how much work they are.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <set>
#include <string>

#include "common/attention/layout.h"
#include "common/attention/validate.h"
#include "common/attention/work.h"

namespace flashsteps {
namespace {

Problem legal() {
  Problem p{.batch = 2, .heads = 4, .kv_heads = 2, .seqlen_q = 5, .seqlen_k = 7, .head_dim = 16};
  p.scale = 0.25f;
  set_packed_strides(p);
  return p;
}

// The message of the refusal; empty where there was none.
std::string refusal(const Problem& p) {
  try {
    validate(p);
    return "";
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
}

TEST(Validate, AcceptsWhatIsLegal) {
  EXPECT_EQ(refusal(legal()), "");
  for (Layout layout : {Layout::bhsd, Layout::bshd}) {
    for (int head_dim = 8; head_dim <= 128; head_dim += 8) {
      for (int seqlen_q : {0, 1, 65}) {
        for (int seqlen_k : {0, 1, 65}) {
          Problem p{.batch = 65536,
                    .heads = 6,
                    .kv_heads = 3,
                    .seqlen_q = seqlen_q,
                    .seqlen_k = seqlen_k,
                    .head_dim = head_dim,
                    .dtype = DType::bf16,
                    .causal = true};
          p.scale = -1.5f;
          set_packed_strides(p, layout);
          EXPECT_EQ(refusal(p), "")
              << name_of(layout) << " d=" << head_dim << " " << seqlen_q << "x" << seqlen_k;
        }
      }
    }
  }
  Problem zero_scale = legal();
  zero_scale.scale = 0;
  EXPECT_EQ(refusal(zero_scale), "");
}

TEST(Validate, AcceptsAnyStridesAlongAnAxisOfOneEntry) {
  Problem p = legal();
  p.batch = 1;
  p.q.batch = p.k.batch = p.v.batch = p.o.batch = 0;
  EXPECT_EQ(refusal(p), "");
}

TEST(Validate, AcceptsGapsAndInterleavedHeads) {
  Problem p = legal();
  p.o = {.batch = 4096, .head = 512, .row = 32};
  EXPECT_EQ(refusal(p), "");
  // Q, K and V of one packed (batch, seqlen, 3, heads, head_dim) tensor.
  p.kv_heads = p.heads;
  p.seqlen_k = p.seqlen_q;
  p.q = p.k = p.v = {.batch = 5 * 3 * 64, .head = 16, .row = 3 * 64};
  EXPECT_EQ(refusal(p), "");
}

struct Refusal {
  const char* name;
  void (*change)(Problem&);
  const char* wrong;    // what must be named
  const char* given;    // what must be quoted
  const char* allowed;  // what must be told
};

constexpr Refusal kRefusals[] = {
    {"batch_zero", [](Problem& p) { p.batch = 0; }, "batch", "0", "1 to"},
    {"batch_negative", [](Problem& p) { p.batch = -3; }, "batch", "-3", "1 to"},
    {"heads_zero", [](Problem& p) { p.heads = 0; }, "heads", "0", "1 to"},
    {"kv_heads_zero", [](Problem& p) { p.kv_heads = 0; }, "kv_heads", "0", "1 to"},
    {"heads_no_multiple", [](Problem& p) { p.kv_heads = 3; }, "heads = 4", "kv_heads = 3",
     "multiple"},
    {"more_kv_heads", [](Problem& p) { p.kv_heads = 8; }, "heads = 4", "kv_heads = 8", "multiple"},
    {"seqlen_q_negative", [](Problem& p) { p.seqlen_q = -1; }, "seqlen_q", "-1", "0 to 1000000000"},
    {"seqlen_k_negative", [](Problem& p) { p.seqlen_k = -1; }, "seqlen_k", "-1", "0 to 1000000000"},
    {"seqlen_long", [](Problem& p) { p.seqlen_k = 1000000001; }, "seqlen_k", "1000000001",
     "0 to 1000000000"},
    {"head_dim_zero", [](Problem& p) { p.head_dim = 0; }, "head_dim", "0",
     "multiples of 8 from 8 to 128"},
    {"head_dim_odd", [](Problem& p) { p.head_dim = 36; }, "head_dim", "36",
     "multiples of 8 from 8 to 128"},
    {"head_dim_large", [](Problem& p) { p.head_dim = 136; }, "head_dim", "136",
     "multiples of 8 from 8 to 128"},
    {"head_dim_negative", [](Problem& p) { p.head_dim = -8; }, "head_dim", "-8",
     "multiples of 8 from 8 to 128"},
    {"dtype", [](Problem& p) { p.dtype = DType::fp32; }, "dtype", "fp32", "fp16, bf16"},
    {"scale_nan", [](Problem& p) { p.scale = std::numeric_limits<float>::quiet_NaN(); }, "scale",
     "nan", "finite"},
    {"scale_inf", [](Problem& p) { p.scale = -std::numeric_limits<float>::infinity(); }, "scale",
     "-inf", "finite"},
    {"row_stride_unaligned", [](Problem& p) { p.q.row = 20; }, "row stride of Q", "20",
     "multiples of 8"},
    {"head_stride_unaligned", [](Problem& p) { p.k.head = 113; }, "head stride of K", "113",
     "multiples of 8"},
    {"batch_stride_unaligned", [](Problem& p) { p.v.batch = 1001; }, "batch stride of V", "1001",
     "multiples of 8"},
    {"row_stride_short", [](Problem& p) { p.k.row = 8; }, "row stride of K", "8",
     "at least head_dim = 16"},
    {"head_stride_zero", [](Problem& p) { p.q.head = 0; }, "head stride of Q", "0",
     "at least head_dim = 16"},
    {"row_stride_negative", [](Problem& p) { p.v.row = -16; }, "row stride of V", "-16",
     "at least head_dim = 16"},
    {"rows_of_o_overlap", [](Problem& p) { p.o.head = 64; }, "head stride of O", "64",
     "at least 80"},
    {"batches_of_o_overlap", [](Problem& p) { p.o.batch = 80; }, "stride of O", "80", "overlap"},
    {"pairs",
     [](Problem& p) {
       p.seqlen_q = p.seqlen_k = 100000000;
       set_packed_strides(p);
     },
     "batch * heads * seqlen_q * seqlen_k", "8e+16", "4503599627370496"},
    {"extent", [](Problem& p) { p.q.batch = int64_t{1} << 62; }, "Q spans", "4.61e+18",
     "1152921504606846976"},
};

TEST(Validate, RefusesInOneLineThatSaysAll) {
  for (const Refusal& wrong : kRefusals) {
    Problem p = legal();
    wrong.change(p);
    const std::string message = refusal(p);
    for (const char* part : {wrong.wrong, wrong.given, wrong.allowed}) {
      EXPECT_NE(message.find(part), std::string::npos) << wrong.name << ": " << message;
    }
    EXPECT_EQ(message.find('\n'), std::string::npos) << wrong.name << ": " << message;
  }
}

TEST(Layout, IndexFormulas) {
  constexpr int B = 2, H = 3, S = 5, D = 8;
  const TensorLayout bhsd{B, H, S, D, packed_strides(Layout::bhsd, H, S, D)};
  const TensorLayout bshd{B, H, S, D, packed_strides(Layout::bshd, H, S, D)};
  std::set<int64_t> seen_bhsd, seen_bshd;
  for (int b = 0; b < B; ++b) {
    for (int h = 0; h < H; ++h) {
      for (int i = 0; i < S; ++i) {
        EXPECT_EQ(bhsd.offset(b, h, i), ((b * H + h) * S + i) * D);
        EXPECT_EQ(bshd.offset(b, h, i), ((b * S + i) * H + h) * D);
        seen_bhsd.insert(bhsd.offset(b, h, i));
        seen_bshd.insert(bshd.offset(b, h, i));
      }
    }
  }
  EXPECT_EQ(seen_bhsd.size(), size_t(B * H * S));
  EXPECT_EQ(seen_bshd, seen_bhsd);  // the same rows of memory, in another order
  EXPECT_EQ(bhsd.extent(), B * H * S * D);
  EXPECT_EQ(bshd.extent(), B * H * S * D);
}

TEST(Layout, ExtentCountsGapsAndIs64Bit) {
  TensorLayout t{2, 3, 5, 8, {.batch = 1000, .head = 200, .row = 24}};
  EXPECT_EQ(t.extent(), 1000 + 2 * 200 + 4 * 24 + 8);
  EXPECT_EQ(t.elements(), 2 * 3 * 5 * 8);
  t.seqlen = 0;
  EXPECT_EQ(t.extent(), 0);
  const TensorLayout large{8300, 16, 128, 128, packed_strides(Layout::bhsd, 16, 128, 128)};  // P19
  EXPECT_EQ(large.extent(), 2175795200);
}

TEST(Work, DefaultScaleTakesTheTrueHeadDim) {
  for (int head_dim : {8, 15, 40, 64, 72, 80, 96, 128}) {  // P05
    EXPECT_EQ(default_scale(head_dim), float(1 / std::sqrt(double(head_dim))));
  }
}

int64_t pairs_by_definition(const Problem& p) {
  int64_t pairs = 0;
  for (int i = 0; i < p.seqlen_q; ++i) {
    for (int j = 0; j < p.seqlen_k; ++j) pairs += !p.causal || j <= i + p.seqlen_k - p.seqlen_q;
  }
  return pairs;
}

TEST(Work, VisiblePairsAreThoseOfTheDefinition) {
  for (int Nq = 0; Nq <= 9; ++Nq) {
    for (int Nk = 0; Nk <= 9; ++Nk) {
      for (bool causal : {false, true}) {
        const Problem p{.batch = 2,
                        .heads = 3,
                        .seqlen_q = Nq,
                        .seqlen_k = Nk,
                        .head_dim = 16,
                        .causal = causal};
        EXPECT_EQ(visible_pairs(p), pairs_by_definition(p))
            << Nq << "x" << Nk << " causal=" << causal;
        int64_t by_rows = 0;
        for (int i = 0; i < Nq; ++i) by_rows += visible_keys(p, i);
        EXPECT_EQ(by_rows, pairs_by_definition(p));
        EXPECT_EQ(forward_flops(p), 4 * 2 * 3 * 16 * pairs_by_definition(p));
      }
    }
  }
}

TEST(Work, CausalPairsOfALargeSquare) {  // P45
  const Problem p{.seqlen_q = 4096, .seqlen_k = 4096, .head_dim = 64, .causal = true};
  EXPECT_EQ(visible_pairs(p), 8390656);
  EXPECT_EQ(forward_flops(p), 4 * 64 * int64_t{8390656});
}

// A tile is visited where one of its pairs is visible, and masked where besides one is not; pairs
// beyond Nk are not, and rows beyond Nq do not count.
TileCounts tiles_by_definition(const Problem& p, int Br, int Bc) {
  TileCounts counts;
  for (int row = 0; row < p.seqlen_q; row += Br) {
    for (int col = 0; col < p.seqlen_k; col += Bc) {
      bool any = false, all = true;
      for (int i = row; i < std::min(row + Br, p.seqlen_q); ++i) {
        for (int j = col; j < col + Bc; ++j) {
          const bool visible = j < p.seqlen_k && (!p.causal || j <= i + p.seqlen_k - p.seqlen_q);
          any |= visible;
          all &= visible;
        }
      }
      counts.visited += any;
      counts.masked += any && !all;
    }
  }
  return {counts.visited * p.batch_heads(), counts.masked * p.batch_heads()};
}

TEST(Work, TileCountsAreThoseOfTheDefinition) {
  for (int Nq : {0, 1, 3, 4, 7, 8, 17, 32}) {
    for (int Nk : {0, 1, 3, 4, 7, 8, 17, 32}) {
      for (bool causal : {false, true}) {
        for (int Br : {1, 4, 8}) {
          for (int Bc : {1, 4, 6}) {
            const Problem p{.batch = 2,
                            .heads = 2,
                            .seqlen_q = Nq,
                            .seqlen_k = Nk,
                            .head_dim = 8,
                            .causal = causal};
            const TileCounts counts = skipping_tile_counts(p, Br, Bc);
            const TileCounts wanted = tiles_by_definition(p, Br, Bc);
            EXPECT_EQ(counts.visited, wanted.visited)
                << Nq << "x" << Nk << " " << Br << "x" << Bc << " " << causal;
            EXPECT_EQ(counts.masked, wanted.masked)
                << Nq << "x" << Nk << " " << Br << "x" << Bc << " " << causal;
          }
        }
      }
    }
  }
}

// --- the backward pass
// ------------------------------------------------------------------------------------

TEST(Backward, FlopsAreTwoAndAHalfTimesTheForwards) {
  Problem p = legal();
  for (const bool causal : {false, true}) {
    p.causal = causal;
    EXPECT_EQ(2 * backward_flops(p), 5 * forward_flops(p));
  }
  // The largest problem that is legal: its FLOPs fit in 63 bits.
  Problem most;
  most.batch = most.heads = most.kv_heads = 1;
  most.seqlen_q = most.seqlen_k = 1 << 26;
  most.head_dim = 128;
  most.scale = 1;
  set_packed_strides(most);
  validate(most);
  EXPECT_GT(backward_flops(most), 0);
  EXPECT_EQ(double(backward_flops(most)), 10. * 128 * 0x1p52);
}

TEST(Backward, GradientsHaveStridesOfTheirOwn) {
  const Problem p = legal();
  const GradientStrides good = strides_of_tensors(p);
  const auto refusal_of = [&](const GradientStrides& strides) {
    try {
      validate(p, strides);
    } catch (const std::invalid_argument& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(refusal_of(good), "");
  EXPECT_EQ(layout_dk(p, good).extent(), layout_k(p).extent());
  const std::pair<const char*, Strides GradientStrides::*> tensors[] = {
      {"dO", &GradientStrides::d_o},
      {"dQ", &GradientStrides::d_q},
      {"dK", &GradientStrides::d_k},
      {"dV", &GradientStrides::d_v}};
  for (const auto& [name, member] : tensors) {
    GradientStrides strides = good;
    (strides.*member).row += 4;
    EXPECT_NE(refusal_of(strides).find("the row stride of " + std::string(name) + " is "),
              std::string::npos)
        << refusal_of(strides);
    strides = good;
    (strides.*member).head = (strides.*member).row;  // rows of two heads in the same place
    const bool overlap = std::string(name) != "dO";  // dO is only read
    EXPECT_EQ(refusal_of(strides).find("no two rows of " + std::string(name) + " overlap") !=
                  std::string::npos,
              overlap)
        << refusal_of(strides);
  }
}

}  // namespace
}  // namespace flashsteps
