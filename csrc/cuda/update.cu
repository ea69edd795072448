// The fused updates, by the rules of csrc/rules.h over single floats. Each element goes through the IEEE operations of
// csrc/cpu/update.inl.h in the same order, and the build sets --fmad=false: the bits are those of the CPU.
#include "update_elements.h"

namespace ze {
namespace {

// Returns the largest magnitude of each moment in the block of moments that the calling thread's warp shares. All threads
// of the launch's block come together.
template <int kMoments>
__device__ inline void largest_magnitudes(const float (&m)[2][kPack], float (&largest)[2]) {
  __shared__ uint32_t of_warps[2][kThreads / kWarp];
  const int warp = int(threadIdx.x) / kWarp, first = warp / kSharing * kSharing;
  uint32_t most[2] = {};
#pragma unroll
  for (int k = 0; k < kMoments; ++k) {
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      const uint32_t magnitude = bits_of(magnitude_of(m[k][j]));
      most[k] = magnitude > most[k] ? magnitude : most[k];
    }
    most[k] = warp_max(most[k]);
  }
  // Those of the slab before have been read.
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kMoments; ++k)
    if (threadIdx.x % kWarp == 0) of_warps[k][warp] = most[k];
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kMoments; ++k) {
    const uint32_t a = of_warps[k][first], b = of_warps[k][first + 1];
    largest[k] = float_of(a > b ? a : b);
  }
}

// What a thread reads at first. All loads are issued before the first value is used.
template <class M>
struct Loaded {
  Words param, grad, low_precision, moments[2];

  template <bool kComplete>
  __device__ void read_all(const ze_update_arrays& a, const Part& part) {
    const int rule = part.run.rule;
    param = read<kComplete>(a.param, size_of(a.param_dtype), part);
    if (rule != ZE_AVERAGE_ONLY) grad = read<kComplete>(a.grad, size_of(a.grad_dtype), part);
    if (num_moments(rule) > 0) moments[0] = read<kComplete>(a.moments[0], sizeof(M), part);
    if (num_moments(rule) > 1) moments[1] = read<kComplete>(a.moments[1], sizeof(M), part);
    if (a.reload_written) low_precision = read<kComplete>(a.low_precision_param, 2, part);
  }
};

// "Values written from outside" in csrc/cpu/update.inl.h.
template <class T>
__device__ inline void reload_written(float (&param)[kPack], const Words& low_precision_param) {
  const Words rounded = narrow<T>(param);
  float written[kPack];
  widen<T>(low_precision_param, written);
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    const uint32_t difference = rounded.v[j / 2] ^ low_precision_param.v[j / 2];
    param[j] = difference >> 16 * (j % 2) & 0xffff ? written[j] : param[j];
  }
}

// Updates a thread's parameters by a rule, and its moments, which stay in `words`.
template <class M, class Rule>
__device__ inline void step(const ze_update_arrays& a, const Part& part, float (&p)[kPack], const float (&g)[kPack],
                            Words (&words)[2]) {
  constexpr bool kBytes = sizeof(M) == 1;
  const Rule rule(part.run.factors);
  const int64_t block = (part.origin + part.warp()) / ZE_MOMENT_BLOCK;
  const bool has_block = part.has(part.warp() / ZE_MOMENT_BLOCK * ZE_MOMENT_BLOCK);
  float m[2][kPack], largest[2];
#pragma unroll
  for (int k = 0; k < Rule::kMoments; ++k) {
    const float scale = kBytes && has_block ? a.scales[k][block] : 0.0f;
    if (sizeof(M) == 4) widen(words[k], ZE_F32, m[k]);
    if (sizeof(M) == 2) widen<bf16>(words[k], m[k]);
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      const uint32_t code = words[k].v[0] >> 8 * j & 0xff;
      if (kBytes) m[k][j] = Rule::is_signed(k) ? decode<true>(code, scale) : decode<false>(code, scale);
    }
  }
