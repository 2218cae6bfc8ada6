// A launch: what CUDA would refuse, the workers that share its blocks, and the ledger.
#include <algorithm>
#include <condition_variable>
#include <exception>
#include <map>
#include <mutex>
#include <thread>

#include "common/model/block.h"
#include "common/stage/device.h"

namespace flashsteps::model {
namespace {

constexpr int64_t kSharedMemoryMax = 256 * 1024;       // that the model can imitate
constexpr int64_t kStaticSharedMemoryMax = 48 * 1024;  // that CUDA lets a kernel declare

std::mutex mutex;  // one launch at a time
Options current_options;
uint64_t launches = 0;
Ledger ledger;
std::map<const void*, Kernel> kernels;
std::vector<std::unique_ptr<Block>> workers;

const Kernel& kernel_of(const void* entry) {
  auto [at, is_new] = kernels.try_emplace(entry);
  Kernel& k = at->second;
  if (!is_new) return k;
  try {
    k.symbols = find_kernel(entry);
  } catch (...) {
    kernels.erase(at);
    throw;
  }
  const std::vector<StaticArray>& arrays = k.symbols.arrays;
  if (arrays.empty()) return k;
  k.static_offset = arrays.front().offset / 16 * 16;
  k.static_span = arrays.back().offset + arrays.back().bytes - k.static_offset;
  k.array_of.resize(k.static_span / kGranule + 1);
  for (size_t i = 0; i < arrays.size(); ++i) {
    k.static_bytes += int64_t(arrays[i].bytes);
    for (size_t byte = 0; byte < arrays[i].bytes; ++byte) {
      k.array_of[(arrays[i].offset - k.static_offset + byte) / kGranule] = uint8_t(i + 1);
    }
  }
  return k;
}

void check(const Launch& launch, const Kernel& kernel, const Options& options) {
  const auto refuse = [&](const std::string& why) {
    throw DeviceError(fmt::format("launch of {}: {}", kernel.symbols.name, why));
  };
  if (launch.grid < 0 || launch.grid > INT32_MAX) {
    refuse(fmt::format("a grid of {} blocks; 0 to {} are allowed", launch.grid, INT32_MAX));
  }
  if (launch.block < 1 || launch.block > 1024) {
    refuse(fmt::format("blocks of {} threads; 1 to 1024 are allowed", launch.block));
  }
  if (launch.block % 32 != 0) {
    refuse(fmt::format("blocks of {} threads; the CPU model takes whole warps, multiples of 32",
                       launch.block));
  }
  if (launch.dynamic_shared_memory < 0) {
    refuse(fmt::format("{} bytes of dynamic shared memory; at least 0 are allowed",
                       launch.dynamic_shared_memory));
  }
  if (kernel.static_bytes > kStaticSharedMemoryMax) {
    refuse(fmt::format("{} bytes of static shared memory; CUDA allows {}, more must be dynamic",
                       kernel.static_bytes, kStaticSharedMemoryMax));
  }
  const int64_t total = kernel.static_bytes + launch.dynamic_shared_memory;
  if (total > options.shared_memory_per_block) {
    refuse(fmt::format(
        "needs {} bytes of shared memory per block ({} dynamic, {} static), the card has {}", total,
        launch.dynamic_shared_memory, kernel.static_bytes, options.shared_memory_per_block));
  }
}

/// Deals the blocks of one launch to the workers, in order.
class Dealer {
 public:
  Dealer(int64_t blocks, int workers) : blocks_(blocks), running_(size_t(workers), INT64_MAX) {}

  /// The next block for this worker, or -1. \param fault of the block that it ran before, if any
  int64_t next(int worker, std::optional<Fault> fault) {
    std::lock_guard lock(mutex_);
    if (fault && running_[worker] < faulty_block_) {
      faulty_block_ = running_[worker];
      fault_ = std::move(fault);
    }
    const bool more = !fault_ && next_ < blocks_;
    running_[worker] = more ? next_++ : INT64_MAX;
    if (waiting_) ended_.notify_all();
    return more ? running_[worker] : -1;
  }

  /// This worker can go no further.
  void abandon(int worker, std::exception_ptr why) {
    std::lock_guard lock(mutex_);
    trouble_ = std::move(why);
    blocks_ = next_;  // no more
    running_[worker] = INT64_MAX;
    ended_.notify_all();
  }

  void wait_for_blocks_before(int64_t block) {
    std::unique_lock lock(mutex_);
    ++waiting_;
    ended_.wait(lock, [&] { return *std::min_element(running_.begin(), running_.end()) >= block; });
    --waiting_;
  }

  /// Throws the fault of the first faulty block. Blocks start in order and started blocks run to
  /// their end, so which one it is does not depend on the workers.
  void rethrow() const {
    if (trouble_) std::rethrow_exception(trouble_);
    if (fault_) throw *fault_;
  }

