// The factors and random bits of an update, on which the kernels for CPU and GPU must agree to the last bit.
//
// The arithmetic is additions, multiplications, divisions and square roots in double, which every compiler and device
// rounds alike. A library's pow() is not rounded alike everywhere, so none is used.
#pragma once

#include <math.h>
#include <stdint.h>

#include "zeroengine.h"

// ZE_LANES: functions over the type V of csrc/rules.h, which is a vector on the CPU and a float on the GPU.
#if defined(__CUDACC__)
#define ZE_SHARED __host__ __device__ inline
#define ZE_LANES __device__ inline
#else
#define ZE_SHARED inline
#define ZE_LANES inline
#endif

namespace ze {

// The factors that an element needs, computed from ze_update_args. A rule uses those that its formula has.
struct UpdateFactors {
  float grad_scale;      // negative to maximize
  float decay;           // decoupled weight decay: 1 - lr * weight_decay; else weight_decay
  float first, second;   // Adam and Lion: 1 - beta1, 1 - beta2; momentum SGD: momentum, 1 - dampening
  float beta2;           // Adam's
  float inv_root;        // Adam: 1 / sqrt(1 - beta2^step)
  float eps;
  float step_size;       // the learning rate; Adam: lr / (1 - beta1^step); Adagrad: lr / (1 + (step - 1) * lr_decay)
  float average_weight;  // of the new parameter in the moving average: 1 - decay
  int32_t nesterov;
};

// The input of the hash that gives the random bits: a counter, which is `first` at element 0, and a key.
struct Random {
  uint32_t first, key;
};

constexpr int kRules = ZE_ADAGRAD + 1;

// The namespace is anonymous, so that the linker does not merge copies of a function: a merged copy could carry one
// instruction set's code to a CPU that lacks it.
namespace {

// The number of moments of a rule.
ZE_SHARED int num_moments(int rule) {
  if (rule == ZE_AVERAGE_ONLY || rule == ZE_SGD) return 0;
  return rule == ZE_ADAM || rule == ZE_ADAMW ? 2 : 1;
}

// Whether the kernels know the dtypes of the arrays that there are.
inline bool has_known_dtypes(const ze_update_arrays& a) {
  const auto is_float = [](int dtype) { return dtype >= ZE_F32 && dtype <= ZE_F16; };
  if (!is_float(a.param_dtype) || (a.grad && !is_float(a.grad_dtype))) return false;
  const bool narrow = a.low_precision_dtype == ZE_BF16 || a.low_precision_dtype == ZE_F16;
  if (a.low_precision_param && !(narrow && a.param_dtype == ZE_F32)) return false;
  if (a.average && a.average_dtype != ZE_F32 && a.average_dtype != ZE_BF16) return false;
  return !a.moments[0] || a.moments_dtype == ZE_F32 || a.moments_dtype == ZE_BF16 || a.moments_dtype == ZE_8BIT;
}

ZE_SHARED double power(double x, int64_t n) {
  double result = 1;
  for (; n > 0; n >>= 1, x *= x)
    if (n & 1) result *= x;
  return result;
}

ZE_SHARED UpdateFactors fold(const ze_update_args& a) {
  UpdateFactors k = {};
  k.grad_scale = float(a.maximize ? -a.grad_scale : a.grad_scale);
  k.decay = float(a.rule == ZE_ADAMW || a.rule == ZE_LION ? 1 - a.lr * a.weight_decay : a.weight_decay);
  k.first = float(1 - a.beta1);
  k.second = float(1 - a.beta2);
  k.beta2 = float(a.beta2);
  k.eps = float(a.eps);
  k.step_size = float(a.lr);
  k.average_weight = float(a.average_weight);
  k.nesterov = a.nesterov;
  if (a.rule == ZE_ADAM || a.rule == ZE_ADAMW) {
    k.inv_root = float(1 / sqrt(1 - power(a.beta2, a.step)));
    k.step_size = float(a.lr / (1 - power(a.beta1, a.step)));
  } else if (a.rule == ZE_MOMENTUM_SGD) {
    k.first = float(a.beta1);
    // The first momentum is the gradient itself, as in torch.
    if (a.step == 1) k.second = 1;
  } else if (a.rule == ZE_ADAGRAD) {
    k.step_size = float(a.lr / (1 + double(a.step - 1) * a.beta1));
  }
  return k;
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

// Returns the hash input of a second word for each element: the moments use the first.
ZE_SHARED Random second_random(const Random& r) { return {r.first, r.key ^ 0x9e3779b9}; }

}  // namespace
}  // namespace ze
