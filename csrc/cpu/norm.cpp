#include <stdlib.h>

#include "kernels.h"
#include "parallel.h"

namespace {

// Elements that one thread sums without a break. The number is fixed, so that the order of the sum is fixed.
constexpr int64_t kChunk = 1 << 15;

}  // namespace

int ze_squared_norm(const void* x, int dtype, int64_t n, double* result, int num_threads) {
  if (dtype < ZE_F32 || dtype > ZE_F16) return ZE_BAD_DTYPE;
  const auto squared_norm = ze::kernels().squared_norm[dtype];
  const int64_t chunks = (n + kChunk - 1) / kChunk;
  double* partial = (double*)malloc(size_t(chunks + 1) * sizeof(double));
  if (!partial) return ZE_NO_MEMORY;
  ze::parallel_for(n, kChunk, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += kChunk)
      partial[i / kChunk] = squared_norm(x, i, i + kChunk < end ? i + kChunk : end);
  });
  *result = 0;
  for (int64_t i = 0; i < chunks; ++i) *result += partial[i];
  free(partial);
  return ZE_OK;
}
