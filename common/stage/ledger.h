/// \file
/// The ledger: what a stage moved and computed, as the CPU model counted it (docs/method.md defines
/// each count). Target-neutral, so that programs and tests may hold one without including the
/// model.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace flashsteps {

/// Bytes by tensor: the buffer's name ("Q", "S", "O_acc") to bytes.
using BytesByTensor = std::map<std::string, int64_t>;

/// Counts of one or more launches. Adding two ledgers adds every count.
struct Ledger {
  BytesByTensor global_read;     ///< bytes that threads asked of global memory (no caches)
  BytesByTensor global_written;  ///< bytes that threads stored to global memory, without atomics
  BytesByTensor global_unique_read;  ///< a byte counted once for each block that reads it
  int64_t atomic_bytes = 0;          ///< bytes added by global atomics
  /// Bytes read from shared memory: ldmatrix included; by wgmma the tiles that its descriptors
  /// name, once for each instruction; by a TMA store its whole box.
  int64_t shared_read = 0;
  /// Bytes stored to shared memory: asynchronous copies included, of a TMA load the whole box.
  int64_t shared_written = 0;
  int64_t warp_exchange_bytes =
      0;  ///< shared bytes read by a warp, last stored by another with an ordinary store
  int64_t bank_conflicts = 0;   ///< shared-memory wavefronts beyond the conflict-free number
  int64_t barriers = 0;         ///< block barriers, once for each block
  int64_t warp_barriers = 0;    ///< __syncwarp, once for each warp
  int64_t shuffles = 0;         ///< once for each warp
  int64_t ldmatrix = 0;         ///< instructions, once for each warp
  int64_t mma = 0;              ///< instructions, once for each warp
  int64_t mma_flops = 0;        ///< executed, on padded tiles
  int64_t cp_async = 0;         ///< 16-byte copies issued, once for each lane
  int64_t named_barriers = 0;   ///< barriers of a part of a block, each time that one is complete
  int64_t mbarrier_phases = 0;  ///< of mbarriers, that ended
  int64_t tma = 0;              ///< boxes copied by TMA, loads and stores
  int64_t wgmma = 0;            ///< instructions, once for each warpgroup
  int64_t exp = 0;              ///< once for each lane
  int64_t div = 0;              ///< once for each lane
  int64_t div_in_loop = 0;      ///< of these, inside the loop over tiles
  int64_t grid_blocks = 0;      ///< blocks launched
  int64_t launches = 0;
  int64_t tiles_visited = 0;  ///< (row block, key tile) pairs that a stage worked on
  int64_t tiles_masked = 0;   ///< of these, the ones to which masking code was applied

  Ledger& operator+=(const Ledger& other);
  bool operator==(const Ledger& other) const = default;
  /// Sum over tensors.
  static int64_t total(const BytesByTensor& bytes);
};

}  // namespace flashsteps
