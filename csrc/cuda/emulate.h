// CUDA's language and the few runtime functions that the kernels use, on a CPU, for tests only. Blocks run one after
// another, and each thread is a fiber that runs until it has to wait for others. This is slow and exact: source, order
// of operations, barriers and bounds are those of the GPU.
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <vector>

#include "../api.h"
#include "../cpu/scalar.h"

#define __host__
#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__

enum {
  cudaSuccess = 0,
  cudaErrorInsufficientDriver = 35,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorInvalidDevice = 101,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorUnsupportedPtxVersion = 222,
  cudaErrorLaunchFailure = 719,
};
typedef int cudaError_t;
enum { cudaDevAttrMultiProcessorCount };
struct cudaFuncAttributes {};

// The number of multiprocessors of the only device, number 0. Tests set it: results must not depend on it.
extern "C" {
ZE_API inline int ze_emulated_multiprocessors = 2;
}

inline int cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
inline int cudaGetLastError() { return cudaSuccess; }
inline int cudaFuncGetAttributes(cudaFuncAttributes*, const void*) { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t) { return "an emulated error"; }
inline int cudaDeviceGetAttribute(int* value, int, int) { return *value = ze_emulated_multiprocessors, cudaSuccess; }

namespace ze {
namespace {

template <class T>
void from_floats(float low, float high, T* y) {
  from_float(low, y);
  from_float(high, y + 1);
}

// One access of the GPU, which must be aligned to its own size.
template <class... W>
void store_words(void* address, W... words) {
  struct alignas(sizeof...(W) * sizeof(uint32_t)) Words {
    uint32_t v[sizeof...(W)];
  };
  *static_cast<Words*>(address) = {{words...}};
}

struct Index {
  unsigned x;
};
Index threadIdx, blockIdx, gridDim;

constexpr size_t kStack = 64 << 10;
constexpr int kEmulatedWarp = 32;

struct Barrier {
  int arrived = 0, generation = 0;
};

struct Fiber {
  ucontext_t context = {};
  std::vector<char> stack = std::vector<char>(kStack);
  bool done = false;
};

struct Block {
  ucontext_t scheduler;
  std::vector<Fiber> fibers;
  std::function<void()> kernel;
  Barrier all, warps[1024 / kEmulatedWarp];
  double shuffled[1024];
  int num_threads = 0, releases = 0;
} block;

inline void wait_at(Barrier& barrier, int count) {
  const int generation = barrier.generation;
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    ++barrier.generation;
    ++block.releases;
    return;
  }
  const Index mine = threadIdx;
  while (barrier.generation == generation) swapcontext(&block.fibers[mine.x].context, &block.scheduler);
}

inline void __syncthreads() { wait_at(block.all, block.num_threads); }

inline void __syncwarp() { wait_at(block.warps[threadIdx.x / kEmulatedWarp], kEmulatedWarp); }

template <class T>
T __shfl_down_sync(unsigned, T x, int step) {
  const int thread = int(threadIdx.x), lane = thread % kEmulatedWarp;
  Barrier& warp = block.warps[thread / kEmulatedWarp];
  static_assert(sizeof(T) == sizeof(double), "shuffled has the room of a double for each thread");
  memcpy(&block.shuffled[thread], &x, sizeof(T));
  wait_at(warp, kEmulatedWarp);
  if (lane + step < kEmulatedWarp) memcpy(&x, &block.shuffled[thread + step], sizeof(T));
  wait_at(warp, kEmulatedWarp);
  return x;
}

inline uint32_t __shfl_xor_sync(unsigned, uint32_t x, int mask) {
  const int thread = int(threadIdx.x);
  Barrier& warp = block.warps[thread / kEmulatedWarp];
  block.shuffled[thread] = x;  // a double holds 32 bits exactly
  wait_at(warp, kEmulatedWarp);
  x = uint32_t(block.shuffled[thread ^ mask]);
  wait_at(warp, kEmulatedWarp);
  return x;
}

// Fibers run one at a time.
inline void atomicAdd(unsigned long long* sum, unsigned long long x) { *sum += x; }

inline void run_fiber() {
  block.kernel();
  block.fibers[threadIdx.x].done = true;
}

inline void make_ready(Fiber& fiber) {
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.data();
  fiber.context.uc_stack.ss_size = kStack;
  fiber.context.uc_link = &block.scheduler;
  fiber.done = false;
  makecontext(&fiber.context, run_fiber, 0);
}

// Runs a warp as far as it gets alone, possibly far ahead of the others. Returns how many of its threads ended.
inline int run_warp(int first) {
  int ended = 0;
  for (int releases = -1; releases != block.releases;) {
    releases = block.releases;
    for (int i = first; i < first + kEmulatedWarp && i < block.num_threads; ++i) {
      Fiber& fiber = block.fibers[size_t(i)];
      if (fiber.done) continue;
      threadIdx.x = unsigned(i);
      swapcontext(&block.scheduler, &fiber.context);
      ended += fiber.done;
    }
  }
  return ended;
}

// Runs warp after warp until all are done. Returns false if they wait for something that never happens.
inline bool run_block() {
  block.all = {};
  for (Barrier& warp : block.warps) warp = {};
  for (int i = 0; i < block.num_threads; ++i) make_ready(block.fibers[size_t(i)]);
  for (int left = block.num_threads; left;) {
    const int before = left, releases = block.releases;
    for (int first = 0; first < block.num_threads; first += kEmulatedWarp) left -= run_warp(first);
    if (left == before && releases == block.releases) return false;
  }
  return true;
}

template <class T>
struct Argument {
  using type = T;
};

template <class... P>
int launch(void (*kernel)(P...), int64_t blocks, int threads, void*, typename Argument<P>::type... arguments) {
  block.num_threads = threads;
  if (int(block.fibers.size()) < threads) block.fibers = std::vector<Fiber>(size_t(threads));
  block.kernel = [=] { kernel(arguments...); };
  gridDim.x = unsigned(blocks);
  for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
    if (!run_block()) return cudaErrorLaunchFailure;
  return cudaSuccess;
}

}  // namespace
}  // namespace ze
