#include "kernels.h"
#include "parallel.h"

namespace {

// A low-precision parameter of more bytes than this leaves the caches before it is read, so its stores bypass them.
constexpr int64_t kBypassCacheBytes = 4 << 20;

bool known(int dtype) { return dtype >= ZE_F32 && dtype <= ZE_F16; }

}  // namespace

int ze_adam(float* param, const void* grad, int grad_dtype, void* exp_avg, void* exp_avg_sq, int moments_dtype,
            void* low_precision_param, int low_precision_dtype, int64_t n, const ze_adam_args* args, int num_threads) {
  if (!low_precision_param) low_precision_dtype = ZE_F32;
  if (!known(grad_dtype) || !known(low_precision_dtype)) return ZE_BAD_DTYPE;
  if (low_precision_param && low_precision_dtype == ZE_F32) return ZE_BAD_DTYPE;
  if (moments_dtype != ZE_F32 && moments_dtype != ZE_BF16) return ZE_BAD_DTYPE;
  const ze::AdamFactors factors = ze::fold(*args);
  const uint64_t seed = ze::mix_seed(args->seed);
  const ze::AdamArrays arrays = {param, grad, exp_avg, exp_avg_sq, low_precision_param, args->reload_written};
  const auto adam = ze::kernels().adam[moments_dtype][grad_dtype][low_precision_dtype][args->decoupled != 0];
  const bool bypass_cache = n * 2 > kBypassCacheBytes;
  ze::parallel_for(n, ze::kBlock, num_threads, [&](int64_t begin, int64_t end) {
    // Each round goes as far as the upper half of the index stays the same.
    while (begin < end) {
      const uint64_t index = uint64_t(args->offset) + uint64_t(begin);
      const int64_t same = (int64_t(1) << 32) - uint32_t(index), stop = same < end - begin ? begin + same : end;
      adam(arrays, begin, stop, factors, ze::random_of(seed, index >> 32, uint32_t(args->offset)), bypass_cache);
      begin = stop;
    }
  });
  return ZE_OK;
}

void ze_stream(float* a, float* b, float* c, const void* g, int g_dtype, void* low_precision_param, int64_t n,
               int num_threads) {
  const ze::StreamArrays arrays = {a, b, c, g, low_precision_param};
  const auto stream = ze::kernels().stream[g_dtype][low_precision_param != nullptr];
  ze::parallel_for(n, ze::kBlock, num_threads, [&](int64_t begin, int64_t end) { stream(arrays, begin, end); });
}
