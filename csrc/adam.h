// Adam's arrays, factors and random bits: what the CPU's and the GPU's kernels must agree on to the last bit.
//
// Plain additions, multiplications, divisions and square roots in double, which every compiler and device rounds
// alike; a library's pow() they do not.
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

// What a step reads and writes.
struct AdamArrays {
  float* param;
  const void* grad;
  void* exp_avg;
  void* exp_avg_sq;
  void* low_precision_param;
  int32_t reload_written;  // see ze_adam_args
};

// ze_adam_args, folded into the factors that an element needs.
struct AdamFactors {
  float grad_scale;   // negative to maximize
  float decay;        // decoupled: 1 - lr * weight_decay; else weight_decay
  float rest1;        // 1 - beta1
  float beta2;
  float rest2;        // 1 - beta2
  float inv_root;     // 1 / sqrt(1 - beta2^step)
  float eps;
  float step_size;    // lr / (1 - beta1^step)
};

// What random bits are hashed from: a counter, which is `first` at element 0, and a key.
struct Random {
  uint32_t first, key;
};

namespace {  // a function shared by the linker could carry one instruction set's code to a CPU that lacks it

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

// For elements whose indices, 64 bits wide, have this upper half; element 0 is that of index `lower`.
ZE_SHARED Random random_of(uint64_t mixed_seed, uint64_t upper, uint32_t lower) {
  const uint64_t keys = mix(mixed_seed + upper);
  return {uint32_t(keys) + lower, uint32_t(keys >> 32)};
}

}  // namespace
}  // namespace ze
