/// \file
/// The end of a kernel file: from its `forward` template to a registered stage.
#pragma once

#include "common/gpu/gpu.h"
#include "common/stage/lse.h"
#include "common/stage/stage.h"

namespace flashsteps::inline FLASHSTEPS_TARGET {

/// Of a stage whose file has no function of this name: it is built for one tile size.
inline constexpr TileList (*candidates)(const Problem&) = nullptr;

/// Calls `f.template operator()<T, D>()` with the element type and the tile width of the problem.
template <typename F>
void dispatch(const Problem& p, F&& f) {
  const bool narrow = tile_width(p.head_dim) == 64;
  if (p.dtype == DType::fp16) {
    narrow ? f.template operator()<fp16_t, 64>() : f.template operator()<fp16_t, 128>();
  } else {
    narrow ? f.template operator()<bf16_t, 64>() : f.template operator()<bf16_t, 128>();
  }
}

}  // namespace flashsteps::inline FLASHSTEPS_TARGET

/// Registers the stage of a kernel file. Expects in scope: `template <typename T, int D> void
/// forward(const Problem&, const ForwardArgs&, Stream)`, `Tiles tiles(const Problem&)`,
/// `WorkspaceList workspaces(const Problem&)`, where forward takes tiles from the caller also
/// `TileList candidates(const Problem&)`, and LSE: a function that computes L, or nullptr where
/// forward writes it.
#define FLASHSTEPS_STAGE_FOR(ID, NAME, SUMMARY, LSE, CAPABILITY, EXACT)           \
  namespace {                                                                     \
  void dispatch_forward(const Problem& p, const ForwardArgs& a, Stream stream) {  \
    dispatch(p, [&]<typename T, int D>() { forward<T, D>(p, a, stream); });       \
  }                                                                               \
  Stage stage_record = {                                                          \
      ID,      NAME,   SUMMARY,    kTarget,    FLASHSTEPS_STAGE_FILE, CAPABILITY, \
      EXACT,   tiles,  candidates, workspaces, dispatch_forward,      LSE,        \
      nullptr, nullptr};                                                          \
  [[maybe_unused]] Stage* const registered_stage = register_stage(&stage_record); \
  }
/// FLASHSTEPS_STAGE_FOR compute capability 8.0 and newer.
#define FLASHSTEPS_STAGE(ID, NAME, SUMMARY, LSE) \
  FLASHSTEPS_STAGE_FOR(ID, NAME, SUMMARY, LSE, 80, false)

/// FLASHSTEPS_STAGE_FOR compute capability 9.0 alone, where wgmma and TMA are: `forward` writes L.
#define FLASHSTEPS_HOPPER_STAGE(ID, NAME, SUMMARY) \
  FLASHSTEPS_STAGE_FOR(ID, NAME, SUMMARY, nullptr, 90, true)

/// Registers a stage of the backward pass, for compute capability 8.0 and newer. Expects in scope:
/// `template <typename T, int D> void backward(const Problem&, const GradientStrides&, const
/// BackwardArgs&, Stream)`, and `tiles`, `workspaces`, `candidates` as FLASHSTEPS_STAGE_FOR does.
#define FLASHSTEPS_BACKWARD_STAGE(ID, NAME, SUMMARY)                                              \
  namespace {                                                                                     \
  void dispatch_backward(const Problem& p, const GradientStrides& strides, const BackwardArgs& a, \
                         Stream stream) {                                                         \
    dispatch(p, [&]<typename T, int D>() { backward<T, D>(p, strides, a, stream); });             \
  }                                                                                               \
  Stage stage_record = {                                                                          \
      ID,         NAME,       SUMMARY, kTarget, FLASHSTEPS_STAGE_FILE, 80,     false, tiles,      \
      candidates, workspaces, nullptr, nullptr, dispatch_backward,     nullptr};                  \
  [[maybe_unused]] Stage* const registered_stage = register_stage(&stage_record);                 \
  }
