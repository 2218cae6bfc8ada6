/// \file
/// What the judge of a lab and the program that runs a submission say to each other, over two
/// pipes. Both are built from this file on one machine, so that structs travel as they lie in
/// memory.
#pragma once

#include <cstdint>

#include "common/attention/problem.h"
#include "common/stage/stage.h"

namespace flashsteps::course {

/// The file descriptor from which the runner reads its request.
inline constexpr int kRequestPipe = 3;
/// And the one to which it writes its response.
inline constexpr int kResponsePipe = 4;

/// One run of the submission's stage. The bits of Q, K and V follow, each as many bytes as its
/// layout spans.
struct Request {
  Problem problem;
  char stage[8] = {};        ///< the id that the submission must register: "06", "02b"
  uint64_t seed = 1;         ///< of the model: which thread goes next, when copies land
  int64_t memory_bytes = 0;  ///< that the stage's buffers may take on the device
};

/// How it went.
enum class Outcome : uint32_t {
  ran,      ///< O, L and the ledger are there
  fault,    ///< the model stopped the kernel
  missing,  ///< a part that the lab leaves to the student was reached
  refused,  ///< not the stage that was asked for, or a launch that CUDA would refuse
};

/// The runner's answer. `text_bytes` of text follow (the fault, or the ledgers as JSON), then,
/// where it ran, `o_bytes` of O and `l_bytes` of L.
struct Response {
  Outcome outcome = Outcome::refused;
  uint32_t text_bytes = 0;
  uint64_t o_bytes = 0;
  uint64_t l_bytes = 0;
  Tiles tiles{};  ///< that it ran with
  double seconds = 0;
};

}  // namespace flashsteps::course
