/// \file
/// A small problem and a stage that is none, for the tests of the timings.
#pragma once

#include "common/attention/layout.h"
#include "common/attention/problem.h"
#include "common/stage/stage.h"

namespace flashsteps {

inline Problem small_problem() {
  Problem p;
  p.batch = 1;
  p.heads = p.kv_heads = 2;
  p.seqlen_q = p.seqlen_k = 128;
  p.head_dim = 64;
  p.scale = 0.125f;
  p.dtype = DType::fp16;
  set_packed_strides(p);
  return p;
}

inline Stage fake_stage(void (*forward)(const Problem&, const ForwardArgs&, Stream)) {
  Stage stage{};
  stage.id = "00";
  stage.name = "fake";
  stage.target = Target::cuda;
  stage.workspaces = [](const Problem&) { return WorkspaceList{}; };
  stage.tiles = [](const Problem&) { return Tiles{}; };
  stage.forward = forward;
  return stage;
}

inline Stage fake_backward_stage(void (*backward)(const Problem&, const GradientStrides&,
                                                  const BackwardArgs&, Stream)) {
  Stage stage = fake_stage(nullptr);
  stage.backward = backward;
  return stage;
}

}  // namespace flashsteps
