#if defined(__x86_64__)
#include "vec_avx2.h"

#include "kernels.inl.h"

namespace ze {
const Kernels kAvx2 = table("avx2");
}
#endif
