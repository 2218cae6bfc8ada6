// The problems that cover every convention of docs/notation.md, for the forward and for the
// backward pass.
#pragma once

#include "stage_suite.h"

namespace flashsteps {

struct Case {
  const char* name;
  Problem problem;
  InputKind kind = InputKind::normal;
};

inline Problem with_scale(Problem p, float scale) {
  p.scale = scale;
  return p;
}

inline Problem with_layout(Problem p, Layout layout) {
  set_packed_strides(p, layout);
  return p;
}

inline Problem with_gaps_everywhere(Problem p) {
  for (Strides* strides : {&p.q, &p.k, &p.v, &p.o}) *strides = with_gaps(*strides);
  return p;
}

// K and V in one layout, Q and O in the other.
inline Problem with_mixed_layouts(Problem p) {
  Problem other = p;
  set_packed_strides(other, Layout::bshd);
  p.k = other.k;
  p.v = other.v;
  return p;
}

inline const Case kCases[] = {
    {"whole_tiles_d64", problem_of(2, 2, 2, 128, 128, 64)},
    {"whole_tiles_d128", problem_of(1, 2, 2, 128, 128, 128)},
    {"ragged", problem_of(1, 3, 3, 67, 131, 64)},
    {"ragged_d128", problem_of(1, 2, 2, 131, 67, 128)},
    {"one_by_one", problem_of(1, 1, 1, 1, 1, 64)},
    {"one_query", problem_of(2, 2, 2, 1, 150, 64)},
    {"one_key", problem_of(2, 2, 2, 150, 1, 64)},
    {"shorter_than_a_tile_2", problem_of(1, 2, 2, 2, 2, 64)},
    {"shorter_than_a_tile_5", problem_of(1, 2, 2, 5, 5, 128)},
    {"shorter_than_a_tile_17", problem_of(1, 2, 2, 17, 17, 64)},
    {"shorter_than_a_tile_31", problem_of(1, 2, 2, 31, 31, 64)},
    {"no_queries", problem_of(1, 2, 2, 0, 40, 64)},
    {"no_keys", problem_of(2, 2, 2, 40, 0, 64)},
    {"no_keys_causal", problem_of(2, 2, 2, 40, 0, 64, true)},
    {"causal", problem_of(1, 2, 2, 150, 150, 64, true)},
    {"causal_d128", problem_of(1, 2, 2, 150, 150, 128, true)},
    {"causal_more_keys", problem_of(1, 2, 2, 70, 200, 64, true)},
    {"causal_more_queries", problem_of(1, 2, 2, 200, 70, 64, true)},
    {"causal_more_queries_d128", problem_of(1, 2, 2, 200, 70, 128, true)},
    {"causal_one_key", problem_of(1, 2, 2, 70, 1, 64, true)},
    // More row blocks than multiprocessors, an odd number for each head, some of which see no key.
    {"causal_many_row_blocks", problem_of(1, 4, 1, 260, 130, 64, true)},
    {"grouped_heads", problem_of(2, 4, 2, 70, 70, 64)},
    {"grouped_heads_causal", problem_of(2, 6, 2, 40, 90, 32, true)},
    {"one_kv_head", problem_of(2, 3, 1, 33, 65, 128)},
    {"d8", problem_of(1, 2, 2, 70, 70, 8)},
    {"d16", problem_of(1, 2, 2, 70, 70, 16)},
    {"d24_causal", problem_of(1, 2, 2, 70, 70, 24, true)},
    {"d40", problem_of(1, 2, 2, 70, 70, 40)},
    {"d56", problem_of(1, 2, 2, 70, 70, 56)},
    {"d72", problem_of(1, 2, 2, 70, 70, 72)},
    {"d80_causal", problem_of(1, 2, 2, 70, 70, 80, true)},
    {"d96", problem_of(1, 2, 2, 70, 70, 96)},
    {"d120", problem_of(1, 2, 2, 70, 70, 120)},
    {"scale_zero", with_scale(problem_of(1, 2, 2, 65, 65, 64), 0.f)},
    {"scale_zero_causal", with_scale(problem_of(1, 2, 2, 65, 65, 64, true), 0.f)},
    {"scale_negative", with_scale(problem_of(1, 2, 2, 65, 90, 64, true), -0.3f)},
    {"scale_large", with_scale(problem_of(1, 2, 2, 65, 90, 64), 2.f)},
    {"layout_bshd", with_layout(problem_of(2, 3, 3, 70, 90, 40), Layout::bshd)},
    {"layouts_mixed", with_mixed_layouts(problem_of(2, 4, 2, 70, 90, 64))},
    {"gaps", with_gaps_everywhere(problem_of(2, 2, 1, 70, 90, 72, true))},
    {"uniform", problem_of(1, 2, 2, 70, 129, 64), InputKind::uniform},
    {"uniform_causal", problem_of(1, 2, 2, 129, 129, 64, true), InputKind::uniform},
    {"moving_max", problem_of(1, 2, 2, 70, 260, 64), InputKind::moving_max},
    {"moving_max_d128", problem_of(1, 2, 2, 70, 260, 128, true), InputKind::moving_max},
    {"large_logits", problem_of(1, 2, 2, 70, 200, 64), InputKind::large_logits},
    {"outlier_channels", problem_of(1, 2, 2, 70, 200, 64, true), InputKind::outlier_channels},
};

}  // namespace flashsteps
