#include "common/stage/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <stdexcept>
#include <string_view>

#include "common/attention/layout.h"
#include "common/attention/validate.h"
#include "common/gpu/cuda_support.h"
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
      o_extent_(layout_o(p).extent()),
      l_count_(p.rows()) {
  args_ = {.Q = q_.data(),
           .K = k_.data(),
           .V = v_.data(),
           .O = o_.data(),
           .L = static_cast<float*>(l_.data()),
           .tiles = tiles_of(stage, p, variant),
           .one_block_per_head = variant.one_block_per_head};
  const WorkspaceList list = stage.workspaces(p);
  workspaces_ = list.size;
  for (int i = 0; i < list.size; ++i) {
    const WorkspaceBuffer& buffer = list.buffer[i];
    workspace_[i] = DeviceBuffer(device, buffer.name, buffer.dtype, buffer.count);
    args_.workspace[i] = workspace_[i].data();
  }
}

void ForwardBuffers::upload(const Inputs& inputs) {
  flashsteps::upload(q_, "Q", inputs.q);
  flashsteps::upload(k_, "K", inputs.k);
  flashsteps::upload(v_, "V", inputs.v);
}

void ForwardBuffers::poison_outputs() {
  const auto poison = [](DeviceBuffer& buffer) {
    if (buffer.bytes() > 0) buffer.poison();
  };
  poison(o_);
  poison(l_);
  for (int i = 0; i < workspaces_; ++i) poison(workspace_[i]);
}

Outputs ForwardBuffers::download() const {
  Outputs outputs{.o = std::vector<uint16_t>(size_t(o_extent_)),
                  .l = std::vector<float>(size_t(l_count_))};
  if (o_extent_ > 0) o_.download(outputs.o.data());
  if (l_count_ > 0) l_.download(outputs.l.data());
  return outputs;
}

ForwardRun run_forward(Device& device, const Stage& stage, const Problem& p, const Inputs& inputs,
                       const Variant& variant) {
  validate(p);
  if (const auto reason = why_not(stage, p, device.info())) {
    throw DeviceError(fmt::format("stage {} {}", stage.id, *reason));
  }
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

}  // namespace flashsteps
