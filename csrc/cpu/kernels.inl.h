// The kernels, written once over the type Vec, which the including file chooses.
//
// [Note: Same bits everywhere] Each element goes through the same IEEE operations in the same order at every
// position, length, thread count and instruction set. There is no fused multiply-add: the build sets
// -ffp-contract=off, and memory is the limit anyway. An incomplete block runs through the same code on a padded copy.
#pragma once

#include <type_traits>

#include "../digest.h"
#include "packets.inl.h"

namespace ze {
namespace {

constexpr int64_t kVecs = kBlock / Vec::kWidth;
// Elements that a kernel of several stages handles in the L1 cache.
constexpr int64_t kStretch = kMomentBlock;

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

// Keeps one running sum for each position within a block, and adds them in order at the end. Narrow elements are
// widened through a buffer: converting to double from memory is twice as fast as from a register. A long range is read
// at four places in turn, because one place alone does not use the memory's bandwidth.
template <class T>
double squared_norm(const void* data, int64_t begin, int64_t end) {
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

// The compiler turns the inner loop into vector code. Memory is read at four places in turn, as in squared_norm.
inline uint64_t digest(const void* data, int64_t n, uint64_t first_place) {
  constexpr int64_t kWords = 128;
  const char* x = (const char*)data;
  const int64_t stretches = (n + kWords - 1) / kWords, places = stretches % 4 ? 1 : 4;
  uint64_t sum = 0;
  for (int64_t s = 0; s < stretches; ++s) {
    const int64_t begin = (s % places * (stretches / places) + s / places) * kWords;
    const int64_t end = begin + kWords < n ? begin + kWords : n;
    for (int64_t i = begin; i < end; i += 8) __builtin_prefetch(x + 8 * i + 512);
    for (int64_t i = begin; i < end; ++i) {
      uint64_t word;
      memcpy(&word, x + 8 * i, 8);
      sum += digest_term(word, first_place + uint64_t(i));
    }
  }
  return sum;
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

}  // namespace
}  // namespace ze

#include "update.inl.h"

namespace ze {
namespace {

constexpr Kernels table(const char* name) {
  Kernels kernels = {
      name,
      {},
      {decode_moment<false>, decode_moment<true>},
      {encode_moment<false>, encode_moment<true>},
      {squared_norm<float>, squared_norm<bf16>, squared_norm<fp16>},
      digest,
      {accumulate<float>, accumulate<bf16>, accumulate<fp16>},
      {cast<float>, cast<bf16>, cast<fp16>},
      {quantize<float>, quantize<bf16>, quantize<fp16>},
      dequantize,
      {{stream<float, false>, stream<float, true>},
       {stream<bf16, false>, stream<bf16, true>},
       {stream<fp16, false>, stream<fp16, true>}},
  };
  updates_of(kernels.update);
  return kernels;
}

}  // namespace
}  // namespace ze
