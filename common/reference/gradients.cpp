#include "common/reference/gradients.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/attention/layout.h"
#include "common/attention/validate.h"
#include "common/attention/work.h"
#include "common/reference/parallel.h"
#include "common/reference/tensor_rows.h"

namespace flashsteps {
namespace {

// Queries that are taken at once for a block of keys, so that a long sequence needs little memory.
constexpr int kQueriesAtOnce = 512;

double largest(const Matrix& x) {
  return x.size() == 0 ? 0 : x.cwiseAbs().maxCoeff<Eigen::PropagateNaN>();
}

// P, dS and the error of dS in fp32, of some queries and some keys of one (batch, head).
struct Scores {
  Matrix P, dS, dS_error;
};

class GradientReference {
 public:
  GradientReference(const Problem& p, const GradientStrides& strides, const Inputs& inputs,
                    const std::vector<uint16_t>& d_o, const RowStatistics& statistics,
                    const Variation& variation)
      : p_(p),
        strides_(strides),
        inputs_(inputs),
        d_o_(d_o),
        statistics_(statistics),
        variation_(variation) {}

  // `count` rows of dQ of one head, into `dQ_out`.
  GradientOracle::Block dq(int b, int h, const int* rows, int count, double* dQ_out) {
    load_kv(b, p_.kv_head(h));
    const Matrix Q = queries(layout_q(p_), inputs_.q, b, h, rows, count);
    const Matrix dO = queries(layout_do(p_, strides_), d_o_, b, h, rows, count);
    const Scores s = scores(b, h, rows, Q, dO, K_, V_, [](int j) { return j; });
    const double scale = p_.scale;
    Eigen::Map<Matrix> dQ(dQ_out, count, p_.head_dim);
    dQ.noalias() = scale * (s.dS * K_);
    GradientOracle::Block block = judge(dQ, scale * (rounded(s.dS) * K_));
    block.fp32_error =
        std::fabs(scale) * kFp32Error * largest(s.dS_error.rowwise().sum()) * largest(K_);
    return block;
  }

  // `count` rows of dK and of dV of one KV head, summed over its query heads.
  void dkv(int b, int kv_head, const int* rows, int count, double* dK_out, double* dV_out,
           GradientOracle::Block& dk_block, GradientOracle::Block& dv_block) {
    const Matrix K = read_rows(layout_k(p_), p_.dtype, inputs_.k, b, kv_head, rows, count);
    const Matrix V = read_rows(layout_v(p_), p_.dtype, inputs_.v, b, kv_head, rows, count);
    const double scale = p_.scale;
    Eigen::Map<Matrix> dK(dK_out, count, p_.head_dim), dV(dV_out, count, p_.head_dim);
    dK.setZero();
    dV.setZero();
    Matrix dK16 = Matrix::Zero(count, p_.head_dim), dV16 = dK16;
    Eigen::VectorXd error = Eigen::VectorXd::Zero(count);
    double largest_q = 0;
    const int group = p_.heads / p_.kv_heads;
    std::vector<int> queries_now;
    for (int h = kv_head * group; h < (kv_head + 1) * group; ++h) {
      for (int64_t first = 0; first < p_.seqlen_q; first += kQueriesAtOnce) {
        queries_now.clear();
        for (int64_t i = first; i < std::min<int64_t>(first + kQueriesAtOnce, p_.seqlen_q); ++i)
          queries_now.push_back(int(i));
        const int* i = queries_now.data();
        const int n = int(queries_now.size());
        const Matrix Q = queries(layout_q(p_), inputs_.q, b, h, i, n);
        const Matrix dO = queries(layout_do(p_, strides_), d_o_, b, h, i, n);
        const Scores s = scores(b, h, i, Q, dO, K, V, [&](int j) { return rows[j]; });
        dK.noalias() += scale * (s.dS.transpose() * Q);
        dV.noalias() += s.P.transpose() * dO;
        dK16.noalias() += scale * (rounded(s.dS).transpose() * Q);
        dV16.noalias() += rounded(s.P).transpose() * dO;
        error += s.dS_error.colwise().sum().transpose();
        largest_q = std::max(largest_q, largest(Q));
      }
    }
    dk_block = judge(dK, dK16);
    dv_block = judge(dV, dV16);
    dk_block.fp32_error = std::fabs(scale) * kFp32Error * largest(error) * largest_q;
  }

 private:
  Matrix queries(const TensorLayout& t, const std::vector<uint16_t>& bits, int b, int h,
                 const int* rows, int count) const {
    return read_rows(t, p_.dtype, bits, b, h, rows, count);
  }

  Matrix rounded(const Matrix& x) const {
    return x.unaryExpr([this](double value) { return round_to(value, p_.dtype); });
  }

  // How far the result with 16-bit intermediates, rounded itself, is from the right one.
  GradientOracle::Block judge(const Eigen::Map<Matrix>& right, const Matrix& ref16) const {
    GradientOracle::Block block;
    block.max = largest(right);
    block.ref16_error = largest(rounded(ref16) - right);
    return block;
  }

