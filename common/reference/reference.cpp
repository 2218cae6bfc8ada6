#include "common/reference/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "common/attention/layout.h"
#include "common/attention/validate.h"
#include "common/attention/work.h"
#include "common/reference/float16.h"
#include "common/reference/parallel.h"
#include "common/reference/tensor_rows.h"

namespace flashsteps {
namespace {

// One block of rows of one (batch, head).
class BlockReference {
 public:
  BlockReference(const Problem& p, const Inputs& inputs, const Variation& variation)
      : p_(p), inputs_(inputs), variation_(variation) {}

  // Fills O and L of `count` rows, and says what the bound needs to know.
  Oracle::Block operator()(int b, int h, const int* rows, int count, double* O_out, double* L_out) {
    load_kv(b, p_.kv_head(h));
    const Matrix Q = read_rows(layout_q(p_), p_.dtype, inputs_.q, b, h, rows, count);
    Oracle::Block block;
    Matrix P = double(p_.scale) * (Q * K_.transpose());  // still S
    for (int r = 0; r < count; ++r) {
      const int64_t end = visible_keys(p_, rows[r]), begin = first_key(rows[r], end);
      auto S_row = P.row(r).segment(begin, end - begin);
      P.row(r).head(begin).setZero();
      P.row(r).tail(p_.seqlen_k - end).setZero();
      if (begin == end) {
        L_out[r] = variation_.sink ? 0 : -std::numeric_limits<double>::infinity();
        continue;
      }
      vary(S_row, rows[r], begin);
      block.score_max = std::max(block.score_max, S_row.cwiseAbs().maxCoeff<Eigen::PropagateNaN>());
      double m = S_row.maxCoeff<Eigen::PropagateNaN>();
      if (variation_.sink) m = std::max(m, 0.);
      S_row = (S_row.array() - m).exp();
      const double l = S_row.sum() + (variation_.sink ? std::exp(-m) : 0.);
      S_row /= l;
      L_out[r] = m + std::log(l);
    }
    Eigen::Map<Matrix> O(O_out, count, p_.head_dim);
    O.noalias() = P * V_;
    const auto round = [this](double x) { return round_to(x, p_.dtype); };
    const Matrix O_rounded_P = P.unaryExpr(round) * V_;
    const Matrix error = O_rounded_P.unaryExpr(round) - O;
    if (count > 0) {
      block.o_max = O.cwiseAbs().maxCoeff<Eigen::PropagateNaN>();
      block.ref16_error = error.cwiseAbs().maxCoeff<Eigen::PropagateNaN>();
    }
    return block;
  }

 private:
  // The first key that query i sees; `end` where it sees none.
  int64_t first_key(int64_t i, int64_t end) const {
    if (variation_.window == 0) return 0;
    return std::clamp<int64_t>(i + p_.seqlen_k - p_.seqlen_q + 1 - variation_.window, 0, end);
  }

  // Scores of query i, the first of them that of key `begin`.
  template <typename Row>
  void vary(Row& S_row, int64_t i, int64_t begin) const {
    if (const double cap = variation_.softcap; cap != 0) {
      S_row = S_row.unaryExpr([cap](double s) { return cap * std::tanh(s / cap); }).eval();
    }
    if (variation_.distance == 0) return;
    for (int64_t k = 0; k < S_row.size(); ++k) {
      const double d = double(i + p_.seqlen_k - p_.seqlen_q - (begin + k));
      S_row[k] -= double(variation_.distance) * std::fabs(d);
    }
  }

  // Consecutive blocks mostly share their K and V.
  void load_kv(int b, int kv_head) {
    if (b == batch_ && kv_head == kv_head_) return;
    K_ = read_head(layout_k(p_), p_.dtype, inputs_.k, b, kv_head);
    V_ = read_head(layout_v(p_), p_.dtype, inputs_.v, b, kv_head);
    batch_ = b;
    kv_head_ = kv_head;
  }

  const Problem& p_;
  const Inputs& inputs_;
  const Variation& variation_;
  int batch_ = -1, kv_head_ = -1;
  Matrix K_, V_;
};

}  // namespace

std::vector<int> all_rows(const Problem& p) {
  return sampled_rows(p.seqlen_q, p.seqlen_q, 0);
}

std::vector<int> sampled_rows(const Problem& p, int count, uint64_t seed) {
  return sampled_rows(p.seqlen_q, count, seed);
}

std::vector<int> sampled_rows(int seqlen, int count, uint64_t seed) {
  std::vector<int> rows(size_t(std::clamp(count, 0, seqlen)));
  if (count >= seqlen) {
    std::iota(rows.begin(), rows.end(), 0);
    return rows;
  }
  std::mt19937_64 random(seed);
  for (int64_t part = 0; part < count; ++part) {
    const int64_t begin = part * seqlen / count, end = (part + 1) * seqlen / count;
    rows[part] = int(begin + int64_t(random() % uint64_t(end - begin)));
  }
  return rows;
}

std::vector<int> affordable_rows(const Problem& p, uint64_t seed) {
  constexpr double kBudget = 1e10;  // FLOPs
  // Three products of a row with all keys: Q K^T, P V and ref16's P V.
  const double row = 6.0 * double(p.batch_heads()) * p.head_dim * std::max(p.seqlen_k, 1);
  const double rows = kBudget / row;
  if (rows >= p.seqlen_q) return all_rows(p);
  return sampled_rows(p, std::max(int(rows) / kBlockRows, 1) * kBlockRows, seed);
}

Oracle make_oracle(const Problem& p, const Inputs& inputs, std::vector<int> rows,
                   const Variation& variation) {
  validate(p);
  require_size("Q", inputs.q.size(), layout_q(p).extent());
  require_size("K", inputs.k.size(), layout_k(p).extent());
  require_size("V", inputs.v.size(), layout_v(p).extent());
  require_rows("seqlen_q", rows, p.seqlen_q);
  Oracle oracle;
  oracle.rows = std::move(rows);
  const int64_t rows_per_head = int64_t(oracle.rows.size());
  const int64_t blocks_per_head = oracle.blocks_per_head();
  oracle.O.resize(size_t(p.batch_heads() * rows_per_head * p.head_dim));
  oracle.L.resize(size_t(p.batch_heads() * rows_per_head));
  oracle.blocks.resize(size_t(p.batch_heads() * blocks_per_head));

  parallel_for(int64_t(oracle.blocks.size()), [&](int64_t begin, int64_t end) {
    BlockReference reference(p, inputs, variation);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i / blocks_per_head;
      const int64_t first = i % blocks_per_head * kBlockRows;
      const int count = int(std::min<int64_t>(kBlockRows, rows_per_head - first));
      const int64_t row = head * rows_per_head + first;
      oracle.blocks[i] =
          reference(int(head / p.heads), int(head % p.heads), oracle.rows.data() + first, count,
                    oracle.O.data() + row * p.head_dim, oracle.L.data() + row);
    }
  });
  return oracle;
}

}  // namespace flashsteps