#pragma unroll
  for (int j = 0; j < kPack; ++j) {
    float of_element[2] = {m[0][j], m[1][j]};
    p[j] = rule.step(p[j], g[j], of_element);
    m[0][j] = of_element[0], m[1][j] = of_element[1];
  }
  if constexpr (kBytes && Rule::kMoments) largest_magnitudes<Rule::kMoments>(m, largest);
  const Random random = part.random();
#pragma unroll
  for (int k = 0; k < Rule::kMoments; ++k) {
    words[k] = {};
    if (sizeof(M) == 4) words[k] = narrow(m[k], ZE_F32);
    const float scale = kBytes ? scale_of(largest[k]) : 1.0f, inverse = 1 / scale;
    if (kBytes && has_block && threadIdx.x % (kSharing * kWarp) == 0) a.scales[k][block] = scale;
#pragma unroll
    for (int j = 0; j < kPack; ++j) {
      const uint32_t i = uint32_t(part.first()) + uint32_t(j);
      if (sizeof(M) == 2)
        put_bf16(words[k], j, m[k][j], half_of(rounding_word(random, i, m[Rule::kMoments - 1][j]), k == 1));
      if (!kBytes) continue;
      const float threshold = float(half_of(random_word(random, i), k == 1)) * 0x1p-16f;
      words[k].v[0] |= (Rule::is_signed(k) ? encode<true>(m[k][j], inverse, threshold)
                                           : encode<false>(m[k][j], inverse, threshold)) << 8 * j;
    }
  }
}

template <bool kComplete>
__device__ inline void update_average(const ze_update_arrays& a, const Part& part, const float (&p)[kPack]) {
  float average[kPack];
  widen(read<kComplete>(a.average, size_of(a.average_dtype), part), a.average_dtype, average);
#pragma unroll
  for (int j = 0; j < kPack; ++j) average[j] = average[j] + part.run.factors.average_weight * (p[j] - average[j]);
  write<kComplete>(a.average, size_of(a.average_dtype), part,
                   a.average_dtype == ZE_BF16 ? narrow_randomly(average, part, true) : narrow(average, ZE_F32));
}

template <bool kComplete, class M>
__device__ inline void write_all(const ze_update_arrays& a, const Part& part, const float (&p)[kPack],
                                 const Words (&moments)[2]) {
  if (num_moments(part.run.rule) > 0) write<kComplete>(a.moments[0], sizeof(M), part, moments[0]);
  if (num_moments(part.run.rule) > 1) write<kComplete>(a.moments[1], sizeof(M), part, moments[1]);
  write<kComplete>(a.param, size_of(a.param_dtype), part,
                   a.param_dtype == ZE_BF16 ? narrow_randomly(p, part, false) : narrow(p, a.param_dtype));
  if (a.low_precision_param) write<kComplete>(a.low_precision_param, 2, part, narrow(p, a.low_precision_dtype));
  if (a.average) update_average<kComplete>(a, part, p);
}

// Updates a part. The block's threads come together.
template <class M>
__device__ inline void update_part(const ze_update_arrays& a, const Part& part, bool complete) {
  Loaded<M> x = {};
  if (complete) x.template read_all<true>(a, part);
  else x.template read_all<false>(a, part);
  float p[kPack], g[kPack];
  widen(x.param, a.param_dtype, p);
  widen(x.grad, a.grad_dtype, g);
#pragma unroll
  for (int j = 0; j < kPack; ++j) g[j] = g[j] * part.run.factors.grad_scale;
  if (a.reload_written && a.low_precision_dtype == ZE_BF16) reload_written<bf16>(p, x.low_precision);
  if (a.reload_written && a.low_precision_dtype == ZE_F16) reload_written<fp16>(p, x.low_precision);
  switch (part.run.rule) {
    case ZE_ADAM: step<M, AdamRule<float, false>>(a, part, p, g, x.moments); break;
    case ZE_ADAMW: step<M, AdamRule<float, true>>(a, part, p, g, x.moments); break;
    case ZE_LION: step<M, LionRule<float>>(a, part, p, g, x.moments); break;
    case ZE_SGD: step<M, SgdRule<float>>(a, part, p, g, x.moments); break;
    case ZE_MOMENTUM_SGD: step<M, MomentumRule<float>>(a, part, p, g, x.moments); break;
    case ZE_ADAGRAD: step<M, AdagradRule<float>>(a, part, p, g, x.moments); break;
    default: break;  // ZE_AVERAGE_ONLY
  }
  if (complete) write_all<true, M>(a, part, p, x.moments);
  else write_all<false, M>(a, part, p, x.moments);
}

