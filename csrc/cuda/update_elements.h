// The elements of an update: which ones a thread has, how it reads and writes them, and how they are rounded.
#pragma once

#include "device.h"

namespace ze {
namespace {

// What the rules and the code of 8-bit moments use, where V is a float. A range is an int.
template <class V>
__device__ inline float fill(float x) {
  return x;
}
template <class V>
__device__ inline int whole(int n) {
  return n;
}
template <class V>
__device__ inline float power_of_2(int n) {
  return float_of(uint32_t(127 + n) << 23);
}
__device__ inline int exponent_of(float x) { return int(bits_of(x) >> 23) - 127; }
__device__ inline int third_of(int n) { return n * 11 >> 5; }
__device__ inline float square_root(float x) { return sqrtf(x); }
__device__ inline float larger(float a, float b) { return a > b ? a : b; }
__device__ inline float smaller(float a, float b) { return a < b ? a : b; }
__device__ inline float sign_of(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : 0.0f; }
__device__ inline float magnitude_of(float x) { return float_of(bits_of(x) & 0x7fffffff); }

// Computes an entry, because a table would lie in memory.
template <int kRanges, float (*entry)(int, int), class V>
__device__ inline float pick(int range) {
  return entry(range, kRanges);
}

}  // namespace
}  // namespace ze

#include "../dynamic_code.h"
#include "../rules.h"

namespace ze {
namespace {

// A thread takes four neighbors at a time: 16 bytes of float or 8 of bf16 or fp16, and a warp's access is one contiguous
// range. Wider accesses of 16-bit types would make those of float strided. A block of threads updates a slab at one
// time, and a tile of some slabs before it looks for the next tile.
constexpr int kPack = 4;
constexpr int kWarpNumel = kWarp * kPack, kSlab = kThreads * kPack, kTile = 2 * kSlab;
// The warps that share a block of 8-bit moments.
constexpr int kSharing = ZE_MOMENT_BLOCK / kWarpNumel;
static_assert(kSharing * kWarpNumel == ZE_MOMENT_BLOCK && kSharing == 2, "");

struct UpdateRun {
  int64_t begin, end, first_tile;
  uint64_t index;  // of element 0 among those that share the seed
  uint64_t mixed_seed;
  UpdateFactors factors;
  int32_t rule;  // kNoRule: nothing is updated
};
static_assert(sizeof(UpdateRun) == ZE_CUDA_RUN_BYTES, "");
constexpr int32_t kNoRule = -1;

// Elements `begin` to `end` of a slab, which begins at element `origin`. Their indices have the same upper half.
struct Part {
  const UpdateRun& run;
  int64_t origin;
  int begin, end;

