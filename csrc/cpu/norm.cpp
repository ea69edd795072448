#include <stdlib.h>

#include "kernels.h"
#include "parallel.h"

namespace {

// Elements that one thread sums without a break. The number is fixed, so that the order of the sum is fixed.
constexpr int64_t kChunk = 1 << 15;

int64_t chunks_of(const ze_array& array) { return (array.numel + kChunk - 1) / kChunk; }

// Takes memory for a number per chunk.
double squared_norm(const ze_array& array, double* partial, int num_threads) {
  const auto of_chunk = ze::kernels().squared_norm[array.dtype];
  ze::parallel_for(array.numel, kChunk, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += kChunk)
      partial[i / kChunk] = of_chunk(array.data, i, i + kChunk < end ? i + kChunk : end);
  });
  double sum = 0;
  for (int64_t i = 0; i < chunks_of(array); ++i) sum += partial[i];
  return sum;
}

}  // namespace

int ze_squared_norm(const ze_array* arrays, int64_t num_arrays, double* result, int num_threads) {
  int64_t most = 0;
  for (int64_t i = 0; i < num_arrays; ++i) {
    if (arrays[i].dtype < ZE_F32 || arrays[i].dtype > ZE_F16) return ZE_BAD_DTYPE;
    if (chunks_of(arrays[i]) > most) most = chunks_of(arrays[i]);
  }
  double* partial = (double*)malloc(size_t(most + 1) * sizeof(double));
  if (!partial) return ZE_NO_MEMORY;
  *result = 0;
  for (int64_t i = 0; i < num_arrays; ++i) *result += squared_norm(arrays[i], partial, num_threads);
  free(partial);
  return ZE_OK;
}
