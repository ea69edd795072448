// Eight floats. Each vec_*.h has the same interface, which kernels.inl.h uses.
#pragma once

#include <immintrin.h>

#include "scalar.h"

namespace ze {
namespace {

struct Bits {  // eight unsigned integers
  __m256i v;

  static Bits fill(uint32_t x) { return {_mm256_set1_epi32(int(x))}; }
  static Bits count(uint32_t x) {  // x, x + 1, ...
    return {_mm256_add_epi32(fill(x).v, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))};
  }
};

inline Bits operator+(Bits a, Bits b) { return {_mm256_add_epi32(a.v, b.v)}; }
inline Bits operator-(Bits a, Bits b) { return {_mm256_sub_epi32(a.v, b.v)}; }
inline Bits operator^(Bits a, Bits b) { return {_mm256_xor_si256(a.v, b.v)}; }
inline Bits operator&(Bits a, Bits b) { return {_mm256_and_si256(a.v, b.v)}; }
inline Bits operator*(Bits a, Bits b) { return {_mm256_mullo_epi32(a.v, b.v)}; }
inline Bits operator>>(Bits a, int n) { return {_mm256_srli_epi32(a.v, n)}; }
inline void store_words(uint32_t* y, Bits a) { _mm256_storeu_si256((__m256i*)y, a.v); }
inline void store_bytes(uint8_t* y, Bits a) {  // the lowest byte of each element
  const __m256i low = _mm256_shuffle_epi8(a.v, _mm256_set1_epi32(0x0c080400));
  const uint32_t first = uint32_t(_mm256_extract_epi32(low, 0)), second = uint32_t(_mm256_extract_epi32(low, 4));
  memcpy(y, &first, 4);
  memcpy(y + 4, &second, 4);
}
inline Bits larger(Bits a, Bits b) { return {_mm256_max_epu32(a.v, b.v)}; }
inline bool any_above(Bits a, uint32_t x) {  // whether any element is
  const __m256i limit = Bits::fill(x).v;
  return _mm256_movemask_epi8(_mm256_cmpeq_epi32(_mm256_max_epu32(a.v, limit), limit)) != -1;
}

struct Vec {
  static constexpr int64_t kWidth = 8;
  __m256 v;

  static Vec fill(float x) { return {_mm256_set1_ps(x)}; }
  static Vec load(const float* x) { return {_mm256_loadu_ps(x)}; }
  static Vec load(const bf16* x) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)x)), 16))};
  }
  static Vec load(const fp16* x) { return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)x))}; }

  // table[i] for the lowest three bits of each element.
  static Vec pick(const float (&table)[8], Bits i) { return {_mm256_permutevar8x32_ps(_mm256_loadu_ps(table), i.v)}; }
  static Vec of_bits(Bits x) { return {_mm256_castsi256_ps(x.v)}; }
  static Vec of_numbers(Bits x) { return {_mm256_cvtepi32_ps(x.v)}; }  // below 2^31
  Bits bits() const { return {_mm256_castps_si256(v)}; }
  Bits truncated() const { return {_mm256_cvttps_epi32(v)}; }
  Vec rounded(const fp16*) const { return {_mm256_cvtph_ps(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT))}; }
  void store(float* y) const { _mm256_storeu_ps(y, v); }
  template <class T>
  void store(T* y) const { _mm_storeu_si128((__m128i*)y, narrow(y)); }
  template <class T>
  void store_bypassing_cache(T* y) const { _mm_stream_si128((__m128i*)y, narrow(y)); }
  void store(bf16* y, Bits random) const {  // [Note: Stochastic rounding]
    const __m256i sum = _mm256_add_epi32(_mm256_castps_si256(v), random.v);
    _mm_storeu_si128((__m128i*)y, pack(_mm256_srli_epi32(sum, 16)));
  }

 private:
  __m128i narrow(const fp16*) const { return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT); }
  __m128i narrow(const bf16*) const {
    const __m256i u = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    return pack(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan));
  }
  static __m128i pack(__m256i x) {
    return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  }
};

inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Bits operator<(Vec a, Vec b) { return {_mm256_castps_si256(_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))}; }
inline Vec square_root(Vec a) { return {_mm256_sqrt_ps(a.v)}; }
// The second one if they cannot be compared.
inline Vec larger(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec smaller(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }

inline Vec load_bytes(const int8_t* x) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)x)))};
}
inline Vec load_bytes(const uint8_t* x) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)x)))};
}

// The running sums of squares of kWidth floats, one double for each.
struct Squares {
  __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();

  void add(const float* x) {  // a float's square is exact in double, so fusing changes nothing
    const __m256d a = _mm256_cvtps_pd(_mm_loadu_ps(x)), b = _mm256_cvtps_pd(_mm_loadu_ps(x + 4));
    low = _mm256_fmadd_pd(a, a, low);
    high = _mm256_fmadd_pd(b, b, high);
  }
  void store(double* y) const {
    _mm256_storeu_pd(y, low);
    _mm256_storeu_pd(y + 4, high);
  }
};

inline void order_bypassing_stores() { _mm_sfence(); }

}  // namespace
}  // namespace ze