 private:
  int64_t blocks_;
  std::mutex mutex_;
  std::condition_variable ended_;
  int64_t next_ = 0;
  int waiting_ = 0;
  std::vector<int64_t> running_;  // the block of each worker
  int64_t faulty_block_ = INT64_MAX;
  std::optional<Fault> fault_;
  std::exception_ptr trouble_;
};

struct SharedLaunch : LaunchState {
  Dealer dealer;
};

void work(SharedLaunch& launch, int worker) {
  try {
    Block& block = *workers[worker];
    block.prepare(launch);
    std::optional<Fault> fault;
    for (int64_t i; (i = launch.dealer.next(worker, std::move(fault))) >= 0;) {
      fault = block.run(launch, i);
    }
  } catch (...) {  // the model's own trouble, such as no memory
    launch.dealer.abandon(worker, std::current_exception());
  }
}

void add_to_ledger(const Block& block) {
  Heap& heap = Heap::instance();
  for (unsigned i = 0; i < Heap::kSlots; ++i) {
    const Buffer& b = heap.buffer(i);
    const Traffic& t = block.traffic[i];
    if (!b.live || t.generation != b.generation) continue;
    if (t.read) ledger.global_read[b.name] += t.read;
    if (t.written) ledger.global_written[b.name] += t.written;
    if (t.unique_read) ledger.global_unique_read[b.name] += t.unique_read;
  }
  const Counts& c = block.counts;
  ledger.atomic_bytes += c.atomic_bytes;
  ledger.shared_read += c.shared_read;
  ledger.shared_written += c.shared_written;
  ledger.warp_exchange_bytes += c.warp_exchange_bytes;
  ledger.bank_conflicts += c.bank_conflicts;
  ledger.barriers += c.barriers;
  ledger.warp_barriers += c.warp_barriers;
  ledger.shuffles += c.shuffles;
  ledger.ldmatrix += c.ldmatrix;
  ledger.mma += c.mma;
  ledger.mma_flops += c.mma * (2 * 16 * 8 * 16) + c.wgmma_flops;
  ledger.cp_async += c.cp_async;
  ledger.named_barriers += c.named_barriers;
  ledger.mbarrier_phases += c.mbarrier_phases;
  ledger.tma += c.tma;
  ledger.wgmma += c.wgmma;
  ledger.exp += c.exp;
  ledger.div += c.div;
  ledger.div_in_loop += c.div_in_loop;
  ledger.grid_blocks += c.grid_blocks;
  ledger.tiles_visited += c.tiles_visited;
  ledger.tiles_masked += c.tiles_masked;
}

}  // namespace

void run(const Launch& launch) {
  if (running.block) throw std::logic_error("a kernel may not launch kernels");
  std::lock_guard lock(mutex);
  const Kernel& kernel = kernel_of(launch.kernel);
  check(launch, kernel, current_options);
  if (launch.grid == 0) return;

  int64_t count =
      current_options.workers ? current_options.workers : std::thread::hardware_concurrency();
  count = std::clamp<int64_t>(count, 1, launch.grid);
  while (int64_t(workers.size()) < count) workers.push_back(std::make_unique<Block>());
  SharedLaunch state{{launch, kernel, current_options, launches++,
                      [](const LaunchState& l, int64_t block) {
                        // The dealer is the launch's own, and locks for itself.
                        const_cast<SharedLaunch&>(static_cast<const SharedLaunch&>(l))
                            .dealer.wait_for_blocks_before(block);
                      }},
                     {launch.grid, int(count)}};
  {
    std::vector<std::jthread> others;
    for (int w = 1; w < count; ++w) others.emplace_back(work, std::ref(state), w);
    work(state, 0);
  }
  state.dealer.rethrow();
  for (int w = 0; w < count; ++w) add_to_ledger(*workers[w]);
  ++ledger.launches;
  Heap::instance().notice_all_written();
}

Options options() {
  std::lock_guard lock(mutex);
  return current_options;
}

void set_options(const Options& o) {
  if (o.workers < 0 || o.workers > 1024) {
    throw std::invalid_argument(
        fmt::format("workers: {} given; 0 (all cores) to 1024 are allowed", o.workers));
  }
  if (o.shared_memory_per_block < 0 || o.shared_memory_per_block > kSharedMemoryMax) {
    throw std::invalid_argument(
        fmt::format("shared_memory_per_block: {} given; 0 to {} bytes are allowed",
                    o.shared_memory_per_block, kSharedMemoryMax));
  }
  if (o.multiprocessors < 1 || o.multiprocessors > 1024) {
    throw std::invalid_argument(
        fmt::format("multiprocessors: {} given; 1 to 1024 are allowed", o.multiprocessors));
  }
  if (!(o.preempt >= 0 && o.preempt <= 1)) {
    throw std::invalid_argument(
        fmt::format("preempt: {} given; a probability from 0 to 1 is allowed", o.preempt));
  }
  std::lock_guard lock(mutex);
  current_options = o;
  launches = 0;
}

Ledger take_ledger() {
  std::lock_guard lock(mutex);
  return std::exchange(ledger, {});
}

const char* to_string(FaultKind kind) {
  switch (kind) {
    case FaultKind::out_of_bounds:
      return "OUT OF BOUNDS";
    case FaultKind::uninitialised:
      return "NEVER WRITTEN";
    case FaultKind::race:
      return "RACE";
    case FaultKind::in_flight:
      return "IN FLIGHT";
    case FaultKind::never_waited:
      return "NEVER WAITED FOR";
    case FaultKind::deadlock:
      return "DEADLOCK";
    case FaultKind::divergence:
      return "DIVERGENCE";
    case FaultKind::mask:
      return "MASK";
    case FaultKind::turn:
      return "TURN";
    case FaultKind::misaligned:
      return "MISALIGNED";
    case FaultKind::host_memory:
      return "HOST MEMORY";
    case FaultKind::unsupported:
      return "NOT SUPPORTED";
    case FaultKind::exception:
      return "EXCEPTION";
    case FaultKind::proxy:
      return "PROXY";
    case FaultKind::barrier:
      return "BARRIER";
    case FaultKind::registers:
      return "REGISTERS";
    case FaultKind::missing_part:
      return "NOT IMPLEMENTED";
  }
  return "?";
}

}  // namespace flashsteps::model

namespace flashsteps::inline model_target {

int shared_memory_per_block() {
  return int(model::options().shared_memory_per_block);
}

int multiprocessor_count() {
  return model::options().multiprocessors;
}

}  // namespace flashsteps::inline model_target
