// The host's side of a card: finding one, device memory, and checked launches. (No fmt here: nvcc
// 13 does not compile version 9 of it as C++20.)

#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <unordered_map>

#include "common/gpu/cuda_device.h"
#include "common/gpu/cuda_support.h"

#ifndef FLASHSTEPS_CUDA_ARCHITECTURES
#error "common/CMakeLists.txt defines FLASHSTEPS_CUDA_ARCHITECTURES"
#endif

namespace flashsteps {

namespace {

/// Loaded, never launched: shows whether this binary has code for a card.
__global__ void probe_kernel() {}

/// After one of these the context is lost: the runtime returns it again from every later call.
bool is_sticky(cudaError_t status) {
  switch (status) {
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorIllegalInstruction:
    case cudaErrorHardwareStackError:
    case cudaErrorAssert:
    case cudaErrorLaunchTimeout:
    case cudaErrorLaunchFailure:
    case cudaErrorECCUncorrectable:
    case cudaErrorExternalDevice:
      return true;
    default:
      return false;
  }
}

bool is_no_code(cudaError_t status) {
  return status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction;
}

std::string words(cudaError_t status) {
  return std::string(cudaGetErrorString(status)) + " (" + cudaGetErrorName(status) + ")";
}

CudaCard probe_card(int index) {
  CudaCard card;
  cudaDeviceProp properties;
  cudaError_t status = cudaGetDeviceProperties(&properties, index);
  if (status == cudaSuccess) {
    card.name = properties.name;
    card.capability = properties.major * 10 + properties.minor;
    if (card.capability < kOldestCapability) return card;
    status = cudaSetDevice(index);
  } else {
    card.name = "card " + std::to_string(index);
  }
  cudaFuncAttributes attributes;
  if (status == cudaSuccess) status = cudaFuncGetAttributes(&attributes, probe_kernel);
  (void)cudaGetLastError();  // told here, and not to whoever asks next
  if (status == cudaSuccess) return card;
  card.error = words(status);
  card.probe = is_no_code(status)                         ? CudaCard::Probe::no_code
               : status == cudaErrorUnsupportedPtxVersion ? CudaCard::Probe::ptx_too_new
               : status == cudaErrorDevicesUnavailable || status == cudaErrorDeviceAlreadyInUse
                   ? CudaCard::Probe::unavailable
                   : CudaCard::Probe::failed_otherwise;
  return card;
}

/// Asks for the cards in turn, up to the first that can be used (to look at a card starts a context
/// on it).
CudaFacts ask_cuda() {
  CudaFacts facts;
  facts.architectures = FLASHSTEPS_CUDA_ARCHITECTURES;
  (void)cudaRuntimeGetVersion(&facts.runtime_version);
  if (cudaDriverGetVersion(&facts.driver_version) != cudaSuccess) facts.driver_version = 0;
  if (facts.driver_version == 0) return facts;
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  (void)cudaGetLastError();
  if (status != cudaSuccess && status != cudaErrorNoDevice) {
    facts.count_error = words(status);
    return facts;
  }
  for (int i = 0; i < count && usable_card(facts) < 0; ++i) facts.cards.push_back(probe_card(i));
  return facts;
}

}  // namespace

const CudaFacts& cuda_facts() noexcept {
  static const CudaFacts facts = ask_cuda();
  return facts;
}

void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  const CudaFailure kind = is_sticky(status)    ? CudaFailure::fault
                           : is_no_code(status) ? CudaFailure::no_code
                                                : CudaFailure::other;
  const std::string message =
      cuda_failure_message(kind, what, words(status), FLASHSTEPS_CUDA_ARCHITECTURES);
  if (kind == CudaFailure::fault) throw DeviceFault(message);
  throw DeviceError(message);
}

