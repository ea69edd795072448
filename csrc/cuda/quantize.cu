// Quantizes slices into packets, and adds packets, a warp for each block of elements.
#include "device.h"
#include "../packet.h"

namespace ze {
namespace {

constexpr int kPerLane = int(kQuantizedBlock) / kWarp;
constexpr int kWarps = kThreads / kWarp;
static_assert(kPerLane == 8, "a lane writes its integers as one word of 4 or 8 bytes");

struct Slices {
  int64_t numel, blocks, count;   // elements and blocks of a slice, and the number of slices
  int64_t first_code, packet;     // of each packet, in bytes
  int bits;
};

// The elements of one lane.
struct Lane {
  int64_t first;  // within the slice
  int count;      // 0 to kPerLane

  __device__ Lane(const Slices& slices, int64_t block) {
    first = block * kQuantizedBlock + int(threadIdx.x % kWarp) * kPerLane;
    const int64_t rest = slices.numel - first;
    count = rest < 0 ? 0 : rest < kPerLane ? int(rest) : kPerLane;
  }
};

// Reads the elements of a lane, 16 bytes at a time where they are aligned, and zeros beyond the slice.
template <class T>
__device__ inline void load_lane(const T* from, int count, float* x) {
  constexpr int kPack = 16 / int(sizeof(T));
  if (count == kPerLane && uintptr_t(from) % 16 == 0) {
#pragma unroll
    for (int p = 0; p < kPerLane; p += kPack) {
      const auto pack = load<Pack<T, kPack>>(from + p);
#pragma unroll
      for (int i = 0; i < kPack; ++i) x[p + i] = to_float(pack.v[i]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) x[i] = i < count ? to_float(from[i]) : 0;
}

template <class T>
__global__ void __launch_bounds__(kThreads) quantize(const T* src, char* packets, bf16* error, float decay, Slices slices) {
  const int64_t total = slices.blocks * slices.count;
  for (int64_t b = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp; b < total; b += int64_t(gridDim.x) * kWarps) {
    const int64_t slice = b / slices.blocks, block = b % slices.blocks;
    const Lane lane(slices, block);
    const T* from = src + slice * slices.numel + lane.first;
    bf16* kept = error ? error + slice * slices.numel + lane.first : nullptr;
    float x[kPerLane], errors[kPerLane];
    load_lane(from, lane.count, x);
    if (kept) load_lane(kept, lane.count, errors);
    uint32_t magnitude = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (kept) x[i] += errors[i];
      const uint32_t bits = bits_of(x[i]) & 0x7fffffff;
      magnitude = bits > magnitude ? bits : magnitude;
    }
    magnitude = warp_max(magnitude);
    const bool finite = magnitude < kInfinityBits;
    const float step = packet_scale(magnitude, slices.bits);
    char* packet = packets + slice * slices.packet;
    if (threadIdx.x % kWarp == 0) reinterpret_cast<float*>(packet)[block] = step;
    uint32_t low = 0, high = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const uint32_t code = finite ? bits_of(x[i] / step + kRounder) & 0xff : 0;
      if (kept && i < lane.count) {
        const float lost = x[i] - float(int8_t(code)) * step;
        from_float(finite ? decay * errors[i] + (1 - decay) * lost : 0.0f, kept + i);
      }
      if (slices.bits == 4) low |= (code & 15) << 4 * i;
      else if (i < 4) low |= code << 8 * i;
      else high |= code << 8 * (i - 4);
    }
    // Beyond the slice the packet holds zeros, up to its end.
    uint32_t* to = reinterpret_cast<uint32_t*>(packet + slices.first_code + codes_bytes(lane.first, slices.bits));
    const uint32_t* end = reinterpret_cast<const uint32_t*>(packet + slices.packet);
    if (to < end) to[0] = low;
    if (slices.bits == 8 && to + 1 < end) to[1] = high;
    // The scales end with zeros up to the integers.
    if (block == slices.blocks - 1 && threadIdx.x % kWarp == 0)
      for (int64_t i = slices.blocks; i < slices.first_code / int64_t(sizeof(float)); ++i)
        reinterpret_cast<float*>(packet)[i] = 0;
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    dequantize_sum(T* target, const char* packets, int64_t num_sources, bool accumulate, Slices slices) {
  const int64_t total = slices.blocks * slices.count;
  for (int64_t b = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp; b < total; b += int64_t(gridDim.x) * kWarps) {
    const int64_t slice = b / slices.blocks, block = b % slices.blocks;
    const Lane lane(slices, block);
    if (!lane.count) continue;
    float sum[kPerLane];
    for (int64_t s = 0; s < num_sources; ++s) {
      const char* packet = packets + (slice * num_sources + s) * slices.packet;
      const float step = reinterpret_cast<const float*>(packet)[block];
      const uint32_t* words =
          reinterpret_cast<const uint32_t*>(packet + slices.first_code + codes_bytes(lane.first, slices.bits));
      // A packet ends at a multiple of 16 bytes, so the words of a lane with elements may reach past the slice alone.
      const uint32_t low = words[0], high = slices.bits == 8 && lane.count > 4 ? words[1] : 0;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int code = slices.bits == 8 ? int8_t((i < 4 ? low : high) >> 8 * (i % 4)) : int((low >> 4 * i & 15) ^ 8) - 8;
        const float value = float(code) * step;
        sum[i] = s ? sum[i] + value : value;
      }
    }
    T* to = target + slice * slices.numel + lane.first;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (i < lane.count) from_float(accumulate ? sum[i] + to_float(to[i]) : sum[i], to + i);
  }
}

Slices slices_of(int64_t n, int64_t num_slices, int bits) {
  return {n, (n + kQuantizedBlock - 1) / kQuantizedBlock, num_slices, scales_bytes(n), packet_bytes(n, bits), bits};
}

template <class T>
int quantize_slices(int device, void* stream, const void* src, void* packets, void* error, float decay, Slices slices) {
  const int64_t tiles = (slices.blocks * slices.count + kWarps - 1) / kWarps;
  return launch_tiles(quantize<T>, device, tiles, stream, static_cast<const T*>(src), static_cast<char*>(packets),
                      static_cast<bf16*>(error), decay, slices);
}

template <class T>
int sum_packets(int device, void* stream, void* target, bool accumulate, const void* packets, int64_t num_sources,
                Slices slices) {
  const int64_t tiles = (slices.blocks * slices.count + kWarps - 1) / kWarps;
  return launch_tiles(dequantize_sum<T>, device, tiles, stream, static_cast<T*>(target),
                      static_cast<const char*>(packets), num_sources, accumulate, slices);
}

}  // namespace
}  // namespace ze

int ze_cuda_quantize(int device, void* stream, const void* src, int src_dtype, int64_t n, int64_t num_slices, int bits,
                     void* packets, void* error, float decay) {
  ZE_RETURN_IF(cudaSetDevice(device));
  if (!ze::known(src_dtype) || (bits != 8 && bits != 4)) return ZE_BAD_DTYPE;
  const ze::Slices slices = ze::slices_of(n, num_slices, bits);
  const auto run = src_dtype == ZE_F32    ? ze::quantize_slices<float>
                   : src_dtype == ZE_BF16 ? ze::quantize_slices<ze::bf16>
                                          : ze::quantize_slices<ze::fp16>;
  return run(device, stream, src, packets, error, decay, slices);
}

int ze_cuda_dequantize_sum(int device, void* stream, void* target, int target_dtype, int accumulate, int64_t n,
                           int64_t num_slices, int64_t num_sources, int bits, const void* packets) {
  ZE_RETURN_IF(cudaSetDevice(device));
  if (!ze::known(target_dtype) || (bits != 8 && bits != 4)) return ZE_BAD_DTYPE;
  const ze::Slices slices = ze::slices_of(n, num_slices, bits);
  const auto run = target_dtype == ZE_F32    ? ze::sum_packets<float>
                   : target_dtype == ZE_BF16 ? ze::sum_packets<ze::bf16>
                                             : ze::sum_packets<ze::fp16>;
  return run(device, stream, target, accumulate != 0, packets, num_sources, slices);
}
