// TMA: boxes of a tensor that come to shared memory, piece by piece at random moments, and complete
// their bytes on an mbarrier; and boxes that are read from shared memory at a random moment before
// the wait that covers them.
#include <algorithm>
#include <cstring>

#include "common/gpu/tma_rules.h"
#include "common/model/block.h"
#include "common/stage/device.h"

namespace flashsteps::model {
namespace {

constexpr int kBoxRow = 128;    // bytes of a box's row: what the swizzle spans
constexpr int kChunk = 16;      // bytes that the swizzle keeps together
constexpr int kPattern = 1024;  // bytes after which the swizzle repeats

/// Where chunk `chunk` of row `row` of a box at `offset` lies.
size_t swizzled(size_t offset, int row, int chunk) {
  const size_t line = offset + size_t(row) * kBoxRow;
  return line + (size_t(chunk) ^ (line / kBoxRow) % 8) * kChunk;
}

int64_t box_bytes(const TensorMap& map) {
  return int64_t{map.box_rows} * kBoxRow;
}

}  // namespace

TensorMap make_tensor_map(const void* base, int head_dim, int rows, int heads, int batch,
                          const Strides& strides, int box_cols, int box_rows) {
  if (!base) throw DeviceError("TMA needs a tensor; its address is null");
  const std::string why =
      why_not_tma(base, head_dim, rows, heads, batch, strides, box_cols, box_rows);
  if (!why.empty()) throw DeviceError(why);
  const auto address = reinterpret_cast<uintptr_t>(base);
  constexpr int element_size = 2;
  TensorMap map;
  map.base = address;
  map.row_bytes = strides.row * element_size;
  map.head_bytes = strides.head * element_size;
  map.batch_bytes = strides.batch * element_size;
  map.cols = head_dim, map.rows = rows, map.heads = heads, map.batch = batch;
  map.box_cols = box_cols, map.box_rows = box_rows;
  return map;
}

/// Checks what a copy of a box asks for. \return where the box lies in the shadow
size_t Block::find_box(const char* what, const TensorMap& map, const void* smem, const int (&at)[4],
                       SourceLine line) {
  const auto here = [&] { return fmt::format("{} ({})", what, site(line.file, line.line)); };
  async_used_ = true;
  if (map.box_rows == 0) {
    fail(FaultKind::uninitialised,
         fmt::format("{} by a TensorMap that make_tensor_map did not make", here()));
  }
  const auto a = reinterpret_cast<uintptr_t>(smem);
  const std::string verb = here() + " of";
  size_t offset = 0;
  if (!find_shared(a, int(box_bytes(map)), verb.c_str(), offset)) {
    fail(FaultKind::host_memory, fmt::format("{} of {:#x}, which is not shared memory", here(), a));
  }
  if (offset >= kDynamicMax) {
    fail(FaultKind::unsupported,
         fmt::format("{} of {}: the model does TMA on dynamic shared memory alone", here(),
                     name_of_shared(offset)));
  }
  if (offset % kPattern != 0) {
    fail(FaultKind::misaligned,
         fmt::format("{} of {}, {} bytes into shared memory: a box lies at a multiple of {} bytes, "
                     "where the 128-byte swizzle begins",
                     here(), name_of_shared(offset), offset, kPattern));
  }
  if (at[2] < 0 || at[2] >= map.heads || at[3] < 0 || at[3] >= map.batch) {
    fail(FaultKind::out_of_bounds,
         fmt::format("{} at head {} and batch {} of a tensor of {} heads and {} batches", here(),
                     at[2], at[3], map.heads, map.batch));
  }
  if (at[0] % (kChunk / 2) != 0) {
    fail(FaultKind::unsupported, fmt::format("{} at column {}: the model takes multiples of {}",
                                             here(), at[0], kChunk / 2));
  }
  return offset;
}

/// Calls f(row of the box, chunk, address in global memory, or 0 outside of the tensor; bytes).
template <typename F>
void Block::for_each_chunk(const TensorMap& map, const int (&at)[4], int first_row, int rows,
                           F&& f) {
  constexpr int kElements = kChunk / 2;
  const uintptr_t plane = map.base + uintptr_t(at[2] * map.head_bytes + at[3] * map.batch_bytes);
  for (int r = first_row; r < first_row + rows; ++r) {
    const int64_t row = int64_t{at[1]} + r;
    for (int c = 0; c < kBoxRow / kChunk; ++c) {
      const int64_t col = int64_t{at[0]} + c * kElements;
      const bool inside = row >= 0 && row < map.rows && col >= 0 && col < map.cols;
      const auto elements = inside ? std::min<int64_t>(kElements, map.cols - col) : 0;
      f(r, c, inside ? plane + uintptr_t(row * map.row_bytes + col * 2) : 0, int(elements) * 2);
    }
  }
}

// --- loads

void Block::load_bulk(const TensorMap& map, void* to, uint64_t* bar, const int (&at)[4],
                      SourceLine line) {
  sometimes_preempt();
  const size_t offset = find_box("tma_load", map, to, at, line);
  Mbarrier& m = find_mbarrier("tma_load", bar, line);
  if (!m.fenced) {
    fail(
        FaultKind::proxy,
        fmt::format("tma_load ({}) on {}, with no fence_mbarrier_init after its mbarrier_init ({})",
                    site(line.file, line.line), name_of(m), site(m.line.file, m.line.line)));
  }
  for_each_chunk(map, at, 0, map.box_rows, [&](int, int, uintptr_t from, int bytes) {
    if (bytes == 0) return;
    if (!heap_.contains(from)) {
      fail(FaultKind::host_memory,
           fmt::format("tma_load ({}) reads {:#x}, which is not global memory",
                       site(line.file, line.line), from));
    }
    global_read(from, bytes);
  });
  const size_t granules = size_t(box_bytes(map)) / kGranule;
  check_async_write(offset / kGranule, granules,
                    fmt::format("tma_load ({})", site(line.file, line.line)));
  const auto number = int(&m - mbarriers_.data());
  const WriteRecord coming =
      WriteRecord::in_flight(uint32_t(loads_agent(number) - size_t(threads_)));
  std::fill_n(shadow_->write(offset / kGranule), granules, coming);
  counts.shared_written += box_bytes(map);
  ++counts.tma;

  loads_.push_back({map, static_cast<unsigned char*>(to), offset, number, at[0], at[1], at[2],
                    at[3], running.fiber->index, line});
  const auto load = first_load_ + uint32_t(loads_.size()) - 1;
  m.load = line;
  for (int row = 0; row < map.box_rows;) {
    const int rows =
        std::min<int>(map.box_rows - row, 1 + int(random_.below(uint32_t(map.box_rows))));
    load_pieces_.push_back({load, row, rows});
    row += rows;
  }
}

void Block::land_piece(size_t i) {
  const LoadPiece piece = load_pieces_[i];
  load_pieces_[i] = load_pieces_.back();
  load_pieces_.pop_back();
  const BulkLoad& l = loads_[piece.load - first_load_];
  for_each_chunk(l.map, {l.col, l.row, l.head, l.batch}, piece.first_row, piece.rows,
                 [&](int row, int chunk, uintptr_t from, int bytes) {
                   unsigned char* const to = l.to + (swizzled(l.offset, row, chunk) - l.offset);
                   if (bytes > 0)
                     std::memcpy(to, reinterpret_cast<const void*>(from), size_t(bytes));
                   std::memset(to + bytes, 0, size_t(kChunk - bytes));
                 });
  const Mbarrier& m = mbarriers_[l.mbarrier];
  // Known to those who wait for the phase that counts these bytes.
  const WriteRecord landed = WriteRecord::by_agent(
      uint32_t(loads_agent(l.mbarrier) - size_t(threads_)), agent_clock(m.phase + 1));
  WriteRecord* const w = shadow_->write((l.offset + size_t(piece.first_row) * kBoxRow) / kGranule);
  std::fill_n(w, size_t(piece.rows) * kBoxRow / kGranule, landed);
  complete_bytes(l, int64_t{piece.rows} * kBoxRow);
  // Loads that have landed wholly are forgotten.
  const auto under_way = [&](uint32_t load) {
    return std::any_of(load_pieces_.begin(), load_pieces_.end(),
                       [&](const LoadPiece& p) { return p.load == load; });
  };
  while (!loads_.empty() && !under_way(first_load_)) {
    loads_.pop_front();
    ++first_load_;
  }
}

void Block::complete_bytes(const BulkLoad& l, int64_t bytes) {
  Mbarrier& m = mbarriers_[l.mbarrier];
  m.bytes -= bytes;
  m.loaded = true;
  if (m.pending == 0 && m.bytes < 0) {
    running.fiber = &fibers_[l.thread];
    fail(FaultKind::barrier,
         fmt::format("its TMA load ({}) brings {} bytes more than were announced at {}",
                     site(l.line.file, l.line.line), -m.bytes, name_of(m)));
  }
  end_phase_if_complete(m);
}

// --- stores

void Block::store_bulk(const TensorMap& map, const void* from, const int (&at)[4],
                       SourceLine line) {
  sometimes_preempt();
  const size_t offset = find_box("tma_store", map, from, at, line);
  Fiber& f = *running.fiber;
  const size_t granules = size_t(box_bytes(map)) / kGranule;
  WriteRecord good{};
  check_async_read(offset / kGranule, granules, {&f, 1},
                   fmt::format("tma_store ({})", site(line.file, line.line)), good);
  for_each_chunk(map, at, 0, map.box_rows, [&](int, int, uintptr_t to, int bytes) {
    if (bytes == 0) return;
    if (!heap_.contains(to)) {
      fail(FaultKind::host_memory,
           fmt::format("tma_store ({}) writes {:#x}, which is not global memory",
                       site(line.file, line.line), to));
    }
    global_write(to, bytes);
  });
  std::fill_n(shadow_->read(SharedShadow::kStores, offset / kGranule), granules,
              ReadRecord::in_flight());
  counts.shared_read += box_bytes(map);
  ++counts.tma;
  ++open_stores_;
  f.stores.push_back({map, static_cast<const unsigned char*>(from), offset, at[0], at[1], at[2],
                      at[3], f.store_commits, false, line});
}

void Block::do_store(BulkStore& s) {
  for_each_chunk(s.map, {s.col, s.row, s.head, s.batch}, 0, s.map.box_rows,
                 [&](int row, int chunk, uintptr_t to, int bytes) {
                   if (bytes == 0) return;
                   std::memcpy(reinterpret_cast<void*>(to),
                               s.from + (swizzled(s.offset, row, chunk) - s.offset), size_t(bytes));
                 });
  s.done = true;
  --open_stores_;
}

void Block::wait_for_stores(uint32_t pending, SourceLine) {
  Fiber& f = *running.fiber;
  size_t covered = 0;
  for (; covered < f.stores.size() && f.stores[covered].group + pending < f.store_commits;
       ++covered) {
    BulkStore& s = f.stores[covered];
    if (!s.done) do_store(s);
    const size_t granule = s.offset / kGranule, granules = size_t(box_bytes(s.map)) / kGranule;
    std::fill_n(shadow_->read(SharedShadow::kStores, granule), granules, ReadRecord::by_lane(0, 0));
    // From here on it is as if the thread had read it itself.
    const ReadRecord now = ReadRecord::by_lane(f.clock, f.lane);
    ReadRecord* const r = shadow_->read(f.warp, granule);
    for (size_t i = 0; i < granules; ++i) r[i] = now.after(r[i]);
  }
  f.stores.erase(f.stores.begin(), f.stores.begin() + std::ptrdiff_t(covered));
}

// --- what copies past the threads ask of shared memory

void Block::check_async_read(size_t granule, size_t count, std::span<Fiber> readers,
                             const std::string& what, WriteRecord& good) {
  const WriteRecord* const w = shadow_->write(granule);
  for (size_t i = 0; i < count; ++i) {
    if (w[i] == good) continue;
    good = w[i];
    const size_t offset = (granule + i) * kGranule;
    if (is_of_former_block(good)) {
      fail(FaultKind::uninitialised,
           fmt::format("{} reads {}, which nobody has written yet", what, name_of_shared(offset)));
    }
    if (good.is_in_flight()) {
      fail(FaultKind::in_flight, fmt::format("{} reads {} while {}", what, name_of_shared(offset),
                                             in_flight_text(offset, good)));
    }
    for (Fiber& f : readers) {
      if (!knows(f, good)) {
        running.fiber = &f;
        fail(FaultKind::race,
             fmt::format("{} reads {}, {}", what, name_of_shared(offset), race_with_writer(good)));
      }
      const bool fenced =
          good.agent() || (f.view && f.view->fenced_of(good.thread()) >= good.clock);
      if (!fenced) {
        running.fiber = &f;
        fail(FaultKind::proxy,
             fmt::format("{} reads {}, which {} stored, with no fence_proxy_async between", what,
                         name_of_shared(offset), name_of(fibers_[good.thread()])));
      }
    }
  }
}

void Block::check_async_write(size_t granule, size_t count, const std::string& what) {
  const Fiber& f = *running.fiber;
  const WriteRecord* const w = shadow_->write(granule);
  for (size_t i = 0; i < count; ++i) {
    if (i > 0 && w[i] == w[i - 1]) continue;
    if (is_of_former_block(w[i])) continue;
    check_shared_write(granule + i, Access::bulk);
    if (w[i].agent() || (f.view && f.view->fenced_of(w[i].thread()) >= w[i].clock)) continue;
    fail(FaultKind::proxy,
         fmt::format("{} overwrites {}, which {} stored, with no fence_proxy_async between", what,
                     name_of_shared((granule + i) * kGranule), name_of(fibers_[w[i].thread()])));
  }
  // Who has read it?
  for (int warp = 0; warp < warps_; ++warp) {
    const ReadRecord* const r = shadow_->read(warp, granule);
    for (size_t i = 0; i < count; ++i) {
      if (r[i].later_than(f.floor)) [[unlikely]]
        check_shared_write(granule + i, Access::bulk);
    }
  }
  const ReadRecord* const stores = shadow_->read(SharedShadow::kStores, granule);
  for (size_t i = 0; i < count; ++i) {
    if (stores[i].is_in_flight()) [[unlikely]]
      check_shared_write(granule + i, Access::bulk);
  }
  for (int g = 0; g < warps_ / 4; ++g) {
    const uint32_t known = std::max(f.known_of(products_agent(g)), first_agent_clock_ - 1);
    const ReadRecord* const r = shadow_->read(SharedShadow::kProducts + g, granule);
    for (size_t i = 0; i < count; ++i) {
      if (r[i].later_than(known)) [[unlikely]]
        check_shared_write(granule + i, Access::bulk);
    }
  }
}

std::string Block::agent_read_text(size_t offset) const {
  for (int t = 0; t < threads_; ++t) {
    for (const BulkStore& s : fibers_[t].stores) {
      if (offset - s.offset >= size_t(box_bytes(s.map))) continue;
      return fmt::format(
          "the TMA store of {} ({}) may still read it ({})", name_of(fibers_[t]),
          site(s.line.file, s.line.line),
          s.group < fibers_[t].store_commits ? "no wait covers it yet" : "not committed");
    }
  }
  return "a TMA store may still read it";
}

void Block::fence_proxy() {
  async_used_ = true;
  Fiber& f = *running.fiber;
  View& v = own_view(f);
  v.fenced.resize(size_t(threads_));
  for (int t = 0; t < threads_; ++t) {
    v.fenced[t] = std::max({v.fenced[t], v.clock[t], f.floor});
  }
  v.fenced[f.index] = f.clock;
  tick(f.warp);
}

void Block::check_end_of_thread() {
  const Fiber& f = *running.fiber;
  if (!f.stores.empty()) {
    const BulkStore& s = f.stores.front();
    fail(FaultKind::never_waited,
         fmt::format("ends with {} TMA stores that no wait covers; the oldest, of {} ({}), was {}",
                     f.stores.size(), name_of_shared(s.offset), site(s.line.file, s.line.line),
                     s.group < f.store_commits ? "committed" : "never committed"));
  }
  if (!f.products.empty()) {
    const PendingProduct& p = f.products.front();
    fail(FaultKind::never_waited,
         fmt::format("ends with {} wgmma that no wait covers; the oldest ({}) was {}",
                     f.products.size(), site(p.line.file, p.line.line),
                     p.group < f.product_commits ? "committed" : "never committed"));
  }
}

// --- primitives

void tma_load(void* to_shared, const TensorMap& map, uint64_t* bar, int col, int row, int head,
              int batch, const char* file, int line) {
  if (skipped(SiteKind::copy, file, line)) return;
  current_block("tma_load").load_bulk(map, to_shared, bar, {col, row, head, batch}, {file, line});
}

void tma_store(const TensorMap& map, const void* from_shared, int col, int row, int head, int batch,
               const char* file, int line) {
  if (skipped(SiteKind::store, file, line)) return;
  current_block("tma_store").store_bulk(map, from_shared, {col, row, head, batch}, {file, line});
}

void tma_store_commit(const char* file, int line) {
  if (skipped(SiteKind::commit, file, line)) return;
  current_block("tma_store_commit").commit_stores();
}

void tma_store_wait(int pending, bool read_only, const char* file, int line) {
  if (skipped(SiteKind::wait, file, line)) return;
  current_block(read_only ? "tma_store_wait_read" : "tma_store_wait")
      .wait_for_stores(uint32_t(pending), {file, line});
}

void fence_proxy_async(const char* file, int line) {
  if (skipped(SiteKind::fence, file, line)) return;
  current_block("fence_proxy_async").fence_proxy();
}

}  // namespace flashsteps::model
