// mbarriers and named barriers: barriers of a part of a block, which join what their participants
// know, and no more. setmaxnreg, which waits for registers as at a barrier.
#include <algorithm>

#include "common/model/block.h"

namespace flashsteps::model {
namespace {

constexpr int kMaxArrivals = (1 << 20) - 1;  // of an mbarrier, and of its bytes
constexpr size_t kMaxMbarriers = 1024;
constexpr int64_t kRegisterFile = 65536;

}  // namespace

void Block::start_async() {
  async_used_ = false;
  mbarriers_.clear();
  for (NamedBarrier& b : named_barriers_) b = {};
  loads_.clear();
  first_load_ = 0;
  load_pieces_.clear();
  open_stores_ = open_products_ = 0;
  for (Warpgroup& w : warpgroups_) w = {};
  free_registers_ = kRegisterFile - int64_t{launch_registers()} * threads_;
  waiting_for_registers_.clear();
}

// --- mbarriers

void Block::init_mbarrier(uint64_t* bar, int arrivals, SourceLine line) {
  const auto a = reinterpret_cast<uintptr_t>(bar);
  const std::string here = fmt::format("mbarrier_init ({})", site(line.file, line.line));
  size_t offset = 0;
  if (!find_shared(a, 8, "mbarrier_init of", offset)) {
    fail(FaultKind::host_memory, fmt::format("{} at {:#x}, which is not shared memory", here, a));
  }
  if (a % 8 != 0) {
    fail(FaultKind::misaligned, fmt::format("{} at {}, which is not at a multiple of 8 bytes", here,
                                            name_of_shared(offset)));
  }
  if (arrivals < 1 || arrivals > kMaxArrivals) {
    fail(FaultKind::barrier, fmt::format("{} of {} with {} arrivals; 1 to {} are allowed", here,
                                         name_of_shared(offset), arrivals, kMaxArrivals));
  }
  for (const Mbarrier& m : mbarriers_) {
    if (m.offset == offset) {
      fail(FaultKind::barrier, fmt::format("{} of {}, which is an mbarrier already, from {}", here,
                                           name_of(m), site(m.line.file, m.line.line)));
    }
  }
  if (mbarriers_.size() == kMaxMbarriers) {
    fail(FaultKind::unsupported, fmt::format("more than {} mbarriers", kMaxMbarriers));
  }
  async_used_ = true;
  shared_write<8 / kGranule>(offset, Access::write);
  counts.shared_written -= 8;  // the ledger counts data
  WriteRecord* const w = shadow_->write(offset / kGranule);
  for (int i = 0; i < 8 / kGranule; ++i) w[i].who |= WriteRecord::kMbarrier;
  Mbarrier m;
  m.offset = offset;
  m.arrivals = m.pending = arrivals;
  m.by = running.fiber->index;
  m.line = line;
  mbarriers_.push_back(std::move(m));
}

void Block::fence_mbarriers() {
  for (Mbarrier& m : mbarriers_) m.fenced |= m.by == running.fiber->index;
}

Mbarrier& Block::find_mbarrier(const char* what, uint64_t* bar, SourceLine line) {
  const auto a = reinterpret_cast<uintptr_t>(bar);
  size_t offset = 0;
  const auto here = [&] { return fmt::format("{} ({})", what, site(line.file, line.line)); };
  if (!find_shared(a, 8, what, offset)) {
    fail(FaultKind::host_memory, fmt::format("{} on {:#x}, which is not shared memory", here(), a));
  }
  for (Mbarrier& m : mbarriers_) {
    if (m.offset != offset) continue;
    const WriteRecord w = *shadow_->write(offset / kGranule);
    if (!w.mbarrier()) {
      fail(FaultKind::barrier,
           fmt::format("{} on {}, whose mbarrier has been overwritten", here(), name_of(m)));
    }
    if (!knows(*running.fiber, w)) {
      fail(FaultKind::race, fmt::format("{} on {}, which {} initialised, with no barrier between",
                                        here(), name_of(m), name_of(fibers_[m.by])));
    }
    return m;
  }
  fail(FaultKind::uninitialised,
       fmt::format("{} on {}, where no mbarrier was initialised", here(), name_of_shared(offset)));
}

std::string Block::state_of(const Mbarrier& m) const {
  return fmt::format("{} in phase {} lacks {} of {} arrivals and {} bytes", name_of(m), m.phase,
                     m.pending, m.arrivals, m.bytes);
}

void Block::end_phase_if_complete(Mbarrier& m) {
  if (m.pending > 0 || m.bytes != 0) return;
  if (last_agent_clock_ >= SharedShadow::kMaxClock - 2) {
    fail(FaultKind::unsupported,
         fmt::format("more than {} phases of mbarriers in one block", SharedShadow::kMaxClock / 2));
  }
  if (m.loaded) {
    m.arrived.learn(loads_agent(int(&m - mbarriers_.data())), agent_clock(m.phase + 1));
    m.unseen_load = true;
    m.loaded = false;
  }
  m.ended = m.arrived;
  ++m.phase;
  m.pending = m.arrivals;
  ++counts.mbarrier_phases;
  for (const uint16_t t : m.waiting) wake(fibers_[t]);
  m.waiting.clear();
}

void Block::arrive_at_mbarrier(const char* name, uint64_t* bar, int64_t bytes, SourceLine line) {
  sometimes_preempt();
  Mbarrier& m = find_mbarrier(name, bar, line);
  if (bytes < 0 || bytes > kMaxArrivals) {
    fail(FaultKind::barrier,
         fmt::format("{} ({}) on {} announces {} bytes; 0 to {} are allowed", name,
                     site(line.file, line.line), name_of(m), bytes, kMaxArrivals));
  }
  if (m.pending == 0) {
    fail(FaultKind::barrier, fmt::format("{} ({}) is one arrival too many: {}", name,
                                         site(line.file, line.line), state_of(m)));
  }
  release(*running.fiber, m.arrived);
  m.bytes += bytes;
  --m.pending;
  if (m.pending == 0 && m.bytes < 0) {
    fail(FaultKind::barrier,
         fmt::format("{} ({}) is the last arrival at {}, and TMA ({}) has brought {} bytes more "
                     "than were announced",
                     name, site(line.file, line.line), name_of(m), site(m.load.file, m.load.line),
                     -m.bytes));
  }
  end_phase_if_complete(m);
}

void Block::wait_for_mbarrier(uint64_t* bar, int parity, SourceLine line) {
  if (parity != 0 && parity != 1) {
    fail(FaultKind::barrier, fmt::format("mbarrier_wait ({}) with parity {}; 0 and 1 are allowed",
                                         site(line.file, line.line), parity));
  }
  sometimes_preempt();
  const size_t number = size_t(&find_mbarrier("mbarrier_wait", bar, line) - mbarriers_.data());
  Fiber& f = *running.fiber;
  // mbarriers_ may grow meanwhile.
  while (int(mbarriers_[number].phase & 1) == parity) {
    mbarriers_[number].waiting.push_back(f.index);
    f.mbarrier = int(number);
    wait(parity ? "mbarrier_wait, parity 1," : "mbarrier_wait, parity 0,", line.file, line.line);
    f.mbarrier = -1;
  }
  Mbarrier& m = mbarriers_[number];
  if (m.phase == 0) return;  // nothing has happened yet
  m.unseen_load = false;
  acquire(f, m.ended);
}

// --- named barriers

void Block::named_barrier(bool sync, int id, int threads, SourceLine line) {
  const char* const name = sync ? "named_barrier_sync" : "named_barrier_arrive";
  const auto here = [&] { return fmt::format("{} ({})", name, site(line.file, line.line)); };
  if (id < 1 || id > 15) {
    fail(FaultKind::barrier, fmt::format("{} with barrier {}; 1 to 15 are allowed (0 is that of "
                                         "__syncthreads)",
                                         here(), id));
  }
  if (threads < 32 || threads % 32 != 0 || threads > threads_) {
    fail(FaultKind::barrier, fmt::format("{} with {} threads; multiples of 32 up to the block's {} "
                                         "are allowed",
                                         here(), threads, threads_));
  }
  sometimes_preempt();
  async_used_ = true;
  NamedBarrier& b = named_barriers_[id];
  if (b.arrived == 0) {
    b.threads = threads;
    b.line = line;
  } else if (b.threads != threads) {
    fail(FaultKind::barrier,
         fmt::format("{} takes barrier {} for {} threads, while others wait or have arrived there "
                     "for {} ({})",
                     here(), id, threads, b.threads, site(b.line.file, b.line.line)));
  }
  Fiber& f = *running.fiber;
  release(f, b.joined);
  ++b.arrived;
  if (sync) b.waiting.push_back(f.index);
  if (b.arrived < b.threads) {
    if (sync) wait(name, line.file, line.line);
    return;
  }
  ++counts.named_barriers;
  // Those that wait share what they know now.
  View* const joined = new_view();
  joined->join(b.joined);
  for (const uint16_t t : b.waiting) {
    Fiber& waiter = fibers_[t];
    drop_view(waiter);
    waiter.view = joined;
    ++joined->owners;
    if (t != f.index) wake(waiter);
    if (waiter.lane == 31) settle_bank_conflicts(waiter.warp);
  }
  if (joined->owners == 0) free_views_.push_back(joined);
  b.arrived = 0;
  b.waiting.clear();
}

// --- registers

void Block::set_registers(int registers, bool grow, SourceLine line) {
  const char* const name = grow ? "grow_registers" : "shrink_registers";
  const auto here = [&] {
    return fmt::format("{}<{}> ({})", name, registers, site(line.file, line.line));
  };
  if (registers < 24 || registers > 256 || registers % 8 != 0) {
    fail(FaultKind::registers,
         fmt::format("{}: multiples of 8 from 24 to 256 are allowed", here()));
  }
  struct Args {
    int registers;
  } args{registers};
  warpgroup_together(name, args, line, [&](std::span<Args*, 128> all) {
    for (const Args* a : all) {
      if (a->registers == registers) continue;
      fail(FaultKind::registers,
           fmt::format("{}: other threads of its warpgroup ask for {}", here(), a->registers));
    }
  });
  Fiber& f = *running.fiber;
  if (grow ? registers < f.registers : registers > f.registers) {
    fail(FaultKind::registers, fmt::format("{}: the thread has {} registers", here(), f.registers));
  }
  // Each thread takes its share of what is free, and waits where it is too little.
  const int more = registers - f.registers;
  while (more > 0 && free_registers_ < more) {
    waiting_for_registers_.push_back(f.index);
    wait(name, line.file, line.line);
  }
  free_registers_ -= more;
  f.registers = registers;
  if (more < 0) {
    for (const uint16_t t : waiting_for_registers_) wake(fibers_[t]);
    waiting_for_registers_.clear();
  }
}

// --- messages

std::string Block::barriers_text() const {
  std::string text;
  for (const bool waited_for : {true, false}) {
    std::string list;
    for (const Mbarrier& m : mbarriers_) {
      if (m.waiting.empty() == waited_for) continue;
      list += (list.empty() ? "" : ", ") + state_of(m);
    }
    if (list.empty()) continue;
    text += (waited_for ? "; mbarriers waited for: " : "; other mbarriers: ") + list;
  }
  for (int id = 1; id < 16; ++id) {
    const NamedBarrier& b = named_barriers_[id];
    if (b.arrived == 0) continue;
    text +=
        fmt::format("; named barrier {}: {} of {} threads have arrived", id, b.arrived, b.threads);
  }
  if (!waiting_for_registers_.empty()) {
    text += fmt::format("; {} of {} registers are free", free_registers_, kRegisterFile);
  }
  return text;
}

void Block::check_end_of_block() {
  for (const Mbarrier& m : mbarriers_) {
    if (!m.unseen_load && !m.loaded && m.bytes == 0) continue;
    if (!m.load.file) {
      fail(FaultKind::never_waited, fmt::format("is the last to end, and no TMA load has brought "
                                                "what was announced: mbarrier {}",
                                                state_of(m)));
    }
    fail(FaultKind::never_waited,
         fmt::format("is the last to end, and nobody has waited on {} for what TMA ({}) brought",
                     name_of(m), site(m.load.file, m.load.line)));
  }
  if (!load_pieces_.empty()) {
    const BulkLoad& l = loads_[load_pieces_.front().load - first_load_];
    fail(FaultKind::never_waited,
         fmt::format("is the last to end while the TMA load of {} ({}) is in flight",
                     name_of(fibers_[l.thread]), site(l.line.file, l.line.line)));
  }
}

// --- primitives

void mbarrier_init(uint64_t* bar, int arrivals, const char* file, int line) {
  if (skipped(SiteKind::mbarrier_init, file, line)) return;
  current_block("mbarrier_init").init_mbarrier(bar, arrivals, {file, line});
}

void fence_mbarrier_init(const char* file, int line) {
  if (skipped(SiteKind::fence, file, line)) return;
  current_block("fence_mbarrier_init").fence_mbarriers();
}

void mbarrier_arrive(uint64_t* bar, const char* file, int line) {
  if (skipped(SiteKind::arrive, file, line)) return;
  current_block("mbarrier_arrive").arrive_at_mbarrier("mbarrier_arrive", bar, 0, {file, line});
}

void mbarrier_arrive_expect_tx(uint64_t* bar, int bytes, const char* file, int line) {
  if (skipped(SiteKind::arrive, file, line)) return;
  if (skipped(SiteKind::expect, file, line)) bytes = 0;
  current_block("mbarrier_arrive_expect_tx")
      .arrive_at_mbarrier("mbarrier_arrive_expect_tx", bar, bytes, {file, line});
}

void mbarrier_wait(uint64_t* bar, int parity, const char* file, int line) {
  if (skipped(SiteKind::wait, file, line)) return;
  current_block("mbarrier_wait").wait_for_mbarrier(bar, parity, {file, line});
}

void named_barrier_sync(int id, int threads, const char* file, int line) {
  if (skipped(SiteKind::named_barrier, file, line)) return;
  current_block("named_barrier_sync").named_barrier(true, id, threads, {file, line});
}

void named_barrier_arrive(int id, int threads, const char* file, int line) {
  if (skipped(SiteKind::arrive, file, line)) return;
  current_block("named_barrier_arrive").named_barrier(false, id, threads, {file, line});
}

void set_registers(int registers, bool grow, const char* file, int line) {
  if (skipped(SiteKind::registers, file, line)) return;
  current_block("setmaxnreg").set_registers(registers, grow, {file, line});
}

int warp_uniform(int x, const char* file, int line) {
  Block& b = current_block("warp_uniform");
  struct Args {
    int x;
  } args{x};
  b.warp_together("warp_uniform", 0xffffffffu, args, file, line, [&](std::span<Args*, 32> lanes) {
    for (const Args* a : lanes) {
      if (a->x == x) continue;
      b.fail(FaultKind::divergence,
             fmt::format("warp_uniform ({}:{}) of {}, while another lane of the warp has {}", file,
                         line, x, a->x));
    }
  });
  return x;
}

}  // namespace flashsteps::model
