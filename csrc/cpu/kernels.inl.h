// The kernels, written once over the type Vec, which the including file chooses.
//
// [Note: Same bits everywhere] Each element goes through the same IEEE operations in the same order at every
// position, length, thread count and instruction set. There is no fused multiply-add: the build sets
// -ffp-contract=off, and memory is the limit anyway. An incomplete block runs through the same code on a padded copy.
#pragma once

#include <type_traits>

#include "packets.inl.h"

namespace ze {
namespace {

constexpr int64_t kVecs = kBlock / Vec::kWidth;

// Prefetches a block, 512 bytes ahead: hardware prefetchers stop at the end of each page. The function is always
// inlined, because GCC drops calls of a function that only prefetches.
template <class T>
__attribute__((always_inline)) inline void prefetch(const T* x) {
  for (int64_t line = 0; line < kBlock * int64_t(sizeof(T)); line += 64)
    __builtin_prefetch((const char*)x + 512 + line);
}

template <class... T>
__attribute__((always_inline)) inline void prefetch(const T*... arrays) {
  (prefetch(arrays), ...);
}

// The factors, each repeated in every lane.
struct AdamVecs {
  Vec grad_scale, decay, one_minus_beta1, beta2, one_minus_beta2, inv_root, eps, step_size;

  explicit AdamVecs(const AdamFactors& k)
      : grad_scale(Vec::fill(k.grad_scale)), decay(Vec::fill(k.decay)),
        one_minus_beta1(Vec::fill(k.one_minus_beta1)), beta2(Vec::fill(k.beta2)),
        one_minus_beta2(Vec::fill(k.one_minus_beta2)), inv_root(Vec::fill(k.inv_root)),
        eps(Vec::fill(k.eps)), step_size(Vec::fill(k.step_size)) {}
};

// [Note: Stochastic rounding] The upper half of a float is a bf16, rounded towards zero, and the lower half is the
// distance to it. Adding 16 random bits carries into the upper half with the probability that makes the mean right; a
// bf16 value is not changed. The bits are a hash of the element's index: Wellons' lowbias32 with a key, so that two
// seeds give unrelated sequences. One word serves both moments. The bits are 0 where exp_avg_sq is the largest bf16,
// infinite or NaN: there a carry would turn a finite value into infinity, or a NaN into zero. This includes every
// exp_avg beyond the largest bf16, because gradients that lead to it have no finite square.
constexpr float kLargestBf16 = 0x1.fep127f;

struct RandomVecs {
  struct Halves {
    Bits lower, upper;
  };
  Bits first, key;

  RandomVecs(const Random& r, int64_t begin) : first(Bits::count(r.first + uint32_t(begin))), key(Bits::fill(r.key)) {}

