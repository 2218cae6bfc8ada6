/// \file
/// What a stage is, and the registry that finds it. A kernel file ends with FLASHSTEPS_STAGE(...),
/// and that alone makes the stage known to every program that it is linked into.
#pragma once

#include <cstdint>

#include "common/attention/problem.h"

namespace flashsteps {

/// Where a kernel runs: on the CPU model of the GPU, or on a card.
enum class Target { model, cuda };

/// Tile sizes, in rows of Q (Br) and rows of K (Bc). 0 where a stage has no tiles.
struct Tiles {
  int Br = 0;
  int Bc = 0;
  bool operator==(const Tiles& other) const = default;
};

/// Tile sizes among which a stage can be told to choose.
struct TileList {
  int size = 0;
  Tiles tiles[8] = {};
};

/// How a stage is to run, where it leaves a choice.
struct Variant {
  Tiles tiles{};                    ///< one of Stage::candidates; 0 x 0: the stage's choice
  bool one_block_per_head = false;  ///< has_grid_choice(): one block for each (batch, head)
  bool deterministic = false;       ///< backward stages: dQ is summed in a fixed order
};

/// Device pointers of one forward pass. Shapes and strides are the Problem's.
struct ForwardArgs {
  const void* Q = nullptr;
  const void* K = nullptr;
  const void* V = nullptr;
  void* O = nullptr;
  float* L = nullptr;
  void* workspace[4] = {};  ///< as WorkspaceList orders them
  Tiles tiles{};            ///< where Stage::candidates has several: which; 0 x 0: Stage::tiles
  bool one_block_per_head = false;  ///< stage 05: 04's grid in place of one block for each row tile
};

/// Device pointers of one backward pass. Shapes are those of the tensors that the gradients belong
/// to; dO has O's.
struct BackwardArgs {
  const void* Q = nullptr;
  const void* K = nullptr;
  const void* V = nullptr;
  const void* O = nullptr;
  const void* dO = nullptr;
  const float* L = nullptr;  ///< of the forward pass, natural logarithm, -inf in an empty row
  void* dQ = nullptr;
  void* dK = nullptr;
  void* dV = nullptr;
  void* workspace[4] = {};     ///< as WorkspaceList orders them
  bool deterministic = false;  ///< dQ is summed in a fixed order
  Tiles tiles{};               ///< where Stage::candidates has several: which; 0 x 0: Stage::tiles
};

/// An intermediate result that a stage keeps in global memory. It is allocated by the caller.
struct WorkspaceBuffer {
  const char* name;  ///< the paper's symbol: "S", "P", "O_acc", "m", "l"
  DType dtype;
  int64_t count;  ///< in elements
};

/// The intermediate results of a stage, in the order of ForwardArgs::workspace.
struct WorkspaceList {
  int size = 0;
  WorkspaceBuffer buffer[4] = {};
};

/// A CUDA stream; unused by the model.
using Stream = void*;

/// One stage for one target, as its kernel file registers it.
struct Stage {
  const char* id;       ///< "01", "02b"
  const char* name;     ///< "naive", "b_tensor_cores"
  const char* summary;  ///< the one idea, in one line
  Target target;
  const char* file;  ///< of the kernel, relative to the repository
  /// Compute capability (major * 10 + minor) that the stage needs, and whether it runs on that
  /// alone.
  int min_capability;
  bool capability_is_exact;
  /// The stage's choice of tiles.
  Tiles (*tiles)(const Problem&);
  /// All tiles that it is built for and that fit the device, each once; null where there is no
  /// other than `tiles`.
  TileList (*candidates)(const Problem&);
  WorkspaceList (*workspaces)(const Problem&);
  /// Computes O (and L, where `lse` is null). Launches on `stream` and does not wait. Null for a
  /// stage of the backward pass.
  void (*forward)(const Problem&, const ForwardArgs&, Stream);
  /// For stages whose forward leaves L to the small common kernel: computes L from the workspaces.
  void (*lse)(const Problem&, const ForwardArgs&, Stream);
  /// Computes dQ, dK and dV from O, L and dO. Launches on `stream` and does not wait. Null for a
  /// stage of the forward pass; a stage has one of the two.
  void (*backward)(const Problem&, const GradientStrides&, const BackwardArgs&, Stream);

  Stage* next;  ///< the registry's list; set on registration
};

/// Whether the stage is of the backward pass.
constexpr bool is_backward(const Stage& stage) {
  return stage.backward != nullptr;
}

/// Adds a stage to the registry; for FLASHSTEPS_STAGE. Returns its argument.
Stage* register_stage(Stage* stage);

/// The first registered stage (then Stage::next), in no particular order; common/stage/registry.h
/// sorts.
Stage* first_registered_stage();

/// The width of the tile that head_dim is zero-filled to: 64 or 128.
constexpr int tile_width(int head_dim) {
  return head_dim <= 64 ? 64 : 128;
}

}  // namespace flashsteps