namespace detail {

namespace {

std::string kernel_name(const void* kernel) {
#if CUDART_VERSION >= 12030
  const char* mangled = nullptr;
  if (cudaFuncGetName(&mangled, kernel) == cudaSuccess && mangled) {
    int failed = 0;
    char* demangled = abi::__cxa_demangle(mangled, nullptr, nullptr, &failed);
    std::string name = failed ? mangled : short_kernel_name(demangled);
    std::free(demangled);
    return name;
  }
  (void)cudaGetLastError();
#endif
  return "the kernel";
}

struct KernelKey {
  const void* kernel;
  int device;
  bool operator==(const KernelKey&) const = default;
};
struct KernelKeyHash {
  size_t operator()(const KernelKey& key) const {
    return std::hash<const void*>()(key.kernel) + size_t(key.device) * 0x9e3779b97f4a7c15u;
  }
};
struct KernelLimits {
  LaunchLimits limits;
  int dynamic_smem = 0;  ///< that launches of this kernel may ask for now
};

KernelLimits ask_limits(const void* kernel, int device) {
  KernelLimits answer;
  int major = 0, minor = 0, optin = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
             "asking for a limit");
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
             "asking for a limit");
  check_cuda(cudaDeviceGetAttribute(&optin, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
             "asking for a limit");
  cudaFuncAttributes attributes;
  const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
  if (status != cudaSuccess) check_cuda(status, ("loading " + kernel_name(kernel)).c_str());
  answer.limits.capability = major * 10 + minor;
  answer.limits.max_block = attributes.maxThreadsPerBlock;
  answer.limits.static_smem = int64_t(attributes.sharedSizeBytes);
  answer.limits.max_smem = optin;
  answer.dynamic_smem = attributes.maxDynamicSharedSizeBytes;
  return answer;
}

// The launch that was prepared last, for last_launched_kernel().
struct LastLaunch {
  const void* kernel = nullptr;
  int block = 0;
  int smem = 0;
};
LastLaunch last_launch;
std::mutex launch_mutex;  // guards it, and what is known of kernels

}  // namespace

void prepare_launch(const void* kernel, int64_t grid, int block, int smem) {
  // One look-up for each launch (some tens of nanoseconds); the runtime is asked once a kernel and
  // device.
  static std::unordered_map<KernelKey, KernelLimits, KernelKeyHash> known;
  int device = 0;
  check_cuda(cudaGetDevice(&device), "asking for the current card");
  const std::lock_guard<std::mutex> lock(launch_mutex);
  last_launch = {kernel, block, smem};
  auto found = known.find({kernel, device});
  if (found == known.end()) {
    found = known.emplace(KernelKey{kernel, device}, ask_limits(kernel, device)).first;
  }
  KernelLimits& now = found->second;
  if (grid >= 1 && grid <= 2147483647 && block >= 1 && block <= now.limits.max_block && smem >= 0 &&
      smem <= now.dynamic_smem) {
    return;
  }
  const std::string name = kernel_name(kernel);
  const std::string refused = why_launch_refused(name, grid, block, smem, now.limits);
  if (!refused.empty()) throw DeviceError(refused);
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem),
             ("raising the shared memory of " + name).c_str());
  now.dynamic_smem = smem;
}

void check_launch(const void* kernel) {
  const cudaError_t status = cudaGetLastError();
  if (status == cudaSuccess) return;
  check_cuda(status, ("launch of " + kernel_name(kernel)).c_str());
}

}  // namespace detail

KernelResources last_launched_kernel() {
  if (*why_no_cuda() != '\0') throw DeviceError(why_no_cuda());
  detail::LastLaunch last;
  {
    const std::lock_guard<std::mutex> lock(detail::launch_mutex);
    last = detail::last_launch;
  }
  if (!last.kernel) throw DeviceError("no kernel has been launched yet");
  KernelResources taken;
  taken.name = detail::kernel_name(last.kernel);
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, last.kernel),
             ("asking about " + taken.name).c_str());
  taken.threads = last.block;
  taken.registers_per_thread = attributes.numRegs;
  taken.local_bytes = int64_t(attributes.localSizeBytes);
  taken.shared_memory = int64_t(attributes.sharedSizeBytes) + last.smem;
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
                 &taken.blocks_per_multiprocessor, last.kernel, last.block, size_t(last.smem)),
             ("asking for the occupancy of " + taken.name).c_str());
  return taken;
}

