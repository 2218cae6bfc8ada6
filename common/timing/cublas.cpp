// Declares by hand the few functions of cuBLAS that it calls, so that its headers are not needed to
// build.
#include "common/timing/cublas.h"

#ifdef FLASHSTEPS_HAS_CUDA

#include <dlfcn.h>
#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <type_traits>
#include <vector>

#include "common/stage/device.h"

namespace flashsteps {

namespace {

// Values from the cuBLAS documentation (cublasOperation_t, cudaDataType_t, cublasComputeType_t,
// cublasGemmAlgo_t).
constexpr int kOpN = 0;
constexpr int kOpT = 1;
constexpr int kReal16BF = 14;
constexpr int kCompute32F = 68;
constexpr int kGemmDefault = -1;

const char* const kVersions[] = {".so.13", ".so.12", ".so"};

/// Opens one file. libcublas needs libcublasLt, which may lie beside it outside the loader's path.
void* open_library(const std::filesystem::path& file) {
  if (void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
  if (!file.has_parent_path()) return nullptr;
  std::string neighbour = file.filename().string();
  const size_t at = neighbour.find("libcublas.");
  if (at != 0) return nullptr;
  neighbour.insert(std::string("libcublas").size(), "Lt");
  // Stays open: libcublas finds it by its name from now on.
  if (!dlopen((file.parent_path() / neighbour).c_str(), RTLD_NOW | RTLD_GLOBAL)) return nullptr;
  return dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
}

std::vector<std::filesystem::path> candidates(const char* named) {
  std::vector<std::filesystem::path> files;
  auto add_directory = [&](const std::filesystem::path& directory) {
    for (const char* version : kVersions)
      files.push_back(directory / (std::string("libcublas") + version));
  };
  if (named) {
    const std::filesystem::path path = named;
    std::error_code ignored;
    if (!std::filesystem::is_directory(path, ignored)) return {path};
    add_directory(path);
    add_directory(path / "nvidia/cu13/lib");
    add_directory(path / "nvidia/cublas/lib");
    return files;
  }
  add_directory({});
  for (const char* variable : {"CUDA_HOME", "CUDA_PATH"}) {
    if (const char* home = std::getenv(variable))
      add_directory(std::filesystem::path(home) / "lib64");
  }
  add_directory("/usr/local/cuda/lib64");
  return files;
}

}  // namespace

struct Cublas::Functions {
  void* library = nullptr;
  void* handle = nullptr;
  int (*create)(void**) = nullptr;
  int (*destroy)(void*) = nullptr;
  int (*version)(void*, int*) = nullptr;
  int (*gemm)(void* handle, int op_a, int op_b, int m, int n, int k, const void* alpha,
              const void* A, int a_type, int lda, const void* B, int b_type, int ldb,
              const void* beta, void* C, int c_type, int ldc, int compute_type,
              int algorithm) = nullptr;

  ~Functions() {
    if (handle) destroy(handle);
    if (library) dlclose(library);
  }
  bool find_all() {
    auto find = [&](auto& function, const char* name) {
      function =
          reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      return function != nullptr;
    };
    return find(create, "cublasCreate_v2") && find(destroy, "cublasDestroy_v2") &&
           find(version, "cublasGetVersion_v2") && find(gemm, "cublasGemmEx");
  }
};

Cublas::Cublas(std::unique_ptr<Functions> functions) : functions_(std::move(functions)) {}
Cublas::~Cublas() = default;

std::unique_ptr<Cublas> Cublas::load(std::string& source) {
  const char* named = std::getenv("FLASHSTEPS_CUBLAS");
  if (named && !*named) named = nullptr;
  auto functions = std::make_unique<Functions>();
  std::string file, last_error;
  for (const std::filesystem::path& candidate : candidates(named)) {
    functions->library = open_library(candidate);
    if (functions->library) {
      file = candidate.string();
      break;
    }
    const char* error = dlerror();
    if (error && named) last_error = fmt::format(": {}", error);
  }
  if (!functions->library) {
    source = named
                 ? fmt::format("no cuBLAS at FLASHSTEPS_CUBLAS={}{}", named, last_error)
                 : "cuBLAS was not found; FLASHSTEPS_CUBLAS may name the library or its directory";
    return nullptr;
  }
  if (!functions->find_all()) {
    source = fmt::format("{} lacks the functions of cuBLAS", file);
    return nullptr;
  }
  if (const int status = functions->create(&functions->handle); status != 0) {
    functions->handle = nullptr;
    source = fmt::format("{} does not start (cuBLAS status {})", file, status);
    return nullptr;
  }
  int version = 0;
  functions->version(functions->handle, &version);
  source = fmt::format("cuBLAS {}.{}.{} ({})", version / 10000, version / 100 % 100, version % 100,
                       file);
  return std::unique_ptr<Cublas>(new Cublas(std::move(functions)));
}

void Cublas::product_bf16(int n, const void* A, const void* B, void* C) {
  const float one = 1, zero = 0;
  const int status =
      functions_->gemm(functions_->handle, kOpT, kOpN, n, n, n, &one, A, kReal16BF, n, B, kReal16BF,
                       n, &zero, C, kReal16BF, n, kCompute32F, kGemmDefault);
  if (status != 0) throw DeviceError(fmt::format("the cuBLAS product failed (status {})", status));
}

}  // namespace flashsteps

#endif
