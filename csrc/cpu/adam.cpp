#include <math.h>

#include "kernels.h"
#include "parallel.h"

namespace {

// A copy larger than this leaves the caches before anyone reads it: write it past them.
constexpr int64_t kStreamBytes = 4 << 20;

ze::AdamFactors fold(const ze_adam_args& a) {
  const double correction1 = 1 - pow(a.beta1, double(a.step)), correction2 = 1 - pow(a.beta2, double(a.step));
  return {
      float(a.maximize ? -a.grad_scale : a.grad_scale),
      float(a.decoupled ? 1 - a.lr * a.weight_decay : a.weight_decay),
      float(1 - a.beta1),
      float(a.beta2),
      float(1 - a.beta2),
      float(1 / sqrt(correction2)),
      float(a.eps),
      float(a.lr / correction1),
  };
}

// The finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014, as tuned by Stafford).
uint64_t mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

// For elements whose indices, 64 bits wide, have this upper half.
ze::Random random_of(const ze_adam_args& a, uint64_t upper) {
  const uint64_t keys = mix(mix(a.seed + 0x9e3779b97f4a7c15) + upper);
  return {uint32_t(keys) + uint32_t(a.offset), uint32_t(keys >> 32)};
}

bool known(int dtype) { return dtype >= ZE_F32 && dtype <= ZE_F16; }

}  // namespace

int ze_adam(float* param, const void* grad, int grad_dtype, void* exp_avg, void* exp_avg_sq, int moments_dtype,
            void* copy, int copy_dtype, int64_t n, const ze_adam_args* args, int num_threads) {
  if (!copy) copy_dtype = ZE_F32;
  if (!known(grad_dtype) || !known(copy_dtype) || (copy && copy_dtype == ZE_F32)) return ZE_BAD_DTYPE;
  if (moments_dtype != ZE_F32 && moments_dtype != ZE_BF16) return ZE_BAD_DTYPE;
  const ze::AdamFactors factors = fold(*args);
  const ze::AdamArrays arrays = {param, grad, exp_avg, exp_avg_sq, copy};
  const auto adam = ze::kernels().adam[moments_dtype][grad_dtype][copy_dtype][args->decoupled != 0];
  const bool stream = n * 2 > kStreamBytes;
  ze::parallel_for(n, ze::kBlock, num_threads, [&](int64_t begin, int64_t end) {
    while (begin < end) {  // as far as the upper half of the index stays
      const uint64_t index = uint64_t(args->offset) + uint64_t(begin);
      const int64_t same = (int64_t(1) << 32) - uint32_t(index), stop = same < end - begin ? begin + same : end;
      adam(arrays, begin, stop, factors, random_of(*args, index >> 32), stream);
      begin = stop;
    }
  });
  return ZE_OK;
}

void ze_stream(float* a, float* b, float* c, const void* g, int g_dtype, void* copy, int64_t n, int num_threads) {
  const ze::StreamArrays arrays = {a, b, c, g, copy};
  const auto stream = ze::kernels().stream[g_dtype][copy != nullptr];
  ze::parallel_for(n, ze::kBlock, num_threads, [&](int64_t begin, int64_t end) { stream(arrays, begin, end); });
}
