// wgmma: products of a warpgroup that are computed at a random moment between their issue and the
// wait that covers them, in order. They read shared memory then, and use the threads' registers
// behind their backs.
#include <algorithm>
#include <cstring>

#include "common/model/block.h"
#include "common/model/float16.h"

namespace flashsteps::model {
namespace {

constexpr int kM = ProductBuffers::kM, kK = ProductBuffers::kK;
constexpr int kPiece = 16;       // bytes that the swizzle keeps together
constexpr int kLine = 128;       // bytes of a row in shared memory
constexpr size_t kRecent = 128;  // products whose lines are remembered

uint32_t start_of(uint64_t descriptor) {
  return uint32_t(descriptor & 0x3fff) << 4;
}
uint32_t leading_of(uint64_t descriptor) {
  return uint32_t(descriptor >> 16 & 0x3fff) << 4;
}
uint32_t stride_of(uint64_t descriptor) {
  return uint32_t(descriptor >> 32 & 0x3fff) << 4;
}

#if defined(__x86_64__)
#define FLASHSTEPS_WIDE [[gnu::target_clones("arch=x86-64-v3", "default")]]
#else
#define FLASHSTEPS_WIDE
#endif

/// D (64 x n, by rows) += A (64 x 16, by rows) B, given as rows of k (16 x n) or of n (n x 16).
template <typename Convert>
[[gnu::always_inline]] inline void multiply(ProductBuffers& buffers, bool b_by_k, int n,
                                            Convert convert) {
  const uint16_t *const a16 = buffers.a16, *const b16 = buffers.b16;
  float *const a = buffers.a, *const b = buffers.b, *const d = buffers.d;
  for (int i = 0; i < kM * kK; ++i) a[i] = convert(a16[i]);
  if (b_by_k) {
    for (int i = 0; i < kK * n; ++i) b[i] = convert(b16[i]);
  } else {
    for (int j = 0; j < n; ++j) {
      for (int k = 0; k < kK; ++k) b[k * n + j] = convert(b16[j * kK + k]);
    }
  }
  for (int i = 0; i < kM; ++i) {
    for (int k = 0; k < kK; ++k) {
      const float x = a[i * kK + k];
      const float* const row = b + k * n;
      float* const sums = d + i * n;
      for (int j = 0; j < n; ++j) sums[j] += x * row[j];
    }
  }
}

FLASHSTEPS_WIDE void multiply_fp16(ProductBuffers& buffers, bool b_by_k, int n) {
  multiply(buffers, b_by_k, n, [](uint16_t x) { return half_to_float(x); });
}
FLASHSTEPS_WIDE void multiply_bf16(ProductBuffers& buffers, bool b_by_k, int n) {
  multiply(buffers, b_by_k, n, [](uint16_t x) { return bfloat_to_float(x); });
}

bool overlap(const void* a, size_t a_bytes, const void* b, size_t b_bytes) {
  const auto x = reinterpret_cast<uintptr_t>(a), y = reinterpret_cast<uintptr_t>(b);
  return x < y + b_bytes && y < x + a_bytes;
}

}  // namespace

// --- operands in shared memory

uint64_t Block::descriptor_of(const void* smem, int leading_bytes, int stride_bytes,
                              SourceLine line) {
  const auto a = reinterpret_cast<uintptr_t>(smem);
  const auto here = [&] {
    return fmt::format("matrix_descriptor ({})", site(line.file, line.line));
  };
  size_t offset = 0;
  if (!find_shared(a, kPiece, "matrix_descriptor of", offset)) {
    fail(FaultKind::host_memory, fmt::format("{} of {:#x}, which is not shared memory", here(), a));
  }
  if (offset >= kDynamicMax) {
    fail(FaultKind::unsupported, fmt::format("{} of {}: the model does wgmma on dynamic shared "
                                             "memory alone",
                                             here(), name_of_shared(offset)));
  }
  if (offset % kPiece != 0) {
    fail(FaultKind::misaligned, fmt::format("{} of {}, which is not at a multiple of {} bytes",
                                            here(), name_of_shared(offset), kPiece));
  }
  for (const int bytes : {leading_bytes, stride_bytes}) {
    if (bytes >= 0 && bytes < 1 << 18 && (bytes % 16 == 0 || bytes == 1)) continue;
    fail(FaultKind::misaligned,
         fmt::format("{} with a step of {} bytes; multiples of 16 below 2^18 are allowed", here(),
                     bytes));
  }
  return uint64_t(offset >> 4 & 0x3fff) | uint64_t(leading_bytes >> 4) << 16 |
         uint64_t(stride_bytes >> 4) << 32 | uint64_t{1} << 62;
}

template <typename F>
void Block::for_each_piece(uint64_t descriptor, bool mn, int size, F&& f) {
  const uint32_t start = start_of(descriptor), leading = leading_of(descriptor),
                 stride = stride_of(descriptor);
  const auto at = [&](uint32_t address) { f(size_t(address ^ (address / kLine % 8) * kPiece)); };
  if (mn) {  // rows of k; panels of 64
    for (int k = 0; k < kK; ++k) {
      for (int j = 0; j < size / 8; ++j) {
        at(start + uint32_t(j / 8) * leading + uint32_t(k / 8) * stride + uint32_t(k % 8) * kLine +
           uint32_t(j % 8) * kPiece);
      }
    }
  } else {  // rows of m or n
    for (int r = 0; r < size; ++r) {
      for (int c = 0; c < kK / 8; ++c) {
        at(start + uint32_t(r / 8) * stride + uint32_t(r % 8) * kLine + uint32_t(c) * kPiece);
      }
    }
  }
}

void Block::check_operand(const char* name, uint64_t descriptor, bool mn, int size, int warpgroup,
                          uint32_t clock, SourceLine line, WriteRecord& good, size_t& begin,
                          size_t& end) {
  const std::string what = fmt::format("the wgmma ({}), for {},", site(line.file, line.line), name);
  if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0) {
    fail(FaultKind::unsupported,
         fmt::format("{} has the descriptor {:#x}, which is not one of the 128-byte swizzle with "
                     "base offset 0",
                     what, descriptor));
  }
  const uint32_t start = start_of(descriptor);
  if (start % (mn ? kLine : 2 * kPiece) != 0 || start / kLine % 8 != 0) {
    fail(FaultKind::misaligned,
         fmt::format("{} starts at {}: it must start at the first of 8 rows of 128 bytes, at a "
                     "multiple of 1024 bytes of shared memory{}",
                     what, name_of_shared(start),
                     mn ? "" : ", and there at a multiple of 32 bytes"));
  }
  begin = start;
  end = 0;
  const ReadRecord read = ReadRecord::by_lane(clock, 0);
  const std::span<Fiber> readers(&fibers_[warpgroup * 128], 128);
  for_each_piece(descriptor, mn, size, [&](size_t offset) {
    if (offset + kPiece > dynamic_bytes_) {
      fail(FaultKind::out_of_bounds,
           fmt::format("{} reads {}, but the launch gave the block {} bytes of dynamic shared "
                       "memory",
                       what, name_of_shared(offset), dynamic_bytes_));
    }
    check_async_read(offset / kGranule, kPiece / kGranule, readers, what, good);
    std::fill_n(shadow_->read(SharedShadow::kProducts + warpgroup, offset / kGranule),
                kPiece / kGranule, read);
    begin = std::min(begin, offset);
    end = std::max(end, offset + kPiece);
  });
  counts.shared_read += size * kK * 2;
}

