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

static_assert(FLASHSTEPS_VERSION == 10000 * FLASHSTEPS_VERSION_MAJOR +
                                        100 * FLASHSTEPS_VERSION_MINOR + FLASHSTEPS_VERSION_PATCH,
              "flashsteps.h has the version of the project");

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

// Each struct of the interface: its name in messages, its size in its first version (a later one is
// longer, and takes what is missing as 0), and its pass.
template <typename Args>
struct About;
template <>
struct About<flashsteps_forward_args> {
  static constexpr const char* kName = "flashsteps_forward_args";
  static constexpr uint64_t kOldestSize =
      offsetof(flashsteps_forward_args, reserved) + sizeof(flashsteps_forward_args::reserved);
  static constexpr bool kBackward = false;
};
template <>
struct About<flashsteps_backward_args> {
  static constexpr const char* kName = "flashsteps_backward_args";
  static constexpr uint64_t kOldestSize =
      offsetof(flashsteps_backward_args, reserved) + sizeof(flashsteps_backward_args::reserved);
  static constexpr bool kBackward = true;
};

template <typename Args>
Args known_part(const Args* given) {
  if (!given) refuse("args is NULL");
  const uint64_t size = given->size;
  if (size < About<Args>::kOldestSize || size > 4096) {
    refuse("size is {}; allowed: sizeof({}) = {}", size, About<Args>::kName, sizeof(Args));
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  if (std::any_of(bytes + std::min<uint64_t>(size, sizeof *given), bytes + size,
                  [](unsigned char byte) { return byte != 0; })) {
    refuse("size is {} and a member beyond {} is set; this library is too old to know it", size,
           sizeof(Args));
  }
  Args args{};
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

void set_strides(Strides& strides, const flashsteps_strides& given) {
  if (given.batch || given.head || given.row) strides = {given.batch, given.head, given.row};
}

template <typename Args>
Problem problem_of(const Args& args) {
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
  set_strides(p.q, args.q_strides);
  set_strides(p.k, args.k_strides);
  set_strides(p.v, args.v_strides);
  set_strides(p.o, args.o_strides);
  validate(p);
  return p;
}

GradientStrides strides_of(const flashsteps_forward_args&, const Problem&) {
  return {};
}

GradientStrides strides_of(const flashsteps_backward_args& args, const Problem& p) {
  Problem packed = p;
  set_packed_strides(packed);
  GradientStrides strides = strides_of_tensors(packed);
  set_strides(strides.d_o, args.d_o_strides);
  set_strides(strides.d_q, args.dq_strides);
  set_strides(strides.d_k, args.dk_strides);
  set_strides(strides.d_v, args.dv_strides);
  validate(p, strides);
  return strides;
}

void require_pass(const Stage& stage, bool backward) {
  if (is_backward(stage) == backward) return;
  refuse("stage {} is of the {} pass; flashsteps_{}() runs it", stage.id,
         backward ? "forward" : "backward", backward ? "forward" : "backward");
}

const Stage& stage_of(const char* id, Target target, bool backward) {
  if (!id) refuse("stage is NULL; allowed: {}", fmt::join(stage_ids(), ", "));
  const Stage* stage = find_stage(id, target);
  if (!stage) {
    const std::vector<std::string> ids = select_stages(id);
    if (ids.size() != 1) refuse("stage is '{}'; one stage is allowed, as in '08'", id);
    stage = find_stage(ids.front(), target);
    if (!stage) {
      const Stage* other =
          find_stage(ids.front(), target == Target::model ? Target::cuda : Target::model);
      if (other) require_pass(*other, backward);
      throw DeviceError(fmt::format("this library was built without {}",
                                    target == Target::model ? "the CPU model" : "CUDA"));
    }
  }
  require_pass(*stage, backward);
  return *stage;
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

Variant variant_of(const flashsteps_backward_args& args, const Stage& stage, const Problem& p) {
  require_flag("deterministic", args.deterministic);
  Variant variant;
  variant.tiles = {args.tile_rows, args.tile_keys};
  variant.deterministic = args.deterministic == 1;
  if (variant.tiles != Tiles{}) (void)tiles_of(stage, p, variant);
  return variant;
}

/// A call, checked but for its pointers. What no library could do is told before what this one
/// cannot.
template <typename Args>
struct Request {
  Args args;
  Target target;
  Problem problem;
  GradientStrides strides;
  const Stage& stage;
  Variant variant;

  explicit Request(const Args* given)
      : args(known_part(given)),
        target(target_of(args.target)),
        problem(problem_of(args)),
        strides(strides_of(args, problem)),
        stage(stage_of(args.stage, target, About<Args>::kBackward)),
        variant(variant_of(args, stage, problem)) {}
};
using ForwardRequest = Request<flashsteps_forward_args>;
using BackwardRequest = Request<flashsteps_backward_args>;

/// Memory of the caller's.
struct Tensor {
  const char* name;
  const void* data;
  bool needed;
  int alignment;
};

std::vector<Tensor> tensors_of(const ForwardRequest& r) {
  const auto& [args, p] = std::tie(r.args, r.problem);
  return {{"q", args.q, p.seqlen_q > 0, 16},
          {"k", args.k, p.seqlen_k > 0, 16},
          {"v", args.v, p.seqlen_k > 0, 16},
          {"o", args.o, p.seqlen_q > 0, 16},
          {"l", args.l, p.seqlen_q > 0 && (args.l || !r.stage.lse), 4}};
}

std::vector<Tensor> tensors_of(const BackwardRequest& r) {
  const auto& [args, p] = std::tie(r.args, r.problem);
  const bool queries = p.seqlen_q > 0, keys = p.seqlen_k > 0;
  return {{"q", args.q, queries, 16},   {"k", args.k, keys, 16},        {"v", args.v, keys, 16},
          {"o", args.o, queries, 16},   {"d_o", args.d_o, queries, 16}, {"l", args.l, queries, 4},
          {"dq", args.dq, queries, 16}, {"dk", args.dk, keys, 16},      {"dv", args.dv, keys, 16}};
}

template <typename Args>
void require_pointers(const Request<Args>& r) {
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

int64_t workspace_bytes(const Stage& stage, const Problem& p) {
  const WorkspaceList list = stage.workspaces(p);
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

/// Checks what a call on a card needs beside its struct, cuts the caller's workspace into the
/// stage's, makes the card of the tensors the current one, and calls `launch`; nothing where there
/// is no tensor to write.
template <typename Args, typename KernelArgs, typename Launch>
void on_card(const Request<Args>& r, KernelArgs& args, Launch&& launch) {
  const CurrentCard kept;
  if (*why_no_cuda() != '\0') throw DeviceError(why_no_cuda());

  std::vector<Tensor> tensors = tensors_of(r);
  const int64_t needed = workspace_bytes(r.stage, r.problem);
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
  launch();
}

void run_on_card(const ForwardRequest& r) {
  ForwardArgs args{.Q = r.args.q,
                   .K = r.args.k,
                   .V = r.args.v,
                   .O = r.args.o,
                   .L = r.args.l,
                   .tiles = r.variant.tiles,
                   .one_block_per_head = r.variant.one_block_per_head};
  on_card(r, args, [&] {
    r.stage.forward(r.problem, args, r.args.stream);
    if (r.stage.lse && args.L) r.stage.lse(r.problem, args, r.args.stream);
  });
}

void run_on_card(const BackwardRequest& r) {
  BackwardArgs args{.Q = r.args.q,
                    .K = r.args.k,
                    .V = r.args.v,
                    .O = r.args.o,
                    .dO = r.args.d_o,
                    .L = r.args.l,
                    .dQ = r.args.dq,
                    .dK = r.args.dk,
                    .dV = r.args.dv,
                    .deterministic = r.variant.deterministic,
                    .tiles = r.variant.tiles};
  on_card(r, args, [&] { r.stage.backward(r.problem, r.strides, args, r.args.stream); });
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

/// A device for this call alone, which `run` gets; a device is for one thread at a time.
template <typename Args, typename Run>
void on_model(const Request<Args>& r, Run&& run) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  const std::unique_ptr<Device> device = make_model_device();
  if (const auto reason = why_not(r.stage, r.problem, device->info())) {
    throw DeviceError(fmt::format("stage {} {}", r.stage.id, *reason));
  }
  run(*device);
}

template <typename Args>
Inputs inputs_of(const Request<Args>& r) {
  const Problem& p = r.problem;
  return {read_tensor(layout_q(p), r.args.q), read_tensor(layout_k(p), r.args.k),
          read_tensor(layout_v(p), r.args.v)};
}

void write_tensor(const TensorLayout& t, void* to, const std::vector<uint16_t>& from) {
  copy_rows(t, static_cast<uint16_t*>(to), from.data());
}

void run_on_model(const ForwardRequest& r) {
  on_model(r, [&](Device& device) {
    const Problem& p = r.problem;
    ForwardBuffers buffers(device, r.stage, p, r.variant);
    buffers.upload(inputs_of(r));
    r.stage.forward(p, buffers.args(), nullptr);
    if (r.stage.lse && r.args.l) r.stage.lse(p, buffers.args(), nullptr);
    const Outputs outputs = buffers.download();
    write_tensor(layout_o(p), r.args.o, outputs.o);
    if (r.args.l) std::copy(outputs.l.begin(), outputs.l.end(), r.args.l);
  });
}

void run_on_model(const BackwardRequest& r) {
  on_model(r, [&](Device& device) {
    const Problem& p = r.problem;
    BackwardBuffers buffers(device, r.stage, p, r.strides, r.variant);
    buffers.upload(inputs_of(r),
                   {.d_o = read_tensor(layout_do(p, r.strides), r.args.d_o),
                    .forward = {.o = read_tensor(layout_o(p), r.args.o),
                                .l = std::vector<float>(r.args.l, r.args.l + p.rows())}});
    r.stage.backward(p, r.strides, buffers.args(), nullptr);
    const Gradients gradients = buffers.download();
    write_tensor(layout_dq(p, r.strides), r.args.dq, gradients.dq);
    write_tensor(layout_dk(p, r.strides), r.args.dk, gradients.dk);
    write_tensor(layout_dv(p, r.strides), r.args.dv, gradients.dv);
  });
}

#endif

std::string ids_for(Target target, bool backward) {
  std::string ids;
  for (const Stage* stage : stages_for(target)) {
    if (is_backward(*stage) != backward) continue;
    if (!ids.empty()) ids += ',';
    ids += stage->id;
  }
  return ids;
}

const char* ids_for(int32_t target, bool backward) noexcept {
  if (target != FLASHSTEPS_MODEL && target != FLASHSTEPS_CUDA) return "";
  try {
    static const std::string ids[2][2] = {
        {ids_for(Target::model, false), ids_for(Target::model, true)},
        {ids_for(Target::cuda, false), ids_for(Target::cuda, true)}};
    return ids[target == FLASHSTEPS_CUDA][backward].c_str();
  } catch (...) {  // no memory for the lists; the next call tries again
    return "";
  }
}

template <typename Args>
flashsteps_status run(const Args* given) {
  return guarded([&] {
    const Request<Args> request(given);
    require_pointers(request);
#ifdef FLASHSTEPS_HAS_MODEL
    if (request.target == Target::model) return run_on_model(request);
#endif
#ifdef FLASHSTEPS_HAS_CUDA
    if (request.target == Target::cuda) return run_on_card(request);
#endif
  });
}

template <typename Args>
flashsteps_status ask_workspace(const Args* given, uint64_t* bytes) {
  return guarded([&] {
    if (!bytes) refuse("bytes is NULL");
    const Request<Args> request(given);
    *bytes = uint64_t(workspace_bytes(request.stage, request.problem));
  });
}

template <typename Args>
flashsteps_status ask_tiles(const Args* given, int32_t* rows, int32_t* keys) {
  return guarded([&] {
    if (!rows || !keys) refuse("{} is NULL", rows ? "keys" : "rows");
    const Request<Args> request(given);
#ifdef FLASHSTEPS_HAS_CUDA
    const CurrentCard kept;
    if (request.target == Target::cuda && *why_no_cuda() != '\0') throw DeviceError(why_no_cuda());
#endif
    const Tiles used = tiles_of(request.stage, request.problem, request.variant);
    *rows = used.Br;
    *keys = used.Bc;
  });
}

}  // namespace

flashsteps_status flashsteps_forward(const flashsteps_forward_args* args) {
  return run(args);
}

flashsteps_status flashsteps_forward_workspace(const flashsteps_forward_args* args,
                                               uint64_t* bytes) {
  return ask_workspace(args, bytes);
}

flashsteps_status flashsteps_forward_tiles(const flashsteps_forward_args* args, int32_t* rows,
                                           int32_t* keys) {
  return ask_tiles(args, rows, keys);
}

flashsteps_status flashsteps_backward(const flashsteps_backward_args* args) {
  return run(args);
}

flashsteps_status flashsteps_backward_workspace(const flashsteps_backward_args* args,
                                                uint64_t* bytes) {
  return ask_workspace(args, bytes);
}

flashsteps_status flashsteps_backward_tiles(const flashsteps_backward_args* args, int32_t* rows,
                                            int32_t* keys) {
  return ask_tiles(args, rows, keys);
}

const char* flashsteps_last_error() {
  return last_error;
}

const char* flashsteps_stages(int32_t target) {
  return ids_for(target, false);
}

const char* flashsteps_backward_stages(int32_t target) {
  return ids_for(target, true);
}

int32_t flashsteps_version() {
  return FLASHSTEPS_VERSION;
}

const char* flashsteps_commit() {
  return FLASHSTEPS_COMMIT;
}
