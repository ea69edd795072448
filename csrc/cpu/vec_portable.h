// Four floats in the compiler's own vectors: SSE2, NEON or plain code. See vec_avx2.h.
#pragma once

#include "scalar.h"

namespace ze {
namespace {

struct Bits {
  typedef uint32_t Lanes __attribute__((vector_size(16)));
  Lanes v;

  static Bits fill(uint32_t x) { return {Lanes{x, x, x, x}}; }
  static Bits count(uint32_t x) { return {Lanes{x, x + 1, x + 2, x + 3}}; }
};

inline Bits operator+(Bits a, Bits b) { return {a.v + b.v}; }
inline Bits operator-(Bits a, Bits b) { return {a.v - b.v}; }
inline Bits operator^(Bits a, Bits b) { return {a.v ^ b.v}; }
inline Bits operator&(Bits a, Bits b) { return {a.v & b.v}; }
inline Bits operator*(Bits a, Bits b) { return {a.v * b.v}; }
inline Bits operator>>(Bits a, int n) { return {a.v >> n}; }
inline void store_words(uint32_t* y, Bits a) { memcpy(y, &a.v, sizeof a.v); }
inline void store_bytes(uint8_t* y, Bits a) {
  for (int i = 0; i < 4; ++i) y[i] = uint8_t(a.v[i]);
}
inline Bits larger(Bits a, Bits b) {
  for (int i = 0; i < 4; ++i) a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}
inline bool any_above(Bits a, uint32_t x) {
  return a.v[0] > x || a.v[1] > x || a.v[2] > x || a.v[3] > x;
}

struct Vec {
  static constexpr int64_t kWidth = 4;
  typedef float Lanes __attribute__((vector_size(16)));
  Lanes v;

  static Vec fill(float x) { return {Lanes{x, x, x, x}}; }
  template <class T>
  static Vec load(const T* x) { return {Lanes{to_float(x[0]), to_float(x[1]), to_float(x[2]), to_float(x[3])}}; }
  static Vec pick(const float (&table)[8], Bits i) {
    return {Lanes{table[i.v[0] & 7], table[i.v[1] & 7], table[i.v[2] & 7], table[i.v[3] & 7]}};
  }
  static Vec of_bits(Bits x) { return {(Lanes)x.v}; }
  static Vec of_numbers(Bits x) { return {Lanes{float(x.v[0]), float(x.v[1]), float(x.v[2]), float(x.v[3])}}; }
  Bits bits() const { return {(Bits::Lanes)v}; }
  Bits truncated() const { return {Bits::Lanes{uint32_t(v[0]), uint32_t(v[1]), uint32_t(v[2]), uint32_t(v[3])}}; }
  Vec rounded(const fp16*) const {
    Vec result;
    for (int i = 0; i < kWidth; ++i) {
      fp16 y;
      from_float(v[i], &y);
      result.v[i] = to_float(y);
    }
    return result;
  }
  template <class T>
  void store(T* y) const {
    for (int i = 0; i < kWidth; ++i) from_float(v[i], y + i);
  }
  template <class T>
  void store_bypassing_cache(T* y) const { store(y); }
  void store(bf16* y, Bits random) const {
    const Bits::Lanes sum = (Bits::Lanes)v + random.v;
    for (int i = 0; i < kWidth; ++i) y[i].bits = uint16_t(sum[i] >> 16);
  }
};

inline Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
inline Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
inline Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
inline Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
inline Bits operator<(Vec a, Vec b) { return {(Bits::Lanes)(a.v < b.v)}; }
inline Vec square_root(Vec a) {
  for (int i = 0; i < Vec::kWidth; ++i) a.v[i] = __builtin_sqrtf(a.v[i]);
  return a;
}

inline Vec larger(Vec a, Vec b) {
  for (int i = 0; i < Vec::kWidth; ++i) a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return a;
}
inline Vec smaller(Vec a, Vec b) {
  for (int i = 0; i < Vec::kWidth; ++i) a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
  return a;
}

template <class T>
inline Vec load_bytes(const T* x) {
  return {Vec::Lanes{float(x[0]), float(x[1]), float(x[2]), float(x[3])}};
}

struct Squares {
  double sums[Vec::kWidth] = {};

  void add(const float* x) {
    for (int i = 0; i < Vec::kWidth; ++i) sums[i] += double(x[i]) * double(x[i]);
  }
  void store(double* y) const { memcpy(y, sums, sizeof sums); }
};

inline void order_bypassing_stores() {}

}  // namespace
}  // namespace ze