void Block::load_operand(uint64_t descriptor, bool mn, int size, uint16_t* to) const {
  for_each_piece(descriptor, mn, size, [&](size_t offset) {
    std::memcpy(to, dynamic_ + offset, kPiece);
    to += kPiece / 2;
  });
}

// --- products

void Block::start_product(const Wgmma& p, SourceLine line) {
  async_used_ = true;
  Fiber& f = *running.fiber;
  const auto here = [&] { return fmt::format("wgmma ({})", site(line.file, line.line)); };
  const size_t d_bytes = size_t(p.n) * 2, a_bytes = p.a ? 16 : 0;
  const size_t d_offset = local_offset(f, p.d), a_offset = p.a ? local_offset(f, p.a) : 0;
  if (d_offset >= LocalMemory::kBytes || a_offset >= LocalMemory::kBytes) {
    fail(FaultKind::unsupported,
         fmt::format("{}: its sums and operands must be local variables of the thread", here()));
  }
  if (!f.follows_registers) {
    fail(FaultKind::registers, fmt::format("{} with no wgmma_fence before", here()));
  }
  if (f.local_memory->was_touched(d_offset, d_bytes)) {
    fail(FaultKind::registers,
         fmt::format("{}: its sums were touched, with no wgmma_fence after", here()));
  }
  if (p.a && f.local_memory->was_touched(a_offset, a_bytes)) {
    fail(FaultKind::registers,
         fmt::format("{}: its operand A was touched, with no wgmma_fence after", here()));
  }
  for (const PendingProduct& q : f.products) {
    const size_t q_bytes = size_t(q.n) * 2;
    const bool same_sums = q.d == p.d && q.n == p.n;
    if ((!same_sums && overlap(p.d, d_bytes, q.d, q_bytes)) ||
        (q.a && overlap(p.d, d_bytes, q.a, 16)) || (p.a && overlap(p.a, a_bytes, q.d, q_bytes))) {
      fail(FaultKind::registers,
           fmt::format("{} uses registers of the wgmma ({}) before a wait that covers it", here(),
                       site(q.line.file, q.line.line)));
    }
  }
  PendingProduct mine{f.product_commits, p.d, p.n, p.a, {}, line};
  if (p.a) std::copy_n(p.a, 4, mine.a_was);
  f.products.push_back(mine);
  f.local_memory->set_accumulator(d_offset, d_bytes, true);
  if (p.a) f.local_memory->set_operand(a_offset, a_bytes, true);

  struct Args {
    Wgmma product;
    uint32_t group;
  } args{p, f.product_commits};
  warpgroup_together("wgmma", args, line, [&](std::span<Args*, 128> all) {
    const int g = running.fiber->warp / 4;
    Product product;
    product.args = all[0]->product;
    product.group = all[0]->group;
    for (int t = 0; t < 128; ++t) {
      const Wgmma &x = all[t]->product, &y = product.args;
      if (x.type != y.type || x.n != y.n || x.a_mn != y.a_mn || x.b_mn != y.b_mn || !x.a != !y.a ||
          x.a_descriptor != y.a_descriptor || x.b_descriptor != y.b_descriptor ||
          x.accumulate != y.accumulate) {
        fail(FaultKind::divergence,
             fmt::format("{}: thread {} and thread {} of the warpgroup ask for different products",
                         here(), g * 128, g * 128 + t));
      }
      if (all[t]->group != product.group) {
        fail(FaultKind::divergence,
             fmt::format("{}: thread {} has committed {} groups, thread {} {}", here(), g * 128,
                         product.group, g * 128 + t, all[t]->group));
      }
      product.d[t] = x.d;
      product.a[t] = x.a;
    }
    const uint32_t clock = agent_clock(product.group + 1);
    ProductLine where{clock, 0, 0, 0, 0, line};
    WriteRecord good{};
    const Wgmma& y = product.args;
    if (!y.a) {
      check_operand("A", y.a_descriptor, y.a_mn, kM, g, clock, line, good, where.a_begin,
                    where.a_end);
    }
    check_operand("B", y.b_descriptor, y.b_mn, y.n, g, clock, line, good, where.b_begin,
                  where.b_end);
    Warpgroup& w = warpgroups_[g];
    w.recent.push_back(where);
    if (w.recent.size() > kRecent) w.recent.pop_front();
    ++counts.wgmma;
    counts.wgmma_flops += int64_t{2} * kM * kK * y.n;
    w.products.push_back(product);
    ++open_products_;
  });
}

