// Blocks that fail on purpose, for tests. A fault replaces the system's result of a block, so that all of the code above
// runs as it does with a failing disk.

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>

#include "queue.h"

namespace {

std::atomic<int> what{ZE_AIO_FAULT_NONE};
std::atomic<int64_t> first{0}, last{0}, counted{0};

void read_environment() {
  const char* text = std::getenv("ZEROENGINE_AIO_FAULT");
  if (text == nullptr || *text == '\0') return;
  char kind[16] = "";
  long long begin = 1, count = 1;
  if (std::sscanf(text, "%15[^:]:%lld:%lld", kind, &begin, &count) < 1) return;
  const bool is_short = kind[0] == 's';
  ze_aio_set_fault(is_short ? ZE_AIO_FAULT_SHORT : std::atoi(kind), begin, count);
}

}  // namespace

namespace ze {

void read_fault_environment() {
  static std::once_flag once;
  std::call_once(once, read_environment);
}

void inject(Block* block) {
  if (what.load(std::memory_order_acquire) == ZE_AIO_FAULT_NONE) return;
  const int64_t number = counted.fetch_add(1) + 1;
  if (number < first || number > last) return;
  block->fault = what;
  if (block->fault != ZE_AIO_FAULT_SHORT) return;
  const int64_t half = block->bytes / 2;
  block->request = half < ZE_AIO_ALIGNMENT ? half + (half == 0) : half - half % ZE_AIO_ALIGNMENT;
}

}  // namespace ze

extern "C" ZE_API void ze_aio_set_fault(int kind, int64_t begin, int64_t count) {
  what.store(ZE_AIO_FAULT_NONE);
  first = begin;
  last = begin + count - 1;
  counted = 0;
  what.store(kind, std::memory_order_release);
}
