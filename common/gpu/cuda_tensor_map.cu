// Tensor maps, made by the driver. Its function is found at run time, so that no program has to be
// linked with the driver's library: most are built, and some run, where there is none.
#include <string>

#include "common/gpu/cuda_hopper.h"
#include "common/gpu/cuda_support.h"
#include "common/gpu/tma_rules.h"
#include "common/stage/device.h"

namespace flashsteps::detail {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

EncodeTiled find_encode_tiled() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                              12000, cudaEnableDefault, &found);
#else
  const cudaError_t status =
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
  check_cuda(status, "asking the driver for tensor maps");
  if (found != cudaDriverEntryPointSuccess || !function) {
    throw DeviceError("TMA needs a driver for CUDA 12.0 or newer; this one makes no tensor maps");
  }
  return reinterpret_cast<EncodeTiled>(function);
}

}  // namespace

void encode_tensor_map(CUtensorMap& map, DType dtype, const void* base, int head_dim, int rows,
                       int heads, int batch, const Strides& strides, int box_cols, int box_rows) {
  const std::string broken =
      why_not_tma(base, head_dim, rows, heads, batch, strides, box_cols, box_rows);
  if (!broken.empty()) throw DeviceError(broken);
  static const EncodeTiled encode = find_encode_tiled();
  const cuuint64_t extents[4] = {cuuint64_t(head_dim), cuuint64_t(rows), cuuint64_t(heads),
                                 cuuint64_t(batch)};
  // A stride along a dimension of one entry is never used; the driver wants one all the same.
  const auto bytes = [](int entries, int64_t stride) {
    return entries == 1 ? cuuint64_t{16} : cuuint64_t(stride) * 2;
  };
  const cuuint64_t stride_bytes[3] = {bytes(rows, strides.row), bytes(heads, strides.head),
                                      bytes(batch, strides.batch)};
  const cuuint32_t box[4] = {cuuint32_t(box_cols), cuuint32_t(box_rows), 1, 1};
  const cuuint32_t step[4] = {1, 1, 1, 1};
  const CUresult status = encode(
      &map,
      dtype == DType::fp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
      const_cast<void*>(base), extents, stride_bytes, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw DeviceError("the driver made no tensor map (CUresult " + std::to_string(status) + ")");
  }
}

}  // namespace flashsteps::detail
