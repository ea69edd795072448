// The fused updates: one template over the rule and the dtype of its moments. See ze_update.
//
// A stretch of kStretch elements goes through the L1 cache: parameter and gradient are widened to float if they are
// not, the rule updates them with the moments, and the results are rounded. One stretch is one block of 8-bit moments.
#pragma once

namespace ze {
namespace {

template <class V>
inline V fill(float x) {
  return V::fill(x);
}

// Returns 2^n, for tables.
template <class V>
constexpr float power_of_2(int n) {
  return n == 0 ? 1.0f : n > 0 ? 2 * power_of_2<V>(n - 1) : power_of_2<V>(n + 1) / 2;
}

// Whole numbers as lanes.
template <class V>
inline Bits whole(int n) {
  return Bits::fill(uint32_t(n));
}

// Returns the exponents of positive numbers.
inline Bits exponent_of(Vec a) { return (a.bits() >> 23) - Bits::fill(127); }

// Returns a third of numbers from 0 to 23, rounded down: 11 / 32 is near enough.
inline Bits third_of(Bits n) { return n * Bits::fill(11) >> 5; }

// Returns entry(range, kRanges) in each lane, for ranges from 0 to 7.
template <int kRanges, float (*entry)(int, int), class V>
inline V pick(Bits range) {
  static constexpr float table[8] = {entry(0, kRanges), entry(1, kRanges), entry(2, kRanges), entry(3, kRanges),
                                     entry(4, kRanges), entry(5, kRanges), entry(6, kRanges), entry(7, kRanges)};
  return V::pick(table, range);
}

inline Vec magnitude_of(Vec a) { return Vec::of_bits(a.bits() & Bits::fill(0x7fffffff)); }

// Returns -1, 0 or 1.
inline Vec sign_of(Vec a) {
  const Bits one = Vec::fill(1).bits(), minus_one = Vec::fill(-1).bits();
  return Vec::of_bits(((Vec::fill(0) < a) & one) ^ ((a < Vec::fill(0)) & minus_one));
}

}  // namespace
}  // namespace ze

#include "../dynamic_code.h"
#include "../rules.h"

namespace ze {
namespace {

// [Note: Stochastic rounding] The upper half of a float is a bf16, rounded towards zero, and the lower half is the
// distance to it. Adding 16 random bits carries into the upper half with the probability that makes the mean right; a
// bf16 value is not changed. The bits are a hash of the element's index: Wellons' lowbias32 with a key, so that two
// seeds give unrelated sequences. One word serves both moments, and a second one parameter and average. The bits are 0
// where the last moment is beyond the largest bf16, infinite or NaN: there a carry would turn a finite value into
// infinity, or a NaN into zero. This includes every exp_avg beyond the largest bf16, because gradients that lead to it
// have no finite square.
constexpr float kLargestBf16 = 0x1.fep127f;

struct RandomVecs {
  struct Halves {
    Bits lower, upper;
  };
  Bits first, key;

  explicit RandomVecs(const Random& r) : first(Bits::count(r.first)), key(Bits::fill(r.key)) {}

  // Returns the random bits of the elements from i on; 0 where `mask` is 0.
  Halves at(int64_t i, Bits mask) const {
    Bits x = first + Bits::fill(uint32_t(i));
    x = (x ^ x >> 16) * Bits::fill(0x7feb352d) ^ key;
    x = (x ^ x >> 15) * Bits::fill(0x846ca68b) & mask;
    const Bits upper = x >> 16;
    return {(x ^ upper) & Bits::fill(0xffff), upper};
  }
};

// [Note: Compiled once] What an update does to a stretch besides its rule is not inlined: seventeen updates would each
// have a copy, and the build would take two and a half times as long. A call for 256 elements costs no time.
// The elements of an array in one stretch: in place, or padded with zeros if the stretch is not complete.
template <class T>
struct Window {
  T* data;
  T* array;
  int64_t n;
  alignas(64) T padded[kStretch];

