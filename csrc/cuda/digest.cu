// The digest of one array: see [Note: Digest] in csrc/digest.h. Blocks add their sums in any order, which changes no bit.
#include "device.h"
#include "../digest.h"

namespace ze {
namespace {

// Words that a block sums at a time.
constexpr int64_t kTile = 16 * kThreads;

// Returns a word that may lie at any address. Bytes behind the `rest` bytes of the array are zeros.
__device__ inline uint64_t load_bytes(const unsigned char* x, int64_t rest) {
  uint64_t word = 0;
  for (int i = 0; i < 8 && i < rest; ++i) word |= uint64_t(x[i]) << 8 * i;
  return word;
}

__global__ void __launch_bounds__(kThreads) digest(const unsigned char* x, int64_t bytes, uint64_t first_word,
                                                   unsigned long long* result) {
  const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x, stride = int64_t(gridDim.x) * kThreads;
  const int64_t whole_words = uintptr_t(x) % 8 ? 0 : bytes / 8;
  uint64_t sum = 0;
// Unrolling issues loads ahead of their use.
#pragma unroll 4
  for (int64_t i = first; i < whole_words; i += stride) sum += digest_term(load<uint64_t>(x + 8 * i), first_word + i);
  for (int64_t i = whole_words + first; 8 * i < bytes; i += stride)
    sum += digest_term(load_bytes(x + 8 * i, bytes - 8 * i), first_word + i);
  sum = block_sum<kThreads>(sum);
  if (threadIdx.x == 0) atomicAdd(result, static_cast<unsigned long long>(sum));
}

}  // namespace
}  // namespace ze

int ze_cuda_digest(int device, void* stream, const void* data, int64_t bytes, int64_t first_word, uint64_t* result) {
  ZE_RETURN_IF(cudaSetDevice(device));
  const int64_t tiles = ((bytes + 7) / 8 + ze::kTile - 1) / ze::kTile;
  return ze::launch_tiles(ze::digest, device, tiles, stream, static_cast<const unsigned char*>(data), bytes,
                          uint64_t(first_word), reinterpret_cast<unsigned long long*>(result));
}