  // `key_of(column)` is the index of a key.
  template <typename KeyOf>
  Scores scores(int b, int h, const int* rows, const Matrix& Q, const Matrix& dO, const Matrix& K,
                const Matrix& V, KeyOf&& key_of) const {
    Scores s;
    s.P = double(p_.scale) * (Q * K.transpose());
    s.dS = dO * V.transpose();  // still dP
    s.dS_error = Matrix::Zero(s.P.rows(), s.P.cols());
    const Eigen::VectorXd norm_v = V.rowwise().norm(), norm_do = dO.rowwise().norm();
    for (int r = 0; r < s.P.rows(); ++r) {
      const int64_t row = (int64_t{b} * p_.heads + h) * p_.seqlen_q + rows[r];
      const double L = statistics_.L[row], D = statistics_.D[row];
      const double norm_o = statistics_.norm_o[row];
      const int64_t visible = visible_keys(p_, rows[r]);
      for (int column = 0; column < s.P.cols(); ++column) {
        double &P = s.P(r, column), &dS = s.dS(r, column);
        // How far the key is behind the last one that this query sees under the causal mask.
        const int64_t behind = int64_t{rows[r]} + p_.seqlen_k - p_.seqlen_q - key_of(column);
        if (key_of(column) >= visible || (variation_.window > 0 && behind >= variation_.window)) {
          P = dS = 0;
          continue;
        }
        double slope = 1;  // of the varied score over the score
        if (const double cap = variation_.softcap; cap != 0) {
          const double share = std::tanh(P / cap);
          P = cap * share;
          slope = 1 - share * share;
        }
        P = std::exp(P - double(variation_.distance) * std::fabs(double(behind)) - L);
        dS = P * (dS - D) * slope;
        s.dS_error(r, column) = P * norm_do(r) * (norm_v(column) + norm_o) * slope;
      }
    }
    return s;
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
  const GradientStrides& strides_;
  const Inputs& inputs_;
  const std::vector<uint16_t>& d_o_;
  const RowStatistics& statistics_;
  const Variation& variation_;
  int batch_ = -1, kv_head_ = -1;
  Matrix K_, V_;
};

// Statistics from dO and a function that gives a row of O.
template <typename RowOfO>
RowStatistics statistics_from(const Problem& p, const GradientStrides& strides,
                              const std::vector<uint16_t>& d_o, RowOfO&& row_of_o) {
  const TensorLayout t = layout_do(p, strides);
  require_size("dO", d_o.size(), t.extent());
  RowStatistics statistics;
  statistics.D.resize(size_t(p.rows()));
  statistics.norm_o.resize(size_t(p.rows()));
  parallel_for(p.batch_heads(), [&](int64_t begin, int64_t end) {
    Eigen::VectorXd O(p.head_dim), dO(p.head_dim);
    for (int64_t bh = begin; bh < end; ++bh) {
      const int b = int(bh / p.heads), h = int(bh % p.heads);
      for (int i = 0; i < p.seqlen_q; ++i) {
        read_row(t, p.dtype, d_o, b, h, i, dO.data());
        row_of_o(b, h, i, O.data());
        statistics.D[bh * p.seqlen_q + i] = dO.dot(O);
        statistics.norm_o[bh * p.seqlen_q + i] = O.norm();
      }
    }
  });
  return statistics;
}

GradientOracle empty_oracle(const Problem& p, int heads, std::vector<int> rows) {
  GradientOracle oracle;
  oracle.heads = heads;
  oracle.rows = std::move(rows);
  const int64_t all_heads = int64_t{p.batch} * heads;
  oracle.values.resize(size_t(all_heads * int64_t(oracle.rows.size()) * p.head_dim));
  oracle.blocks.resize(size_t(all_heads * oracle.blocks_per_head()));
  return oracle;
}

// Calls `work(b, h, first, count, block)` for the blocks of an oracle, from all cores; a core has
// consecutive blocks, and a GradientReference of its own.
template <typename Work>
void for_each_block(const GradientOracle& oracle, Work&& work) {
  const int64_t blocks_per_head = oracle.blocks_per_head();
  parallel_for(int64_t(oracle.blocks.size()), [&](int64_t begin, int64_t end) {
    work([&](auto&& one) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t head = block / blocks_per_head;
        const int64_t first = block % blocks_per_head * kBlockRows;
        const int64_t rows = int64_t(oracle.rows.size());
        one(int(head / oracle.heads), int(head % oracle.heads), oracle.rows.data() + first,
            int(std::min<int64_t>(kBlockRows, rows - first)), head * rows + first, block);
      }
    });
  });
}

}  // namespace