  Window(void* start, int64_t i, int64_t count) : data((T*)start + i), array(data), n(count) {
    if (n == kStretch) return;
    memset((void*)padded, 0, sizeof padded);
    memcpy((void*)padded, data, size_t(n) * sizeof(T));
    data = padded;
  }
  void flush() const {
    if (data != array) memcpy((void*)array, data, size_t(n) * sizeof(T));
  }
};

// Prefetches the next stretch of an array: hardware prefetchers stop at the end of each page. The function is always
// inlined, because GCC drops calls of a function that only prefetches.
__attribute__((always_inline)) inline void prefetch_next(const void* array, int64_t i, int64_t size) {
  for (int64_t line = 0; line < kBlock * size; line += 64)
    __builtin_prefetch((const char*)array + (i + kStretch) * size + line);
}

inline int64_t size_of(int dtype) { return dtype == ZE_F32 ? 4 : 2; }

// Floats of one stretch: those of an array in place, or its 16-bit elements widened.
struct Floats {
  const float* data;
  alignas(64) float buffer[kStretch];

  Floats(const void* array, int dtype, int64_t i, int64_t n) : data(buffer) {
    if (dtype == ZE_F32 && n == kStretch) data = (const float*)array + i;
    else if (dtype == ZE_F32) widen((const float*)array + i, n);
    else if (dtype == ZE_BF16) widen((const bf16*)array + i, n);
    else widen((const fp16*)array + i, n);
  }

