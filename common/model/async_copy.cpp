// cp.async: copies that land at a random moment between their issue and the wait that covers them.
// Until that wait their target is in flight: nobody may touch it.
#include <algorithm>
#include <cstring>

#include "common/model/block.h"

namespace flashsteps::model {

void Block::start_copy(const AsyncCopy& copy, size_t to_offset) {
  shared_write<16 / kGranule>(to_offset, Access::copy);
  Fiber& f = *running.fiber;
  f.copies.push_back(copy);
  AsyncCopy& c = f.copies.back();
  c.group = f.commits;
  // Half of them land at once, the others when a thread is picked, or at the latest in the wait.
  if (random_.below(2) == 0) {
    land(c);
    c.landed = true;
  } else {
    not_landed_.push_back({f.index, f.first_copy + uint32_t(f.copies.size()) - 1});
  }
}

void Block::land(const AsyncCopy& c) {
  if (c.from) {
    std::memcpy(c.to, c.from, 16);
  } else {
    std::memset(c.to, 0, 16);
  }
}

bool Block::land_one(uint32_t i) {
  const CopyNumber n = not_landed_[i];
  not_landed_[i] = not_landed_.back();
  not_landed_.pop_back();
  Fiber& f = fibers_[n.thread];
  if (n.copy < f.first_copy) return false;  // its wait was first
  AsyncCopy& c = f.copies[n.copy - f.first_copy];
  land(c);
  c.landed = true;
  return true;
}

void Block::advance() {
  // Copies and pieces of TMA's boxes in any order, products in that of their warpgroup.
  const auto pieces = uint32_t(load_pieces_.size());
  uint32_t i = 0;
  for (;;) {
    const auto copies = uint32_t(not_landed_.size());
    const uint32_t all = copies + pieces + uint32_t(open_stores_ + open_products_);
    if (all == 0) return;
    i = random_.below(all);
    if (i >= copies) {
      i -= copies;
      break;
    }
    if (land_one(i)) return;
  }
  if (i < pieces) return land_piece(i);
  i -= pieces;
  if (i < uint32_t(open_stores_)) {
    for (int t = 0; t < threads_; ++t) {
      for (BulkStore& store : fibers_[t].stores) {
        if (!store.done && i-- == 0) return do_store(store);
      }
    }
  }
  i -= uint32_t(open_stores_);
  for (int g = 0; g < SharedShadow::kWarpgroups; ++g) {
    const auto products = uint32_t(warpgroups_[g].products.size());
    if (i < products) return compute_product(g);
    i -= products;
  }
}

void Block::commit_copies() {
  ++running.fiber->commits;
}

void Block::wait_for_copies(uint32_t pending) {
  Fiber& f = *running.fiber;
  size_t done = 0;
  for (; done < f.copies.size() && f.copies[done].group + pending < f.commits; ++done) {
    AsyncCopy& c = f.copies[done];
    if (!c.landed) land(c);
    size_t offset = 0;
    find_shared(reinterpret_cast<uintptr_t>(c.to), 16, "copies", offset);
    WriteRecord* w = shadow_->write(offset / kGranule);
    // From here on it is as if the thread had written it itself.
    for (int i = 0; i < 16 / kGranule; ++i) w[i] = {f.index | WriteRecord::kAsync, f.clock};
  }
  f.copies.erase(f.copies.begin(), f.copies.begin() + std::ptrdiff_t(done));
  f.first_copy += uint32_t(done);
}

void cp_async(void* to_shared, const void* from_global, bool fetch, const char* file, int line) {
  if (skipped(SiteKind::copy, file, line)) return;
  Block& b = current_block("cp_async_16");
  const auto to = reinterpret_cast<uintptr_t>(to_shared);
  const auto from = reinterpret_cast<uintptr_t>(from_global);
  const auto here = [&] { return fmt::format("cp.async ({}:{})", file, line); };
  size_t offset = 0;
  if (!b.find_shared(to, 16, "cp.async writes", offset)) {
    b.fail(FaultKind::host_memory,
           fmt::format("{} writes {:#x}, which is not shared memory", here(), to));
  }
  if (to % 16 != 0) {
    b.fail(FaultKind::misaligned,
           fmt::format("{} writes {}, which is not at a multiple of 16 bytes", here(),
                       b.name_of_shared(offset)));
  }
  if (!Heap::instance().contains(from)) {
    b.fail(FaultKind::host_memory,
           fmt::format("{} reads {:#x}, which is not global memory", here(), from));
  }
  if (from % 16 != 0) {
    b.fail(FaultKind::misaligned,
           fmt::format("{} reads {} at an address that is not a multiple of 16", here(),
                       Heap::instance().buffer(Heap::instance().owner_of(from)).name));
  }
  if (fetch) b.global_read(from, 16);
  b.start_copy({to_shared, fetch ? from_global : nullptr, 0, false, file, line}, offset);
  b.log_shared(to, 4, reinterpret_cast<uintptr_t>(__builtin_return_address(0)));
  ++b.counts.cp_async;
}

void cp_async_commit(const char* file, int line) {
  if (skipped(SiteKind::commit, file, line)) return;
  current_block("cp_async_commit").commit_copies();
}

void cp_async_wait(int pending, const char* file, int line) {
  if (skipped(SiteKind::wait, file, line)) return;
  current_block("cp_async_wait").wait_for_copies(uint32_t(pending));
}

}  // namespace flashsteps::model
