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

bool known(int dtype) { return dtype >= ZE_F32 && dtype <= ZE_F16; }

}  // namespace

int ze_adam(float* param, const void* grad, int grad_dtype, float* exp_avg, float* exp_avg_sq, void* copy,
            int copy_dtype, int64_t n, const ze_adam_args* args, int num_threads) {
  if (!copy) copy_dtype = ZE_F32;
  if (!known(grad_dtype) || !known(copy_dtype) || (copy && copy_dtype == ZE_F32)) return ZE_BAD_DTYPE;
  const ze::AdamFactors factors = fold(*args);
  const ze::AdamArrays arrays = {param, grad, exp_avg, exp_avg_sq, copy};
  const auto adam = ze::kernels().adam[grad_dtype][copy_dtype][args->decoupled != 0];
  const bool stream = n * 2 > kStreamBytes;
  ze::parallel_for(n, ze::kBlock, num_threads,
                   [&](int64_t begin, int64_t end) { adam(arrays, begin, end, factors, stream); });
  return ZE_OK;
}

void ze_stream(float* a, float* b, float* c, const void* g, int g_dtype, void* copy, int64_t n, int num_threads) {
  const ze::StreamArrays arrays = {a, b, c, g, copy};
  const auto stream = ze::kernels().stream[g_dtype][copy != nullptr];
  ze::parallel_for(n, ze::kBlock, num_threads, [&](int64_t begin, int64_t end) { stream(arrays, begin, end); });
}