// Returns the run that a tile belongs to: the last run that does not begin after it.
__device__ inline int64_t run_of(const UpdateRun* runs, int64_t num_runs, int64_t tile) {
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
template <class M>
__global__ void __launch_bounds__(kThreads, 4)
    update(ze_update_arrays a, const UpdateRun* runs, int64_t num_runs, const __grid_constant__ UpdateRun one,
           int64_t num_tiles, int phase) {
  for (int64_t tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const UpdateRun& run = runs ? runs[run_of(runs, num_runs, tile)] : one;
    // Elements without a gradient change nothing but an average.
    if (run.rule == kNoRule || (run.rule == ZE_AVERAGE_ONLY && !a.average)) continue;
    const int64_t start = phase < 0 ? run.begin : run.begin - (run.begin + phase) % kPack;
    const int64_t origin = start + (tile - run.first_tile) * kTile;
    const int end = int(run.end - origin < kTile ? run.end - origin : kTile);
    // Each round goes as far as the slab, and as the upper half of the index stays the same.
    for (int begin = int(run.begin > origin ? run.begin - origin : 0); begin < end;) {
      const int slab = begin / kSlab * kSlab, slab_end = end < slab + kSlab ? end : slab + kSlab;
      const uint32_t same = 0 - uint32_t(run.index + uint64_t(origin + begin));  // 0 stands for 2^32
      const int stop = same && same < uint32_t(slab_end - begin) ? begin + int(same) : slab_end;
      const Part part = {run, origin + slab, begin - slab, stop - slab};
      update_part<M>(a, part, phase >= 0 && stop - begin == kSlab);
      begin = stop;
    }
  }
}

__device__ __host__ inline UpdateRun run_from(const ze_update_args& args, int64_t begin, int64_t end,
                                              int64_t first_tile) {
  return {begin, end, first_tile, uint64_t(args.offset), mix_seed(args.seed), fold(args), args.rule};
}

// Runs as one block, so that the counts are written before they are read.
__global__ void __launch_bounds__(kThreads)
    update_prepare(const ze_cuda_segment* segments, int64_t num_segments, const ze_cuda_group* groups, int64_t* steps,
                   const double* used, int64_t num_slots, const ze_cuda_factor* factor, UpdateRun* runs) {
  __shared__ int64_t most_steps[kThreads];
  const bool overflow = factor->overflow != 0;
  int64_t most = 0;
  for (int64_t slot = threadIdx.x; slot < num_slots; slot += kThreads) {
    if (!overflow && (!used || used[slot] > 0)) steps[slot] += 1;
    most = steps[slot] > most ? steps[slot] : most;
  }
  most_steps[threadIdx.x] = most;
  __syncthreads();
  for (int thread = 0; thread < kThreads; ++thread) most = most_steps[thread] > most ? most_steps[thread] : most;
  for (int64_t i = threadIdx.x; i < num_segments; i += kThreads) {
    const ze_cuda_segment s = segments[i];
    const ze_cuda_group g = groups[s.group];
    const bool is_used = !used || used[s.slot] > 0;
    // An average without a gradient is rounded by new bits as long as any step is counted.
    const int64_t step = is_used ? steps[s.slot] : most;
    const int32_t rule = overflow ? kNoRule : is_used ? int32_t(g.rule) : ZE_AVERAGE_ONLY;
    const ze_update_args args = {g.lr,
                                 g.beta1,
                                 g.beta2,
                                 g.eps,
                                 g.weight_decay,
                                 factor->factor,
                                 g.average_weight,
                                 step,
                                 s.seed + uint64_t(step),
                                 s.offset,
                                 rule,
                                 g.maximize != 0,
                                 g.nesterov != 0};
    runs[i] = run_from(args, s.begin, s.end, s.first_tile);
  }
}

// Returns the `phase` of the kernel.
int phase_of(const ze_update_arrays& a) {
  const auto size_of = [](int dtype) { return dtype == ZE_F32 ? 4 : dtype == ZE_8BIT ? 1 : 2; };
  const struct {
    const void* data;
    int dtype;
  } arrays[] = {{a.param, a.param_dtype},
                {a.grad, a.grad_dtype},
                {a.moments[0], a.moments_dtype},
                {a.moments[1], a.moments_dtype},
                {a.low_precision_param, a.low_precision_dtype},
                {a.average, a.average_dtype}};
  const int phase = int(uintptr_t(a.param) / size_t(size_of(a.param_dtype)) % kPack);
  for (const auto& array : arrays) {
    const size_t size = size_t(size_of(array.dtype));
    if (!array.data) continue;
    if (uintptr_t(array.data) % size || int(uintptr_t(array.data) / size % kPack) != phase) return -1;
  }
  // Tiles begin where blocks of moments do, at multiples of kPack.
  return a.moments[0] && a.moments_dtype == ZE_8BIT && phase ? -1 : phase;
}

int run_update(int device, void* stream, ze_update_arrays a, const UpdateRun* runs, int64_t num_runs,
               const UpdateRun& one, int64_t num_tiles) {
  if (!has_known_dtypes(a)) return ZE_BAD_DTYPE;
  if (!a.low_precision_param) a.reload_written = 0;
  decltype(&update<float>) const kernels[] = {update<float>, update<bf16>, nullptr, update<code8>};
  return launch_tiles(kernels[a.moments[0] ? a.moments_dtype : ZE_F32], device, num_tiles, stream, a, runs, num_runs,
                      one, num_tiles, phase_of(a));
}

}  // namespace
}  // namespace ze

