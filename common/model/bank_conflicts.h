/// \file
/// Bank conflicts of shared memory. Shared memory has 32 banks of 4-byte words; lanes of one access
/// that want different words of one bank are served one after the other.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace flashsteps::model {

/// One lane's access to shared memory.
struct SharedAccess {
  uint32_t call;     ///< low half of the address of the code that made it
  uint32_t encoded;  ///< address (26 bits) and log2 of the size

  static SharedAccess make(uintptr_t call, uintptr_t address, int log2_size) {
    return {uint32_t(call), uint32_t(address & kAddress) | uint32_t(log2_size) << 26};
  }
  uint32_t address() const { return encoded & kAddress; }
  int log2_size() const { return int(encoded >> 26); }

 private:
  static constexpr uint32_t kAddress = (1u << 26) - 1;
};

/// What a lane did since its warp last came together.
using AccessLog = std::vector<SharedAccess>;

/// Wavefronts beyond the conflict-free number for one access of a warp: lanes are served together
/// as 32 lanes for up to 4 bytes, 16 for 8 bytes and 8 for 16 bytes, and a group takes as many
/// wavefronts as the most distinct words that it wants of one bank.
///
/// \param addresses in bytes, of the lanes that take part
///
/// \param lanes their numbers, ascending
///
/// \param log2_size of the access in bytes: 1 to 4
int64_t bank_conflicts(std::span<const uint32_t> addresses, std::span<const uint8_t> lanes,
                       int log2_size);

/// Lines up the n-th access of each lane from the same place in the code, counts the conflicts of
/// each such access of the warp, and clears the logs.
///
/// \param logs of the 32 lanes
int64_t settle_bank_conflicts(std::span<AccessLog* const, 32> logs);

}  // namespace flashsteps::model