  // Returns the random bits of the elements from i on; 0 where `mask` is 0.
  Halves at(int64_t i, Bits mask) const {
    Bits x = first + Bits::fill(uint32_t(i));
    x = (x ^ x >> 16) * Bits::fill(0x7feb352d) ^ key;
    x = (x ^ x >> 15) * Bits::fill(0x846ca68b) & mask;
    const Bits upper = x >> 16;
    return {(x ^ upper) & Bits::fill(0xffff), upper};
  }
};

// Holds a block's new bf16 moments in float until the parameter is updated. Moments in float stay in their arrays.
using MomentBuffer = float[2][kBlock];

inline float* in_float(float* array, MomentBuffer&, int64_t i) { return array + i; }
inline float* in_float(bf16*, MomentBuffer& buffer, int64_t i) { return buffer[i / kBlock % 2]; }

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
inline void reload_written(float* param, const C* low_precision_param) {
  Bits furthest = Bits::fill(0);
  for (int64_t i = 0; i < kBlock; i += Vec::kWidth)
    furthest = larger(furthest, rounding_distance(param + i, low_precision_param + i));
  if (__builtin_expect(!any_above(furthest, max_rounding_distance(low_precision_param)), 1)) return;
  for (int64_t i = 0; i < kBlock; ++i) {
    C rounded;
    from_float(param[i], &rounded);
    if (rounded.bits != low_precision_param[i].bits) param[i] = to_float(low_precision_param[i]);
  }
}
inline void reload_written(float*, const none*) {}

// [Note: Trailing stages] From gradient to low-precision parameter an element passes a chain of about 90 cycles, too
// long for a CPU to keep enough elements in flight. So Adam runs in three stages, each one block behind the stage
// before it: while a block waits for its roots and quotients, the next block's moments and the previous block's
// low-precision parameter proceed. Values between the stages are in the L1 cache.
template <bool kDecoupled, class G, class M>
inline void adam_moments(const float* param, const G* grad, M* exp_avg, M* exp_avg_sq, float* new_avg,
                         float* new_avg_sq, const AdamVecs& k, const RandomVecs& random, int64_t position) {
  for (int64_t i = 0; i < kBlock; i += Vec::kWidth) {
    Vec g = Vec::load(grad + i) * k.grad_scale;
    if constexpr (!kDecoupled) g = g + k.decay * Vec::load(param + i);
    Vec m = Vec::load(exp_avg + i), v = Vec::load(exp_avg_sq + i);
    m = m + k.one_minus_beta1 * (g - m);
    v = k.beta2 * v + k.one_minus_beta2 * g * g;
    m.store(new_avg + i);
    v.store(new_avg_sq + i);
    if constexpr (std::is_same_v<M, bf16>) {
      const auto bits = random.at(position + i, v < Vec::fill(kLargestBf16));
      m.store(exp_avg + i, bits.lower);
      v.store(exp_avg_sq + i, bits.upper);
    }
  }
}

template <bool kDecoupled>
inline void adam_param(float* param, const float* exp_avg, const float* exp_avg_sq, const AdamVecs& k) {
  for (int64_t i = 0; i < kBlock; i += Vec::kWidth) {
    const Vec denominator = sqrt(Vec::load(exp_avg_sq + i)) * k.inv_root + k.eps;
    Vec p = Vec::load(param + i);
    if constexpr (kDecoupled) p = p * k.decay;
    (p - k.step_size * Vec::load(exp_avg + i) / denominator).store(param + i);
  }
}

template <bool kBypassCache, class C>
inline void write_low_precision(const float* param, C* low_precision_param) {
  if constexpr (!std::is_same_v<C, none>) {
    for (int64_t i = 0; i < kBlock; i += Vec::kWidth) {
      if constexpr (kBypassCache) Vec::load(param + i).store_bypassing_cache(low_precision_param + i);
      else Vec::load(param + i).store(low_precision_param + i);
    }
  }
}

template <bool kDecoupled, class G, class M, class C>
void adam_partial(float* param, const G* grad, M* exp_avg, M* exp_avg_sq, C* low_precision_param, int64_t n,
                  const AdamVecs& k, const RandomVecs& random, int64_t position, bool reload) {
  float p[kBlock] = {};
  G g[kBlock] = {};
  M m[kBlock] = {}, v[kBlock] = {};
  C c[kBlock] = {};
  MomentBuffer new_avg, new_avg_sq;
  memcpy(p, param, n * sizeof(float));
  memcpy(m, exp_avg, n * sizeof(M));
  memcpy(v, exp_avg_sq, n * sizeof(M));
  memcpy(g, grad, n * sizeof(G));
  if (reload) {
    memcpy(c, low_precision_param, n * sizeof(C));
    reload_written(p, c);
  }
  float *m_new = in_float(m, new_avg, 0), *v_new = in_float(v, new_avg_sq, 0);
  adam_moments<kDecoupled>(p, g, m, v, m_new, v_new, k, random, position);
  adam_param<kDecoupled>(p, m_new, v_new, k);
  write_low_precision<false>(p, c);
  memcpy(param, p, n * sizeof(float));
  memcpy(exp_avg, m, n * sizeof(M));
  memcpy(exp_avg_sq, v, n * sizeof(M));
  if constexpr (!std::is_same_v<C, none>) memcpy(low_precision_param, c, n * sizeof(C));
}

template <bool kBypassCache, bool kDecoupled, class G, class M, class C>
void adam_range(float* param, const G* grad, M* exp_avg, M* exp_avg_sq, C* low_precision_param, int64_t n,
                const AdamFactors& factors, const RandomVecs& random, bool reload) {
  const AdamVecs k(factors);
  MomentBuffer new_avg, new_avg_sq;
  int64_t first = 0;
  if constexpr (kBypassCache) {
    // Non-temporal stores need whole, aligned cache lines.
    first = int64_t(-uintptr_t(low_precision_param) % 64 / sizeof(C));
    if (first > n) first = n;
    if (first)
      adam_partial<kDecoupled>(param, grad, exp_avg, exp_avg_sq, low_precision_param, first, k, random, 0, reload);
  }
  const int64_t last = n - (n - first) % kBlock;
  for (int64_t i = first; i < last + 2 * kBlock; i += kBlock) {  // [Note: Trailing stages]
    if (i < last) {
      prefetch(param + i, grad + i, exp_avg + i, exp_avg_sq + i);
      if (reload) {
        prefetch(low_precision_param + i);
        reload_written(param + i, low_precision_param + i);
      }
      adam_moments<kDecoupled>(param + i, grad + i, exp_avg + i, exp_avg_sq + i, in_float(exp_avg, new_avg, i),
                               in_float(exp_avg_sq, new_avg_sq, i), k, random, i);
    }
    const int64_t j = i - kBlock, h = j - kBlock;
    if (first <= j && j < last)
      adam_param<kDecoupled>(param + j, in_float(exp_avg, new_avg, j), in_float(exp_avg_sq, new_avg_sq, j), k);
    if (first <= h) write_low_precision<kBypassCache>(param + h, low_precision_param + h);
  }
  if (last < n)
    adam_partial<kDecoupled>(param + last, grad + last, exp_avg + last, exp_avg_sq + last, low_precision_param + last,
                             n - last, k, random, last, reload);
  if constexpr (kBypassCache) order_bypassing_stores();
}

template <class M, class G, class C, bool kDecoupled>
void adam(const AdamArrays& a, int64_t begin, int64_t end, const AdamFactors& k, const Random& r,
          bool bypass_cache) {
  float* param = a.param + begin;
  const G* grad = (const G*)a.grad + begin;
  M *exp_avg = (M*)a.exp_avg + begin, *exp_avg_sq = (M*)a.exp_avg_sq + begin;
  C* low_precision_param = (C*)a.low_precision_param + begin;
  const RandomVecs random(r, begin);
  const bool reload = a.reload_written && !std::is_same_v<C, none>;
  if constexpr (!std::is_same_v<C, none>) {
    if (bypass_cache)
      return adam_range<true, kDecoupled>(param, grad, exp_avg, exp_avg_sq, low_precision_param, end - begin, k, random,
                                          reload);
  }
  adam_range<false, kDecoupled>(param, grad, exp_avg, exp_avg_sq, low_precision_param, end - begin, k, random, reload);
}

// Keeps one running sum for each position within a block, and adds them in order at the end. Narrow elements are
// widened through a buffer: converting to double from memory is twice as fast as from a register. A long range is read
// at four places in turn, because one place alone does not use the memory's bandwidth.
template <class T>
double squared_norm(const void* data, int64_t begin, int64_t end) {
  constexpr int64_t kStretch = 8 * kBlock;
  const T* x = (const T*)data;
  Squares squares[kVecs];
  float buffer[kStretch];
  const int64_t stretches = (end - begin + kStretch - 1) / kStretch, places = stretches % 4 ? 1 : 4;
  for (int64_t s = 0; s < stretches; ++s) {
    const int64_t i = begin + (s % places * (stretches / places) + s / places) * kStretch;
    const int64_t n = end - i < kStretch ? end - i : kStretch;
    const float* values = buffer;
    if (n < kStretch) {
      for (int64_t j = 0; j < kStretch; ++j) buffer[j] = j < n ? to_float(x[i + j]) : 0;
    } else if constexpr (std::is_same_v<T, float>) {
      values = x + i;
    } else {
      for (int64_t j = 0; j < kStretch; j += Vec::kWidth) Vec::load(x + i + j).store(buffer + j);
    }
    for (int64_t block = 0; block < kStretch; block += kBlock) {
      prefetch(x + i + block);
      for (int64_t j = 0; j < kVecs; ++j) squares[j].add(values + block + j * Vec::kWidth);
    }
  }
  double sums[kBlock], total = 0;
  for (int64_t j = 0; j < kVecs; ++j) squares[j].store(sums + j * Vec::kWidth);
  for (double sum : sums) total += sum;
  return total;
}

// Each operation rounds once, so vector and scalar code agree.
template <class T>
void accumulate(float* acc, const void* data, int64_t n, bool init) {
  const T* src = (const T*)data;
  int64_t i = 0;
  if (init) {
    for (; i + Vec::kWidth <= n; i += Vec::kWidth) Vec::load(src + i).store(acc + i);
    for (; i < n; ++i) acc[i] = to_float(src[i]);
  } else {
    for (; i + Vec::kWidth <= n; i += Vec::kWidth) (Vec::load(acc + i) + Vec::load(src + i)).store(acc + i);
    for (; i < n; ++i) acc[i] = acc[i] + to_float(src[i]);
  }
}

template <class T>
void cast(const float* src, void* data, int64_t n) {
  T* dst = (T*)data;
  int64_t i = 0;
  for (; i + Vec::kWidth <= n; i += Vec::kWidth) Vec::load(src + i).store(dst + i);
  for (; i < n; ++i) from_float(src[i], dst + i);
}

// Adam's memory traffic without its arithmetic: see ze_stream. `a`, `b` and `c` change, so that the compiler drops no
// store.
template <class G, bool kCopy>
void stream(const StreamArrays& s, int64_t begin, int64_t end) {
  const G* grad = (const G*)s.grad;
  bf16* low_precision_param = (bf16*)s.low_precision_param;
  const auto update = [](float* x, Vec y) { (Vec::load(x) + y).store(x); };
  for (int64_t i = begin; i + kBlock <= end; i += kBlock) {
    prefetch(s.a + i, grad + i, s.b + i, s.c + i);
    for (int64_t j = i; j < i + kBlock; j += Vec::kWidth) {
      const Vec g = Vec::load(grad + j);
      update(s.a + j, g);
      update(s.b + j, g);
      update(s.c + j, g);
      if constexpr (kCopy) g.store_bypassing_cache(low_precision_param + j);
    }
  }
  if constexpr (kCopy) order_bypassing_stores();
}

template <class M, class G, class C>
constexpr void adams_of(Adam (&to)[2]) {
  to[0] = adam<M, G, C, false>;
  to[1] = adam<M, G, C, true>;
}

template <class M, class G>
constexpr void adams_of(Adam (&to)[3][2]) {
  adams_of<M, G, none>(to[0]);
  adams_of<M, G, bf16>(to[1]);
  adams_of<M, G, fp16>(to[2]);
}

template <class M>
constexpr void adams_of(Adam (&to)[3][3][2]) {
  adams_of<M, float>(to[0]);
  adams_of<M, bf16>(to[1]);
  adams_of<M, fp16>(to[2]);
}

constexpr Kernels table(const char* name) {
  Kernels kernels = {
      name,
      {},
      {squared_norm<float>, squared_norm<bf16>, squared_norm<fp16>},
      {accumulate<float>, accumulate<bf16>, accumulate<fp16>},
      {cast<float>, cast<bf16>, cast<fp16>},
      {quantize<float>, quantize<bf16>, quantize<fp16>},
      dequantize,
      {{stream<float, false>, stream<float, true>},
       {stream<bf16, false>, stream<bf16, true>},
       {stream<fp16, false>, stream<fp16, true>}},
  };
  adams_of<float>(kernels.adam[ZE_F32]);
  adams_of<bf16>(kernels.adam[ZE_BF16]);
  return kernels;
}

}  // namespace
}  // namespace ze
