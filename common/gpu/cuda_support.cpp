#include "common/gpu/cuda_support.h"

#include <fmt/format.h>

#include <algorithm>

namespace flashsteps {

std::string capability_name(int capability) {
  return fmt::format("{}.{}", capability / 10, capability % 10);
}

std::string cuda_version_name(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

std::string size_name(int64_t bytes) {
  const char* const units[] = {"KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024) return fmt::format("{} bytes", bytes);
  double value = double(bytes) / 1024;
  int unit = 0;
  while (value >= 1024 && unit < 3) value /= 1024, ++unit;
  return fmt::format("{:.{}f} {}", value, value < 10 ? 2 : 1, units[unit]);
}

int usable_card(const CudaFacts& facts) {
  if (!facts.built_with_cuda || !facts.count_error.empty()) return -1;
  for (size_t i = 0; i < facts.cards.size(); ++i) {
    const CudaCard& card = facts.cards[i];
    if (card.capability >= kOldestCapability && card.probe == CudaCard::Probe::loaded)
      return int(i);
  }
  return -1;
}

namespace {

std::string why_unusable(const CudaCard& card, const CudaFacts& facts) {
  const std::string which =
      fmt::format("{} (compute capability {})", card.name, capability_name(card.capability));
  if (card.capability < kOldestCapability) {
    return fmt::format("{} is too old: the kernels need {} or newer, for cp.async and bf16", which,
                       capability_name(kOldestCapability));
  }
  switch (card.probe) {
    case CudaCard::Probe::loaded:
      return "";
    case CudaCard::Probe::no_code:
      return fmt::format(
          "this program has no code for {}: it was built for {}; configure with "
          "-DCMAKE_CUDA_ARCHITECTURES={}",
          which, facts.architectures, card.capability);
    case CudaCard::Probe::ptx_too_new:
      return fmt::format(
          "the driver (CUDA {}) cannot compile the PTX of this program (CUDA {}) for {}: update "
          "the "
          "driver, or configure with -DCMAKE_CUDA_ARCHITECTURES={}-real",
          cuda_version_name(facts.driver_version), cuda_version_name(facts.runtime_version), which,
          card.capability);
    case CudaCard::Probe::unavailable:
      return fmt::format(
          "{} is not available to this process: {}; see which process holds it with nvidia-smi",
          which, card.error);
    case CudaCard::Probe::failed_otherwise:
      break;
  }
  return fmt::format("{} cannot be used: {}", which, card.error);
}

}  // namespace

std::string why_no_usable_card(const CudaFacts& facts) {
  if (!facts.built_with_cuda) {
    return "this program was built without CUDA; where nvcc is installed, configure with "
           "-DFLASHSTEPS_CUDA=ON";
  }
  if (facts.driver_version == 0) {
    return "no CUDA driver was found; install the NVIDIA driver, or give the container access to "
           "the "
           "card";
  }
  // Within one major version, a newer runtime works on an older driver; across majors it does not.
  if (facts.driver_version / 1000 < facts.runtime_version / 1000) {
    return fmt::format(
        "the driver supports CUDA {}, but this program was built with CUDA {}; update the driver, "
        "or "
        "build with a toolkit no newer than CUDA {}",
        cuda_version_name(facts.driver_version), cuda_version_name(facts.runtime_version),
        cuda_version_name(facts.driver_version));
  }
  if (!facts.count_error.empty()) {
    return fmt::format("CUDA does not start: {} (driver for CUDA {}, runtime {}); see nvidia-smi",
                       facts.count_error, cuda_version_name(facts.driver_version),
                       cuda_version_name(facts.runtime_version));
  }
  if (facts.cards.empty())
    return "no card is visible to CUDA; see nvidia-smi and CUDA_VISIBLE_DEVICES";
  if (usable_card(facts) >= 0) return "";
  std::string reason = why_unusable(facts.cards.front(), facts);
  if (facts.cards.size() > 1) {
    reason += fmt::format(" (the first of {} cards, none of them usable)", facts.cards.size());
  }
  return reason;
}

std::string why_capability_unfit(int needed, bool exact, const DeviceInfo& device) {
  if (exact ? device.capability == needed : device.capability >= needed) return "";
  return fmt::format("needs compute capability {}{}, found {} ({})", capability_name(needed),
                     exact ? "" : " or newer", capability_name(device.capability), device.name);
}

std::string cuda_failure_message(CudaFailure kind, const std::string& what,
                                 const std::string& error, const std::string& architectures) {
  switch (kind) {
    case CudaFailure::fault:
      return fmt::format(
          "{}: {}: a kernel broke, and CUDA refuses every later call of this process; to see "
          "where, run the "
          "same command under compute-sanitizer",
          what, error);
    case CudaFailure::no_code:
      return fmt::format("{}: {}: this program has no code for this card; it was built for {}",
                         what, error, architectures);
    case CudaFailure::other:
      break;
  }
  return fmt::format("{}: {}", what, error);
}

std::string out_of_memory_message(const char* tensor, int64_t asked, int64_t free, int64_t total) {
  return fmt::format(
      "not enough device memory for {}: needs {}, {} of {} are free; use a smaller batch or "
      "sequence",
      tensor, size_name(asked), size_name(free), size_name(total));
}

std::string why_launch_refused(const std::string& kernel, int64_t grid, int block, int64_t smem,
                               const LaunchLimits& limits) {
  constexpr int64_t kMaxGrid = 2147483647;
  if (grid < 1 || grid > kMaxGrid) {
    return fmt::format("{}: a grid of {} blocks was asked for; 1 to {} are allowed", kernel, grid,
                       kMaxGrid);
  }
  if (block < 1 || block > limits.max_block) {
    return fmt::format("{}: a block of {} threads was asked for; 1 to {} are allowed", kernel,
                       block, limits.max_block);
  }
  if (smem < 0) return fmt::format("{}: {} bytes of shared memory were asked for", kernel, smem);
  const int64_t needed = smem + limits.static_smem;
  if (needed > limits.max_smem) {
    return fmt::format(
        "{} needs {} bytes of shared memory a block; {} are available at compute capability {}",
        kernel, needed, limits.max_smem, capability_name(limits.capability));
  }
  return "";
}

std::string short_kernel_name(const std::string& demangled) {
  // Up to the parameter list, which opens at angle depth 0; "(anonymous namespace)::" opens there
  // as well.
  std::string name = demangled;
  const std::string anonymous = "(anonymous namespace)::";
  for (size_t at; (at = name.find(anonymous)) != std::string::npos;)
    name.erase(at, anonymous.size());
  int depth = 0;
  size_t start = 0, end = name.size();
  for (size_t i = 0; i < name.size(); ++i) {
    const char c = name[i];
    if (c == '<') ++depth;
    if (c == '>') --depth;
    if (depth != 0) continue;
    if (c == '(') {
      end = i;
      break;
    }
    if (c == ' ' || c == ':') start = i + 1;
  }
  return name.substr(start, end - start);
}

#ifndef FLASHSTEPS_HAS_CUDA

const CudaFacts& cuda_facts() noexcept {
  static const CudaFacts facts = [] {
    CudaFacts none;
    none.built_with_cuda = false;
    return none;
  }();
  return facts;
}

std::unique_ptr<Device> make_cuda_device() {
  throw DeviceError(why_no_cuda());
}

KernelResources last_launched_kernel() {
  throw DeviceError(why_no_cuda());
}

#endif

const char* why_no_cuda() noexcept {
  static const std::string reason = why_no_usable_card(cuda_facts());
  return reason.c_str();
}

}  // namespace flashsteps
