// The squared norm in three stages, and the gradient's factor: the sum of each tile, of these the sum of each array,
// and of these the total, each in order. So the total is the sum of the arrays' own norms, to the last bit.
#include "device.h"

namespace ze {
namespace {

// Elements that a block sums without a break. The number is fixed, so that the order of the sum is fixed.
constexpr int64_t kTile = 1 << 14;
// Arrays in one launch.
constexpr int kArrays = 64;
constexpr int kFinishThreads = 1024;

struct NormArray {
  const void* data;
  int64_t numel;
  int64_t first_tile;
  int32_t dtype;
};

using NormArrays = Batch<NormArray, kArrays>;

// The sums of a thread: element j of a pack goes to sum j % 4.
struct Sums {
  double at[4];

  template <class T, int kCount>
  __device__ inline void add(const Pack<T, kCount>& pack) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const double value = double(to_float(pack.v[j]));
      // The product is exact in double, so there is one rounding, fused or not.
      at[j % 4] = fma(value, value, at[j % 4]);
    }
  }
};

// Returns, to thread 0, the sum over a tile's `n` elements. Only the position of an element decides when it is added.
template <class T>
__device__ inline double tile_norm(const T* x, int64_t n) {
  constexpr int kPack = 16 / sizeof(T), kStride = kThreads * kPack, kAhead = 4;
  using P = Pack<T, kPack>;
  Sums sums = {};
  if (n == kTile && uintptr_t(x) % sizeof(P) == 0) {
#pragma unroll 1
    for (int i = int(threadIdx.x) * kPack; i < kTile; i += kAhead * kStride) {
      // All loads are issued before the first one is used.
      P packs[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) packs[k] = load<P>(x + i + k * kStride);
#pragma unroll
      for (int k = 0; k < kAhead; ++k) sums.add(packs[k]);
    }
  } else {
#pragma unroll 1
    for (int64_t i = int64_t(threadIdx.x) * kPack; i < n; i += kStride) {
      P pack;
#pragma unroll
      for (int j = 0; j < kPack; ++j) pack.v[j] = i + j < n ? x[i + j] : T{};
      sums.add(pack);
    }
  }
  return block_sum<kThreads>((sums.at[0] + sums.at[1]) + (sums.at[2] + sums.at[3]));
}

__global__ void __launch_bounds__(kThreads) squared_norm(NormArrays arrays, double* partial, int64_t num_tiles) {
  for (int64_t tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const NormArray& array = arrays.of(tile);
    const int64_t begin = (tile - array.first_tile) * kTile;
    const int64_t n = array.numel - begin < kTile ? array.numel - begin : kTile;
    double sum;
    if (array.dtype == ZE_F32) sum = tile_norm(static_cast<const float*>(array.data) + begin, n);
    else if (array.dtype == ZE_BF16) sum = tile_norm(static_cast<const bf16*>(array.data) + begin, n);
    else sum = tile_norm(static_cast<const fp16*>(array.data) + begin, n);
    if (threadIdx.x == 0) partial[tile] = sum;
  }
}

__host__ __device__ inline int64_t tiles_of(int64_t numel) { return (numel + kTile - 1) / kTile; }

// Runs one block per array.
__global__ void __launch_bounds__(kFinishThreads) finish_norms(NormArrays arrays, const double* partial, double* norms) {
  const NormArray& array = arrays.at[blockIdx.x];
  const int64_t count = tiles_of(array.numel);
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kFinishThreads) sum += partial[array.first_tile + i];
  sum = block_sum<kFinishThreads>(sum);
  if (threadIdx.x == 0) norms[blockIdx.x] = sum;
}

__global__ void add_norms(const double* norms, int64_t count, double* result) {
  double sum = 0;
// Unrolling issues loads ahead of their use.
#pragma unroll 8
  for (int64_t i = 0; i < count; ++i) sum += norms[i];
  *result = sum;
}

__global__ void gradient_factor(const double* squared_norm, const double* loss_scale, double divisor, double limit,
                                int skip, ze_cuda_factor* factor) {
  if (loss_scale) divisor = divisor * *loss_scale;
  if (divisor == 0) {
    // The losses of the step have no weight.
    *factor = {0, 0, 1};
    return;
  }
  const double grad_norm = sqrt(*squared_norm) / divisor;
  const double clip = limit > 0 ? limit / (grad_norm + 1e-6) : 1;
  factor->factor = (clip > 1 ? 1 : clip) / divisor;
  factor->grad_norm = grad_norm;
  factor->overflow = skip && !(*squared_norm < INFINITY) ? 1 : 0;
}

}  // namespace
}  // namespace ze

int64_t ze_cuda_squared_norm_workspace(const ze_array* arrays, int64_t num_arrays) {
  int64_t tiles = 0;
  for (int64_t i = 0; i < num_arrays; ++i) tiles += ze::tiles_of(arrays[i].numel);
  return num_arrays + tiles;
}

int ze_cuda_squared_norm(int device, void* stream, const ze_array* arrays, int64_t num_arrays, double* workspace,
                         double* result) {
  ZE_RETURN_IF(cudaSetDevice(device));
  for (int64_t i = 0; i < num_arrays; ++i)
    if (!ze::known(arrays[i].dtype)) return ZE_BAD_DTYPE;
  double* partial = workspace + num_arrays;
  int64_t done = 0;
  for (int64_t i = 0; i < num_arrays;) {
    ze::NormArrays batch = {};
    int64_t tiles = 0;
    for (; i < num_arrays && batch.count < ze::kArrays; ++i) {
      if (!arrays[i].numel) continue;
      batch.at[batch.count++] = {arrays[i].data, arrays[i].numel, tiles, arrays[i].dtype};
      tiles += ze::tiles_of(arrays[i].numel);
    }
    if (!batch.count) break;
    ZE_RETURN_IF(ze::launch_tiles(ze::squared_norm, device, tiles, stream, batch, partial, tiles));
    ZE_RETURN_IF(ze::launch(ze::finish_norms, batch.count, ze::kFinishThreads, stream, batch, partial, workspace + done));
    partial += tiles;
    done += batch.count;
  }
  return ze::launch(ze::add_norms, 1, 1, stream, workspace, done, result);
}

int ze_cuda_gradient_factor(int device, void* stream, const double* squared_norm, const double* loss_scale,
                            double divisor, double limit, int skip, ze_cuda_factor* factor) {
  ZE_RETURN_IF(cudaSetDevice(device));
  return ze::launch(ze::gradient_factor, 1, 1, stream, squared_norm, loss_scale, divisor, limit, skip, factor);
}