  // The first element of the calling thread's warp within the slab, and that of the thread within the warp.
  __device__ int warp() const { return int(threadIdx.x) / kWarp * kWarpNumel; }
  __device__ int lane() const { return int(threadIdx.x) % kWarp * kPack; }
  // The thread's first element.
  __device__ int64_t first() const { return origin + warp() + lane(); }
  __device__ bool has(int element) const { return begin <= element && element < end; }
  __device__ Random random() const {
    return random_of(run.mixed_seed, (run.index + uint64_t(origin + begin)) >> 32, uint32_t(run.index));
  }
};

// -- memory -------------------------------------------------------------------------------------------

// Eight bits of a moment.
struct code8 {
  uint8_t bits;
};

__device__ inline int size_of(int dtype) { return dtype == ZE_F32 ? 4 : 2; }

// Four elements as they lie in memory: each in a word, or two or four in one.
using Words = Pack<uint32_t, kPack>;

// Where a warp's elements of an array go if they are not complete and aligned: a word for each.
__device__ inline Words* staged() {
  __shared__ Words of_threads[kThreads];
  return of_threads + threadIdx.x / kWarp * kWarp;
}

// Copies the elements of a warp that are in the part one by one: from an array, with zeros for others, or to it.
template <class T, bool kFrom>
__device__ inline void copy_singly(void* array, const Part& part) {
  __syncwarp();
#pragma unroll 1
  for (int j = int(threadIdx.x) % kWarp; j < kWarpNumel; j += kWarp) {
    T* element = static_cast<T*>(array) + part.origin + part.warp() + j;
    uint32_t& word = staged()[j / kPack].v[j % kPack];
    if (kFrom) word = part.has(part.warp() + j) ? *element : 0;
    else if (part.has(part.warp() + j)) *element = T(word);
  }
  __syncwarp();
}

template <bool kFrom>
__device__ inline void copy_singly(void* array, int size, const Part& part) {
  if (size == 4) copy_singly<uint32_t, kFrom>(array, part);
  if (size == 2) copy_singly<uint16_t, kFrom>(array, part);
  if (size == 1) copy_singly<uint8_t, kFrom>(array, part);
}

// Reads a thread's elements. A complete part is aligned.
template <bool kComplete>
__device__ inline Words read(const void* array, int size, const Part& part) {
  if constexpr (!kComplete) {
    copy_singly<true>(const_cast<void*>(array), size, part);
    const Words x = staged()[threadIdx.x % kWarp];
    if (size == 4) return x;
    if (size == 1) return {{x.v[0] | x.v[1] << 8 | x.v[2] << 16 | x.v[3] << 24}};
    return {{x.v[0] | x.v[1] << 16, x.v[2] | x.v[3] << 16}};
  }
  if (size == 4) return load<Words>(static_cast<const uint32_t*>(array) + part.first());
  if (size == 1) return {{load<uint32_t>(static_cast<const uint8_t*>(array) + part.first())}};
  const auto two = load<Pack<uint32_t, 2>>(static_cast<const uint16_t*>(array) + part.first());
  return {{two.v[0], two.v[1]}};
}

template <bool kComplete>
__device__ inline void write(void* array, int size, const Part& part, const Words& x) {
  if constexpr (kComplete) {
    if (size == 4) store_words(static_cast<uint32_t*>(array) + part.first(), x.v[0], x.v[1], x.v[2], x.v[3]);
    if (size == 2) store_words(static_cast<uint16_t*>(array) + part.first(), x.v[0], x.v[1]);
    if (size == 1) *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(array) + part.first()) = x.v[0];
  } else {
    Words& words = staged()[threadIdx.x % kWarp];
#pragma unroll
    for (int j = 0; j < kPack; ++j)
      words.v[j] = size == 4 ? x.v[j] : size == 2 ? x.v[j / 2] >> 16 * (j % 2) : x.v[0] >> 8 * j;
    copy_singly<false>(array, size, part);
  }
}

template <class T>
__device__ inline void widen(const Words& x, float* values) {
#pragma unroll
  for (int j = 0; j < kPack; ++j) values[j] = to_float(T{uint16_t(x.v[j / 2] >> 16 * (j % 2))});
}

__device__ inline void widen(const Words& x, int dtype, float* values) {
  if (dtype == ZE_BF16) return widen<bf16>(x, values);
  if (dtype == ZE_F16) return widen<fp16>(x, values);
#pragma unroll
  for (int j = 0; j < kPack; ++j) values[j] = float_of(x.v[j]);
}

// Returns floats in another dtype, rounded to nearest even.
template <class T>
__device__ inline Words narrow(const float* values) {
  Pack<T, kPack> pack;
#pragma unroll
  for (int j = 0; j < kPack; j += 2) from_floats(values[j], values[j + 1], pack.v + j);
  return {{word(pack.v), word(pack.v + 2)}};
}

__device__ inline Words narrow(const float* values, int dtype) {
  if (dtype == ZE_BF16) return narrow<bf16>(values);
  if (dtype == ZE_F16) return narrow<fp16>(values);
  return {{bits_of(values[0]), bits_of(values[1]), bits_of(values[2]), bits_of(values[3])}};
}

// -- rounding -----------------------------------------------------------------------------------------

// "Stochastic rounding" in csrc/cpu/update.inl.h.
constexpr float kLargestBf16 = 0x1.fep127f;

__device__ inline uint32_t random_word(const Random& r, uint32_t i) {
  uint32_t x = r.first + i;
  x = ((x ^ x >> 16) * 0x7feb352d) ^ r.key;
  x = (x ^ x >> 15) * 0x846ca68b;
  return x ^ x >> 16;
}

// Returns a random word; 0 where `value`, or an infinite one, could be rounded beyond the largest bf16.
__device__ inline uint32_t rounding_word(const Random& r, uint32_t i, float value) {
  return magnitude_of(value) < kLargestBf16 ? random_word(r, i) : 0;
}

__device__ inline uint32_t half_of(uint32_t word, bool upper) { return upper ? word >> 16 : word & 0xffff; }

__device__ inline void put_bf16(Words& x, int j, float value, uint32_t random) {
  x.v[j / 2] |= (bits_of(value) + random) >> 16 << 16 * (j % 2);
}

// Returns a thread's floats in bf16, rounded by halves of the second words.
__device__ inline Words narrow_randomly(const float* values, const Part& part, bool upper) {
  const Random second = second_random(part.random());
  Words x = {};
#pragma unroll
  for (int j = 0; j < kPack; ++j)
    put_bf16(x, j, values[j], half_of(rounding_word(second, uint32_t(part.first()) + uint32_t(j), values[j]), upper));
  return x;
}

// "A dynamic code" in csrc/dynamic_code.h.
template <bool kSigned>
__device__ inline float decode(uint32_t code, float scale) {
  if (!kSigned) return fraction_of<8>(float(code)) * scale;
  const float number = float(int8_t(code)), fraction = fraction_of<7>(magnitude_of(number));
  return float_of(bits_of(fraction) ^ (bits_of(number) & 0x80000000)) * scale;
}

template <bool kSigned>
__device__ inline uint32_t encode(float value, float inverse_scale, float threshold) {
  const float fraction = magnitude_of(value) * inverse_scale;
  float number = number_of<kSigned ? 7 : 8>(fraction) + threshold;
  if (!kSigned) number = larger(number, fraction > 0 ? 1.0f : 0.0f);
  const int code = int(number);
  return uint32_t(kSigned && value < 0 ? -code : code) & 0xff;
}

}  // namespace
}  // namespace ze
