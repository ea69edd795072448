// Fused Adam. Each element goes through the IEEE operations of csrc/cpu/kernels.inl.h in the same order, and the build
// sets --fmad=false: the bits are those of the CPU.
#include "device.h"

namespace ze {
namespace {

// A tile is the range that a block updates at one time. A thread takes four neighbors at a time: 16 bytes of float or
// 8 of bf16 or fp16, and a warp's access is one contiguous range. Wider accesses of 16-bit types would make those of
// float strided.
constexpr int kPack = 4, kPacks = 2;
constexpr int64_t kTile = kThreads * kPack * kPacks;

struct AdamRun {
  int64_t begin, end, first_tile;
  uint64_t index;  // of element 0 among those that share the seed
  uint64_t mixed_seed;
  AdamFactors factors;
  int32_t decoupled, active;
};
static_assert(sizeof(AdamRun) == ZE_CUDA_RUN_BYTES, "");

// "Stochastic rounding" in csrc/cpu/kernels.inl.h.
constexpr float kLargestBf16 = 0x1.fep127f;

__device__ inline uint32_t random_word(const Random& r, uint32_t i) {
  uint32_t x = r.first + i;
  x = ((x ^ x >> 16) * 0x7feb352d) ^ r.key;
  x = (x ^ x >> 15) * 0x846ca68b;
  return x ^ x >> 16;
}

__device__ inline void keep_moments(float m, float v, float* exp_avg, float* exp_avg_sq, const Random&, uint32_t) {
  *exp_avg = m;
  *exp_avg_sq = v;
}

__device__ inline void keep_moments(float m, float v, bf16* exp_avg, bf16* exp_avg_sq, const Random& r, uint32_t i) {
  const uint32_t word = v < kLargestBf16 ? random_word(r, i) : 0;
  exp_avg->bits = uint16_t((bits_of(m) + (word & 0xffff)) >> 16);
  exp_avg_sq->bits = uint16_t((bits_of(v) + (word >> 16)) >> 16);
}

// Updates one element; `i` is its index in the run's arrays, whose element 0 `random` starts from.
template <class G, class M>
__device__ inline void update(float& param, G grad, M& exp_avg, M& exp_avg_sq, const AdamRun& run, const Random& random,
                              uint32_t i) {
  const AdamFactors& k = run.factors;
  float p = param, g = to_float(grad) * k.grad_scale;
  if (!run.decoupled) g = g + k.decay * p;
  float m = to_float(exp_avg), v = to_float(exp_avg_sq);
  m = m + k.one_minus_beta1 * (g - m);
  v = k.beta2 * v + k.one_minus_beta2 * g * g;
  keep_moments(m, v, &exp_avg, &exp_avg_sq, random, i);
  const float denominator = sqrtf(v) * k.inv_root + k.eps;
  if (run.decoupled) p = p * k.decay;
  param = p - k.step_size * m / denominator;
}

// "Values written from outside" in csrc/cpu/kernels.inl.h.
__device__ inline void reload_element(float& param, uint16_t rounded, uint16_t low_precision_param, float value) {
  param = rounded == low_precision_param ? param : value;
}

// `low_precision_param` as it was read, in its own dtype.
template <class C>
__device__ inline void reload_pack(Pack<float, kPack>& p, const Pack<uint16_t, kPack>& low_precision_param) {
  Pack<C, kPack> rounded;
#pragma unroll
  for (int j = 0; j < kPack; j += 2) from_floats(p.v[j], p.v[j + 1], rounded.v + j);
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    const uint16_t bits = low_precision_param.v[j];
    reload_element(p.v[j], rounded.v[j].bits, bits, to_float(C{bits}));
  }
}

template <class C>
__device__ inline void reload_one(float& param, const void* low_precision_param, int64_t i) {
  const C written = static_cast<const C*>(low_precision_param)[i];
  C rounded;
  from_float(param, &rounded);
  reload_element(param, rounded.bits, written.bits, to_float(written));
}

template <class C>
__device__ inline void write_low_precision(const Pack<float, kPack>& p, void* low_precision_param, int64_t i) {
  Pack<C, kPack> c;
#pragma unroll
  for (int j = 0; j < kPack; j += 2) from_floats(p.v[j], p.v[j + 1], c.v + j);
  store(static_cast<C*>(low_precision_param) + i, c);
}

// Updates a complete aligned tile from element `origin` on.
template <class G, class M>
__device__ inline void update_tile(const AdamArrays& a, int low_precision_dtype, const AdamRun& run,
                                   const Random& random, int64_t origin) {
  Pack<float, kPack> p[kPacks];
  Pack<G, kPack> g[kPacks];
  Pack<M, kPack> m[kPacks], v[kPacks];
  Pack<uint16_t, kPack> c[kPacks];
  const int64_t first = origin + int64_t(threadIdx.x) * kPack;
#pragma unroll
  // All loads are issued before the first one is used.
  for (int q = 0; q < kPacks; ++q) {
    const int64_t i = first + q * kThreads * kPack;
    p[q] = load<Pack<float, kPack>>(a.param + i);
    g[q] = load<Pack<G, kPack>>(static_cast<const G*>(a.grad) + i);
    m[q] = load<Pack<M, kPack>>(static_cast<M*>(a.exp_avg) + i);
    v[q] = load<Pack<M, kPack>>(static_cast<M*>(a.exp_avg_sq) + i);
    if (a.reload_written) c[q] = load<Pack<uint16_t, kPack>>(static_cast<uint16_t*>(a.low_precision_param) + i);
  }
#pragma unroll
  for (int q = 0; q < kPacks; ++q) {
    const int64_t i = first + q * kThreads * kPack;
    if (a.reload_written && low_precision_dtype == ZE_BF16) reload_pack<bf16>(p[q], c[q]);
    if (a.reload_written && low_precision_dtype == ZE_F16) reload_pack<fp16>(p[q], c[q]);
#pragma unroll
    for (int j = 0; j < kPack; ++j)
      update(p[q].v[j], g[q].v[j], m[q].v[j], v[q].v[j], run, random, uint32_t(i + j));
    store(a.param + i, p[q]);
    store(static_cast<M*>(a.exp_avg) + i, m[q]);
    store(static_cast<M*>(a.exp_avg_sq) + i, v[q]);
    if (low_precision_dtype == ZE_BF16) write_low_precision<bf16>(p[q], a.low_precision_param, i);
    if (low_precision_dtype == ZE_F16) write_low_precision<fp16>(p[q], a.low_precision_param, i);
  }
}

// Updates some elements of a tile one by one: at the ends of a segment, and if arrays have different alignments.
template <class G, class M>
__device__ inline void update_singly(const AdamArrays& a, int low_precision_dtype, const AdamRun& run, int64_t origin) {
#pragma unroll 1
  for (int64_t i = origin + threadIdx.x; i < origin + kTile; i += kThreads) {
    if (i < run.begin || i >= run.end) continue;
    const uint64_t index = run.index + uint64_t(i);
    const Random random = random_of(run.mixed_seed, index >> 32, uint32_t(run.index));
    M *exp_avg = static_cast<M*>(a.exp_avg) + i, *exp_avg_sq = static_cast<M*>(a.exp_avg_sq) + i;
    if (a.reload_written && low_precision_dtype == ZE_BF16) reload_one<bf16>(a.param[i], a.low_precision_param, i);
    if (a.reload_written && low_precision_dtype == ZE_F16) reload_one<fp16>(a.param[i], a.low_precision_param, i);
    update(a.param[i], static_cast<const G*>(a.grad)[i], *exp_avg, *exp_avg_sq, run, random, uint32_t(i));
    if (low_precision_dtype == ZE_BF16) from_float(a.param[i], static_cast<bf16*>(a.low_precision_param) + i);
    if (low_precision_dtype == ZE_F16) from_float(a.param[i], static_cast<fp16*>(a.low_precision_param) + i);
  }
}

// Returns the run that a tile belongs to: the last run that does not begin after it.
__device__ inline int64_t run_of(const AdamRun* runs, int64_t num_runs, int64_t tile) {
  int64_t low = 0, high = num_runs;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (runs[middle].first_tile <= tile) low = middle;
    else high = middle;
  }
  return low;
}

