#include "common/capi/flashsteps.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "common/attention/layout.h"
#include "common/attention/validate.h"
#include "common/gpu/cuda_support.h"
#include "common/stage/device.h"
#include "common/stage/registry.h"
#include "common/stage/run.h"
#include "flashsteps_commit.inc"  // generated at build time by common/cli/commit.cmake
#ifdef FLASHSTEPS_HAS_CUDA
#include <cuda_runtime_api.h>
#endif
#ifdef FLASHSTEPS_HAS_MODEL
#include "common/model/model.h"
#endif

namespace {

using namespace flashsteps;

template <typename... Args>
[[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) {
  throw std::invalid_argument(fmt::format(format, std::forward<Args>(args)...));
}

// --- errors: a status, and a line of this thread's ---

// No std::string: to tell of a failure must not fail.
thread_local char last_error[1024];

flashsteps_status fail(flashsteps_status status, const char* what) noexcept {
  std::snprintf(last_error, sizeof last_error, "%s", what);
  std::replace(last_error, last_error + std::strlen(last_error), '\n', ' ');
  return status;
}

/// Runs `f` and turns what it throws into a status.
template <typename F>
flashsteps_status guarded(F&& f) noexcept {
  last_error[0] = '\0';
  try {
    f();
    return FLASHSTEPS_OK;
  } catch (const std::invalid_argument& error) {
    return fail(FLASHSTEPS_BAD_INPUT, error.what());
  } catch (const DeviceFault& error) {
    return fail(FLASHSTEPS_FAILED, error.what());
  } catch (const DeviceError& error) {
    return fail(FLASHSTEPS_UNAVAILABLE, error.what());
  } catch (const std::bad_alloc&) {
    return fail(FLASHSTEPS_UNAVAILABLE, "out of host memory");
  } catch (const std::exception& error) {  // model::Fault is one of these
    return fail(FLASHSTEPS_FAILED, error.what());
  } catch (...) {
    return fail(FLASHSTEPS_FAILED, "an unknown exception");
  }
}

// --- from the caller's struct to a problem ---

// Of the first version of the struct. A later one is longer, and takes what is missing as 0.
constexpr uint64_t kOldestSize =
    offsetof(flashsteps_forward_args, reserved) + sizeof(flashsteps_forward_args::reserved);

flashsteps_forward_args known_part(const flashsteps_forward_args* given) {
  if (!given) refuse("args is NULL");
  const uint64_t size = given->size;
  if (size < kOldestSize || size > 4096) {
    refuse("size is {}; allowed: sizeof(flashsteps_forward_args) = {}", size,
           sizeof(flashsteps_forward_args));
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  if (std::any_of(bytes + std::min<uint64_t>(size, sizeof *given), bytes + size,
                  [](unsigned char byte) { return byte != 0; })) {
    refuse("size is {} and a member beyond {} is set; this library is too old to know it", size,
           sizeof(flashsteps_forward_args));
  }
  flashsteps_forward_args args{};
  std::memcpy(&args, given, std::min<uint64_t>(size, sizeof args));
  if (args.reserved != 0) refuse("reserved is {}; allowed: 0", args.reserved);
  return args;
}

Target target_of(int32_t target) {
  if (target == FLASHSTEPS_MODEL) return Target::model;
  if (target == FLASHSTEPS_CUDA) return Target::cuda;
  refuse("target is {}; allowed: {} (model), {} (cuda)", target, int{FLASHSTEPS_MODEL},
         int{FLASHSTEPS_CUDA});
}

DType dtype_of(int32_t dtype) {
  if (dtype == FLASHSTEPS_FP16) return DType::fp16;
  if (dtype == FLASHSTEPS_BF16) return DType::bf16;
  refuse("dtype is {}; allowed: {} (fp16), {} (bf16)", dtype, int{FLASHSTEPS_FP16},
         int{FLASHSTEPS_BF16});
}

void require_flag(const char* name, int32_t value) {
  if (value != 0 && value != 1) refuse("{} is {}; allowed: 0, 1", name, value);
}

Problem problem_of(const flashsteps_forward_args& args) {
  require_flag("causal", args.causal);
  Problem p;
  p.batch = args.batch;
  p.heads = args.heads;
  p.kv_heads = args.kv_heads;
  p.seqlen_q = args.seqlen_q;
  p.seqlen_k = args.seqlen_k;
  p.head_dim = args.head_dim;
  p.dtype = dtype_of(args.dtype);
  p.causal = args.causal == 1;
  p.scale = args.scale;
  set_packed_strides(p);
  const auto set = [](Strides& strides, const flashsteps_strides& given) {
    if (given.batch || given.head || given.row) strides = {given.batch, given.head, given.row};
  };
  set(p.q, args.q_strides);
  set(p.k, args.k_strides);
  set(p.v, args.v_strides);
  set(p.o, args.o_strides);
  validate(p);
  return p;
}

const Stage& stage_of(const flashsteps_forward_args& args, Target target) {
  if (!args.stage) refuse("stage is NULL; allowed: {}", fmt::join(stage_ids(), ", "));
  if (const Stage* stage = find_stage(args.stage, target)) return *stage;
  const std::vector<std::string> ids = select_stages(args.stage);
  if (ids.size() != 1) refuse("stage is '{}'; one stage is allowed, as in '08'", args.stage);
  if (const Stage* stage = find_stage(ids.front(), target)) return *stage;
  throw DeviceError(fmt::format("this library was built without {}",
                                target == Target::model ? "the CPU model" : "CUDA"));
}

/// The variant of the stage that the caller asks for, checked. Without one no card is asked.
Variant variant_of(const flashsteps_forward_args& args, const Stage& stage, const Problem& p) {
  require_flag("one_block_per_head", args.one_block_per_head);
  const Variant variant{{args.tile_rows, args.tile_keys}, args.one_block_per_head == 1};
  if (variant.tiles != Tiles{} || (variant.one_block_per_head && !has_grid_choice(stage))) {
    (void)tiles_of(stage, p, variant);
  }
  return variant;
}

/// A call, checked but for its pointers. What no library could do is told before what this one
/// cannot.
struct Request {
  flashsteps_forward_args args;
  Target target;
  Problem problem;
  const Stage& stage;
  Variant variant;

  explicit Request(const flashsteps_forward_args* given)
      : args(known_part(given)),
        target(target_of(args.target)),
        problem(problem_of(args)),
        stage(stage_of(args, target)),
        variant(variant_of(args, stage, problem)) {}
};

/// Memory of the caller's.
struct Tensor {
  const char* name;
  const void* data;
  bool needed;
  int alignment;
};

std::vector<Tensor> tensors_of(const Request& r) {
  const auto& [args, p] = std::tie(r.args, r.problem);
  return {{"q", args.q, p.seqlen_q > 0, 16},
          {"k", args.k, p.seqlen_k > 0, 16},
          {"v", args.v, p.seqlen_k > 0, 16},
          {"o", args.o, p.seqlen_q > 0, 16},
          {"l", args.l, p.seqlen_q > 0 && (args.l || !r.stage.lse), 4}};
}

void require_pointers(const Request& r) {
  for (const Tensor& t : tensors_of(r)) {
    if (t.needed && !t.data) refuse("{} is NULL; stage {} needs it", t.name, r.stage.id);
    if (reinterpret_cast<uintptr_t>(t.data) % uintptr_t(t.alignment) != 0) {
      refuse("{} is at {}; allowed: addresses that are multiples of {}", t.name, fmt::ptr(t.data),
             t.alignment);
    }
  }
}

// --- workspaces ---

constexpr int64_t kWorkspaceAlignment = 256;

int64_t aligned_bytes(const WorkspaceBuffer& buffer) {
  const int64_t bytes = size_of(buffer.dtype) * buffer.count;
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

int64_t workspace_bytes(const Request& r) {
  const WorkspaceList list = r.stage.workspaces(r.problem);
  int64_t bytes = 0;
  for (int i = 0; i < list.size; ++i) bytes += aligned_bytes(list.buffer[i]);
  return bytes;
}

// --- a card ---

#ifdef FLASHSTEPS_HAS_CUDA

/// Gives the caller its current card back.
class CurrentCard {
 public:
  CurrentCard() : known_(cudaGetDevice(&index_) == cudaSuccess) {}
  ~CurrentCard() {
    if (known_ && !is(index_)) (void)cudaSetDevice(index_);
  }
  /// Whether the current card is this one.
  static bool is(int index) {
    int now = 0;
    return cudaGetDevice(&now) == cudaSuccess && now == index;
  }
  CurrentCard(const CurrentCard&) = delete;
  CurrentCard& operator=(const CurrentCard&) = delete;

 private:
  int index_ = 0;
  bool known_;
};

void require(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  throw DeviceError(fmt::format("{}: {}", what, cudaGetErrorString(status)));
}

/// The card whose memory this is.
int card_of(const char* name, const void* pointer) {
  cudaPointerAttributes attributes{};
  const cudaError_t status = cudaPointerGetAttributes(&attributes, pointer);
  if (status == cudaSuccess &&
      (attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged)) {
    return attributes.device;
  }
  (void)cudaGetLastError();
  if (status != cudaSuccess && status != cudaErrorInvalidValue) {
    require(status, "asking CUDA about a pointer");
  }
  refuse("{} at {} is no memory of a card", name, fmt::ptr(pointer));
}

void forward_on_card(const Request& r) {
  const CurrentCard kept;
  if (*why_no_cuda() != '\0') throw DeviceError(why_no_cuda());

  ForwardArgs args{.Q = r.args.q,
                   .K = r.args.k,
                   .V = r.args.v,
                   .O = r.args.o,
                   .L = r.args.l,
                   .tiles = r.variant.tiles,
                   .one_block_per_head = r.variant.one_block_per_head};
  std::vector<Tensor> tensors = tensors_of(r);
  const int64_t needed = workspace_bytes(r);
  if (needed > 0) {
    if (!r.args.workspace || r.args.workspace_bytes < uint64_t(needed)) {
      refuse("the workspace has {} bytes; stage {} needs {} for this problem",
             r.args.workspace ? r.args.workspace_bytes : 0, r.stage.id, needed);
    }
    if (reinterpret_cast<uintptr_t>(r.args.workspace) % kWorkspaceAlignment != 0) {
      refuse("workspace is at {}; allowed: addresses that are multiples of {}",
             fmt::ptr(r.args.workspace), kWorkspaceAlignment);
    }
    tensors.push_back({"workspace", r.args.workspace, true, int(kWorkspaceAlignment)});
    char* at = static_cast<char*>(r.args.workspace);
    const WorkspaceList list = r.stage.workspaces(r.problem);
    for (int i = 0; i < list.size; ++i) {
      args.workspace[i] = at;
      at += aligned_bytes(list.buffer[i]);
    }
  }

  int card = -1;
  for (const Tensor& t : tensors) {
    if (!t.needed) continue;
    const int found = card_of(t.name, t.data);
    if (card >= 0 && found != card) {
      refuse("{} is in the memory of card {}, the tensors before it in that of card {}", t.name,
             found, card);
    }
    card = found;
  }
  if (card < 0) return;  // nothing to write

  if (!CurrentCard::is(card)) require(cudaSetDevice(card), "choosing the card");
  int major = 0, minor = 0;
  require(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, card),
          "asking for the card's capability");
  require(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, card),
          "asking for the card's capability");
  DeviceInfo info;
  info.name = fmt::format("card {}", card);
  info.capability = 10 * major + minor;
  const std::string unfit =
      why_capability_unfit(r.stage.min_capability, r.stage.capability_is_exact, info);
  if (!unfit.empty()) throw DeviceError(fmt::format("stage {} {}", r.stage.id, unfit));

  r.stage.forward(r.problem, args, r.args.stream);
  if (r.stage.lse && args.L) r.stage.lse(r.problem, args, r.args.stream);
}

#endif

// --- the CPU model ---

#ifdef FLASHSTEPS_HAS_MODEL

/// Copies a tensor's rows and leaves what lies between them.
void copy_rows(const TensorLayout& t, uint16_t* to, const uint16_t* from) {
  for (int b = 0; b < t.batch; ++b) {
    for (int h = 0; h < t.heads; ++h) {
      for (int i = 0; i < t.seqlen; ++i) {
        const int64_t at = t.offset(b, h, i);
        std::memcpy(to + at, from + at, size_t(t.head_dim) * sizeof(uint16_t));
      }
    }
  }
}

std::vector<uint16_t> read_tensor(const TensorLayout& t, const void* from) {
  std::vector<uint16_t> bits(size_t(t.extent()), 0xffff);
  copy_rows(t, bits.data(), static_cast<const uint16_t*>(from));
  return bits;
}

void forward_on_model(const Request& r) {
  static std::mutex mutex;  // a device is for one thread at a time
  const std::lock_guard lock(mutex);
  const Problem& p = r.problem;
  const std::unique_ptr<Device> device = make_model_device();
  if (const auto reason = why_not(r.stage, p, device->info())) {
    throw DeviceError(fmt::format("stage {} {}", r.stage.id, *reason));
  }
  ForwardBuffers buffers(*device, r.stage, p, r.variant);
  buffers.upload({read_tensor(layout_q(p), r.args.q), read_tensor(layout_k(p), r.args.k),
                  read_tensor(layout_v(p), r.args.v)});
  r.stage.forward(p, buffers.args(), nullptr);
  if (r.stage.lse && r.args.l) r.stage.lse(p, buffers.args(), nullptr);
  const Outputs outputs = buffers.download();
  copy_rows(layout_o(p), static_cast<uint16_t*>(r.args.o), outputs.o.data());
  if (r.args.l) std::copy(outputs.l.begin(), outputs.l.end(), r.args.l);
}

#endif

std::string ids_for(Target target) {
  std::string ids;
  for (const Stage* stage : stages_for(target)) {
    if (!ids.empty()) ids += ',';
    ids += stage->id;
  }
  return ids;
}

}  // namespace

flashsteps_status flashsteps_forward(const flashsteps_forward_args* given) {
  return guarded([&] {
    const Request request(given);
    require_pointers(request);
#ifdef FLASHSTEPS_HAS_MODEL
    if (request.target == Target::model) return forward_on_model(request);
#endif
#ifdef FLASHSTEPS_HAS_CUDA
    if (request.target == Target::cuda) return forward_on_card(request);
#endif
  });
}

flashsteps_status flashsteps_forward_workspace(const flashsteps_forward_args* given,
                                               uint64_t* bytes) {
  return guarded([&] {
    if (!bytes) refuse("bytes is NULL");
    *bytes = uint64_t(workspace_bytes(Request(given)));
  });
}

flashsteps_status flashsteps_forward_tiles(const flashsteps_forward_args* given, int32_t* rows,
                                           int32_t* keys) {
  return guarded([&] {
    if (!rows || !keys) refuse("{} is NULL", rows ? "keys" : "rows");
    const Request request(given);
#ifdef FLASHSTEPS_HAS_CUDA
    const CurrentCard kept;
    if (request.target == Target::cuda && *why_no_cuda() != '\0') throw DeviceError(why_no_cuda());
#endif
    const Tiles used = tiles_of(request.stage, request.problem, request.variant);
    *rows = used.Br;
    *keys = used.Bc;
  });
}

const char* flashsteps_last_error() {
  return last_error;
}

const char* flashsteps_stages(int32_t target) {
  static const std::string model = ids_for(Target::model), cuda = ids_for(Target::cuda);
  return target == FLASHSTEPS_MODEL ? model.c_str() : target == FLASHSTEPS_CUDA ? cuda.c_str() : "";
}

int32_t flashsteps_version() {
  return 10000 * FLASHSTEPS_VERSION_MAJOR + 100 * FLASHSTEPS_VERSION_MINOR +
         FLASHSTEPS_VERSION_PATCH;
}

const char* flashsteps_commit() {
  return FLASHSTEPS_COMMIT;
}
