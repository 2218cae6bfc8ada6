#include "common/model/block.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <stdexcept>

#include "common/stage/device.h"

namespace flashsteps::model {

using boost::context::detail::jump_fcontext;
using boost::context::detail::make_fcontext;
using boost::context::detail::transfer_t;

Block& current_block(const char* what) {
  if (!running.block) throw std::logic_error(fmt::format("{} outside of a kernel", what));
  return *running.block;
}

Block::Block() {
  void* p =
      mmap(nullptr, kReservation, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw DeviceError("the CPU model has no room for shared memory");
  reservation_ = reinterpret_cast<uintptr_t>(p);
  dynamic_ = static_cast<unsigned char*>(p) + kReservation / 2;
  mprotect(dynamic_, kDynamicMax, PROT_READ | PROT_WRITE);
}

Block::~Block() {
  munmap(reinterpret_cast<void*>(reservation_), kReservation);
  for (Traffic& t : traffic) t.prepare(Buffer());
}

// --- one block

void Block::prepare(const LaunchState& launch) {
  launch_ = &launch;
  counts = {};
  threads_ = launch.launch.block;
  warps_ = threads_ / 32;
  dynamic_bytes_ = launch.launch.dynamic_shared_memory;
  thread_locals_ = thread_local_block();
  static_begin_ = thread_locals_.begin + launch.kernel.static_offset;
  static_span_ = launch.kernel.static_span;
  for (unsigned i = 0; i < Heap::kSlots; ++i) {
    const Buffer& b = heap_.buffer(i);
    if (!b.live) continue;
    Traffic& t = traffic[i];
    t.prepare(b);
    t.read = t.written = t.unique_read = 0;
  }
  if (!shadow_) {
    shadow_ =
        std::make_unique<SharedShadow>(kDynamicMax + (thread_locals_.end - thread_locals_.begin));
  }
  if (stacks_count_ < threads_) {
    stacks_.reset();
    stacks_ = std::make_unique<StackPool>(threads_);
    stacks_count_ = threads_;
    fibers_.resize(threads_);
  }
  warp_.resize(warps_);
  runnable_.reserve(threads_);
}

std::optional<Fault> Block::run(const LaunchState& launch, int64_t index) {
  index_ = index;
  ++number_;
  fault_.reset();
  has_turn_ = false;
  random_ =
      Random(scramble(launch.options.seed) ^ scramble(scramble(launch.number) + uint64_t(index)));
  until_preemption_ = preemption_interval();

  if (std::max(first_clock_, first_agent_clock_) > SharedShadow::kMaxClock / 2) {
    shadow_->clear();
    first_clock_ = first_agent_clock_ = last_agent_clock_ = 1;
  }
  // Nothing is there until a thread writes it.
  std::memset(dynamic_, 0xff, dynamic_bytes_);
  for (const StaticArray& array : launch.kernel.symbols.arrays) {
    std::memset(reinterpret_cast<void*>(thread_locals_.begin + array.offset), 0xff, array.bytes);
  }
  parts_.clear();
  not_landed_.clear();
  start_async();
  free_views_.clear();
  for (const auto& view : views_) free_views_.push_back(view.get());

  runnable_.clear();
  for (int i = 0; i < threads_; ++i) {
    Fiber& f = fibers_[i];
    f.context = make_fcontext(stacks_->top(i), StackPool::kStack - 4096, &Block::enter);
    f.stack_low = stacks_->low(i);
    f.index = uint16_t(i);
    f.lane = uint8_t(i % 32);
    f.warp = uint8_t(i / 32);
    f.state = Fiber::State::runnable;
    f.clock = first_clock_;
    f.floor = first_clock_ - 1;
    f.view = nullptr;
    f.log.clear();
    f.copies.clear();
    f.first_copy = f.commits = 0;
    f.mbarrier = -1;
    f.stores.clear();
    f.products.clear();
    f.store_commits = f.product_commits = 0;
    f.follows_registers = false;
    f.registers = launch_registers();
    f.tiles = f.tiles_masked = 0;
    f.in_tile_loop = false;
    f.turn = nullptr;
    runnable_.push_back(&f);
  }
  for (Warp& w : warp_) w.arrived = 0;
  barrier_.arrived = 0;
  alive_ = threads_;

  running.block = this;
  running.stack_bytes = StackPool::kStack;
  running.fiber = &main_;
  resume(pick());
  running = outside_kernels();

  uint32_t last = first_clock_;
  for (int i = 0; i < threads_; ++i) last = std::max(last, fibers_[i].clock);
  first_clock_ = last + 1;
  first_agent_clock_ = last_agent_clock_ + 1;
  if (fault_) {
    shadow_->clear();  // copies may have been left in flight
    first_clock_ = first_agent_clock_ = last_agent_clock_ = 1;
    return std::move(fault_);
  }

  int64_t tiles = 0, masked = 0;
  for (int i = 0; i < threads_; ++i) {
    tiles = std::max(tiles, fibers_[i].tiles);
    masked = std::max(masked, fibers_[i].tiles_masked);
  }
  counts.tiles_visited += tiles;
  counts.tiles_masked += masked;
  ++counts.grid_blocks;
  return std::nullopt;
}

// --- threads

void Block::enter(transfer_t from) {
  static_cast<Fiber*>(from.data)->context = from.fctx;
  Block& block = *running.block;
  std::string thrown;
  try {
    block.launch_->launch.body(block.launch_->launch.parameters);
  } catch (const std::exception& e) {
    thrown = e.what();
  } catch (...) {
    thrown = "not a std::exception";
  }
  if (!thrown.empty()) block.fail(FaultKind::exception, "an exception left the kernel: " + thrown);
  block.exit_thread();
}

void Block::resume(Fiber& next) {
  Fiber* const self = running.fiber;
  if (self == &next) return;
  running.fiber = &next;
  running.stack_low = next.stack_low;
  running.follows_registers = next.follows_registers;
  const transfer_t from = jump_fcontext(next.context, self);
  static_cast<Fiber*>(from.data)->context = from.fctx;
}

Fiber& Block::pick() {
  if (has_async_work() && random_.below(4) == 0) advance();
  const uint32_t i = random_.below(uint32_t(runnable_.size()));
  Fiber* const f = runnable_[i];
  runnable_[i] = runnable_.back();
  runnable_.pop_back();
  return *f;
}

void Block::wait(const char* what, const char* file, int line) {
  Fiber& f = *running.fiber;
  f.state = Fiber::State::waiting;
  f.waits_for = what, f.file = file, f.line = line;
  // What works beside the threads may wake one.
  while (runnable_.empty() && has_async_work()) advance();
  if (runnable_.empty()) deadlock();
  resume(pick());
}

void Block::wake(Fiber& f) {
  f.state = Fiber::State::runnable;
  runnable_.push_back(&f);
}

int64_t Block::preemption_interval() {
  const double p = launch_->options.preempt;
  if (p <= 0) return INT64_MAX;
  const double longest = std::min(2 / p - 1, 1e9);  // uniform on 1 … longest: the mean is 1/p
  return random_.below(uint32_t(longest));
}

void Block::preempt() {
  until_preemption_ = preemption_interval();
  runnable_.push_back(running.fiber);
  resume(pick());
}

void Block::exit_thread() {
  Fiber& f = *running.fiber;
  if (!f.copies.empty()) {
    const AsyncCopy& c = f.copies.front();
    size_t offset = 0;
    find_shared(reinterpret_cast<uintptr_t>(c.to), 16, "copies", offset);
    fail(FaultKind::never_waited,
         fmt::format("ends with {} cp.async that no wait covers; the oldest, to {} ({}), was {}",
                     f.copies.size(), name_of_shared(offset), site(c.file, c.line),
                     c.group < f.commits ? "committed" : "never committed"));
  }
  check_end_of_thread();
  f.state = Fiber::State::exited;
  const Fiber* const lanes = &fibers_[f.warp * 32];
  if (std::all_of(lanes, lanes + 32,
                  [](const Fiber& l) { return l.state == Fiber::State::exited; })) {
    settle_bank_conflicts(f.warp);
  }
  if (--alive_ == 0) {
    check_end_of_block();
    resume(main_);
  } else {
    while (runnable_.empty() && has_async_work()) advance();
    if (runnable_.empty()) deadlock();
    resume(pick());
  }
  __builtin_unreachable();
}

void Block::leave() {
  resume(main_);
  __builtin_unreachable();
}

void Block::fail(FaultKind kind, const std::string& what) {
  const Fiber& f = *running.fiber;
  fault_ = Fault(kind, fmt::format("{} block ({},0,0) {}: {}: {}", launch_->kernel.symbols.name,
                                   index_, name_of(f), to_string(kind), what));
  leave();
}

void Block::deadlock() {
  // Threads that wait at the same place, or have ended, are told together, as ranges.
  struct Group {
    std::string place, members;
    int first = 0, last = 0, size = 0;
  };
  std::vector<Group> groups;
  const auto close = [](Group& g) {
    if (g.size == 0) return;
    if (!g.members.empty()) g.members += ' ';
    g.members +=
        g.first == g.last ? fmt::to_string(g.first) : fmt::format("{}-{}", g.first, g.last);
  };
  for (int i = 0; i < threads_; ++i) {
    const Fiber& f = fibers_[i];
    const std::string place =
        f.state == Fiber::State::exited
            ? "ended"
            : fmt::format("wait at {} ({}){}", f.waits_for, site(f.file, f.line),
                          f.mbarrier < 0 ? std::string()
                                         : " for " + name_of(mbarriers_[size_t(f.mbarrier)]));
    auto g = std::find_if(groups.begin(), groups.end(),
                          [&](const Group& x) { return x.place == place; });
    if (g == groups.end()) g = groups.insert(groups.end(), Group{place, {}, i, i - 1, 0});
    if (g->last != i - 1) {
      close(*g);
      g->first = i;
    }
    g->last = i;
    ++g->size;
  }
  std::string text;
  for (Group& g : groups) {
    close(g);
    text += fmt::format("{}threads {} {}", text.empty() ? "" : "; ", g.members, g.place);
  }
  text += barriers_text();
  fault_ = Fault(FaultKind::deadlock, fmt::format("{} block ({},0,0): {}: no thread can go on: {}",
                                                  launch_->kernel.symbols.name, index_,
                                                  to_string(FaultKind::deadlock), text));
  leave();
}

// --- barriers and happens-before

void Block::block_barrier(const char* file, int line) {
  if (barrier_.arrived == 0) {
    barrier_.file = file, barrier_.line = line;
  } else if (barrier_.line != line || std::strcmp(barrier_.file, file) != 0) {
    fail(FaultKind::divergence,
         fmt::format("is at __syncthreads ({}) while {} threads of its block wait at another "
                     "({})",
                     site(file, line), barrier_.arrived, site(barrier_.file, barrier_.line)));
  }
  if (++barrier_.arrived < threads_) return wait("__syncthreads", file, line);
  barrier_.arrived = 0;
  ++counts.barriers;
  for (int w = 0; w < warps_; ++w) settle_bank_conflicts(w);
  synchronise_all();
  for (int i = 0; i < threads_; ++i) wake(fibers_[i]);
  resume(pick());
}

void Block::synchronise_all() {
  uint32_t last = 0;
  for (int i = 0; i < threads_; ++i) last = std::max(last, fibers_[i].clock);
  if (last >= SharedShadow::kMaxClock - 1) {
    fail(FaultKind::unsupported,
         fmt::format("more than {} barriers in one block", SharedShadow::kMaxClock / 2));
  }
  // The floor tells of the threads; of agents and of fences a view that all share.
  View* joined = nullptr;
  if (async_used_) {
    joined = new_view();
    const View* former = nullptr;
    for (int i = 0; i < threads_; ++i) {
      if (fibers_[i].view && fibers_[i].view != former) joined->join(*fibers_[i].view);
      former = fibers_[i].view;
    }
    joined->owners = threads_;
  }
  for (int i = 0; i < threads_; ++i) {
    Fiber& f = fibers_[i];
    f.floor = last;
    f.clock = last + 1;
    if (f.view) drop_view(f);
    f.view = joined;
  }
}

View* Block::new_view() {
  if (free_views_.empty()) {
    views_.push_back(std::make_unique<View>());
    free_views_.push_back(views_.back().get());
  }
  View* v = free_views_.back();
  free_views_.pop_back();
  v->owners = 0;
  v->clock.assign(threads_, 0);
  v->fenced.clear();
  return v;
}

View& Block::own_view(Fiber& f) {
  if (f.view && f.view->owners == 1) return *f.view;
  View* const own = new_view();
  if (f.view) own->join(*f.view);
  own->owners = 1;
  drop_view(f);
  f.view = own;
  return *own;
}

void Block::release(Fiber& f, Knowledge& to) {
  if (to.clock.size() < size_t(threads_)) to.clock.resize(threads_);
  if (f.view) to.join(*f.view);  // the floor is everybody's
  to.clock[f.index] = f.clock;
  tick(f.warp);
}

void Block::tick(int warp) {
  // All lanes alike, so that reads of several lanes at one time can be told from one lane's.
  Fiber* const lanes = &fibers_[warp * 32];
  for (int lane = 0; lane < 32; ++lane) {
    if (++lanes[lane].clock >= SharedShadow::kMaxClock - 1) {
      fail(FaultKind::unsupported,
           fmt::format("more than {} barriers in one block", SharedShadow::kMaxClock / 2));
    }
  }
}

bool Block::knows(const Fiber& f, const WriteRecord& w) const {
  if (w.agent()) return f.known_of(size_t(threads_) + w.thread()) >= w.agent_clock();
  return f.knows(w.thread(), w.clock);
}

bool Block::is_of_former_block(const WriteRecord& w) const {
  if (w.is_in_flight()) return false;
  return w.agent() ? w.agent_clock() < first_agent_clock_ : w.clock < first_clock_;
}

void Block::drop_view(Fiber& f) {
  if (f.view && --f.view->owners == 0) free_views_.push_back(f.view);
  f.view = nullptr;
}

void Block::synchronise_warp(int warp) {
  Fiber* const lanes = &fibers_[warp * 32];
  View* view = lanes[0].view;
  const bool same = std::all_of(lanes, lanes + 32, [&](const Fiber& l) { return l.view == view; });
  if (!same || !view || view->owners != 32) {
    // What any lane knows, all will know.
    View* const joined = new_view();
    for (int lane = 0; lane < (same ? 1 : 32); ++lane) {
      const Fiber& l = lanes[lane];
      for (int t = 0; t < threads_; ++t) joined->clock[t] = std::max(joined->clock[t], l.floor);
      if (l.view) joined->join(*l.view);
    }
    for (int lane = 0; lane < 32; ++lane) {
      drop_view(lanes[lane]);
      lanes[lane].view = joined;
    }
    joined->owners = 32;
    view = joined;
  }
  for (int lane = 0; lane < 32; ++lane) {
    Fiber& l = lanes[lane];
    view->clock[l.index] = l.clock;
  }
  tick(warp);
}

void Block::take_turn() {
  if (has_turn_) return;
  launch_->wait_for_blocks_before(*launch_, index_);
  has_turn_ = true;
}

void Block::turn_wait(const int* turn, int value, const char* file, int line) {
  struct Args {
    const int* turn;
    int value;
  } args{turn, value};
  warp_together("turn_wait", 0xffffffffu, args, file, line, [&](std::span<Args*, 32> lanes) {
    take_turn();
    for (const Args* lane : lanes) {
      if (lane->turn != turn || lane->value != value) {
        fail(FaultKind::turn, fmt::format("turn_wait ({}): lanes of the warp wait for different "
                                          "turns",
                                          site(file, line)));
      }
    }
    global_read(reinterpret_cast<uintptr_t>(turn), sizeof(int));  // by one lane, as on a card
    if (*turn != value) {
      fail(FaultKind::deadlock,
           fmt::format("waits at turn_wait ({}) for turn {} where turn {} is on, and all blocks "
                       "before this one have ended",
                       site(file, line), value, *turn));
    }
    ++counts.warp_barriers;
    synchronise_warp(running.fiber->warp);
    for (int lane = 0; lane < 32; ++lane) {
      fibers_[running.fiber->warp * 32 + lane].turn = turn;
    }
  });
}

void Block::turn_pass(int* turn, const char* file, int line) {
  struct None {
  } none;
  if (running.fiber->turn != turn) {
    fail(FaultKind::turn, fmt::format("turn_pass ({}) of a turn that this warp has not waited for",
                                      site(file, line)));
  }
  warp_together("turn_pass", 0xffffffffu, none, file, line, [&](std::span<None*, 32>) {
    ++counts.warp_barriers;
    synchronise_warp(running.fiber->warp);
    for (int lane = 0; lane < 32; ++lane) {
      fibers_[running.fiber->warp * 32 + lane].turn = nullptr;
    }
    global_atomic(reinterpret_cast<uintptr_t>(turn), sizeof(int));
    ++*turn;
  });
}

// --- shared memory

void Block::settle_bank_conflicts(int warp) {
  AccessLog* logs[32];
  size_t any = 0;
  for (int lane = 0; lane < 32; ++lane) {
    logs[lane] = &fibers_[warp * 32 + lane].log;
    any |= logs[lane]->size();
  }
  if (any) counts.bank_conflicts += model::settle_bank_conflicts(logs);
}

void* Block::take_shared(const char* name, int64_t offset, int64_t count, int element_size,
                         const char* file, int line) {
  const int64_t bytes = count * element_size;
  const auto named = [&](const Part& p) {
    return p.offset == offset && p.bytes == bytes && p.name == name;
  };
  if (std::none_of(parts_.begin(), parts_.end(), named)) {
    if (count < 0 || offset + bytes > int64_t(dynamic_bytes_)) {
      fail(FaultKind::out_of_bounds,
           fmt::format("takes {} ({} elements of {} bytes, from byte {} on) of dynamic shared "
                       "memory ({}), but the "
                       "launch gave the block {} bytes",
                       name, count, element_size, offset, site(file, line), dynamic_bytes_));
    }
    parts_.push_back({name, offset, bytes, element_size});
  }
  return dynamic_ + offset;
}

std::string Block::name_of(const Fiber& f) {
  return fmt::format("thread {} (warp {} lane {})", f.index, f.warp, f.lane);
}

std::string Block::site(const char* file, int line) {
  return fmt::format("{}:{}", file, line);
}

std::string Block::name_of_shared(size_t offset) const {
  if (offset >= kDynamicMax && offset - kDynamicMax < static_span_) {  // a static array
    const size_t at = offset - kDynamicMax + launch_->kernel.static_offset;
    const StaticArray* nearest = nullptr;
    for (const StaticArray& a : launch_->kernel.symbols.arrays) {
      if (!nearest || a.offset <= at) nearest = &a;
    }
    return fmt::format("{}+{} bytes", nearest->name, int64_t(at - nearest->offset));
  }
  const auto at = int64_t(offset);
  const Part* nearest = nullptr;
  for (const Part& p : parts_) {
    if (p.offset <= at && (!nearest || p.offset > nearest->offset)) nearest = &p;
  }
  if (!nearest) return fmt::format("dynamic shared memory{:+} bytes", at);
  if ((at - nearest->offset) % nearest->element_size != 0) {
    return fmt::format("{}+{} bytes", nearest->name, at - nearest->offset);
  }
  return fmt::format("{}[{}]", nearest->name, (at - nearest->offset) / nearest->element_size);
}

std::string Block::in_flight_text(size_t offset, const WriteRecord& w) {
  if (w.agent()) {
    for (const LoadPiece& piece : load_pieces_) {
      const BulkLoad& l = loads_[piece.load - first_load_];
      if (loads_agent(l.mbarrier) != size_t(threads_) + w.thread()) continue;
      if (offset - l.offset - size_t(piece.first_row) * 128 >= size_t(piece.rows) * 128) continue;
      return fmt::format("the TMA load of {} ({}) is in flight (on {})", name_of(fibers_[l.thread]),
                         site(l.line.file, l.line.line), name_of(mbarriers_[l.mbarrier]));
    }
    return "a TMA load is in flight";
  }
  const Fiber& by = fibers_[w.thread()];
  for (auto c = by.copies.rbegin(); c != by.copies.rend(); ++c) {
    size_t to = 0;
    if (!find_shared(reinterpret_cast<uintptr_t>(c->to), 16, "copies", to)) continue;
    if (offset - to >= 16) continue;
    return fmt::format("the cp.async of {} ({}) is in flight ({})", name_of(by),
                       site(c->file, c->line),
                       c->group < by.commits ? "no wait covers it yet" : "not committed");
  }
  return fmt::format("a cp.async of {} is in flight", name_of(by));
}

std::string Block::race_with_writer(const WriteRecord& w) const {
  if (w.agent()) {
    const Mbarrier& m = mbarriers_[w.thread() - SharedShadow::kWarpgroups];
    return fmt::format("loaded by TMA ({}), with no wait on {} for it",
                       site(m.load.file, m.load.line), name_of(m));
  }
  const Fiber& by = fibers_[w.thread()];
  if (w.async())
    return fmt::format("copied by a cp.async of {}, with no barrier after that thread's wait",
                       name_of(by));
  return fmt::format("written by {}, with no barrier between", name_of(by));
}

void Block::check_shared_read(size_t granule) {
  const Fiber& f = *running.fiber;
  const WriteRecord w = *shadow_->write(granule);
  const size_t offset = granule * kGranule;
  if (is_of_former_block(w)) {
    fail(FaultKind::uninitialised,
         fmt::format("reads {}, which no thread of the block has written yet",
                     name_of_shared(offset)));
  }
  if (w.clock == WriteRecord::kInFlight) {
    fail(FaultKind::in_flight,
         fmt::format("reads {} while {}", name_of_shared(offset), in_flight_text(offset, w)));
  }
  if (!knows(f, w)) {
    fail(FaultKind::race, fmt::format("reads {}, {}", name_of_shared(offset), race_with_writer(w)));
  }
}

void Block::check_shared_write(size_t granule, Access how) {
  const Fiber& f = *running.fiber;
  const size_t offset = granule * kGranule;
  const char* verb = how == Access::copy   ? "cp.async overwrites"
                     : how == Access::bulk ? "a TMA load overwrites"
                                           : "overwrites";
  const WriteRecord w = *shadow_->write(granule);
  if (w.clock == WriteRecord::kInFlight) {
    fail(FaultKind::in_flight,
         fmt::format("{} {} while {}", verb, name_of_shared(offset), in_flight_text(offset, w)));
  }
  const bool written = !is_of_former_block(w);
  const bool both_atomic = how == Access::atomic && w.atomic();
  if (written && !both_atomic && !knows(f, w)) {
    fail(FaultKind::race,
         fmt::format("{} {}, {}", verb, name_of_shared(offset), race_with_writer(w)));
  }
  for (int warp = 0; warp < warps_; ++warp) {
    const ReadRecord r = *shadow_->read(warp, granule);
    if (r.clock() < first_clock_ || r.clock() <= f.floor) continue;
    uint16_t reader = uint16_t(warp * 32 + r.lane());
    if (reader == f.index) {
      if (!r.several()) continue;
      reader ^= 1;  // stands for the other lanes that read: a warp's lanes come together together
    }
    if (f.knows(reader, r.clock())) continue;
    fail(FaultKind::race,
         fmt::format("{} {} still being read by {} (no barrier after the read)", verb,
                     name_of_shared(offset),
                     r.several() ? fmt::format("warp {}", warp) : name_of(fibers_[reader])));
  }
  if (!async_used_) return;
  if (shadow_->read(SharedShadow::kStores, granule)->is_in_flight()) {
    fail(FaultKind::in_flight,
         fmt::format("{} {} while {}", verb, name_of_shared(offset), agent_read_text(offset)));
  }
  for (int g = 0; g < warps_ / 4; ++g) {
    const ReadRecord r = *shadow_->read(SharedShadow::kProducts + g, granule);
    if (r.clock() < first_agent_clock_ || r.clock() <= f.known_of(products_agent(g))) continue;
    const std::deque<ProductLine>& recent = warpgroups_[g].recent;
    const auto at = std::find_if(recent.rbegin(), recent.rend(), [&](const ProductLine& p) {
      return p.clock <= r.clock() && ((offset >= p.a_begin && offset < p.a_end) ||
                                      (offset >= p.b_begin && offset < p.b_end));
    });
    fail(FaultKind::race,
         fmt::format("{} {} while the wgmma of warpgroup {}{} may still read it (this thread does "
                     "not know of a wait that covers it)",
                     verb, name_of_shared(offset), g,
                     at == recent.rend()
                         ? std::string()
                         : fmt::format(" ({})", site(at->line.file, at->line.line))));
  }
}

void Block::shared_warp_read(Fiber& lane, size_t offset) {
  constexpr int kGranules = 16 / kGranule;
  const size_t granule = offset / kGranule;
  const WriteRecord* w = shadow_->write(granule);
  if (!written_and_known<kGranules>(w, lane)) [[unlikely]] {
    // Every lane receives a part of what lies at every lane's address, so all must know of the
    // write.
    Fiber* const self = running.fiber;
    running.fiber = &lane;
    for (int i = 0; i < kGranules; ++i) {
      check_shared_read(granule + i);
      const Fiber* const lanes = &fibers_[lane.warp * 32];
      for (int l = 0; l < 32; ++l) {
        if (knows(lanes[l], w[i])) continue;
        fail(FaultKind::race,
             fmt::format("ldmatrix reads {} for lane {}, {}",
                         name_of_shared(offset + size_t(i) * kGranule), l, race_with_writer(w[i])));
      }
    }
    running.fiber = self;
  }
  ReadRecord* r = shadow_->read(lane.warp, granule);
  const ReadRecord now = ReadRecord::by_warp(lane.clock, lane.lane);
  for (int i = 0; i < kGranules; ++i) r[i] = now;
  counts.shared_read += 16;
}

void Block::shared_atomic(size_t offset) {
  for (int i = 0; i < 4 / kGranule; ++i) {
    const WriteRecord w = *shadow_->write(offset / kGranule + i);
    if (!w.atomic() || is_of_former_block(w)) check_shared_read(offset / kGranule + i);
  }
  shared_write<4 / kGranule>(offset, Access::atomic);
  counts.shared_read += 4;
}

void Block::global_atomic(uintptr_t a, int bytes) {
  const Buffer& b = heap_.buffer(heap_.owner_of(a));
  const size_t offset = a - b.begin;
  if (offset >= b.bytes || b.bytes - offset < size_t(bytes) ||
      (!b.all_written && !b.is_written(offset, bytes))) {
    global_out_of_bounds(a, bytes, "atomicAdd on");
  }
  counts.atomic_bytes += bytes;
}

// --- what no fast path takes

void Block::other_access(uintptr_t a, int bytes, bool write) {
  const char* verb = write ? "writes" : "reads";
  size_t offset = 0;
  const bool in_heap = heap_.contains(a);
  const bool shared = !in_heap && find_shared(a, bytes, verb, offset);
  if ((in_heap || shared) && a % bytes != 0) {
    const std::string name = shared ? name_of_shared(offset) : heap_.buffer(heap_.owner_of(a)).name;
    fail(FaultKind::misaligned,
         fmt::format("{} {} bytes of {} at an address that is not a multiple of {}", verb, bytes,
                     name, bytes));
  }
  if (shared) {
    fail(FaultKind::unsupported,
         fmt::format("{} 1 byte of {}: the model follows shared memory in pieces of {} bytes", verb,
                     name_of_shared(offset), kGranule));
  }
  const auto parameters = reinterpret_cast<uintptr_t>(launch_->launch.parameters);
  if (!write) {
    if (a - parameters < size_t(launch_->launch.parameters_size)) return;
    for (const AddressRange& r : read_only_memory()) {
      if (r.contains(a)) return;
    }
  }
  if (thread_locals_.contains(a) && !launch_->kernel.symbols.arrays.empty()) {
    const size_t at = a - thread_locals_.begin;
    const StaticArray* nearest = &launch_->kernel.symbols.arrays.front();
    for (const StaticArray& array : launch_->kernel.symbols.arrays) {
      if (array.offset <= at) nearest = &array;
    }
    fail(FaultKind::out_of_bounds,
         fmt::format("{} {} bytes at {}{:+} bytes; {} has {} bytes", verb, bytes, nearest->name,
                     int64_t(at - nearest->offset), nearest->name, nearest->bytes));
  }
  if (thread_locals_.contains(a)) {
    fail(FaultKind::unsupported,
         fmt::format("{} a thread_local variable that is no shared array of this kernel (the "
                     "model wants __shared__ arrays in the kernel itself)",
                     verb));
  }
  if (stacks_->contains(a)) {
    fail(FaultKind::out_of_bounds,
         a - (running.stack_low - StackPool::kGuard) < StackPool::kGuard
             ? fmt::format("{} local memory below its stack (the model gives a thread {} KiB)",
                           verb, StackPool::kStack / 1024)
             : fmt::format("{} the local memory of another thread", verb));
  }
  fail(FaultKind::host_memory,
       a < 4096 ? fmt::format("{} {} bytes at {:#x}: a null pointer", verb, bytes, a)
                : fmt::format("{} {} bytes of host memory at {:#x}: kernels may use device "
                              "buffers, shared memory, "
                              "their parameters and constants",
                              verb, bytes, a));
}

void Block::global_out_of_bounds(uintptr_t a, int bytes, const char* verb) {
  const Buffer& b = heap_.buffer(heap_.owner_of(a));
  if (b.name.empty()) {
    fail(FaultKind::out_of_bounds,
         fmt::format("{} {} bytes at {:#x}, far from every buffer", verb, bytes, a));
  }
  const int size = size_of(b.type);
  const auto offset = int64_t(a - b.begin);
  const int64_t element = offset >= 0 ? offset / size : -((size - 1 - offset) / size);
  if (!b.live) {
    fail(FaultKind::out_of_bounds, fmt::format("{} {} bytes at {}[{}], which has been released",
                                               verb, bytes, b.name, element));
  }
  const char* type = b.type == DType::fp16 ? "fp16" : b.type == DType::bf16 ? "bf16" : "fp32";
  if (offset >= 0 && size_t(offset) + bytes <= b.bytes) {
    fail(FaultKind::uninitialised, fmt::format("{} {} bytes at {}[{}], which was never written",
                                               verb, bytes, b.name, element));
  }
  fail(FaultKind::out_of_bounds, fmt::format("{} {} bytes at {}[{}]; {} has {} {} elements", verb,
                                             bytes, b.name, element, b.name, b.bytes / size, type));
}

// --- host code of kernel files

namespace {
// Where host code is watched: what it may write to.
constinit thread_local std::optional<HostMemory> host_memory;
}  // namespace

Running outside_kernels() {
  Running host;
  if (host_memory) {
    host.stack_low = host_memory->stack_begin;
    host.stack_bytes = host_memory->stack_end - host_memory->stack_begin;
  } else {
    host.stack_low = Heap::instance().outside_begin();
    host.stack_bytes = Heap::instance().outside_bytes();
  }
  return host;
}

void watch_host_code(const std::optional<HostMemory>& memory) {
  host_memory = memory;
  running = outside_kernels();
}

void host_access(uintptr_t a, int bytes, bool write) {
  Heap& heap = Heap::instance();
  const char* verb = write ? "writes" : "reads";
  if (heap.contains(a)) {
    throw Fault(FaultKind::host_memory,
                fmt::format("host code: {}: {} {} bytes of the device buffer {}, which only "
                            "kernels can touch",
                            to_string(FaultKind::host_memory), verb, bytes,
                            heap.buffer(heap.owner_of(a)).name));
  }
  if (!write || (a >= host_memory->statics_begin && a < host_memory->statics_end)) return;
  throw Fault(
      FaultKind::host_memory,
      fmt::format("host code: {}: writes {} bytes at {:#x}, which is neither its stack nor a "
                  "static variable of its own",
                  to_string(FaultKind::host_memory), bytes, a));
}

}  // namespace flashsteps::model