 private:
  template <class T>
  __attribute__((noinline)) void widen(const T* x, int64_t n) {
    int64_t j = 0;
    for (; j + Vec::kWidth <= n; j += Vec::kWidth) Vec::load(x + j).store(buffer + j);
    for (; j < n; ++j) buffer[j] = to_float(x[j]);
    for (; j < kStretch; ++j) buffer[j] = 0;
  }
};

// [Note: Values written from outside] `low_precision_param` is `param` rounded, unless the user has written it since
// the last step. Such an element of param takes its value. The comparison finds every write, however it was done, and
// reads 2 more bytes. A block without such elements stores nothing here. A block that may have some is compared again,
// element by element.
//
// The first comparison of bf16 does not round, which would take more instructions. As integers, a float and the bf16
// that it rounds to are at most 2^15 apart, half the distance of two bf16. Values exactly 2^15 apart are left to the
// second comparison.
inline Bits rounding_distance(const float* param, const bf16* low_precision_param) {
  return Vec::load(param).bits() - Vec::load(low_precision_param).bits() + Bits::fill(0x7fff);
}
inline Bits rounding_distance(const float* param, const fp16* low_precision_param) {
  return Vec::load(param).rounded(low_precision_param).bits() ^ Vec::load(low_precision_param).bits();
}
// Only an element above this rounding_distance can have been written from outside.
constexpr uint32_t max_rounding_distance(const bf16*) { return 0xfffe; }
constexpr uint32_t max_rounding_distance(const fp16*) { return 0; }

template <class C>
__attribute__((noinline)) void reload_written(float* param, void* low_precision_param, int64_t i, int64_t n) {
  const Window<C> written(low_precision_param, i, n);
  Bits furthest = Bits::fill(0);
  for (int64_t j = 0; j < kStretch; j += Vec::kWidth)
    furthest = larger(furthest, rounding_distance(param + j, written.data + j));
  if (__builtin_expect(!any_above(furthest, max_rounding_distance(written.data)), 1)) return;
  for (int64_t j = 0; j < n; ++j) {
    C rounded;
    from_float(param[j], &rounded);
    if (rounded.bits != written.data[j].bits) param[j] = to_float(written.data[j]);
  }
}

template <class C>
__attribute__((noinline)) void write_low_precision(const float* param, void* low_precision_param, int64_t i, int64_t n, bool bypass_cache) {
  C* to = (C*)low_precision_param + i;
  if (n < kStretch) {
    for (int64_t j = 0; j < n; ++j) from_float(param[j], to + j);
  } else if (bypass_cache) {
    for (int64_t j = 0; j < kStretch; j += Vec::kWidth) Vec::load(param + j).store_bypassing_cache(to + j);
  } else {
    for (int64_t j = 0; j < kStretch; j += Vec::kWidth) Vec::load(param + j).store(to + j);
  }
}

// Stores floats in bf16, rounded stochastically by the lower or the upper halves of words.
template <bool kUpper>
__attribute__((noinline)) void store_randomly(const float* values, bf16* to, const RandomVecs& random, int64_t i) {
  for (int64_t j = 0; j < kStretch; j += Vec::kWidth) {
    const Vec value = Vec::load(values + j);
    const auto bits = random.at(i + j, magnitude_of(value) < Vec::fill(kLargestBf16));
    value.store(to + j, kUpper ? bits.upper : bits.lower);
  }
}

// -- moments ------------------------------------------------------------------------------------------

// Eight bits of a moment; see "A dynamic code".
struct code8 {
  uint8_t bits;
};

template <bool kSigned>
inline Vec decode(const code8* codes, Vec scale) {
  if constexpr (!kSigned) return fraction_of<8>(load_bytes((const uint8_t*)codes)) * scale;
  const Vec number = load_bytes((const int8_t*)codes), fraction = fraction_of<7>(magnitude_of(number));
  return Vec::of_bits(fraction.bits() ^ (number.bits() & Bits::fill(0x80000000))) * scale;
}

// `threshold` is from 0 to 1: what is added before a fraction of a number is dropped.
template <bool kSigned>
inline void encode(Vec value, Vec inverse_scale, Vec threshold, code8* codes) {
  const Vec fraction = magnitude_of(value) * inverse_scale;
  Vec number = number_of<kSigned ? 7 : 8>(fraction) + threshold;
  if (!kSigned) number = larger(number, Vec::of_bits((Vec::fill(0) < fraction) & Vec::fill(1).bits()));
  const Bits negative = kSigned ? value < Vec::fill(0) : Bits::fill(0);
  store_bytes((uint8_t*)codes, (number.truncated() ^ negative) - negative);
}

// Returns the scale of a stretch.
inline float scale_of_stretch(const float* values) {
  Bits largest = Bits::fill(0);
  for (int64_t j = 0; j < kStretch; j += Vec::kWidth) largest = larger(largest, magnitude_of(Vec::load(values + j)).bits());
  uint32_t lanes[Vec::kWidth], magnitude = 0;
  store_words(lanes, largest);
  for (uint32_t lane : lanes) magnitude = lane > magnitude ? lane : magnitude;
  return scale_of(float_of(magnitude));
}

template <bool kSigned>
void decode_moment(const void* codes, const float* scales, float* values, int64_t n) {
  for (int64_t i = 0; i < n; i += kStretch) {
    const int64_t count = n - i < kStretch ? n - i : kStretch;
    const Window<code8> from((void*)codes, i, count);
    Window<float> to(values, i, count);
    for (int64_t j = 0; j < kStretch; j += Vec::kWidth)
      decode<kSigned>(from.data + j, Vec::fill(scales[i / kStretch])).store(to.data + j);
    to.flush();
  }
}

template <bool kSigned>
void encode_moment(const float* values, void* codes, float* scales, int64_t n) {
  for (int64_t i = 0; i < n; i += kStretch) {
    const int64_t count = n - i < kStretch ? n - i : kStretch;
    const Floats from(values, ZE_F32, i, count);
    Window<code8> to(codes, i, count);
    const float scale = scales[i / kStretch] = scale_of_stretch(from.data);
    for (int64_t j = 0; j < kStretch; j += Vec::kWidth)
      encode<kSigned>(Vec::load(from.data + j), Vec::fill(1 / scale), Vec::fill(0.5f), to.data + j);
    to.flush();
  }
}

// The moments of one stretch. Those of 8 bits are kept in floats until their scale is known.
template <class Rule, class M>
struct Moments {
  static constexpr int kCount = Rule::kMoments;
  Window<M> first, second;
  alignas(64) float values[kCount ? kCount : 1][kStretch];
  float* const* scales;
  int64_t block;