// Takes `runs` in memory, or `one` as an argument. An element is aligned if its index plus `phase` is a multiple of
// kPack. A negative phase means that the arrays have different alignments.
template <class G, class M>
__global__ void __launch_bounds__(kThreads)
    adam(AdamArrays a, int low_precision_dtype, const AdamRun* runs, int64_t num_runs, AdamRun one, int64_t num_tiles,
         int phase) {
  for (int64_t tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const AdamRun run = runs ? runs[run_of(runs, num_runs, tile)] : one;
    if (!run.active) continue;
    const int64_t start = phase < 0 ? run.begin : run.begin - (run.begin + phase) % kPack;
    const int64_t origin = start + (tile - run.first_tile) * kTile;
    const uint64_t index = run.index + uint64_t(origin);
    const bool same_upper = index >> 32 == (index + kTile - 1) >> 32;
    if (phase >= 0 && origin >= run.begin && origin + kTile <= run.end && same_upper) {
      update_tile<G, M>(a, low_precision_dtype, run, random_of(run.mixed_seed, index >> 32, uint32_t(run.index)),
                        origin);
    } else {
      update_singly<G, M>(a, low_precision_dtype, run, origin);
    }
  }
}

__device__ __host__ inline AdamRun run_from(const ze_adam_args& args, int64_t begin, int64_t end, int64_t first_tile,
                                            bool active) {
  return {begin, end, first_tile, uint64_t(args.offset), mix_seed(args.seed), fold(args), args.decoupled, active};
}

