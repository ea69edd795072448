// Sixteen floats; see vec_avx2.h.
#pragma once

#include <immintrin.h>

#include "scalar.h"

namespace ze {
namespace {

struct Bits {
  __m512i v;

  static Bits fill(uint32_t x) { return {_mm512_set1_epi32(int(x))}; }
  static Bits count(uint32_t x) {
    return {_mm512_add_epi32(fill(x).v, _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15))};
  }
};

inline Bits operator+(Bits a, Bits b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Bits operator-(Bits a, Bits b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline Bits operator^(Bits a, Bits b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline Bits operator&(Bits a, Bits b) { return {_mm512_and_si512(a.v, b.v)}; }
inline Bits operator*(Bits a, Bits b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline Bits operator>>(Bits a, int n) { return {_mm512_srli_epi32(a.v, unsigned(n))}; }
inline void store_words(uint32_t* y, Bits a) { _mm512_storeu_si512(y, a.v); }
inline void store_bytes(uint8_t* y, Bits a) { _mm_storeu_si128((__m128i*)y, _mm512_cvtepi32_epi8(a.v)); }
inline Bits larger(Bits a, Bits b) { return {_mm512_max_epu32(a.v, b.v)}; }
inline bool any_above(Bits a, uint32_t x) { return _mm512_cmpgt_epu32_mask(a.v, Bits::fill(x).v) != 0; }

struct Vec {
  static constexpr int64_t kWidth = 16;
  __m512 v;

  static Vec fill(float x) { return {_mm512_set1_ps(x)}; }
  static Vec load(const float* x) { return {_mm512_loadu_ps(x)}; }
  static Vec load(const bf16* x) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16))};
  }
  static Vec load(const fp16* x) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)x))}; }

  static Vec pick(const float (&table)[8], Bits i) {
    const __m512 twice = _mm512_broadcast_f32x8(_mm256_loadu_ps(table));
    return {_mm512_permutexvar_ps(i.v, twice)};
  }
  static Vec of_bits(Bits x) { return {_mm512_castsi512_ps(x.v)}; }
  static Vec of_numbers(Bits x) { return {_mm512_cvtepi32_ps(x.v)}; }
  Bits bits() const { return {_mm512_castps_si512(v)}; }
  Bits truncated() const { return {_mm512_cvttps_epi32(v)}; }
  Vec rounded(const fp16*) const { return {_mm512_cvtph_ps(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT))}; }
  void store(float* y) const { _mm512_storeu_ps(y, v); }
  template <class T>
  void store(T* y) const { _mm256_storeu_si256((__m256i*)y, narrow(y)); }
  template <class T>
  void store_bypassing_cache(T* y) const { _mm256_stream_si256((__m256i*)y, narrow(y)); }
  void store(bf16* y, Bits random) const {
    const __m512i sum = _mm512_add_epi32(_mm512_castps_si512(v), random.v);
    _mm256_storeu_si256((__m256i*)y, _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16)));
  }

 private:
  __m256i narrow(const fp16*) const { return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
  __m256i narrow(const bf16*) const {  // not vcvtneps2bf16, which flushes subnormals
    const __m512i u = _mm512_castps_si512(v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0)));
  }
};

inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Bits operator<(Vec a, Vec b) { return {_mm512_movm_epi32(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ))}; }
inline Vec square_root(Vec a) { return {_mm512_sqrt_ps(a.v)}; }
inline Vec larger(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec smaller(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }

inline Vec load_bytes(const int8_t* x) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)x)))};
}
inline Vec load_bytes(const uint8_t* x) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)x)))};
}

struct Squares {
  __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();

  void add(const float* x) {
    const __m512d a = _mm512_cvtps_pd(_mm256_loadu_ps(x)), b = _mm512_cvtps_pd(_mm256_loadu_ps(x + 8));
    low = _mm512_fmadd_pd(a, a, low);
    high = _mm512_fmadd_pd(b, b, high);
  }
  void store(double* y) const {
    _mm512_storeu_pd(y, low);
    _mm512_storeu_pd(y + 8, high);
  }
};

inline void order_bypassing_stores() { _mm_sfence(); }

}  // namespace
}  // namespace ze