// One tile more than needed if the segment does not begin at a multiple of a pack, whatever the arrays' phase.
int64_t ze_cuda_tiles(int64_t begin, int64_t end) {
  return end > begin ? (end - begin + ze::kPack - 1 + ze::kTile - 1) / ze::kTile : 0;
}

int ze_cuda_update(int device, void* stream, const ze_update_arrays* arrays, int64_t n, const ze_update_args* args) {
  ZE_RETURN_IF(cudaSetDevice(device));
  if (args->rule < 0 || args->rule >= ze::kRules) return ZE_BAD_DTYPE;
  return ze::run_update(device, stream, *arrays, nullptr, 0, ze::run_from(*args, 0, n, 0), ze_cuda_tiles(0, n));
}

int ze_cuda_update_prepare(int device, void* stream, const ze_cuda_segment* segments, int64_t num_segments,
                           const ze_cuda_group* groups, int64_t* steps, const double* used, int64_t num_slots,
                           const ze_cuda_factor* factor, void* runs) {
  ZE_RETURN_IF(cudaSetDevice(device));
  return ze::launch(ze::update_prepare, 1, ze::kThreads, stream, segments, num_segments, groups, steps, used, num_slots,
                    factor, static_cast<ze::UpdateRun*>(runs));
}

int ze_cuda_update_buffers(int device, void* stream, const ze_cuda_buffer* buffers, int64_t num_buffers) {
  ZE_RETURN_IF(cudaSetDevice(device));
  for (const ze_cuda_buffer* buffer = buffers; buffer < buffers + num_buffers; ++buffer)
    ZE_RETURN_IF(ze::run_update(device, stream, buffer->arrays, static_cast<const ze::UpdateRun*>(buffer->runs),
                                buffer->num_runs, {}, buffer->num_runs ? buffer->num_tiles : 0));
  return 0;
}
