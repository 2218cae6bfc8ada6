/// \file
/// What the judge of a lab and the program that runs a submission say to each other, over two
/// pipes. Both are built from this file on one machine, so that structs travel as they lie in
/// memory.
#pragma once

#include <array>
#include <cstdint>

#include "common/attention/layout.h"
#include "common/attention/problem.h"
#include "common/stage/stage.h"

namespace flashsteps::course {

/// The file descriptor from which the runner reads its request.
inline constexpr int kRequestPipe = 3;
/// And the one to which it writes its response.
inline constexpr int kResponsePipe = 4;

/// One run of the submission's stage. The bits of Q, K and V follow, each as many bytes as its
/// layout spans; of a backward pass then those of O, dO and L, too, of a forward pass that the
/// judge made. dO and the gradients have the strides of the tensors that they belong to.
struct Request {
  Problem problem;
  char stage[8] = {};          ///< the id that the submission must register: "06", "02b"
  bool backward = false;       ///< the pass that it must be of
  bool deterministic = false;  ///< of the backward pass: dQ is to be summed in a fixed order
  uint64_t seed = 1;           ///< of the model: which thread goes next, when copies land
  int64_t memory_bytes = 0;    ///< that the stage's buffers may take on the device
};

/// How many bytes the tensors have that a run gives back: O and L, or dQ, dK and dV.
inline std::array<uint64_t, 3> result_bytes(const Problem& p, bool backward) {
  if (!backward) return {uint64_t(layout_o(p).extent()) * 2, uint64_t(p.rows()) * 4, 0};
  const GradientStrides strides = strides_of_tensors(p);
  return {uint64_t(layout_dq(p, strides).extent()) * 2,
          uint64_t(layout_dk(p, strides).extent()) * 2,
          uint64_t(layout_dv(p, strides).extent()) * 2};
}

/// How it went.
enum class Outcome : uint32_t {
  ran,      ///< the results and the ledger are there
  fault,    ///< the model stopped the kernel
  missing,  ///< a part that the lab leaves to the student was reached
  refused,  ///< not the stage that was asked for, or a launch that CUDA would refuse
};

/// The runner's answer. `text_bytes` of text follow (the fault, or the ledgers as JSON), then,
/// where it ran, the tensors of result_bytes().
struct Response {
  Outcome outcome = Outcome::refused;
  uint32_t text_bytes = 0;
  std::array<uint64_t, 3> tensor_bytes{};
  Tiles tiles{};  ///< that it ran with
  double seconds = 0;
};

}  // namespace flashsteps::course
