// Adam's arrays, factors and random bits, on which the kernels for CPU and GPU must agree to the last bit.
//
// The arithmetic is additions, multiplications, divisions and square roots in double, which every compiler and device
// rounds alike. A library's pow() is not rounded alike everywhere, so none is used.
#pragma once

#include <math.h>
#include <stdint.h>

#include "zeroengine.h"

#if defined(__CUDACC__)
#define ZE_SHARED __host__ __device__ inline
#else
#define ZE_SHARED inline
#endif

namespace ze {

// The arrays that a step reads and writes.
struct AdamArrays {
  float* param;
  const void* grad;
  void* exp_avg;
  void* exp_avg_sq;
  void* low_precision_param;
  int32_t reload_written;  // see ze_adam_args
};

// The factors that an element needs, computed from ze_adam_args.
struct AdamFactors {
  float grad_scale;  // negative to maximize
  float decay;       // decoupled: 1 - lr * weight_decay; else weight_decay
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float inv_root;    // 1 / sqrt(1 - beta2^step)
  float eps;
  float step_size;   // lr / (1 - beta1^step)
};

// The input of the hash that gives the random bits: a counter, which is `first` at element 0, and a key.
struct Random {
  uint32_t first, key;
};

// The namespace is anonymous, so that the linker does not merge copies of a function: a merged copy could carry one
// instruction set's code to a CPU that lacks it.
namespace {

ZE_SHARED double power(double x, int64_t n) {
  double result = 1;
  for (; n > 0; n >>= 1, x *= x)
    if (n & 1) result *= x;
  return result;
}

ZE_SHARED AdamFactors fold(const ze_adam_args& a) {
  const double correction1 = 1 - power(a.beta1, a.step), correction2 = 1 - power(a.beta2, a.step);
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
ZE_SHARED uint64_t mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
  x = (x ^ x >> 27) * 0x94d049bb133111eb;
  return x ^ x >> 31;
}

ZE_SHARED uint64_t mix_seed(uint64_t seed) { return mix(seed + 0x9e3779b97f4a7c15); }

// Returns the hash input of the elements whose 64-bit indices have this upper half; element 0 has the index `lower`.
ZE_SHARED Random random_of(uint64_t mixed_seed, uint64_t upper, uint32_t lower) {
  const uint64_t keys = mix(mixed_seed + upper);
  return {uint32_t(keys) + lower, uint32_t(keys >> 32)};
}

}  // namespace
}  // namespace ze
