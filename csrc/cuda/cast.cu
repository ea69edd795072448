// Casts many tensors into a bucket in one launch, and writes a few bytes from the host.
#include <string.h>

#include "device.h"

namespace ze {
namespace {

constexpr int kPack = 4, kPacks = 4;
constexpr int64_t kTile = kThreads * kPack * kPacks;
// Copies in one launch.
constexpr int kCopies = 64;

struct Copy {
  const void* src;
  void* dst;
  int64_t numel;
  int64_t first_tile;
  int32_t src_dtype;
};

using Copies = Batch<Copy, kCopies>;

template <bool kAccumulate, class S, class D>
__device__ inline float value_of(S src, D dst, float scale) {
  const float x = to_float(src) * scale;
  return kAccumulate ? to_float(dst) + x : x;
}

template <bool kAccumulate, class S, class D>
__device__ inline void cast_tile(const S* src, D* dst, int64_t n, float scale) {
  const bool aligned = uintptr_t(src) % sizeof(Pack<S, kPack>) == 0 && uintptr_t(dst) % sizeof(Pack<D, kPack>) == 0;
  // The elements that no whole pack holds: those after the last pack of the last tile, or all.
  const int64_t packed = aligned ? n / kPack * kPack : 0;
#pragma unroll 1
  for (int64_t i = packed + threadIdx.x; i < n; i += kThreads)
    from_float(value_of<kAccumulate>(src[i], kAccumulate ? dst[i] : D{}, scale), dst + i);
  Pack<S, kPack> s[kPacks];
#pragma unroll
  for (int q = 0; q < kPacks; ++q) {
    const int64_t first = (q * kThreads + threadIdx.x) * kPack;
    if (first < packed) s[q] = load<Pack<S, kPack>>(src + first);
  }
#pragma unroll
  for (int q = 0; q < kPacks; ++q) {
    const int64_t first = (q * kThreads + threadIdx.x) * kPack;
    if (first >= packed) break;
    D* to = dst + first;
    Pack<D, kPack> d = {};
    if constexpr (kAccumulate) d = load<Pack<D, kPack>>(to);
#pragma unroll
    for (int j = 0; j < kPack; j += 2)
      from_floats(value_of<kAccumulate>(s[q].v[j], d.v[j], scale),
                  value_of<kAccumulate>(s[q].v[j + 1], d.v[j + 1], scale), d.v + j);
    store(to, d);
  }
}

template <bool kAccumulate, class D>
__global__ void __launch_bounds__(kThreads) cast(Copies copies, int64_t num_tiles, float scale) {
  for (int64_t tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const Copy& copy = copies.of(tile);
    const int64_t begin = (tile - copy.first_tile) * kTile;
    const int64_t n = copy.numel - begin < kTile ? copy.numel - begin : kTile;
    D* dst = static_cast<D*>(copy.dst) + begin;
    if (copy.src_dtype == ZE_F32) cast_tile<kAccumulate>(static_cast<const float*>(copy.src) + begin, dst, n, scale);
    else if (copy.src_dtype == ZE_BF16) cast_tile<kAccumulate>(static_cast<const bf16*>(copy.src) + begin, dst, n, scale);
    else cast_tile<kAccumulate>(static_cast<const fp16*>(copy.src) + begin, dst, n, scale);
  }
}

// Bytes that travel as an argument of one launch.
constexpr int64_t kArgumentBytes = 2048;

struct BytesArgument {
  char bytes[kArgumentBytes];
};

__global__ void __launch_bounds__(kThreads) write(BytesArgument argument, char* dst, int64_t bytes) {
  for (int64_t i = threadIdx.x; i < bytes; i += kThreads) dst[i] = argument.bytes[i];
}

}  // namespace
}  // namespace ze

int ze_cuda_cast(int device, void* stream, const ze_cuda_copy* copies, int64_t num_copies, int dst_dtype, float scale,
                 int accumulate) {
  ZE_RETURN_IF(cudaSetDevice(device));
  if (!ze::known(dst_dtype)) return ZE_BAD_DTYPE;
  for (int64_t i = 0; i < num_copies; ++i)
    if (!ze::known(copies[i].src_dtype)) return ZE_BAD_DTYPE;
  decltype(&ze::cast<false, float>) const kernels[2][3] = {
      {ze::cast<false, float>, ze::cast<false, ze::bf16>, ze::cast<false, ze::fp16>},
      {ze::cast<true, float>, ze::cast<true, ze::bf16>, ze::cast<true, ze::fp16>}};
  for (int64_t i = 0; i < num_copies;) {
    ze::Copies batch = {};
    int64_t tiles = 0;
    for (; i < num_copies && batch.count < ze::kCopies; ++i) {
      if (!copies[i].numel) continue;
      batch.at[batch.count++] = {copies[i].src, copies[i].dst, copies[i].numel, tiles, copies[i].src_dtype};
      tiles += (copies[i].numel + ze::kTile - 1) / ze::kTile;
    }
    ZE_RETURN_IF(
        ze::launch_tiles(kernels[accumulate != 0][dst_dtype], device, tiles, stream, batch, tiles, scale));
  }
  return ZE_OK;
}

int ze_cuda_write(int device, void* stream, void* dst, const void* src, int64_t bytes) {
  ZE_RETURN_IF(cudaSetDevice(device));
  for (int64_t done = 0; done < bytes; done += ze::kArgumentBytes) {
    const int64_t some = bytes - done < ze::kArgumentBytes ? bytes - done : ze::kArgumentBytes;
    ze::BytesArgument argument;
    memcpy(argument.bytes, static_cast<const char*>(src) + done, size_t(some));
    ZE_RETURN_IF(ze::launch(ze::write, 1, ze::kThreads, stream, argument, static_cast<char*>(dst) + done, some));
  }
  return ZE_OK;
}
