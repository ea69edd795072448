#if defined(__x86_64__)
#include "vec_avx512.h"

#include "kernels.inl.h"

namespace ze {
const Kernels kAvx512 = table("avx512");
}
#endif
