// The kernels, written once over the Vec that the including file chose.
//
// [Note: Same bits everywhere] Each element goes through the same IEEE operations in the same order at every
// position, length, thread count and instruction set: no fused multiply-add (the build says -ffp-contract=off,
// and memory is the limit anyway), and an incomplete block runs through the same code on a padded copy.
#pragma once

#include <type_traits>

namespace ze {
namespace {

constexpr int64_t kVecs = kBlock / Vec::kWidth;

// A block, 512 bytes ahead: hardware prefetchers stop at the end of each page. Inlined by force, since GCC drops calls of
// a function that only prefetches.
template <class T>
__attribute__((always_inline)) inline void prefetch(const T* x) {
  for (int64_t line = 0; line < kBlock * int64_t(sizeof(T)); line += 64)
    __builtin_prefetch((const char*)x + 512 + line);
}

template <class... T>
__attribute__((always_inline)) inline void prefetch(const T*... arrays) {
  (prefetch(arrays), ...);
}

// The factors, one in every lane.
struct AdamVecs {
  Vec grad_scale, decay, rest1, beta2, rest2, inv_root, eps, step_size;

  explicit AdamVecs(const AdamFactors& k)
      : grad_scale(Vec::fill(k.grad_scale)), decay(Vec::fill(k.decay)),
        rest1(Vec::fill(k.rest1)), beta2(Vec::fill(k.beta2)), rest2(Vec::fill(k.rest2)),
        inv_root(Vec::fill(k.inv_root)), eps(Vec::fill(k.eps)), step_size(Vec::fill(k.step_size)) {}
};

// [Note: Trailing stages] From gradient to copy an element passes a chain of some 90 cycles, too long for a CPU to keep
// enough of them in flight. So Adam runs in three stages, each a block behind the one before: while a block waits for
// its roots and quotients, the next one's moments and the last one's copy go ahead. What lies between is in L1.
template <bool kDecoupled, class G>
inline void adam_moments(const float* param, const G* grad, float* exp_avg, float* exp_avg_sq, const AdamVecs& k) {
  for (int64_t i = 0; i < kBlock; i += Vec::kWidth) {
    Vec g = Vec::load(grad + i) * k.grad_scale;
    if constexpr (!kDecoupled) g = g + k.decay * Vec::load(param + i);
    const Vec m = Vec::load(exp_avg + i), v = Vec::load(exp_avg_sq + i);
    (m + k.rest1 * (g - m)).store(exp_avg + i);
    (k.beta2 * v + k.rest2 * g * g).store(exp_avg_sq + i);
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

template <bool kStream, class C>
inline void adam_copy(const float* param, C* copy) {
  if constexpr (!std::is_same_v<C, none>) {
    for (int64_t i = 0; i < kBlock; i += Vec::kWidth) {
      if constexpr (kStream) Vec::load(param + i).stream(copy + i);
      else Vec::load(param + i).store(copy + i);
    }
  }
}

template <bool kDecoupled, class G, class C>
void adam_partial(float* param, const G* grad, float* exp_avg, float* exp_avg_sq, C* copy, int64_t n,
                  const AdamVecs& k) {
  float p[kBlock] = {}, m[kBlock] = {}, v[kBlock] = {};
  G g[kBlock] = {};
  C c[kBlock];
  memcpy(p, param, n * sizeof(float));
  memcpy(m, exp_avg, n * sizeof(float));
  memcpy(v, exp_avg_sq, n * sizeof(float));
  memcpy(g, grad, n * sizeof(G));
  adam_moments<kDecoupled>(p, g, m, v, k);
  adam_param<kDecoupled>(p, m, v, k);
  adam_copy<false>(p, c);
  memcpy(param, p, n * sizeof(float));
  memcpy(exp_avg, m, n * sizeof(float));
  memcpy(exp_avg_sq, v, n * sizeof(float));
  if constexpr (!std::is_same_v<C, none>) memcpy(copy, c, n * sizeof(C));
}

template <bool kStream, bool kDecoupled, class G, class C>
void adam_range(float* param, const G* grad, float* exp_avg, float* exp_avg_sq, C* copy, int64_t n,
                const AdamFactors& factors) {
  const AdamVecs k(factors);
  int64_t first = 0;
  if constexpr (kStream) {  // streaming stores want whole, aligned cache lines
    first = int64_t(-uintptr_t(copy) % 64 / sizeof(C));
    if (first > n) first = n;
    if (first) adam_partial<kDecoupled>(param, grad, exp_avg, exp_avg_sq, copy, first, k);
  }
  const int64_t last = n - (n - first) % kBlock;
  for (int64_t i = first; i < last + 2 * kBlock; i += kBlock) {  // [Note: Trailing stages]
    if (i < last) {
      prefetch(param + i, grad + i, exp_avg + i, exp_avg_sq + i);
      adam_moments<kDecoupled>(param + i, grad + i, exp_avg + i, exp_avg_sq + i, k);
    }
    const int64_t j = i - kBlock, h = j - kBlock;
    if (first <= j && j < last) adam_param<kDecoupled>(param + j, exp_avg + j, exp_avg_sq + j, k);
    if (first <= h) adam_copy<kStream>(param + h, copy + h);
  }
  if (last < n)
    adam_partial<kDecoupled>(param + last, grad + last, exp_avg + last, exp_avg_sq + last, copy + last, n - last, k);
  if constexpr (kStream) finish_streams();
}

template <class G, class C, bool kDecoupled>
void adam(const AdamArrays& a, int64_t begin, int64_t end, const AdamFactors& k, bool stream) {
  float *param = a.param + begin, *exp_avg = a.exp_avg + begin, *exp_avg_sq = a.exp_avg_sq + begin;
  const G* grad = (const G*)a.grad + begin;
  C* copy = (C*)a.copy + begin;
  if constexpr (!std::is_same_v<C, none>) {
    if (stream) return adam_range<true, kDecoupled>(param, grad, exp_avg, exp_avg_sq, copy, end - begin, k);
  }
  adam_range<false, kDecoupled>(param, grad, exp_avg, exp_avg_sq, copy, end - begin, k);
}

// One running sum for each position within a block, added up in order at the end. Narrow elements are widened
// through a buffer: converting to double straight from memory is twice as fast as from a register. A long range is
// read at four places in turn, as one place alone leaves the memory waiting.
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

// Single operations, rounded once: vector and scalar code agree.
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

// Adam's traffic alone. `a`, `b` and `c` change, so that no store can be dropped.
template <class G, bool kCopy>
void stream(const StreamArrays& s, int64_t begin, int64_t end) {
  const G* grad = (const G*)s.grad;
  bf16* copy = (bf16*)s.copy;
  const auto update = [](float* x, Vec y) { (Vec::load(x) + y).store(x); };
  for (int64_t i = begin; i + kBlock <= end; i += kBlock) {
    prefetch(s.a + i, grad + i, s.b + i, s.c + i);
    for (int64_t j = i; j < i + kBlock; j += Vec::kWidth) {
      const Vec g = Vec::load(grad + j);
      update(s.a + j, g);
      update(s.b + j, g);
      update(s.c + j, g);
      if constexpr (kCopy) g.stream(copy + j);
    }
  }
  if constexpr (kCopy) finish_streams();
}

constexpr Kernels table(const char* name) {
  return {
      name,
      {{{adam<float, none, false>, adam<float, none, true>},
        {adam<float, bf16, false>, adam<float, bf16, true>},
        {adam<float, fp16, false>, adam<float, fp16, true>}},
       {{adam<bf16, none, false>, adam<bf16, none, true>},
        {adam<bf16, bf16, false>, adam<bf16, bf16, true>},
        {adam<bf16, fp16, false>, adam<bf16, fp16, true>}},
       {{adam<fp16, none, false>, adam<fp16, none, true>},
        {adam<fp16, bf16, false>, adam<fp16, bf16, true>},
        {adam<fp16, fp16, false>, adam<fp16, fp16, true>}}},
      {squared_norm<float>, squared_norm<bf16>, squared_norm<fp16>},
      {accumulate<float>, accumulate<bf16>, accumulate<fp16>},
      {cast<float>, cast<bf16>, cast<fp16>},
      {{stream<float, false>, stream<float, true>},
       {stream<bf16, false>, stream<bf16, true>},
       {stream<fp16, false>, stream<fp16, true>}},
  };
}

}  // namespace
}  // namespace ze
