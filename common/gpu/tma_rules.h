/// \file
/// What TMA can take, for both targets: a card's driver refuses the rest without a reason, so this
/// gives one. Includes no CUDA header.
#pragma once

#include <cstdint>
#include <string>

#include "common/attention/problem.h"

namespace flashsteps {

/// Which rule of TMA the 4-D tensor (batch, heads, rows, head_dim) of 16-bit elements in boxes of
/// (box_rows, box_cols) with the 128-byte swizzle breaks (CUDA driver API, cuTensorMapEncodeTiled),
/// in one line; empty where it breaks none.
std::string why_not_tma(const void* base, int head_dim, int rows, int heads, int batch,
                        const Strides& strides, int box_cols, int box_rows);

}  // namespace flashsteps