// Runs as one block, so that the counts are written before they are read.
__global__ void __launch_bounds__(kThreads)
    adam_prepare(const ze_cuda_segment* segments, int64_t num_segments, const ze_cuda_group* groups, int64_t* steps,
                 const double* used, int64_t num_slots, const ze_cuda_factor* factor, AdamRun* runs) {
  const bool overflow = factor->overflow != 0;
  for (int64_t slot = threadIdx.x; slot < num_slots; slot += kThreads)
    if (!overflow && (!used || used[slot] > 0)) steps[slot] += 1;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < num_segments; i += kThreads) {
    const ze_cuda_segment s = segments[i];
    const ze_cuda_group g = groups[s.group];
    const int64_t step = steps[s.slot];
    const ze_adam_args args = {g.lr,    g.beta1, g.beta2,         g.eps,    g.weight_decay,   factor->factor,
                               step,    s.seed + uint64_t(step),  s.offset, g.decoupled != 0, g.maximize != 0, 0};
    runs[i] = run_from(args, s.begin, s.end, s.first_tile, !overflow && (!used || used[s.slot] > 0));
  }
}

// Returns the `phase` of adam.
int phase_of(const AdamArrays& a, size_t grad_size, size_t moments_size, size_t low_precision_size) {
  const int phase = int(uintptr_t(a.param) / sizeof(float) % kPack);
  const auto agrees = [&](const void* array, size_t size) {
    return uintptr_t(array) % size == 0 && int(uintptr_t(array) / size % kPack) == phase;
  };
  const bool all = agrees(a.param, sizeof(float)) && agrees(a.grad, grad_size) && agrees(a.exp_avg, moments_size) &&
                   agrees(a.exp_avg_sq, moments_size) &&
                   (!low_precision_size || agrees(a.low_precision_param, low_precision_size));
  return all ? phase : -1;
}

size_t size_of(int dtype) { return dtype == ZE_F32 ? 4 : 2; }

int run_adam(int device, void* stream, AdamArrays a, int grad_dtype, int moments_dtype, int low_precision_dtype,
             const AdamRun* runs, int64_t num_runs, const AdamRun& one, int64_t num_tiles) {
  if (!a.low_precision_param) low_precision_dtype = ZE_F32, a.reload_written = 0;
  if (!known(grad_dtype) || !known(low_precision_dtype)) return ZE_BAD_DTYPE;
  if (a.low_precision_param && low_precision_dtype == ZE_F32) return ZE_BAD_DTYPE;
  if (moments_dtype != ZE_F32 && moments_dtype != ZE_BF16) return ZE_BAD_DTYPE;
  decltype(&adam<float, float>) const kernels[2][3] = {
      {adam<float, float>, adam<bf16, float>, adam<fp16, float>}, {adam<float, bf16>, adam<bf16, bf16>, adam<fp16, bf16>}};
  const size_t low_precision_size = low_precision_dtype == ZE_F32 ? 0 : size_of(low_precision_dtype);
  const int phase = phase_of(a, size_of(grad_dtype), size_of(moments_dtype), low_precision_size);
  return launch_tiles(kernels[moments_dtype][grad_dtype], device, num_tiles, stream, a, low_precision_dtype, runs,
                      num_runs, one, num_tiles, phase);
}

}  // namespace
}  // namespace ze

// One tile more than needed if the segment does not begin at a multiple of a pack, whatever the arrays' phase.
int64_t ze_cuda_tiles(int64_t begin, int64_t end) {
  return end > begin ? (end - begin + ze::kPack - 1 + ze::kTile - 1) / ze::kTile : 0;
}

int ze_cuda_adam(int device, void* stream, float* param, const void* grad, int grad_dtype, void* exp_avg,
                 void* exp_avg_sq, int moments_dtype, void* low_precision_param, int low_precision_dtype, int64_t n,
                 const ze_adam_args* args) {
  ZE_RETURN_IF(cudaSetDevice(device));
  const ze::AdamRun one = ze::run_from(*args, 0, n, 0, true);
  const ze::AdamArrays arrays = {param, grad, exp_avg, exp_avg_sq, low_precision_param, args->reload_written};
  return ze::run_adam(device, stream, arrays, grad_dtype, moments_dtype, low_precision_dtype, nullptr, 0, one,
                      ze_cuda_tiles(0, n));
}

int ze_cuda_adam_prepare(int device, void* stream, const ze_cuda_segment* segments, int64_t num_segments,
                         const ze_cuda_group* groups, int64_t* steps, const double* used, int64_t num_slots,
                         const ze_cuda_factor* factor, void* runs) {
  ZE_RETURN_IF(cudaSetDevice(device));
  return ze::launch(ze::adam_prepare, 1, ze::kThreads, stream, segments, num_segments, groups, steps, used, num_slots,
                    factor, static_cast<ze::AdamRun*>(runs));
}

int ze_cuda_adam_runs(int device, void* stream, float* param, const void* grad, int grad_dtype, void* exp_avg,
                      void* exp_avg_sq, int moments_dtype, void* low_precision_param, int low_precision_dtype,
                      int reload_written, const void* runs, int64_t num_runs, int64_t num_tiles) {
  ZE_RETURN_IF(cudaSetDevice(device));
  const ze::AdamArrays arrays = {param, grad, exp_avg, exp_avg_sq, low_precision_param, reload_written};
  return ze::run_adam(device, stream, arrays, grad_dtype, moments_dtype, low_precision_dtype,
                      static_cast<const ze::AdamRun*>(runs), num_runs, {}, num_runs ? num_tiles : 0);
}
