/// \file
/// The CPU model of the GPU, seen from the host: its options, its faults, its ledger, and the
/// switches that tests of tests use to take one primitive out of a kernel (mutants). Kernels are
/// launched by `launch` of common/gpu/gpu.h, memory comes from make_model_device() of
/// common/stage/device.h.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/stage/ledger.h"

namespace flashsteps::model {

/// How the model runs, and which card it imitates. The same options and the same launches give the
/// same run, whatever the number of workers.
struct Options {
  /// Of the generator that picks the next thread, the moments of preemption, and when asynchronous
  /// copies land.
  uint64_t seed = 1;
  /// OS threads over which blocks are spread; 0: as many as the machine has.
  int workers = 0;
  /// Compute capability of the imitated card, major * 10 + minor.
  int capability = 90;
  /// Shared memory that one block may have, static and dynamic, in bytes: the card's opt-in maximum
  /// (227 KiB on Hopper, 163 KiB on an A100, 99 KiB on consumer cards). At most 256 KiB.
  int64_t shared_memory_per_block = 227 * 1024;
  /// What multiprocessor_count() gives kernels: the grid of a persistent one. So few that its
  /// blocks take several tiles each.
  int multiprocessors = 3;
  /// Probability that a thread is interrupted at an access to shared or global memory.
  double preempt = 1.0 / 64;
};

/// The options of the launches to come.
Options options();
/// Sets them, and counts launches from 0 again (a block's random numbers derive from the seed, the
/// number of the launch and its own index).
///
/// \throws std::invalid_argument for values out of range
void set_options(const Options& options);

/// What a kernel did wrong.
enum class FaultKind {
  out_of_bounds,  ///< of a buffer in global memory, or of an array in shared memory
  uninitialised,  ///< a read of memory that nothing wrote
  race,       ///< two threads touch shared memory, at least one writes, and no barrier orders them
  in_flight,  ///< the target of an asynchronous copy was touched before the wait that covers it
  never_waited,  ///< a thread ended with asynchronous copies that no wait covers
  deadlock,      ///< no thread can run, and not all have ended
  divergence,    ///< threads wait for one another at different calls
  mask,          ///< a warp primitive without all 32 lanes, or with a wrong width
  turn,          ///< the order of blocks is broken: a turn used that nobody waited for
  misaligned,    ///< an address that is not a multiple of the access's size
  host_memory,   ///< an address that is no GPU memory at all
  unsupported,   ///< legal CUDA that the model does not do
  exception,     ///< a C++ exception left the kernel
  proxy,         ///< TMA or wgmma reads what ordinary stores wrote, without a proxy fence between
  barrier,       ///< an mbarrier or named barrier is used as it may not be
  registers,     ///< registers that wgmma uses were touched without its fence or wait; setmaxnreg
  missing_part,  ///< what a lab leaves to the student was reached
};

/// "race", "out of bounds", …
const char* to_string(FaultKind kind);

/// A kernel's fault. what() is one line that names kernel, block, thread, array and cause.
class Fault : public std::runtime_error {
 public:
  Fault(FaultKind kind, const std::string& what) : std::runtime_error(what), kind_(kind) {}
  FaultKind kind() const { return kind_; }

 private:
  FaultKind kind_;
};

/// Addresses that host code may write to: its stack, and static variables.
struct HostMemory {
  uintptr_t stack_begin = 0, stack_end = 0;
  uintptr_t statics_begin = 0, statics_end = 0;
};
/// From now on host code of kernel files, on this OS thread, may write to nothing else; an access
/// that it may not make throws Fault. (Without: to anything but device buffers, as at first.) For a
/// program that runs kernel files that it does not trust.
void watch_host_code(const std::optional<HostMemory>& memory);

/// What all launches since the last call moved and computed. A launch that ended with a fault adds
/// nothing.
Ledger take_ledger();

/// The kinds of primitives that can be taken out of a kernel.
enum class SiteKind {
  barrier,        ///< `__syncthreads`: does nothing
  warp_barrier,   ///< `__syncwarp`: does nothing
  shuffle,        ///< a shuffle or vote: gives the lane's own value
  copy,           ///< cp.async or a TMA load: does nothing
  commit,         ///< of cp.async, TMA stores or wgmma: does nothing
  wait,           ///< for cp.async, TMA stores, wgmma or an mbarrier: does nothing
  ldmatrix,       ///< leaves the registers as they are
  mma,            ///< leaves the sums as they are
  mask,           ///< mask_if: false
  exp,            ///< fast_exp, fast_exp2: 1
  div,            ///< divide: the numerator
  atomic,         ///< atomicAdd, atomic_add_quad: a plain store
  turn,           ///< turn_wait, turn_pass: does nothing
  mbarrier_init,  ///< does nothing
  arrive,         ///< at an mbarrier (with the bytes that it announces) or named barrier: nothing
  expect,         ///< an arrival at an mbarrier announces no bytes
  named_barrier,  ///< `named_barrier_sync`: does nothing
  fence,          ///< of mbarriers, of the async proxy or of wgmma: does nothing
  store,          ///< a TMA store: does nothing
  wgmma,          ///< leaves the sums as they are
  registers,      ///< setmaxnreg: does nothing
};

/// "barrier", "warp barrier", …
const char* to_string(SiteKind kind);

/// One line of source with a primitive. Two primitives of one kind in one line are one site.
struct Site {
  std::string file;  ///< relative to the repository
  int line = 0;
  SiteKind kind = SiteKind::barrier;
  auto operator<=>(const Site&) const = default;
};

/// Starts (with an empty list) or stops noting the sites that kernels pass.
void record_sites(bool on);
/// The sites noted, in order of file, line and kind.
std::vector<Site> sites();
/// Takes this site out of every kernel until told otherwise; all lanes skip it alike. Sites are
/// skipped by line, so nothing is recompiled.
void skip_site(std::optional<Site> site);

}  // namespace flashsteps::model
