#include "kernels.h"

int ze_accumulate(float* acc, const void* src, int src_dtype, int64_t n, int init) {
  if (src_dtype < ZE_F32 || src_dtype > ZE_F16) return ZE_BAD_DTYPE;
  ze::kernels().accumulate[src_dtype](acc, src, n, init != 0);
  return ZE_OK;
}

int ze_cast(const float* src, void* dst, int dst_dtype, int64_t n) {
  if (dst_dtype < ZE_F32 || dst_dtype > ZE_F16) return ZE_BAD_DTYPE;
  ze::kernels().cast[dst_dtype](src, dst, n);
  return ZE_OK;
}
