#include "common/stage/bound.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <stdexcept>

#include "common/attention/work.h"

namespace flashsteps {
namespace {

using Part = std::pair<const char*, double>;

std::array<Part, 4> parts(const TimeBound& b) {
  return {{{"memory", b.memory_us}, {"MMA", b.mma_us}, {"FMA", b.fma_us}, {"exp", b.exp_us}}};
}

Part slowest(const TimeBound& b) {
  const auto all = parts(b);
  return *std::max_element(all.begin(), all.end(),
                           [](const Part& x, const Part& y) { return x.second < y.second; });
}

// What was asked of a tensor, but no byte twice.
int64_t once(const BytesByTensor& asked, const char* tensor, int64_t size) {
  const auto found = asked.find(tensor);
  return found == asked.end() ? 0 : std::min(found->second, size);
}

}  // namespace

double TimeBound::bound_us() const {
  return slowest(*this).second;
}

const char* TimeBound::bound_by() const {
  return bound_us() > 0 ? slowest(*this).first : "nothing";
}

TimeBound time_bound(const Card& card, const Stage& stage, const Problem& p, const Ledger& ledger) {
  const int64_t q_bytes = p.rows() * p.head_dim * size_of(p.dtype);
  const int64_t kv_bytes =
      int64_t{p.batch} * p.kv_heads * p.seqlen_k * p.head_dim * size_of(p.dtype);
  const int64_t l_bytes = p.rows() * size_of(DType::fp32);
  int64_t least = once(ledger.global_read, "Q", q_bytes) + once(ledger.global_read, "K", kv_bytes) +
                  once(ledger.global_read, "V", kv_bytes);
  if (is_backward(stage)) {
    least += once(ledger.global_read, "O", q_bytes) + once(ledger.global_read, "dO", q_bytes) +
             once(ledger.global_read, "L", l_bytes) + once(ledger.global_written, "dQ", q_bytes) +
             once(ledger.global_written, "dK", kv_bytes) +
             once(ledger.global_written, "dV", kv_bytes);
  } else {
    least += once(ledger.global_written, "O", q_bytes) + once(ledger.global_written, "L", l_bytes);
  }
  const int64_t requested = Ledger::total(ledger.global_read) +
                            Ledger::total(ledger.global_written) + 2 * ledger.atomic_bytes;
  // A block runs on one SM: with fewer blocks than SMs, the rest of the card has nothing to do.
  const auto us = [](double amount, double per_s) {
    return amount == 0 ? 0 : amount / per_s * 1e6;
  };

  TimeBound bound;
  bound.multiprocessors = int(std::min<int64_t>(ledger.grid_blocks, card.multiprocessors));
  const double busy = double(bound.multiprocessors) / card.multiprocessors;
  bound.memory_us = us(double(least), card.memory_gb_per_s * 1e9);
  bound.requested_us = us(double(requested), card.memory_gb_per_s * 1e9);
  bound.mma_us = us(double(ledger.mma_flops), busy * card.tensor_tflops * 1e12);
  if (ledger.mma_flops == 0 && ledger.grid_blocks > 0)
    bound.fma_us = us(double(is_backward(stage) ? backward_flops(p) : forward_flops(p)),
                      busy * card.fp32_tflops * 1e12);
  bound.exp_us = us(double(ledger.exp + ledger.div), busy * card.special_per_s());
  return bound;
}

TimeBound time_bound_of_more_heads(const Card& card, const Stage& stage, const Problem& p,
                                   const Ledger& ledger, const Problem& larger) {
  const bool same = p.seqlen_q == larger.seqlen_q && p.seqlen_k == larger.seqlen_k &&
                    p.head_dim == larger.head_dim && p.dtype == larger.dtype &&
                    p.causal == larger.causal &&
                    p.heads / p.kv_heads == larger.heads / larger.kv_heads;
  if (!same || p.batch_heads() == 0) {
    throw std::invalid_argument(
        "a bound grows with batch and heads alone; the problems differ in more");
  }
  const double factor = double(larger.batch_heads()) / double(p.batch_heads());
  const auto grow = [&](int64_t& count) { count = std::llround(double(count) * factor); };
  Ledger grown = ledger;
  for (BytesByTensor* table : {&grown.global_read, &grown.global_written}) {
    for (auto& [tensor, bytes] : *table) grow(bytes);
  }
  for (int64_t* count :
       {&grown.atomic_bytes, &grown.mma_flops, &grown.exp, &grown.div, &grown.grid_blocks}) {
    grow(*count);
  }
  return time_bound(card, stage, larger, grown);
}

std::optional<std::string> why_no_bound(const Card& card, const Problem& p, const Ledger& ledger) {
  if (card.capability >= 80) return std::nullopt;
  // PTX ISA: mma.m16n8k16 of 16-bit types, cp.async, and mma of bf16 need sm_80.
  const char* lacking = ledger.cp_async > 0      ? "cp.async"
                        : ledger.mma > 0         ? "mma.m16n8k16"
                        : p.dtype == DType::bf16 ? "bf16"
                                                 : nullptr;
  if (!lacking) return std::nullopt;
  return fmt::format("cannot run on {}: {} needs compute capability 8.0, it has {}.{}", card.name,
                     lacking, card.capability / 10, card.capability % 10);
}

}  // namespace flashsteps
