#include <string.h>

#include "kernels.h"
#include "parallel.h"

namespace {

bool known(int dtype, int bits) { return dtype >= ZE_F32 && dtype <= ZE_F16 && (bits == 8 || bits == 4); }

int item_size(int dtype) { return dtype == ZE_F32 ? 4 : 2; }

// Calls f(slice, block) for every block of every slice, in any order.
template <class F>
void for_each_block(int64_t n, int64_t num_slices, int num_threads, F f) {
  const int64_t blocks = (n + ze::kQuantizedBlock - 1) / ze::kQuantizedBlock;
  ze::parallel_for(blocks * num_slices * ze::kQuantizedBlock, ze::kQuantizedBlock, num_threads,
                   [&](int64_t begin, int64_t end) {
                     for (int64_t i = begin / ze::kQuantizedBlock; i < end / ze::kQuantizedBlock; ++i)
                       f(i / blocks, i % blocks);
                   });
}

int64_t block_size(int64_t n, int64_t block) {
  const int64_t rest = n - block * ze::kQuantizedBlock;
  return rest < ze::kQuantizedBlock ? rest : ze::kQuantizedBlock;
}

}  // namespace

int64_t ze_packet_bytes(int64_t n, int bits) { return bits == 8 || bits == 4 ? ze::packet_bytes(n, bits) : -1; }

int ze_quantize(const void* src, int src_dtype, int64_t n, int64_t num_slices, int bits, void* packets, void* error,
                float decay, int num_threads) {
  if (!known(src_dtype, bits)) return ZE_BAD_DTYPE;
  const auto quantize = ze::kernels().quantize[src_dtype];
  const int64_t packet = ze::packet_bytes(n, bits), first_code = ze::scales_bytes(n), item = item_size(src_dtype);
  const int64_t scales = (n + ze::kQuantizedBlock - 1) / ze::kQuantizedBlock * int64_t(sizeof(float));
  for (int64_t s = 0; s < num_slices; ++s) {
    char* to = static_cast<char*>(packets) + s * packet;
    memset(to + scales, 0, size_t(first_code - scales));
    const int64_t end = first_code + ze::codes_bytes(n, bits);
    memset(to + end, 0, size_t(packet - end));
  }
  for_each_block(n, num_slices, num_threads, [&](int64_t s, int64_t block) {
    char* to = static_cast<char*>(packets) + s * packet;
    const int64_t begin = block * ze::kQuantizedBlock, element = s * n + begin;
    quantize(static_cast<const char*>(src) + element * item, block_size(n, block), bits,
             reinterpret_cast<float*>(to) + block,
             reinterpret_cast<uint8_t*>(to + first_code + ze::codes_bytes(begin, bits)),
             error ? static_cast<ze::bf16*>(error) + element : nullptr, decay);
  });
  return ZE_OK;
}

int ze_dequantize_sum(void* target, int target_dtype, int accumulate, int64_t n, int64_t num_slices,
                      int64_t num_sources, int bits, const void* packets, int num_threads) {
  if (!known(target_dtype, bits)) return ZE_BAD_DTYPE;
  const ze::Kernels& kernels = ze::kernels();
  const int64_t packet = ze::packet_bytes(n, bits), first_code = ze::scales_bytes(n), item = item_size(target_dtype);
  for_each_block(n, num_slices, num_threads, [&](int64_t s, int64_t block) {
    alignas(64) float sum[ze::kQuantizedBlock];
    const int64_t begin = block * ze::kQuantizedBlock, count = block_size(n, block);
    for (int64_t i = 0; i < num_sources; ++i) {
      const char* from = static_cast<const char*>(packets) + (s * num_sources + i) * packet;
      kernels.dequantize(reinterpret_cast<const uint8_t*>(from + first_code + ze::codes_bytes(begin, bits)),
                         reinterpret_cast<const float*>(from)[block], count, bits, sum, i == 0);
    }
    char* to = static_cast<char*>(target) + (s * n + begin) * item;
    if (accumulate) kernels.accumulate[target_dtype](sum, to, count, false);
    kernels.cast[target_dtype](sum, to, count);
  });
  return ZE_OK;
}
