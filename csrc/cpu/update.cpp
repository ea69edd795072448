#include "kernels.h"
#include "parallel.h"

namespace {

// A low-precision parameter of more bytes than this leaves the caches before it is read, so its stores bypass them.
constexpr int64_t kBypassCacheBytes = 4 << 20;
constexpr int64_t kCacheLine = 64;

}  // namespace

int ze_update(const ze_update_arrays* arrays, int64_t n, const ze_update_args* args, int num_threads) {
  if (args->rule < 0 || args->rule >= ze::kRules || !ze::has_known_dtypes(*arrays)) return ZE_BAD_DTYPE;
  const ze::UpdateFactors factors = ze::fold(*args);
  const uint64_t seed = ze::mix_seed(args->seed);
  ze_update_arrays a = *arrays;
  if (!a.low_precision_param) a.reload_written = 0;
  const bool has_moments = ze::num_moments(args->rule) && a.moments[0];
  const auto update = ze::kernels().update[args->rule][has_moments ? a.moments_dtype : ZE_F32];
  const bool may_bypass_cache = a.low_precision_param && n * 2 > kBypassCacheBytes;
  ze::parallel_for(n, ze::kMomentBlock, num_threads, [&](int64_t begin, int64_t end) {
    // Each round goes as far as the upper half of the index stays the same, and the first one perhaps only to where
    // stores may bypass the caches. Blocks of moments are not divided.
    while (begin < end) {
      const uint64_t index = uint64_t(args->offset) + uint64_t(begin);
      const int64_t same = (int64_t(1) << 32) - uint32_t(index);
      const int64_t past_line = int64_t((uintptr_t(a.low_precision_param) + uintptr_t(begin) * 2) % kCacheLine);
      const bool divides = may_bypass_cache && past_line && !(has_moments && a.moments_dtype == ZE_8BIT);
      int64_t stop = same < end - begin ? begin + same : end;
      if (divides && stop - begin > (kCacheLine - past_line) / 2) stop = begin + (kCacheLine - past_line) / 2;
      update(a, begin, stop, factors, ze::random_of(seed, index >> 32, uint32_t(args->offset)),
             may_bypass_cache && !past_line);
      begin = stop;
    }
  });
  return ZE_OK;
}

int ze_update_parts(const ze_update_part* parts, int64_t num_parts, const ze_update_args* groups, int64_t num_steps,
                    int num_threads) {
  for (const ze_update_part* part = parts; part < parts + num_parts; ++part) {
    ze_update_args args = groups[part->group];
    args.step = part->step + num_steps;
    args.seed = part->seed + uint64_t(args.step);
    args.offset = part->offset;
    if (const int result = ze_update(&part->arrays, part->n, &args, num_threads)) return result;
  }
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
