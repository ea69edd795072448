#include "vec_portable.h"

#include "kernels.inl.h"

namespace ze {
const Kernels kPortable = table("portable");
}
