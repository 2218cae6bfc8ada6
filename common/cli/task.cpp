#include "common/cli/task.h"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <stdexcept>

#include "common/attention/validate.h"
#include "common/attention/work.h"
#include "common/reference/float16.h"
#include "common/reference/npy.h"

namespace flashsteps::cli {
namespace {

// The four axes of a tensor in the order in which a file has them.
std::array<int64_t, 4> file_shape(const TensorLayout& t, Layout layout) {
  if (layout == Layout::bhsd) return {t.batch, t.heads, t.seqlen, t.head_dim};
  return {t.batch, t.seqlen, t.heads, t.head_dim};
}

std::string shown(std::span<const int64_t> shape) {
  return fmt::format("({})", fmt::join(shape, ", "));
}

void require_shape(const char* option, const NpyArray& array, std::span<const int64_t> needed) {
  if (!std::equal(array.shape.begin(), array.shape.end(), needed.begin(), needed.end())) {
    throw std::invalid_argument(
        fmt::format("{} has shape {}; needed: {}", option, shown(array.shape), shown(needed)));
  }
}

// The value of an option, or the file's where it is not given; they must agree.
int dimension(const char* option, const std::optional<int>& given, int64_t file,
              const char* file_option) {
  if (file > kMaxSeqlen) {
    throw std::invalid_argument(
        fmt::format("{}: a dimension is {}; allowed: up to {}", file_option, file, kMaxSeqlen));
  }
  if (given && *given != file) {
    throw std::invalid_argument(
        fmt::format("{} is {}, but {} has {}", option, *given, file_option, file));
  }
  return int(file);
}

std::vector<uint16_t> to_16_bits(const char* option, const NpyArray& array, DType type) {
  if (type == DType::fp16 && array.dtype == DType::fp16) {
    for (size_t i = 0; i < array.fp16.size(); ++i) {
      if ((array.fp16[i] & 0x7c00) == 0x7c00) {
        throw std::invalid_argument(fmt::format("{}: element {} is {}; allowed: finite values",
                                                option, i, array.value(int64_t(i))));
      }
    }
    return array.fp16;
  }
  std::vector<uint16_t> bits(size_t(array.size()));
  for (size_t i = 0; i < bits.size(); ++i) {
    const double value = array.value(int64_t(i));
    if (!std::isfinite(round_to(value, type))) {
      throw std::invalid_argument(
          fmt::format("{}: element {} is {}; allowed in {}: finite values up to {}", option, i,
                      value, name_of(type), largest_finite(type)));
    }
    bits[i] = to_bits(value, type);
  }
  return bits;
}

// A packed tensor: as float16, or as float32 for bf16.
void write_tensor(const std::filesystem::path& path, const Options& options, DType type,
                  const TensorLayout& t, const std::vector<uint16_t>& bits) {
  const std::array<int64_t, 4> shape = file_shape(t, options.layout);
  if (type == DType::fp16) {
    write_npy(path, shape, std::span(bits));
    return;
  }
  std::vector<float> wide(bits.size());
  for (size_t i = 0; i < wide.size(); ++i) wide[i] = float(from_bits(bits[i], type));
  write_npy(path, shape, std::span<const float>(wide));
}

Problem with_defaults(const Options& options, Problem p) {
  p.dtype = options.dtype.value_or(DType::fp16);
  p.causal = options.causal;
  p.scale = options.scale.value_or(default_scale(p.head_dim));
  set_packed_strides(p, options.layout);
  validate(p);
  return p;
}

}  // namespace

Problem problem_for(const Options& options, Target target) {
  const bool timed = options.command == Command::bench || options.command == Command::ladder;
  const bool on_card = target == Target::cuda;
  // Small enough for the model; large enough to fill a card.
  const int seqlen = on_card ? (timed ? 4096 : 1024) : 256;
  Problem p;
  p.batch = options.batch.value_or(1);
  p.heads = options.heads.value_or(on_card ? 16 : 2);
  p.kv_heads = options.kv_heads.value_or(p.heads);
  p.seqlen_q = options.seqlen_q.value_or(seqlen);
  p.seqlen_k = options.seqlen_k.value_or(seqlen);
  p.head_dim = options.head_dim.value_or(on_card ? 128 : 64);
  return with_defaults(options, p);
}

Task make_task(const Options& options, Target target) {
  // dO from its file, or as random as other tensors.
  const auto with_d_o = [&](const Problem& p, Inputs inputs) {
    Task task{p, std::move(inputs), strides_of_tensors(p), {}};
    if (options.d_o) {
      const NpyArray d_o = read_npy(*options.d_o, 4);
      require_shape("--do", d_o, file_shape(layout_o(p), options.layout));
      task.d_o = to_16_bits("--do", d_o, p.dtype);
    } else if (names_backward(options)) {
      task.d_o = make_d_o(p, task.strides, options.seed);
    }
    return task;
  };
  if (!options.q) {
    const Problem p = problem_for(options, target);
    return with_d_o(p, make_inputs(p, options.input, options.seed));
  }
  const NpyArray q = read_npy(*options.q, 4), k = read_npy(*options.k, 4),
                 v = read_npy(*options.v, 4);
  const bool bhsd = options.layout == Layout::bhsd;
  const int heads_axis = bhsd ? 1 : 2, seqlen_axis = bhsd ? 2 : 1;
  Problem p;
  p.batch = dimension("--batch", options.batch, q.shape[0], "--q");
  p.heads = dimension("--heads", options.heads, q.shape[heads_axis], "--q");
  p.seqlen_q = dimension("--seqlen-q", options.seqlen_q, q.shape[seqlen_axis], "--q");
  p.head_dim = dimension("--head-dim", options.head_dim, q.shape[3], "--q");
  p.kv_heads = dimension("--kv-heads", options.kv_heads, k.shape[heads_axis], "--k");
  p.seqlen_k = dimension("--seqlen-k", options.seqlen_k, k.shape[seqlen_axis], "--k");
  if (k.shape[0] != p.batch || k.shape[3] != p.head_dim) {
    throw std::invalid_argument(
        fmt::format("--k has shape {}, --q {}; batch and head_dim must be equal", shown(k.shape),
                    shown(q.shape)));
  }
  require_shape("--v", v, k.shape);
  p = with_defaults(options, p);
  return with_d_o(p, {.q = to_16_bits("--q", q, p.dtype),
                      .k = to_16_bits("--k", k, p.dtype),
                      .v = to_16_bits("--v", v, p.dtype)});
}

Oracle expected_from_files(const Options& options, const Problem& p, Oracle oracle) {
  const int64_t rows = int64_t(oracle.rows.size());
  if (options.expect_o) {
    const NpyArray o = read_npy(*options.expect_o, 4);
    require_shape("--expect-o", o, file_shape(layout_o(p), options.layout));
    for (int64_t bh = 0; bh < p.batch_heads(); ++bh) {
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t from =
            layout_o(p).offset(int(bh / p.heads), int(bh % p.heads), oracle.rows[r]);
        for (int c = 0; c < p.head_dim; ++c)
          oracle.O[(bh * rows + r) * p.head_dim + c] = o.value(from + c);
      }
    }
  }
  if (options.expect_lse) {
    const NpyArray l = read_npy(*options.expect_lse, 3);
    require_shape("--expect-lse", l, std::array<int64_t, 3>{p.batch, p.heads, p.seqlen_q});
    for (int64_t bh = 0; bh < p.batch_heads(); ++bh) {
      for (int64_t r = 0; r < rows; ++r)
        oracle.L[bh * rows + r] = l.value(bh * p.seqlen_q + oracle.rows[r]);
    }
  }
  return oracle;
}

