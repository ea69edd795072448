// Conversions of one element. Every instruction set includes this file, so everything is static: a function that the
// linker merges could carry one set's instructions to a CPU that lacks them.
#pragma once

#include <string.h>

#include "kernels.h"

namespace ze {
namespace {

inline uint32_t bits_of(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

inline float float_of(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return float_of(uint32_t(x.bits) << 16); }

inline float to_float(fp16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, exponent = x.bits >> 10 & 0x1f, mantissa = x.bits & 0x3ff;
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24
    const float magnitude = float(mantissa) * 5.9604644775390625e-8f;
    return float_of(sign | bits_of(magnitude));
  }
  if (exponent == 31) return float_of(sign | 0x7f800000 | (mantissa ? 0x400000 : 0) | mantissa << 13);
  return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
}

inline void from_float(float x, float* y) { *y = x; }

inline void from_float(float x, bf16* y) {
  const uint32_t u = bits_of(x);
  y->bits = x != x ? 0x7fc0 : uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

inline void from_float(float x, fp16* y) {
  const uint32_t u = bits_of(x), sign = u >> 16 & 0x8000, magnitude = u & 0x7fffffff;
  uint32_t h;
  if (magnitude > 0x7f800000) {
    h = 0x7e00 | (magnitude >> 13 & 0x3ff);
  } else if (magnitude >= 0x477ff000) {  // rounds past 65504
    h = 0x7c00;
  } else if (magnitude < 0x38800000) {   // subnormal: adding 0.5 leaves the rounded multiple of 2^-24
    h = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000;
  } else {
    h = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  }
  y->bits = uint16_t(sign | h);
}

}  // namespace
}  // namespace ze
