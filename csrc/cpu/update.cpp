#include "kernels.h"
#include "parallel.h"

namespace {

// A low-precision parameter of more bytes than this leaves the caches before it is read, so its stores bypass them.
constexpr int64_t kBypassCacheBytes = 4 << 20;

bool is_float(int dtype) { return dtype >= ZE_F32 && dtype <= ZE_F16; }

bool fit(const ze_update_arrays& a, int rule) {
  if (rule < 0 || rule >= ze::kRules || !is_float(a.param_dtype)) return false;
  if (rule != ZE_AVERAGE_ONLY && !is_float(a.grad_dtype)) return false;
  if (a.low_precision_param && (a.param_dtype != ZE_F32 || !is_float(a.low_precision_dtype) || !a.low_precision_dtype))
    return false;
  if (a.average && a.average_dtype != ZE_F32 && a.average_dtype != ZE_BF16) return false;
  return !a.moments[0] || a.moments_dtype == ZE_F32 || a.moments_dtype == ZE_BF16 || a.moments_dtype == ZE_8BIT;
}

}  // namespace

int ze_update(const ze_update_arrays* arrays, int64_t n, const ze_update_args* args, int num_threads) {
  if (!fit(*arrays, args->rule)) return ZE_BAD_DTYPE;
  const ze::UpdateFactors factors = ze::fold(*args);
  const uint64_t seed = ze::mix_seed(args->seed);
  const ze_update_arrays& a = *arrays;
  const auto update = ze::kernels().update[args->rule][a.moments[0] ? a.moments_dtype : ZE_F32];
  const bool bypass_cache = n * 2 > kBypassCacheBytes && uintptr_t(a.low_precision_param) % 64 == 0;
  ze::parallel_for(n, ze::kMomentBlock, num_threads, [&](int64_t begin, int64_t end) {
    // Each round goes as far as the upper half of the index stays the same.
    while (begin < end) {
      const uint64_t index = uint64_t(args->offset) + uint64_t(begin);
      const int64_t same = (int64_t(1) << 32) - uint32_t(index), stop = same < end - begin ? begin + same : end;
      update(a, begin, stop, factors, ze::random_of(seed, index >> 32, uint32_t(args->offset)), bypass_cache);
      begin = stop;
    }
  });
  return ZE_OK;
}

void ze_decode_moment(const void* codes, const float* scales, float* values, int64_t n, int is_signed) {
  ze::kernels().decode_moment[is_signed != 0](codes, scales, values, n);
}

void ze_encode_moment(const float* values, void* codes, float* scales, int64_t n, int is_signed) {
  ze::kernels().encode_moment[is_signed != 0](values, codes, scales, n);
}

void ze_stream(float* a, float* b, float* c, const void* g, int g_dtype, void* low_precision_param, int64_t n,
               int num_threads) {
  const ze::StreamArrays arrays = {a, b, c, g, low_precision_param};
  const auto stream = ze::kernels().stream[g_dtype][low_precision_param != nullptr];
  ze::parallel_for(n, ze::kBlock, num_threads, [&](int64_t begin, int64_t end) { stream(arrays, begin, end); });
}
