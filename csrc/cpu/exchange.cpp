// The exchange between ranks of one host: counters in shared pages, and sums over the memory of other ranks.
//
// A rank's buffers for communication are one memfd. Sums read it with pread: the pages of other ranks then never count
// towards this process, and the copy into the cache is the only copy.

#include "../zeroengine.h"

#include <cerrno>
#include <climits>
#include <cstring>

#include <sys/mman.h>
#include <unistd.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#endif

namespace {

// About 50 us: longer than the usual delay of another rank, shorter than a wake-up takes.
constexpr int kSpins = 2000;
// Elements. A chunk and its sum in float fit into the L2 cache.
constexpr int64_t kChunk = 16 * 1024;
constexpr uintptr_t kHugePage = uintptr_t(2) << 20;
// MADV_COLLAPSE, for which the C library's headers of many systems have no name.
constexpr int kCollapse = 25;

bool reached(const uint32_t* address, uint32_t value) {
  return static_cast<int32_t>(__atomic_load_n(address, __ATOMIC_ACQUIRE) - value) >= 0;
}

// Asks for huge pages, whatever the system's default for shared memory, which is not to use them. They are there when
// this returns. A kernel before 6.1 refuses, and so does one that finds no free huge page: then pages stay small.
void collapse(void* address, int64_t bytes) {
#if defined(__linux__)
  const uintptr_t begin = (uintptr_t(address) + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t end = (uintptr_t(address) + uintptr_t(bytes)) & ~(kHugePage - 1);
  for (uintptr_t page = begin; page < end; page += kHugePage) {
    // Without a small page in it a huge page cannot be made, so this writes, and changes no value.
    __atomic_fetch_or(reinterpret_cast<char*>(page), 0, __ATOMIC_RELAXED);
    if (madvise(reinterpret_cast<void*>(page), kHugePage, kCollapse)) return;
  }
#else
  (void)address, (void)bytes;
#endif
}

int item_size(int dtype) { return dtype == ZE_F32 ? 4 : 2; }

}  // namespace

extern "C" {

ZE_API void ze_post(uint32_t* address, uint32_t value) {
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
#if defined(__linux__)
  syscall(SYS_futex, address, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

ZE_API uint32_t ze_load(const uint32_t* address) { return __atomic_load_n(address, __ATOMIC_ACQUIRE); }

ZE_API int ze_wait(const uint32_t* address, uint32_t value, int timeout_us) {
  for (int i = 0; i < kSpins; ++i) {
    if (reached(address, value)) return 1;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
#if defined(__linux__)
  const uint32_t seen = __atomic_load_n(address, __ATOMIC_ACQUIRE);
  if (static_cast<int32_t>(seen - value) < 0) {
    const timespec limit{timeout_us / 1000000, (timeout_us % 1000000) * 1000L};
    syscall(SYS_futex, address, FUTEX_WAIT, seen, &limit, nullptr, 0);
  }
#else
  usleep(timeout_us < 50 ? timeout_us : 50);
#endif
  return reached(address, value);
}

ZE_API int64_t ze_pread(int fd, void* target, int64_t bytes, int64_t offset) {
  char* out = static_cast<char*>(target);
  for (int64_t done = 0; done < bytes;) {
    const ssize_t n = pread(fd, out + done, static_cast<size_t>(bytes - done), offset + done);
    if (n > 0) {
      done += n;
    } else if (n == 0) {
      // The other rank's memory is shorter than announced.
      return -EIO;
    } else if (errno != EINTR) {
      return -errno;
    }
  }
  return bytes;
}

ZE_API int ze_map(void* address, int64_t bytes, int fd, int64_t offset, int shared) {
  const int flags = (shared ? MAP_SHARED : MAP_PRIVATE) | MAP_FIXED;
  void* at = mmap(address, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, flags, fd, offset);
  if (at == MAP_FAILED) return -errno;
#ifdef MADV_POPULATE_READ
  // All pages at once take two thirds of the time of a fault at the first use of each, which would slow down the
  // computation and look like a part of it. A kernel before 5.14 refuses, and the pages are mapped by faults.
  if (!shared) madvise(at, static_cast<size_t>(bytes), MADV_POPULATE_READ);
#endif
  if (shared) collapse(at, bytes);
  return 0;
}

ZE_API int ze_unmap(void* address, int64_t bytes) {
  const int flags = MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS | MAP_NORESERVE;
  void* at = mmap(address, static_cast<size_t>(bytes), PROT_NONE, flags, -1, 0);
  return at == MAP_FAILED ? -errno : 0;
}

ZE_API int64_t ze_sum(void* target, int target_dtype, int accumulate, int64_t n, int source_dtype, int num_sources,
                      const void* const* local, const int* fds, const int64_t* offsets) {
  if (target_dtype < ZE_F32 || target_dtype > ZE_F16 || source_dtype < ZE_F32 || source_dtype > ZE_F16)
    return ZE_BAD_DTYPE;
  alignas(64) static thread_local float sum[kChunk];
  alignas(64) static thread_local char piece[kChunk * sizeof(float)];
  const int64_t source_size = item_size(source_dtype), target_size = item_size(target_dtype);
  for (int64_t start = 0; start < n; start += kChunk) {
    const int64_t count = n - start < kChunk ? n - start : kChunk;
    for (int s = 0; s < num_sources; ++s) {
      const void* source = piece;
      if (local[s] != nullptr) {
        source = static_cast<const char*>(local[s]) + start * source_size;
      } else {
        const int64_t got = ze_pread(fds[s], piece, count * source_size, offsets[s] + start * source_size);
        if (got < 0) return got;
      }
      ze_accumulate(sum, source, source_dtype, count, s == 0);
    }
    char* out = static_cast<char*>(target) + start * target_size;
    // Addition commutes, so adding the old value last gives the bits of old + sum.
    if (accumulate) ze_accumulate(sum, out, target_dtype, count, 0);
    if (target_dtype == ZE_F32)
      std::memcpy(out, sum, static_cast<size_t>(count) * sizeof(float));
    else
      ze_cast(sum, out, target_dtype, count);
  }
  return n;
}

}  // extern "C"
