#include "common/stage/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <string_view>

#include "common/attention/layout.h"
#include "common/attention/validate.h"
#include "common/gpu/cuda_support.h"
#include "common/stage/registry.h"
#ifdef FLASHSTEPS_HAS_MODEL
#include "common/model/model.h"
#endif

namespace flashsteps {
namespace {

void upload(DeviceBuffer& buffer, const char* name, const std::vector<uint16_t>& from) {
  if (from.size() * sizeof(uint16_t) != buffer.bytes()) {
    throw std::invalid_argument(fmt::format("{} holds {} elements; the problem's strides span {}",
                                            name, from.size(), buffer.bytes() / sizeof(uint16_t)));
  }
  if (!from.empty()) buffer.upload(from.data());
}

void poison(DeviceBuffer& buffer) {
  if (buffer.bytes() > 0) buffer.poison();
}

std::vector<uint16_t> download(const DeviceBuffer& buffer) {
  std::vector<uint16_t> to(buffer.bytes() / sizeof(uint16_t));
  if (!to.empty()) buffer.download(to.data());
  return to;
}

// Allocates the stage's workspaces and names them in its arguments; how many there are.
template <typename Args>
int allocate_workspaces(Device& device, const Stage& stage, const Problem& p, DeviceBuffer* buffers,
                        Args& args) {
  const WorkspaceList list = stage.workspaces(p);
  for (int i = 0; i < list.size; ++i) {
    const WorkspaceBuffer& buffer = list.buffer[i];
    buffers[i] = DeviceBuffer(device, buffer.name, buffer.dtype, buffer.count);
    args.workspace[i] = buffers[i].data();
  }
  return list.size;
}

void require_pass(const Stage& stage, bool backward) {
  if (is_backward(stage) == backward) return;
  throw std::invalid_argument(fmt::format("stage {} is of the {} pass; one of the {} is needed",
                                          stage.id, backward ? "forward" : "backward",
                                          backward ? "backward" : "forward"));
}

void require_runnable(const Stage& stage, const Problem& p, const Device& device) {
  if (const auto reason = why_not(stage, p, device.info())) {
    throw DeviceError(fmt::format("stage {} {}", stage.id, *reason));
  }
}

// What the model has counted since the last time; nothing on a card.
std::optional<Ledger> take_ledger([[maybe_unused]] const Device& device) {
#ifdef FLASHSTEPS_HAS_MODEL
  if (device.info().target == Target::model) return model::take_ledger();
#endif
  return std::nullopt;
}

}  // namespace

int64_t device_bytes(const Stage& stage, const Problem& p) {
  int64_t bytes = 2 * (layout_q(p).extent() + layout_k(p).extent() + layout_v(p).extent() +
                       layout_o(p).extent());
  bytes += 4 * p.rows();
  if (is_backward(stage)) {
    const GradientStrides strides = strides_of_tensors(p);
    bytes += 2 * (layout_do(p, strides).extent() + layout_dq(p, strides).extent() +
                  layout_dk(p, strides).extent() + layout_dv(p, strides).extent());
  }
  const WorkspaceList list = stage.workspaces(p);
  for (int i = 0; i < list.size; ++i) bytes += size_of(list.buffer[i].dtype) * list.buffer[i].count;
  return bytes;
}

std::optional<std::string> why_not(const Stage& stage, const Problem& p, const DeviceInfo& device) {
  const std::string unfit =
      why_capability_unfit(stage.min_capability, stage.capability_is_exact, device);
  if (!unfit.empty()) return unfit;
  const int64_t needed = device_bytes(stage, p);
  if (device.memory_bytes > 0 && needed > device.memory_bytes) {
    return fmt::format("needs {} of device memory; {} has {}", size_name(needed), device.name,
                       size_name(device.memory_bytes));
  }
  return std::nullopt;
}

const Stage* last_forward_stage(const Problem& p, const DeviceInfo& device) {
  const Stage* last = nullptr;
  for (const Stage* stage : stages_for(device.target)) {
    if (!is_backward(*stage) && !why_not(*stage, p, device)) last = stage;
  }
  return last;
}

bool has_grid_choice(const Stage& stage) {
  return std::string_view(stage.id) == "05";
}

std::string name_of(Tiles tiles) {
  return fmt::format("{}x{}", tiles.Br, tiles.Bc);
}

std::vector<Tiles> tile_candidates(const Stage& stage, const Problem& p) {
  const Tiles choice = stage.tiles(p);
  if (choice == Tiles{}) return {};
  std::vector<Tiles> tiles = {choice};
  const TileList list = stage.candidates ? stage.candidates(p) : TileList{};
  for (int i = 0; i < list.size; ++i) {
    if (list.tiles[i] != choice) tiles.push_back(list.tiles[i]);
  }
  return tiles;
}

Tiles tiles_of(const Stage& stage, const Problem& p, const Variant& variant) {
  if (variant.one_block_per_head && !has_grid_choice(stage)) {
    throw std::invalid_argument(
        fmt::format("stage {} has one grid; only 05 can also run with one block for each "
                    "(batch, head)",
                    stage.id));
  }
  if (variant.deterministic && !is_backward(stage)) {
    throw std::invalid_argument(fmt::format(
        "stage {} is of the forward pass, which always sums in a fixed order; only stages of the "
        "backward pass can also run deterministically",
        stage.id));
  }
  if (variant.tiles == Tiles{}) return stage.tiles(p);
  const std::vector<Tiles> allowed = tile_candidates(stage, p);
  if (std::find(allowed.begin(), allowed.end(), variant.tiles) != allowed.end())
    return variant.tiles;
  if (allowed.empty()) {
    throw std::invalid_argument(fmt::format("stage {} has no tiles to choose; {} was given",
                                            stage.id, name_of(variant.tiles)));
  }
  std::string names;
  for (const Tiles tiles : allowed) names += (names.empty() ? "" : ", ") + name_of(tiles);
  throw std::invalid_argument(fmt::format("stage {} at head_dim {} is built for {}; {} was given",
                                          stage.id, p.head_dim, names, name_of(variant.tiles)));
}

ForwardBuffers::ForwardBuffers(Device& device, const Stage& stage, const Problem& p,
                               const Variant& variant)
    : q_(device, "Q", p.dtype, layout_q(p).extent()),
      k_(device, "K", p.dtype, layout_k(p).extent()),
      v_(device, "V", p.dtype, layout_v(p).extent()),
      o_(device, "O", p.dtype, layout_o(p).extent()),
      l_(device, "L", DType::fp32, p.rows()),
      l_count_(p.rows()) {
  args_ = {.Q = q_.data(),
           .K = k_.data(),
           .V = v_.data(),
           .O = o_.data(),
           .L = static_cast<float*>(l_.data()),
           .tiles = tiles_of(stage, p, variant),
           .one_block_per_head = variant.one_block_per_head};
  workspaces_ = allocate_workspaces(device, stage, p, workspace_, args_);
}

void ForwardBuffers::upload(const Inputs& inputs) {
  flashsteps::upload(q_, "Q", inputs.q);
  flashsteps::upload(k_, "K", inputs.k);
  flashsteps::upload(v_, "V", inputs.v);
}

void ForwardBuffers::poison_outputs() {
  poison(o_);
  poison(l_);
  for (int i = 0; i < workspaces_; ++i) poison(workspace_[i]);
}

Outputs ForwardBuffers::download() const {
  Outputs outputs{.o = flashsteps::download(o_), .l = std::vector<float>(size_t(l_count_))};
  if (l_count_ > 0) l_.download(outputs.l.data());
  return outputs;
}

ForwardRun run_forward(Device& device, const Stage& stage, const Problem& p, const Inputs& inputs,
                       const Variant& variant) {
  require_pass(stage, false);
  validate(p);
  require_runnable(stage, p, device);
  ForwardBuffers buffers(device, stage, p, variant);
  buffers.upload(inputs);
  buffers.poison_outputs();
  take_ledger(device);  // what came before is not this stage's

  ForwardRun run;
  stage.forward(p, buffers.args(), nullptr);
  device.synchronize();
  run.ledger = take_ledger(device);
  if (stage.lse) {
    stage.lse(p, buffers.args(), nullptr);
    device.synchronize();
    run.lse_ledger = take_ledger(device);
  }
  run.outputs = buffers.download();
  return run;
}

BackwardBuffers::BackwardBuffers(Device& device, const Stage& stage, const Problem& p,
                                 const GradientStrides& strides, const Variant& variant)
    : q_(device, "Q", p.dtype, layout_q(p).extent()),
      k_(device, "K", p.dtype, layout_k(p).extent()),
      v_(device, "V", p.dtype, layout_v(p).extent()),
      o_(device, "O", p.dtype, layout_o(p).extent()),
      l_(device, "L", DType::fp32, p.rows()),
      d_o_(device, "dO", p.dtype, layout_do(p, strides).extent()),
      dq_(device, "dQ", p.dtype, layout_dq(p, strides).extent()),
      dk_(device, "dK", p.dtype, layout_dk(p, strides).extent()),
      dv_(device, "dV", p.dtype, layout_dv(p, strides).extent()) {
  args_ = {.Q = q_.data(),
           .K = k_.data(),
           .V = v_.data(),
           .O = o_.data(),
           .dO = d_o_.data(),
           .L = static_cast<const float*>(l_.data()),
           .dQ = dq_.data(),
           .dK = dk_.data(),
           .dV = dv_.data(),
           .deterministic = variant.deterministic,
           .tiles = tiles_of(stage, p, variant)};
  workspaces_ = allocate_workspaces(device, stage, p, workspace_, args_);
}

void BackwardBuffers::upload(const Inputs& inputs, const BackwardInputs& backward) {
  flashsteps::upload(q_, "Q", inputs.q);
  flashsteps::upload(k_, "K", inputs.k);
  flashsteps::upload(v_, "V", inputs.v);
  flashsteps::upload(o_, "O", backward.forward.o);
  flashsteps::upload(d_o_, "dO", backward.d_o);
  const std::vector<float>& l = backward.forward.l;
  if (l.size() * sizeof(float) != l_.bytes()) {
    throw std::invalid_argument(fmt::format("L holds {} elements; the problem has {}", l.size(),
                                            l_.bytes() / sizeof(float)));
  }
  if (!l.empty()) l_.upload(l.data());
}

void BackwardBuffers::poison_outputs() {
  poison(dq_);
  poison(dk_);
  poison(dv_);
  for (int i = 0; i < workspaces_; ++i) poison(workspace_[i]);
}

Gradients BackwardBuffers::download() const {
  return {.dq = flashsteps::download(dq_),
          .dk = flashsteps::download(dk_),
          .dv = flashsteps::download(dv_)};
}

BackwardRun run_backward(Device& device, const Stage& stage, const Problem& p,
                         const GradientStrides& strides, const Inputs& inputs,
                         const BackwardInputs& backward, const Variant& variant) {
  require_pass(stage, true);
  validate(p, strides);
  require_runnable(stage, p, device);
  BackwardBuffers buffers(device, stage, p, strides, variant);
  buffers.upload(inputs, backward);
  buffers.poison_outputs();
  take_ledger(device);  // what came before is not this stage's

  BackwardRun run;
  stage.backward(p, strides, buffers.args(), nullptr);
  device.synchronize();
  run.ledger = take_ledger(device);
  run.gradients = buffers.download();
  return run;
}

}  // namespace flashsteps
