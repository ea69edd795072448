// Chooses the instruction set once, and implements the functions that concern the whole library.
#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "kernels.h"

namespace ze {
namespace {

bool supported(const Kernels& k) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (&k == &kAvx2)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (&k == &kAvx512)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
  return &k == &kPortable;
}

const Kernels* const kBestFirst[] = {
#if defined(__x86_64__)
    &kAvx512, &kAvx2,
#endif
    &kPortable};

const Kernels* choose(const char* name) {
  for (const Kernels* k : kBestFirst)
    if ((!name || !*name || !strcmp(name, k->name)) && supported(*k)) return k;
  return nullptr;
}

const Kernels* in_use = choose(nullptr);

}  // namespace

const Kernels& kernels() { return *in_use; }

}  // namespace ze

int ze_abi_version(void) { return ZE_ABI_VERSION; }

const char* ze_cpu_isa(void) { return ze::kernels().name; }

int ze_cpu_set_isa(const char* name) {
  const ze::Kernels* chosen = ze::choose(name);
  if (!chosen) return ZE_UNSUPPORTED;
  ze::in_use = chosen;
  return ZE_OK;
}

int ze_advise_huge(void* address, size_t bytes) {
#if defined(MADV_HUGEPAGE)
  const uintptr_t page = uintptr_t(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (uintptr_t(address) + page - 1) & ~(page - 1), end = (uintptr_t(address) + bytes) & ~(page - 1);
  if (begin >= end) return ZE_OK;
  return madvise((void*)begin, end - begin, MADV_HUGEPAGE) ? ZE_UNSUPPORTED : ZE_OK;
#else
  (void)address, (void)bytes;
  return ZE_UNSUPPORTED;
#endif
}