void Block::compute_product(int warpgroup) {
  Warpgroup& w = warpgroups_[warpgroup];
  const Product p = w.products.front();
  w.products.pop_front();
  --open_products_;
  if (p.args.taken_out) return;
  // A thread's stack has no room for them.
  if (!product_buffers_) product_buffers_ = std::make_unique<ProductBuffers>();
  ProductBuffers& buffers = *product_buffers_;
  uint16_t* const a = buffers.a16;
  float* const d = buffers.d;
  const int n = p.args.n;
  if (p.args.a) {
    for (int t = 0; t < 128; ++t) {
      const int row = t / 32 * 16 + t % 32 / 4, col = 2 * (t % 4);
      for (int r = 0; r < 4; ++r) {
        uint16_t* const to = a + (row + r % 2 * 8) * kK + col + r / 2 * 8;
        to[0] = uint16_t(p.a[t][r]);
        to[1] = uint16_t(p.a[t][r] >> 16);
      }
    }
  } else if (p.args.a_mn) {
    load_operand(p.args.a_descriptor, true, kM, buffers.b16);
    for (int k = 0; k < kK; ++k) {
      for (int m = 0; m < kM; ++m) a[m * kK + k] = buffers.b16[k * kM + m];
    }
  } else {
    load_operand(p.args.a_descriptor, false, kM, a);
  }
  load_operand(p.args.b_descriptor, p.args.b_mn, n, buffers.b16);

  const auto element = [&](int t, int j, int e) -> float& {
    const int row = t / 32 * 16 + t % 32 / 4 + e / 2 * 8;
    return d[row * n + j * 8 + t % 4 * 2 + e % 2];
  };
  if (p.args.accumulate) {
    for (int t = 0; t < 128; ++t) {
      for (int j = 0; j < n / 8; ++j) {
        for (int e = 0; e < 4; ++e) element(t, j, e) = p.d[t][j * 4 + e];
      }
    }
  } else {
    std::fill_n(d, kM * n, 0.f);
  }
  p.args.type == Type16::fp16 ? multiply_fp16(buffers, p.args.b_mn, n)
                              : multiply_bf16(buffers, p.args.b_mn, n);
  for (int t = 0; t < 128; ++t) {
    for (int j = 0; j < n / 8; ++j) {
      for (int e = 0; e < 4; ++e) p.d[t][j * 4 + e] = element(t, j, e);
    }
  }
}

