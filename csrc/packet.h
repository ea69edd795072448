// The layout of quantized packets, and the scale of a block: see ze_quantize. The kernels of CPU and GPU share it.
#pragma once

#include "zeroengine.h"

#if defined(__CUDACC__)
#define ZE_BOTH __host__ __device__
#else
#define ZE_BOTH
#endif

namespace ze {

constexpr int64_t kQuantizedBlock = ZE_QUANTIZED_BLOCK;
constexpr uint32_t kInfinityBits = 0x7f800000;
// Adding 1.5 * 2^23 rounds a small float to an integer, ties to even, which is then the low bits of the sum.
constexpr float kRounder = 12582912.0f;

namespace {

ZE_BOTH inline int64_t round_up_16(int64_t bytes) { return (bytes + 15) / 16 * 16; }

// Bytes of the scales, with the zeros behind them: where the integers begin.
ZE_BOTH inline int64_t scales_bytes(int64_t n) {
  return round_up_16((n + kQuantizedBlock - 1) / kQuantizedBlock * int64_t(sizeof(float)));
}

ZE_BOTH inline int64_t codes_bytes(int64_t n, int bits) { return bits == 8 ? n : (n + 1) / 2; }

ZE_BOTH inline int64_t packet_bytes(int64_t n, int bits) { return scales_bytes(n) + round_up_16(codes_bytes(n, bits)); }

// Returns the scale of a block whose largest magnitude has these bits.
ZE_BOTH inline float packet_scale(uint32_t magnitude, int bits) {
  union {
    uint32_t u;
    float f;
  } largest, smallest, nan;
  largest.u = magnitude;
  smallest.u = 0x00800000;  // 2^-126: a smaller scale would be rounded too coarsely itself
  nan.u = 0x7fc00000;
  if (magnitude >= kInfinityBits) return nan.f;
  const float scale = largest.f / (bits == 8 ? 127.0f : 7.0f);
  return scale > smallest.f ? scale : smallest.f;
}

}  // namespace
}  // namespace ze
