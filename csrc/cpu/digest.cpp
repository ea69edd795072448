#include <string.h>

#include "../digest.h"
#include "kernels.h"
#include "parallel.h"

namespace {

// Words that the kernel sums at a time: a multiple of what it reads at four places.
constexpr int64_t kChunk = 1 << 15;

}  // namespace

uint64_t ze_digest(const void* data, int64_t bytes, int64_t first_word, int num_threads) {
  const char* x = (const char*)data;
  const int64_t words = bytes / 8, rest = bytes % 8;
  const auto digest = ze::kernels().digest;
  uint64_t sum = 0;
  ze::parallel_for(words, kChunk, num_threads, [&](int64_t begin, int64_t end) {
    uint64_t part = 0;
    for (int64_t i = begin; i < end; i += kChunk)
      part += digest(x + 8 * i, i + kChunk < end ? kChunk : end - i, uint64_t(first_word + i));
    __atomic_fetch_add(&sum, part, __ATOMIC_RELAXED);
  });
  if (rest) {
    uint64_t word = 0;
    memcpy(&word, x + 8 * words, size_t(rest));
    sum += ze::digest_term(word, uint64_t(first_word + words));
  }
  return sum;
}