void Block::wait_for_products(uint32_t pending, const WgmmaSums& sums, SourceLine line) {
  Fiber& f = *running.fiber;
  const uint32_t covered = f.product_commits > pending ? f.product_commits - pending : 0;
  if (covered == 0) return;
  const int g = f.warp / 4;
  Warpgroup& w = warpgroups_[g];
  while (!w.products.empty() && w.products.front().group < covered) compute_product(g);
  size_t done = 0;
  for (; done < f.products.size() && f.products[done].group < covered; ++done) {
    const PendingProduct& p = f.products[done];
    f.local_memory->set_accumulator(local_offset(f, p.d), size_t(p.n) * 2, false);
    if (sums.count > 0 && std::find(sums.d, sums.d + sums.count, p.d) == sums.d + sums.count) {
      fail(FaultKind::registers,
           fmt::format("wgmma_wait ({}) completes the sums of the wgmma ({}), which it does not "
                       "name: a card's compiler may read them before",
                       site(line.file, line.line), site(p.line.file, p.line.line)));
    }
    if (!p.a) continue;
    f.local_memory->set_operand(local_offset(f, p.a), 16, false);
    if (std::equal(p.a_was, p.a_was + 4, p.a)) continue;
    fail(FaultKind::registers,
         fmt::format("the operand A of its wgmma ({}) was changed before the wait that covers it",
                     site(p.line.file, p.line.line)));
  }
  f.products.erase(f.products.begin(), f.products.begin() + std::ptrdiff_t(done));
  for (const PendingProduct& p : f.products) {  // they may share registers with the ones done
    f.local_memory->set_accumulator(local_offset(f, p.d), size_t(p.n) * 2, true);
    if (p.a) f.local_memory->set_operand(local_offset(f, p.a), 16, true);
  }
  own_view(f).learn(products_agent(g), agent_clock(covered));
}

void Block::fence_registers() {
  async_used_ = true;
  Fiber& f = *running.fiber;
  if (f.follows_registers) return f.local_memory->forget_touched();
  if (!f.local_memory) f.local_memory = std::make_unique<LocalMemory>();
  f.local_memory->clear();
  f.follows_registers = running.follows_registers = true;
}

void Block::touched_in_flight(size_t offset, int bytes, bool write) {
  const Fiber& f = *running.fiber;
  const auto* const at = reinterpret_cast<const char*>(f.stack_low) + offset;
  for (const PendingProduct& p : f.products) {
    const bool sums = overlap(at, size_t(bytes), p.d, size_t(p.n) * 2);
    if (!sums && !(p.a && overlap(at, size_t(bytes), p.a, 16))) continue;
    fail(FaultKind::registers,
         fmt::format("{} {} of its wgmma ({}) before a wait that covers it ({})",
                     write ? "writes" : "reads", sums ? "sums" : "the operand A",
                     site(p.line.file, p.line.line),
                     p.group < f.product_commits ? "committed" : "not committed"));
  }
  fail(FaultKind::registers, "touches registers of a wgmma before a wait that covers it");
}

// --- primitives

uint64_t matrix_descriptor(const void* smem, int leading_bytes, int stride_bytes, const char* file,
                           int line) {
  return current_block("matrix_descriptor")
      .descriptor_of(smem, leading_bytes, stride_bytes, {file, line});
}

void wgmma(const Wgmma& product, const char* file, int line) {
  Wgmma p = product;
  p.taken_out = skipped(SiteKind::wgmma, file, line);
  current_block("wgmma").start_product(p, {file, line});
}

void wgmma_fence(const char* file, int line) {
  if (skipped(SiteKind::fence, file, line)) return;
  current_block("wgmma_fence").fence_registers();
}

void wgmma_commit(const char* file, int line) {
  if (skipped(SiteKind::commit, file, line)) return;
  current_block("wgmma_commit").commit_products();
}

void wgmma_wait(int pending, const WgmmaSums& sums, const char* file, int line) {
  if (skipped(SiteKind::wait, file, line)) return;
  current_block("wgmma_wait").wait_for_products(uint32_t(pending), sums, {file, line});
}

}  // namespace flashsteps::model