  Moments(const ze_update_arrays& a, int64_t i, int64_t n)
      : first(a.moments[0], i, kCount > 0 ? n : kStretch), second(a.moments[1], i, kCount > 1 ? n : kStretch),
        scales(a.scales), block(i / kMomentBlock) {}

  M* array(int number) { return number ? second.data : first.data; }

  void load(int64_t j, Vec* m) {
    if constexpr (kCount > 0) load<0>(j, m);
    if constexpr (kCount > 1) load<1>(j, m);
  }

  void store(int64_t i, int64_t j, const Vec* m, const RandomVecs& random) {
    if constexpr (std::is_same_v<M, bf16> && kCount > 0) {
      const auto bits = random.at(i + j, magnitude_of(m[kCount - 1]) < Vec::fill(kLargestBf16));
      m[0].store(first.data + j, bits.lower);
      if constexpr (kCount > 1) m[1].store(second.data + j, bits.upper);
    } else {
      for (int k = 0; k < kCount; ++k) {
        if constexpr (std::is_same_v<M, float>) m[k].store(array(k) + j);
        else m[k].store(values[k] + j);
      }
    }
  }

  void flush(int64_t i, const RandomVecs& random) {
    if constexpr (std::is_same_v<M, code8>) {
      Vec inverse[2];
      for (int k = 0; k < kCount; ++k) {
        scales[k][block] = scale_of_stretch(values[k]);
        inverse[k] = Vec::fill(1 / scales[k][block]);
      }
      const Vec unit = Vec::fill(0x1p-16f);
      for (int64_t j = 0; j < kStretch; j += Vec::kWidth) {
        const auto bits = random.at(i + j, Bits::fill(~0u));
        if constexpr (kCount > 0)
          encode<Rule::is_signed(0)>(Vec::load(values[0] + j), inverse[0], Vec::of_numbers(bits.lower) * unit, first.data + j);
        if constexpr (kCount > 1)
          encode<Rule::is_signed(1)>(Vec::load(values[1] + j), inverse[1], Vec::of_numbers(bits.upper) * unit, second.data + j);
      }
    }
    if constexpr (kCount > 0) first.flush();
    if constexpr (kCount > 1) second.flush();
  }