GradientOracles expected_from_files(const Options& options, const Task& task,
                                    GradientOracles oracles) {
  const Problem& p = task.problem;
  const auto take = [&](const char* option, const std::optional<std::filesystem::path>& path,
                        const TensorLayout& t, GradientOracle& oracle) {
    if (!path) return;
    const NpyArray array = read_npy(*path, 4);
    require_shape(option, array, file_shape(t, options.layout));
    const int64_t rows = int64_t(oracle.rows.size());
    for (int64_t row = 0; row < int64_t{t.batch} * t.heads * rows; ++row) {
      const int bh = int(row / rows);
      const int64_t from = t.offset(bh / t.heads, bh % t.heads, oracle.rows[row % rows]);
      for (int c = 0; c < t.head_dim; ++c)
        oracle.values[row * t.head_dim + c] = array.value(from + c);
    }
  };
  take("--expect-dq", options.expect_dq, layout_dq(p, task.strides), oracles.dq);
  take("--expect-dk", options.expect_dk, layout_dk(p, task.strides), oracles.dk);
  take("--expect-dv", options.expect_dv, layout_dv(p, task.strides), oracles.dv);
  return oracles;
}

void write_outputs(const Options& options, const Problem& p, const Outputs& outputs) {
  if (options.out) write_tensor(*options.out, options, p.dtype, layout_o(p), outputs.o);
  if (options.lse) {
    const std::array<int64_t, 3> shape = {p.batch, p.heads, p.seqlen_q};
    write_npy(*options.lse, shape, std::span(outputs.l));
  }
}

void write_gradients(const Options& options, const Task& task, const Gradients& gradients) {
  const Problem& p = task.problem;
  const auto write = [&](const std::optional<std::filesystem::path>& path, const TensorLayout& t,
                         const std::vector<uint16_t>& bits) {
    if (path) write_tensor(*path, options, p.dtype, t, bits);
  };
  write(options.dq, layout_dq(p, task.strides), gradients.dq);
  write(options.dk, layout_dk(p, task.strides), gradients.dk);
  write(options.dv, layout_dv(p, task.strides), gradients.dv);
}

}  // namespace flashsteps::cli
