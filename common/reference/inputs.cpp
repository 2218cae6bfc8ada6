#include "common/reference/inputs.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <random>

#include "common/attention/layout.h"
#include "common/attention/validate.h"
#include "common/reference/float16.h"
#include "common/reference/parallel.h"

namespace flashsteps {
namespace {

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014): neighbouring numbers become unrelated
// ones.
uint64_t mix(uint64_t z) {
  z += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

uint64_t hash(std::initializer_list<uint64_t> numbers) {
  uint64_t state = 0;
  for (const uint64_t number : numbers) state = mix(state + number);
  return state;
}

// A normal distribution whose bits are the same everywhere: the sum of twelve uniform 16-bit
// numbers (Irwin and Hall), variance 1, at most 6 away from 0. The standard library's own is not
// specified, and log and cos differ by platform.
class Normal {
 public:
  explicit Normal(uint64_t seed) : engine_(seed) {}

  double operator()() {
    int64_t sum = 0;
    for (int draw = 0; draw < 3; ++draw) {
      const uint64_t bits = engine_();
      sum +=
          int64_t((bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48));
    }
    return double(sum - 6 * 65535) / 65536;
  }

  // Uniform in [0, 1).
  double uniform() { return double(engine_() >> 11) / 9007199254740992.0; }

 private:
  std::mt19937_64 engine_;
};

enum Part : uint64_t { kQ = 1, kK, kV, kDirection, kDO };

// Scores of moving_max differ by this much from the first key to the last, and scores of
// large_logits have this standard deviation, both at the default scale.
constexpr double kTrend = 4;
constexpr double kLargeScore = 50;

// Fills a tensor: `row(b, h, i, normal, values)` gives the head_dim values of a row. What rounds to
// zero becomes 2^-14, unless `zeros` allows it. Products are added with std::fma: left to the
// compiler, the rounding would differ by platform.
template <typename Row>
std::vector<uint16_t> fill(const TensorLayout& t, DType type, Part part, uint64_t seed, bool zeros,
                           Row&& row) {
  std::vector<uint16_t> bits(size_t(t.extent()), uint16_t{0xffff});
  const uint16_t instead = zeros ? 0 : to_bits(0x1p-14, type);
  // Each head has a generator of its own, so that they can be made in parallel.
  parallel_for(int64_t{t.batch} * t.heads, [&](int64_t begin, int64_t end) {
    std::vector<double> values(size_t(t.head_dim));
    for (int64_t head = begin; head < end; ++head) {
      const int b = int(head / t.heads), h = int(head % t.heads);
      Normal normal(hash({seed, part, uint64_t(b), uint64_t(h)}));
      for (int i = 0; i < t.seqlen; ++i) {
        row(b, h, i, normal, values);
        uint16_t* to = bits.data() + t.offset(b, h, i);
        for (int c = 0; c < t.head_dim; ++c) {
          to[c] = to_bits(values[c], type);
          if ((to[c] & 0x7fff) == 0) to[c] = instead;
        }
      }
    }
  });
  return bits;
}

void draw_row(Normal& normal, std::vector<double>& values) {
  for (double& x : values) x = normal();
}

void make_moving_max(const Problem& p, uint64_t seed, Inputs& inputs) {
  // Q and K of a KV head lean along a common direction u = (+-1, …, +-1) / sqrt(d). The scaled
  // score of the two leanings is reach^2 / sqrt(d) * j / Nk = kTrend * j / Nk for a query of
  // average steepness.
  const double reach = std::sqrt(kTrend) * std::sqrt(std::sqrt(double(p.head_dim)));
  const double length = 1 / std::sqrt(double(p.head_dim));
  const auto lean = [&](int b, int kv_head, double by, std::vector<double>& values) {
    for (size_t c = 0; c < values.size(); ++c) {
      const bool up = hash({seed, kDirection, uint64_t(b), uint64_t(kv_head), c}) >> 63;
      values[c] = std::fma(by, up ? length : -length, values[c]);
    }
  };
  inputs.q = fill(layout_q(p), p.dtype, kQ, seed, false,
                  [&](int b, int h, int, Normal& normal, std::vector<double>& values) {
                    draw_row(normal, values);
                    lean(b, p.kv_head(h), reach * (0.5 + normal.uniform()), values);
                  });
  inputs.k = fill(layout_k(p), p.dtype, kK, seed, false,
                  [&](int b, int g, int j, Normal& normal, std::vector<double>& values) {
                    draw_row(normal, values);
                    const double along = double(j) / p.seqlen_k;
                    lean(b, g, reach * ((b + g) % 2 == 0 ? along : 1 - along), values);
                  });
}

}  // namespace

const char* name_of(InputKind kind) {
  switch (kind) {
    case InputKind::normal:
      return "normal";
    case InputKind::moving_max:
      return "moving_max";
    case InputKind::large_logits:
      return "large_logits";
    case InputKind::outlier_channels:
      return "outlier_channels";
    case InputKind::uniform:
      return "uniform";
  }
  return "?";
}

Inputs make_inputs(const Problem& p, InputKind kind, uint64_t seed) {
  validate(p);
  const bool outliers = kind == InputKind::outlier_channels;
  // Draws a normal row times `factor`, and every 32nd channel from one on that depends on the KV
  // head times `outlier`.
  const auto rows = [&](double factor, double outlier, int heads_per_kv_head) {
    return [=, &p](int, int h, int, Normal& normal, std::vector<double>& values) {
      draw_row(normal, values);
      const int first = h / heads_per_kv_head % std::min(p.head_dim, 32);
      for (double& x : values) x *= factor;
      for (int c = first; c < p.head_dim; c += 32) values[c] *= outlier;
    };
  };
  Inputs inputs;
  if (kind == InputKind::moving_max) {
    make_moving_max(p, seed, inputs);
  } else {
    // q.k of normal rows has the standard deviation sqrt(d), which the default scale takes to 1.
    const double factor = kind == InputKind::large_logits ? std::sqrt(kLargeScore) : 1;
    const bool zeros = kind == InputKind::uniform;
    inputs.q = fill(layout_q(p), p.dtype, kQ, seed, zeros,
                    rows(zeros ? 0 : factor, outliers ? 4 : 1, p.heads / p.kv_heads));
    inputs.k = fill(layout_k(p), p.dtype, kK, seed, false, rows(factor, outliers ? 16 : 1, 1));
  }
  inputs.v = fill(layout_v(p), p.dtype, kV, seed, false, rows(1, outliers ? 16 : 1, 1));
  return inputs;
}

std::vector<uint16_t> make_d_o(const Problem& p, const GradientStrides& strides, uint64_t seed) {
  validate(p, strides);
  return fill(
      layout_do(p, strides), p.dtype, kDO, seed, false,
      [](int, int, int, Normal& normal, std::vector<double>& values) { draw_row(normal, values); });
}

}  // namespace flashsteps
