/// \file
/// Whether this machine has a card that this binary can use, and what to tell the user where it has
/// not. The wording is made by pure functions of what the CUDA runtime reported, so it is tested
/// without a card. Includes no CUDA header: any part of the host may use it, in a build without
/// CUDA too.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/stage/device.h"

namespace flashsteps {

/// A kernel broke while it ran (an illegal address, a failed assertion, a timeout). CUDA then
/// refuses every later call of this process, so nothing more can be run on the card.
class DeviceFault : public DeviceError {
 public:
  using DeviceError::DeviceError;
};

/// One card, as the CUDA runtime describes it.
struct CudaCard {
  std::string name;    ///< "NVIDIA H200"
  int capability = 0;  ///< major * 10 + minor
  /// Why a trivial kernel of this binary could not be loaded there.
  enum class Probe {
    loaded,
    no_code,           ///< the binary holds no code for the card's architecture
    ptx_too_new,       ///< its PTX comes from a toolkit newer than the driver
    unavailable,       ///< in use by another process in exclusive mode, or not allowed
    failed_otherwise,  ///< see `error`
  } probe = Probe::loaded;
  std::string error;  ///< the runtime's own words, where the probe failed
};

/// Everything that decides whether a card can be used.
struct CudaFacts {
  bool built_with_cuda = true;
  /// Highest CUDA version that the driver supports, 1000 * major + 10 * minor; 0 without a driver.
  int driver_version = 0;
  int runtime_version = 0;  ///< of the CUDA runtime in this binary, the same way
  /// What asking for the number of cards failed with; empty where it did not.
  std::string count_error;
  std::vector<CudaCard> cards;  ///< in order, up to the first usable one
  /// That this binary was built for, as CMAKE_CUDA_ARCHITECTURES names them.
  std::string architectures;
};

/// The oldest compute capability that the kernels run on (cp.async and bf16).
constexpr int kOldestCapability = 80;

/// "9.0" for 90.
std::string capability_name(int capability);
/// "13.0" for 13000.
std::string cuda_version_name(int version);
/// "1.50 GiB", "48.0 KiB", "17 bytes".
std::string size_name(int64_t bytes);

/// The first card that can be used, or -1.
int usable_card(const CudaFacts& facts);

/// Why no card can be used, with advice, in one line; empty where one can.
std::string why_no_usable_card(const CudaFacts& facts);

/// Why a stage that needs capability `needed` (that alone, if `exact`: its kernel uses instructions
/// of one architecture, as sm_90a's wgmma) cannot run on a device; empty where it can. One line.
std::string why_capability_unfit(int needed, bool exact, const DeviceInfo& device);

/// What kind of failure a CUDA call met.
enum class CudaFailure {
  fault,    ///< a kernel broke while it ran
  no_code,  ///< the binary holds no code for the card
  other,
};

/// One line that says what to do.
///
/// \param what was being done: "launch of scores_kernel"
///
/// \param error the runtime's own words
///
/// \param architectures that this binary was built for
std::string cuda_failure_message(CudaFailure kind, const std::string& what,
                                 const std::string& error, const std::string& architectures);

/// What to say when device memory runs out. Bytes.
std::string out_of_memory_message(const char* tensor, int64_t asked, int64_t free, int64_t total);

/// What bounds one launch.
struct LaunchLimits {
  int capability = 0;
  int max_block = 1024;      ///< threads; fewer where the kernel's registers allow fewer
  int64_t static_smem = 0;   ///< bytes that the kernel declares
  int64_t max_smem = 49152;  ///< bytes of a block, static and dynamic: the opt-in maximum
};

/// Why a launch would be refused; empty where it would not. One line that names needed and
/// available.
std::string why_launch_refused(const std::string& kernel, int64_t grid, int block, int64_t smem,
                               const LaunchLimits& limits);

/// "scores_kernel<__half, 64>" for "void flashsteps::cuda_target::scores_kernel<__half, 64>(…)".
std::string short_kernel_name(const std::string& demangled);

/// What a kernel takes of a multiprocessor, and how many of its blocks fit there at once.
struct KernelResources {
  std::string name;              ///< "attention_kernel<__half, 64, 128, 128>"
  int threads = 0;               ///< of a block
  int registers_per_thread = 0;  ///< 32-bit
  int64_t local_bytes = 0;       ///< of a thread in local memory: spilled registers, mostly
  int64_t shared_memory = 0;     ///< bytes of a block, static and dynamic
  int blocks_per_multiprocessor = 0;
};

/// Of the kernel that this process launched last by `launch`, as it was launched, on the current
/// card.
///
/// \throws DeviceError where there is no card, or nothing was launched
KernelResources last_launched_kernel();

/// What the CUDA runtime reports about this machine. Starts CUDA; does not throw and does not wait.
const CudaFacts& cuda_facts() noexcept;

/// Why no card can be used here; empty where one can. Never throws, and asks only once: for
/// choosing the default device.
const char* why_no_cuda() noexcept;

}  // namespace flashsteps
