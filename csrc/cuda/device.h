// What every kernel needs: launches, reading and writing elements, and sums over a block.
//
// Kernels do not know how they are launched, so that emulate.h can run the same source on a CPU, thread for thread, on
// machines without a GPU.
#pragma once

#include <stdint.h>

#include "../update.h"
#include "../zeroengine_cuda.h"

#if defined(ZE_EMULATED)
#include "emulate.h"
#else
#include <cuda_runtime.h>
#endif

namespace ze {
namespace {

// Threads in a block.
constexpr int kThreads = 256;
constexpr int kWarp = 32;

// -- elements -----------------------------------------------------------------------------------------

// The emulation takes these types and their conversions from csrc/cpu.
#if !defined(ZE_EMULATED)
struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};
#endif

// Elements that one access moves.
template <class T, int kCount>
struct alignas(kCount * sizeof(T)) Pack {
  T v[kCount];
};

template <class P>
__device__ inline P load(const void* address) {
  return *static_cast<const P*>(address);
}

#if !defined(ZE_EMULATED)
__device__ inline float float_of(uint32_t u) { return __uint_as_float(u); }
__device__ inline uint32_t bits_of(float x) { return __float_as_uint(x); }

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return float_of(uint32_t(x.bits) << 16); }
__device__ inline float to_float(fp16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

// Rounded to nearest even.
__device__ inline void from_float(float x, float* y) { *y = x; }
__device__ inline void from_float(float x, fp16* y) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y->bits) : "f"(x)); }

#if __CUDA_ARCH__ < 800  // compute capability 7.5 has neither an instruction that rounds to bf16 nor one for two numbers
__device__ inline void from_float(float x, bf16* y) {
  const uint32_t u = bits_of(x);
  y->bits = x == x ? uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16) : uint16_t(0x7fff);
}
template <class T>
__device__ inline void from_floats(float low, float high, T* y) {
  from_float(low, y);
  from_float(high, y + 1);
}
#else
__device__ inline void from_float(float x, bf16* y) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y->bits) : "f"(x)); }

// Two at a time, in one instruction.
__device__ inline void from_floats(float low, float high, bf16* y) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  y[0].bits = uint16_t(word), y[1].bits = uint16_t(word >> 16);
}
__device__ inline void from_floats(float low, float high, fp16* y) {
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  y[0].bits = uint16_t(word), y[1].bits = uint16_t(word >> 16);
}
__device__ inline void from_floats(float low, float high, float* y) { y[0] = low, y[1] = high; }
#endif

__device__ inline void store_words(void* address, uint32_t x, uint32_t y) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(address), "r"(x), "r"(y) : "memory");
}
__device__ inline void store_words(void* address, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
#endif

__device__ inline uint32_t word(const float* x) { return bits_of(x[0]); }
template <class T>
__device__ inline uint32_t word(const T* x) {
  return uint32_t(x[0].bits) | uint32_t(x[1].bits) << 16;
}

// Written by hand: the compiler splits a plain store of a struct whose members were computed one by one.
template <class T>
__device__ inline void store(void* address, const Pack<T, 4>& pack) {
  const T* x = pack.v;
  if constexpr (sizeof(T) == 2) store_words(address, word(x), word(x + 2));
  else store_words(address, word(x), word(x + 1), word(x + 2), word(x + 3));
}

// -- sums and maxima -----------------------------------------------------------------------------------

// Returns, to thread 0, the sum over a block's threads in a fixed order.
template <int kCount, class T>
__device__ inline T block_sum(T x) {
  __shared__ T warps[kCount / kWarp];
  for (int step = kWarp / 2; step; step /= 2) x += __shfl_down_sync(~0u, x, step);
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = x;
  __syncthreads();
  if (threadIdx.x == 0)
    for (int i = 1; i < kCount / kWarp; ++i) x += warps[i];
  // The stores of the next sum must come after these loads.
  __syncthreads();
  return x;
}

// Returns, to every thread of a warp, the largest of its numbers.
__device__ inline uint32_t warp_max(uint32_t x) {
  for (int step = kWarp / 2; step; step /= 2) {
    const uint32_t other = __shfl_xor_sync(~0u, x, step);
    x = other > x ? other : x;
  }
  return x;
}

// -- launches -----------------------------------------------------------------------------------------

// Several times the number of resident blocks, so that all multiprocessors end at about the same time.
constexpr int64_t kBlocksPerMultiprocessor = 32;

// The items of one launch, which travel as its argument. The tiles of each item follow those of the item before it.
template <class T, int kMost>
struct Batch {
  T at[kMost];
  int count;

  // Returns the item that a tile belongs to.
  __device__ inline const T& of(int64_t tile) const {
    int k = 0;
    while (k + 1 < count && at[k + 1].first_tile <= tile) ++k;
    return at[k];
  }
};

inline bool known(int dtype) { return dtype >= ZE_F32 && dtype <= ZE_F16; }

template <class T>
struct Same {
  using type = T;
};

#define ZE_RETURN_IF(call) \
  if (const int ze_result = int(call)) return ze_result

#if !defined(ZE_EMULATED)
template <class... P>
int launch(void (*kernel)(P...), int64_t blocks, int threads, void* stream, typename Same<P>::type... arguments) {
  void* pointers[] = {static_cast<void*>(&arguments)...};
  const int result = cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(unsigned(blocks)),
                                      dim3(unsigned(threads)), pointers, 0, static_cast<cudaStream_t>(stream));
  // This clears the error, so that the next call does not report it again.
  if (result) cudaGetLastError();
  return result;
}
#endif

// Launches one block per tile, or fewer on large inputs: kernels stride over the tiles.
template <class... P>
int launch_tiles(void (*kernel)(P...), int device, int64_t tiles, void* stream,
                 typename Same<P>::type... arguments) {
  if (!tiles) return ZE_OK;
  int multiprocessors = 0;
  ZE_RETURN_IF(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  const int64_t most = multiprocessors * kBlocksPerMultiprocessor;
  return launch(kernel, tiles < most ? tiles : most, kThreads, stream, arguments...);
}

}  // namespace
}  // namespace ze