 private:
  template <int kNumber>
  void load(int64_t j, Vec* m) {
    if constexpr (std::is_same_v<M, code8>)
      m[kNumber] = decode<Rule::is_signed(kNumber)>(array(kNumber) + j, Vec::fill(scales[kNumber][block]));
    else
      m[kNumber] = Vec::load(array(kNumber) + j);
  }
};

// -- one stretch after another ------------------------------------------------------------------------

__attribute__((noinline)) void update_average(const ze_update_arrays& a, const float* param, float weight, int64_t i, int64_t n,
                           const RandomVecs& random) {
  const Floats old(a.average, a.average_dtype, i, n);
  alignas(64) float average[kStretch];
  for (int64_t j = 0; j < kStretch; j += Vec::kWidth) {
    const Vec v = Vec::load(old.data + j);
    (v + Vec::fill(weight) * (Vec::load(param + j) - v)).store(average + j);
  }
  if (a.average_dtype == ZE_F32) {
    memcpy((float*)a.average + i, average, size_t(n) * sizeof(float));
  } else {
    Window<bf16> to(a.average, i, n);
    store_randomly<true>(average, to.data, random, i);
    to.flush();
  }
}

template <class Rule, class M>
void update(const ze_update_arrays& a, int64_t begin, int64_t end, const UpdateFactors& k, const Random& r,
            bool bypass_cache) {
  const Rule rule(k);
  const Vec grad_scale = Vec::fill(k.grad_scale);
  const int64_t param_size = size_of(a.param_dtype), grad_size = size_of(a.grad_dtype),
                average_size = size_of(a.average_dtype);
  const RandomVecs random(r), second(second_random(r));
  for (int64_t i = begin; i < end; i += kStretch) {
    const int64_t n = end - i < kStretch ? end - i : kStretch;
    const bool in_place = n == kStretch && a.param_dtype == ZE_F32;
    Floats param(a.param, a.param_dtype, i, n);
    float* p = in_place ? (float*)a.param + i : param.buffer;
    if (a.reload_written && a.low_precision_dtype == ZE_BF16) reload_written<bf16>(p, a.low_precision_param, i, n);
    if (a.reload_written && a.low_precision_dtype == ZE_F16) reload_written<fp16>(p, a.low_precision_param, i, n);
    if constexpr (!std::is_same_v<Rule, AverageOnly<Vec>>) {
      const Floats grad(a.grad, a.grad_dtype, i, n);
      Moments<Rule, M> moments(a, i, n);
      for (int64_t block = 0; block < kStretch; block += kBlock) {
        prefetch_next(a.param, i + block, param_size);
        prefetch_next(a.grad, i + block, grad_size);
        if (Rule::kMoments > 0) prefetch_next(a.moments[0], i + block, sizeof(M));
        if (Rule::kMoments > 1) prefetch_next(a.moments[1], i + block, sizeof(M));
        if (a.average) prefetch_next(a.average, i + block, average_size);
        for (int64_t j = block; j < block + kBlock; j += Vec::kWidth) {
          Vec m[2];
          moments.load(j, m);
          rule.step(Vec::load(p + j), Vec::load(grad.data + j) * grad_scale, m).store(p + j);
          moments.store(i, j, m, random);
        }
      }
      moments.flush(i, random);
    }
    if (a.param_dtype == ZE_F32 && !in_place) memcpy((float*)a.param + i, p, size_t(n) * sizeof(float));
    if (a.param_dtype == ZE_F16) write_low_precision<fp16>(p, a.param, i, n, false);
    if (a.param_dtype == ZE_BF16) {
      Window<bf16> to(a.param, i, n);
      store_randomly<false>(p, to.data, second, i);
      to.flush();
    }
    if (a.low_precision_param && a.low_precision_dtype == ZE_BF16)
      write_low_precision<bf16>(p, a.low_precision_param, i, n, bypass_cache);
    if (a.low_precision_param && a.low_precision_dtype == ZE_F16)
      write_low_precision<fp16>(p, a.low_precision_param, i, n, bypass_cache);
    if (a.average) update_average(a, p, k.average_weight, i, n, second);
  }
  if (bypass_cache) order_bypassing_stores();
}

template <class Rule>
constexpr void updates_of(Update (&to)[4]) {
  to[ZE_F32] = update<Rule, float>;
  if constexpr (Rule::kMoments > 0) {
    to[ZE_BF16] = update<Rule, bf16>;
    to[ZE_8BIT] = update<Rule, code8>;
  }
}

constexpr void updates_of(Update (&to)[kRules][4]) {
  updates_of<AverageOnly<Vec>>(to[ZE_AVERAGE_ONLY]);
  updates_of<AdamRule<Vec, false>>(to[ZE_ADAM]);
  updates_of<AdamRule<Vec, true>>(to[ZE_ADAMW]);
  updates_of<LionRule<Vec>>(to[ZE_LION]);
  updates_of<SgdRule<Vec>>(to[ZE_SGD]);
  updates_of<MomentumRule<Vec>>(to[ZE_MOMENTUM_SGD]);
  updates_of<AdagradRule<Vec>>(to[ZE_ADAGRAD]);
}

}  // namespace
}  // namespace ze
