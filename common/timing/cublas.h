/// \file
/// A large matrix product by cuBLAS, found at run time: the yardstick of the timings, and no
/// dependency of the build. Only in builds with CUDA.
#pragma once

#include <memory>
#include <string>

namespace flashsteps {

/// cuBLAS, loaded with dlopen.
class Cublas {
 public:
  /// Loads it from FLASHSTEPS_CUBLAS (the library, its directory, or a Python site-packages
  /// directory) if that is set; else from where the loader looks, CUDA_HOME, CUDA_PATH and
  /// /usr/local/cuda.
  ///
  /// \param[out] source "cuBLAS 13.0.2 (path)", or why there is none
  ///
  /// \return nullptr where there is none
  static std::unique_ptr<Cublas> load(std::string& source);
  ~Cublas();
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;

  /// Starts C = A^T B on the default stream: n x n, bf16 with fp32 accumulation, column-major
  /// device matrices.
  ///
  /// \throws DeviceError when cuBLAS refuses
  void product_bf16(int n, const void* A, const void* B, void* C);

 private:
  struct Functions;
  explicit Cublas(std::unique_ptr<Functions> functions);
  std::unique_ptr<Functions> functions_;
};

}  // namespace flashsteps