namespace {

class CudaDevice : public Device {
 public:
  explicit CudaDevice(int index) : index_(index) {
    check_cuda(cudaSetDevice(index), "choosing the card");
  }

  DeviceInfo info() const override {
    const CudaFacts& facts = cuda_facts();
    DeviceInfo info;
    info.target = Target::cuda;
    info.name = facts.cards[size_t(index_)].name;
    info.capability = facts.cards[size_t(index_)].capability;
    info.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
    info.shared_memory_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    size_t free = 0, total = 0;
    check_cuda(cudaMemGetInfo(&free, &total), "asking for the card's memory");
    info.memory_bytes = int64_t(total);
    info.driver = cuda_version_name(facts.driver_version);
    info.runtime = cuda_version_name(facts.runtime_version);
    return info;
  }

  void* allocate(const char* name, DType type, int64_t count) override {
    if (count < 0 || count > INT64_MAX / size_of(type)) {
      throw std::invalid_argument(std::string(name) + ": " + std::to_string(count) +
                                  " elements were asked for");
    }
    // A tensor without elements still has an address.
    const size_t bytes = std::max<size_t>(size_t(count) * size_t(size_of(type)), 256);
    void* pointer = nullptr;
    const cudaError_t status = cudaMalloc(&pointer, bytes);
    if (status == cudaErrorMemoryAllocation) {
      (void)cudaGetLastError();
      size_t free = 0, total = 0;
      check_cuda(cudaMemGetInfo(&free, &total), "asking for the card's memory");
      throw DeviceError(out_of_memory_message(name, int64_t(bytes), int64_t(free), int64_t(total)));
    }
    check_cuda(status, name);
    const cudaError_t filled = cudaMemset(pointer, 0xff, bytes);
    if (filled != cudaSuccess) {
      (void)cudaFree(pointer);
      check_cuda(filled, name);
    }
    return pointer;
  }

  // Called by destructors: an earlier fault is told by synchronize() or the next call, not here.
  void release(void* pointer) override {
    if (cudaFree(pointer) != cudaSuccess) (void)cudaGetLastError();
  }

  void upload(void* to_device, const void* from_host, size_t bytes) override {
    if (bytes == 0) return;
    check_cuda(cudaMemcpy(to_device, from_host, bytes, cudaMemcpyHostToDevice), "copy to the card");
  }
  void download(void* to_host, const void* from_device, size_t bytes) override {
    if (bytes == 0) return;
    check_cuda(cudaMemcpy(to_host, from_device, bytes, cudaMemcpyDeviceToHost),
               "copy from the card");
  }
  void poison(void* pointer, size_t bytes) override {
    if (bytes == 0) return;
    check_cuda(cudaMemset(pointer, 0xff, bytes), "filling device memory");
  }
  void synchronize() override { check_cuda(cudaDeviceSynchronize(), "running on the card"); }

 private:
  int attribute(cudaDeviceAttr which) const {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, which, index_), "asking for the card's limits");
    return value;
  }
  int index_;
};

}  // namespace

std::unique_ptr<Device> make_cuda_device() {
  if (*why_no_cuda() != '\0') throw DeviceError(why_no_cuda());
  return std::make_unique<CudaDevice>(usable_card(cuda_facts()));
}

inline namespace cuda_target {

int shared_memory_per_block() {
  int device = 0, bytes = 0;
  check_cuda(cudaGetDevice(&device), "asking for the current card");
  check_cuda(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
             "asking for the card's limits");
  return bytes;
}

int multiprocessor_count() {
  int device = 0, count = 0;
  check_cuda(cudaGetDevice(&device), "asking for the current card");
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
             "asking for the card's multiprocessors");
  return count;
}

}  // namespace cuda_target
}  // namespace flashsteps
