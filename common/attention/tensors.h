/// \file
/// The tensors of one problem in host memory, as the bits that a device sees.
#pragma once

#include <cstdint>
#include <vector>

namespace flashsteps {

/// Q, K and V: 16-bit patterns of the problem's type, each as long as its TensorLayout's extent.
struct Inputs {
  std::vector<uint16_t> q, k, v;
};

/// O, as long as its TensorLayout's extent (gaps between rows as the device left them), and L,
/// packed.
struct Outputs {
  std::vector<uint16_t> o;
  std::vector<float> l;
};

/// What the backward pass reads beside Q, K and V: dO, as long as its TensorLayout's extent, and O
/// and L of a forward pass.
struct BackwardInputs {
  std::vector<uint16_t> d_o;
  Outputs forward;
};

/// dQ, dK and dV, each as long as its TensorLayout's extent.
struct Gradients {
  std::vector<uint16_t> dq, dk, dv;
};

}  // namespace flashsteps
