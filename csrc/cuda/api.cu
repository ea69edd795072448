// The functions that concern the whole library: versions, whether it runs on a device, and what its results mean.
#include "device.h"

namespace ze {
namespace {

__global__ void nothing() {}

}  // namespace
}  // namespace ze

int ze_cuda_abi_version(void) { return ZE_CUDA_ABI_VERSION; }

const char* ze_cuda_architectures(void) { return ZE_CUDA_ARCHITECTURES; }

const char* ze_cuda_message(int result) {
  switch (result) {
    case ZE_OK:
      return "success";
    case ZE_BAD_DTYPE:
      return "a dtype that this kernel does not know";
    case cudaErrorInsufficientDriver:
      return "the NVIDIA driver is older than the CUDA toolkit that zeroengine was built with; update the driver, or "
             "install zeroengine again with the older toolkit's nvcc first on PATH";
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
      return "zeroengine was built for other GPU architectures (" ZE_CUDA_ARCHITECTURES
             "); install it again with ZEROENGINE_CUDA_ARCHITECTURES set to this GPU's";
    default:
      return result < 0 ? "an unknown result" : cudaGetErrorString(static_cast<cudaError_t>(result));
  }
}

int ze_cuda_probe(int device) {
  cudaFuncAttributes attributes;
  int result = cudaSetDevice(device);
  if (!result) result = cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(ze::nothing));
  if (result) cudaGetLastError();
  return result;
}
