/// \file
/// What works beside the threads of a block on Hopper, as the model keeps it: TMA, wgmma, and the
/// barriers that order them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "common/model/hopper_primitives.h"

namespace flashsteps::model {

/// A line of a kernel.
struct SourceLine {
  const char* file = nullptr;
  int line = 0;
};

/// Vector clocks: of thread t everything up to clock[t] is known; after the threads come the agents
/// (wgmma of each warpgroup, then TMA of each mbarrier), and how much of their work is known to be
/// done. `fenced` is the part of it, of threads, behind which a proxy fence lies.
struct Knowledge {
  std::vector<uint32_t> clock, fenced;

  uint32_t of(size_t who) const { return who < clock.size() ? clock[who] : 0; }
  uint32_t fenced_of(size_t who) const { return who < fenced.size() ? fenced[who] : 0; }
  /// Learns what `other` knows.
  void join(const Knowledge& other) {
    raise(clock, other.clock);
    raise(fenced, other.fenced);
  }
  void learn(size_t who, uint32_t when) {
    if (clock.size() <= who) clock.resize(who + 1);
    clock[who] = std::max(clock[who], when);
  }
  void clear() {
    clock.clear();
    fenced.clear();
  }

 private:
  static void raise(std::vector<uint32_t>& to, const std::vector<uint32_t>& by) {
    if (to.size() < by.size()) to.resize(by.size());
    uint32_t* const t = to.data();
    const uint32_t* const b = by.data();
    for (size_t i = 0; i < by.size(); ++i) t[i] = std::max(t[i], b[i]);
  }
};

struct Mbarrier {
  size_t offset = 0;    // in the shadow
  int arrivals = 0;     // of each phase
  int pending = 0;      // arrivals that this phase lacks
  int64_t bytes = 0;    // that it lacks; negative where they came before they were announced
  uint32_t phase = 0;   // how many have ended
  uint16_t by = 0;      // the thread that initialised it
  bool fenced = false;  // TMA can see that it is initialised
  SourceLine line;
  Knowledge arrived;         // of those that arrived in this phase and before
  Knowledge ended;           // likewise, up to the last phase that ended
  bool loaded = false;       // TMA brought bytes in the current phase
  bool unseen_load = false;  // ... in a phase that ended, and that nobody has waited for
  SourceLine load;           // the last one
  std::vector<uint16_t> waiting;
};

struct NamedBarrier {
  int threads = 0, arrived = 0;
  SourceLine line;
  Knowledge joined;
  std::vector<uint16_t> waiting;
};

/// A box that TMA brings, and what of it is still under way.
struct BulkLoad {
  TensorMap map;
  unsigned char* to = nullptr;
  size_t offset = 0;  // of `to`, in the shadow
  int mbarrier = 0;
  int col = 0, row = 0, head = 0, batch = 0;
  uint16_t thread = 0;
  SourceLine line;
};
struct LoadPiece {
  uint32_t load;  // counted from the block's start
  int first_row, rows;
};

/// A box that TMA stores, until its thread has waited for it.
struct BulkStore {
  TensorMap map;
  const unsigned char* from = nullptr;
  size_t offset = 0;
  int col = 0, row = 0, head = 0, batch = 0;
  uint32_t group = 0;  // the number of commits before it
  bool done = false;
  SourceLine line;
};

/// A product in a thread's hands: which registers wgmma uses behind its back.
struct PendingProduct {
  uint32_t group;  // the number of commits before it
  float* d;
  int n;
  const uint32_t* a;  // null: A is in shared memory
  uint32_t a_was[4];
  SourceLine line;
};

/// A product of a warpgroup, until it has been computed.
struct Product {
  Wgmma args;  // of the warpgroup's first thread
  uint32_t group = 0;
  float* d[128];
  const uint32_t* a[128];
};

/// Where a product is computed.
struct ProductBuffers {
  static constexpr int kM = 64, kK = 16, kMaxN = 256;
  alignas(64) uint16_t a16[kM * kK], b16[kK * kMaxN];
  alignas(64) float a[kM * kK], b[kK * kMaxN], d[kM * kMaxN];
};

/// Which shared memory a product reads; kept for messages.
struct ProductLine {
  uint32_t clock;
  size_t a_begin, a_end, b_begin, b_end;
  SourceLine line;
};

struct Warpgroup {
  int arrived = 0;  // at what its 128 threads do together
  const char* name = nullptr;
  SourceLine line;
  void* args[128];

  std::deque<Product> products;    // not yet computed
  std::deque<ProductLine> recent;  // the last ones
};

}  // namespace flashsteps::model