RowStatistics row_statistics(const Problem& p, const GradientStrides& strides,
                             const BackwardInputs& backward) {
  const Outputs& forward = backward.forward;
  const TensorLayout o = layout_o(p);
  require_size("O", forward.o.size(), o.extent());
  require_size("L", forward.l.size(), p.rows());
  RowStatistics statistics = statistics_from(
      p, strides, backward.d_o,
      [&](int b, int h, int i, double* to) { read_row(o, p.dtype, forward.o, b, h, i, to); });
  statistics.L.assign(forward.l.begin(), forward.l.end());
  return statistics;
}

RowStatistics row_statistics(const Problem& p, const GradientStrides& strides,
                             const std::vector<uint16_t>& d_o, const Oracle& oracle) {
  require_size("O of the oracle", oracle.O.size(), p.rows() * p.head_dim);
  require_size("L of the oracle", oracle.L.size(), p.rows());
  RowStatistics statistics = statistics_from(p, strides, d_o, [&](int b, int h, int i, double* to) {
    const int64_t row = (int64_t{b} * p.heads + h) * p.seqlen_q + i;
    std::copy_n(oracle.O.data() + row * p.head_dim, p.head_dim, to);
  });
  statistics.L = oracle.L;
  return statistics;
}

GradientRows all_gradient_rows(const Problem& p) {
  return {.query = all_rows(p), .key = sampled_rows(p.seqlen_k, p.seqlen_k, 0)};
}

GradientRows affordable_gradient_rows(const Problem& p, uint64_t seed) {
  constexpr double kBudget = 5e9;  // FLOPs, of each of the two
  const auto affordable = [&](double products, int seqlen, int other_seqlen, uint64_t its_seed) {
    const double row =
        2 * products * double(p.batch_heads()) * p.head_dim * std::max(other_seqlen, 1);
    const double rows = kBudget / row;
    if (rows >= seqlen) return sampled_rows(seqlen, seqlen, its_seed);
    return sampled_rows(seqlen, std::max(int(rows) / kBlockRows, 1) * kBlockRows, its_seed);
  };
  // Products of a row with all rows of the other sequence: Q K^T, dO V^T and dS K, the last one
  // twice; Q K^T, dO V^T, P^T dO and dS^T Q, the last two twice.
  return {.query = affordable(4, p.seqlen_q, p.seqlen_k, seed),
          .key = affordable(6, p.seqlen_k, p.seqlen_q, seed + 1)};
}

GradientOracles make_gradient_oracles(const Problem& p, const GradientStrides& strides,
                                      const Inputs& inputs, const std::vector<uint16_t>& d_o,
                                      const RowStatistics& statistics, GradientRows rows,
                                      const Variation& variation) {
  validate(p, strides);
  require_size("Q", inputs.q.size(), layout_q(p).extent());
  require_size("K", inputs.k.size(), layout_k(p).extent());
  require_size("V", inputs.v.size(), layout_v(p).extent());
  require_size("dO", d_o.size(), layout_do(p, strides).extent());
  require_size("L", statistics.L.size(), p.rows());
  require_size("D", statistics.D.size(), p.rows());
  require_rows("seqlen_q", rows.query, p.seqlen_q);
  require_rows("seqlen_k", rows.key, p.seqlen_k);
  GradientOracles oracles;
  oracles.dq = empty_oracle(p, p.heads, std::move(rows.query));
  oracles.dk = empty_oracle(p, p.kv_heads, rows.key);
  oracles.dv = empty_oracle(p, p.kv_heads, std::move(rows.key));
  const int d = p.head_dim;
  for_each_block(oracles.dq, [&](auto&& each) {
    GradientReference reference(p, strides, inputs, d_o, statistics, variation);
    each([&](int b, int h, const int* i, int count, int64_t row, int64_t block) {
      oracles.dq.blocks[block] = reference.dq(b, h, i, count, oracles.dq.values.data() + row * d);
    });
  });
  for_each_block(oracles.dk, [&](auto&& each) {
    GradientReference reference(p, strides, inputs, d_o, statistics, variation);
    each([&](int b, int h, const int* j, int count, int64_t row, int64_t block) {
      reference.dkv(b, h, j, count, oracles.dk.values.data() + row * d,
                    oracles.dv.values.data() + row * d, oracles.dk.blocks[block],
                    oracles.dv.blocks[block]);
    });
  });
  return oracles;
}

Outputs reference_outputs(const Problem& p, const Inputs& inputs, const Variation& variation) {
  const Oracle oracle = make_oracle(p, inputs, all_rows(p), variation);
  const TensorLayout t = layout_o(p);
  Outputs outputs{.o = std::vector<uint16_t>(size_t(t.extent()), uint16_t{0xffff}),
                  .l = std::vector<float>(oracle.L.begin(), oracle.L.end())};
  for (int64_t row = 0; row < p.rows(); ++row) {
    const int64_t bh = row / p.seqlen_q;
    uint16_t* to =
        outputs.o.data() + t.offset(int(bh / p.heads), int(bh % p.heads), row % p.seqlen_q);
    for (int c = 0; c < p.head_dim; ++c) to[c] = to_bits(oracle.O[row * p.head_dim + c], p.dtype);
  }
  return outputs;
}

}  // namespace flashsteps
