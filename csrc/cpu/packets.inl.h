// The kernels of quantized packets, written once over the type Vec, which the including file chooses.
#pragma once

namespace ze {
namespace {

// Quantizes one block of at most kQuantizedBlock elements. See ze_quantize.
template <class T>
void quantize(const void* data, int64_t n, int bits, float* scale, uint8_t* codes, bf16* error, float decay) {
  const T* src = (const T*)data;
  float x[kQuantizedBlock];
  const int64_t whole = n - n % Vec::kWidth;
  for (int64_t i = 0; i < whole; i += Vec::kWidth) {
    Vec v = Vec::load(src + i);
    if (error) v = v + Vec::load(error + i);
    v.store(x + i);
  }
  for (int64_t i = whole; i < n; ++i) x[i] = error ? to_float(src[i]) + to_float(error[i]) : to_float(src[i]);
  // Zeros fill up the last vector. They do not change the largest magnitude.
  const int64_t padded = (n + Vec::kWidth - 1) / Vec::kWidth * Vec::kWidth;
  for (int64_t i = n; i < padded; ++i) x[i] = 0;
  // As integers, magnitudes are in the order of their values, and NaN is above infinity.
  Bits largest = Bits::fill(0);
  for (int64_t i = 0; i < padded; i += Vec::kWidth) largest = larger(largest, Vec::load(x + i).bits() & Bits::fill(0x7fffffff));
  uint32_t lanes[Vec::kWidth], magnitude = 0;
  store_words(lanes, largest);
  for (uint32_t lane : lanes) magnitude = lane > magnitude ? lane : magnitude;
  *scale = packet_scale(magnitude, bits);
  uint8_t wide[kQuantizedBlock];
  if (magnitude >= kInfinityBits) {
    memset(wide, 0, size_t(padded));
    if (error) memset((void*)error, 0, size_t(n) * sizeof(bf16));
  } else {
    const Vec step = Vec::fill(*scale), rounder = Vec::fill(kRounder);
    for (int64_t i = 0; i < padded; i += Vec::kWidth)
      store_bytes(wide + i, (Vec::load(x + i) / step + rounder).bits());
    if (error) {
      const Vec kept = Vec::fill(decay), added = Vec::fill(1 - decay);
      bf16 last[Vec::kWidth] = {};
      for (int64_t i = 0; i < padded; i += Vec::kWidth) {
        const Vec lost = Vec::load(x + i) - load_bytes((const int8_t*)wide + i) * step;
        if (i < whole) {
          (kept * Vec::load(error + i) + added * lost).store(error + i);
        } else {
          memcpy((void*)last, error + i, size_t(n - i) * sizeof(bf16));
          (kept * Vec::load(last) + added * lost).store(last);
          memcpy((void*)(error + i), last, size_t(n - i) * sizeof(bf16));
        }
      }
    }
  }
  if (bits == 8) {
    memcpy(codes, wide, size_t(n));
    return;
  }
  if (n % 2) wide[n] = 0;
  for (int64_t i = 0; i < (n + 1) / 2; ++i) codes[i] = uint8_t((wide[2 * i] & 15) | wide[2 * i + 1] << 4);
}

// Writes the values of one block to `sum`, or adds them. `sum` is padded to kQuantizedBlock elements.
inline void dequantize(const uint8_t* codes, float scale, int64_t n, int bits, float* sum, bool init) {
  uint8_t wide[kQuantizedBlock];
  const int64_t padded = (n + Vec::kWidth - 1) / Vec::kWidth * Vec::kWidth;
  if (bits == 8) {
    memcpy(wide, codes, size_t(n));
  } else {
    // Flipping the sign bit of a half and subtracting it again extends the sign.
    for (int64_t i = 0; i < (n + 1) / 2; ++i) {
      wide[2 * i] = uint8_t(((codes[i] & 15) ^ 8) - 8);
      wide[2 * i + 1] = uint8_t(((codes[i] >> 4) ^ 8) - 8);
    }
  }
  for (int64_t i = n; i < padded; ++i) wide[i] = 0;
  const Vec step = Vec::fill(scale);
  for (int64_t i = 0; i < padded; i += Vec::kWidth) {
    const Vec value = load_bytes((const int8_t*)wide + i) * step;
    (init ? value : Vec::load(sum + i) + value).store(sum + i);
  }
}

}  // namespace
}  // namespace ze
