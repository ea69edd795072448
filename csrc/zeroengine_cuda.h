/* The C interface of zeroengine's CUDA library.
 *
 * Plain C, free of torch: Python loads it with ctypes, and one build serves every torch version. CUDA's runtime is
 * linked in statically; it shares the device's primary context with torch, so its pointers and streams are the same.
 *
 * Every function that takes a `stream` only issues work to it (a cudaStream_t; NULL is the default stream) and returns
 * without waiting, makes `device` the calling thread's current one, and may be captured in a CUDA graph. Pointers are
 * to that device's memory unless said to be the host's; the host's are read before the function returns, so what a
 * captured graph replays are the values of the time of capture. Counts (`n`, `numel`) are elements. Pointers need the
 * alignment of their own element type; 16 bytes make the kernels fast.
 *
 * Results are 0, a negative ze_status, or a positive cudaError_t; ze_cuda_message says what it means.
 */
#ifndef ZEROENGINE_CUDA_H
#define ZEROENGINE_CUDA_H

#include "zeroengine.h"

#ifdef __cplusplus
extern "C" {
#endif

#define ZE_CUDA_ABI_VERSION 2

ZE_API int ze_cuda_abi_version(void);

/* What the machine code in this library is for, as in "80 90 100+PTX". */
ZE_API const char* ze_cuda_architectures(void);

/* In words, of any result of the functions below. A string that stays. */
ZE_API const char* ze_cuda_message(int result);

/* Whether the kernels run on `device`: 0, or why not (a driver too old, no code for its architecture). */
ZE_API int ze_cuda_probe(int device);

/* ze_adam of zeroengine.h, and its bits. `args` is the host's. A NaN may be another one than the CPU's. */
ZE_API int ze_cuda_adam(int device, void* stream, float* param, const void* grad, int grad_dtype, void* exp_avg,
                        void* exp_avg_sq, int moments_dtype, void* low_precision_param,
                        int low_precision_dtype, int64_t n, const struct ze_adam_args* args);

/* Adam whose step counts, learning rates, gradient factor and overflow flag are in device memory, so that nobody waits
 * for them. ze_cuda_adam_prepare counts the step and folds the hyperparameters of any number of segments, those of
 * many buffers say; then a ze_cuda_adam_runs for each buffer updates all of that buffer's segments. */

/* Neighbouring elements of one buffer that share all. A buffer's segments ascend and do not overlap; elements
 * between them stay as they are. */
struct ze_cuda_segment {
  int64_t begin, end;  /* in the buffer */
  int64_t first_tile;  /* sum of ze_cuda_tiles over the buffer's segments before this one */
  uint64_t seed;       /* that of bf16 moments is seed + step */
  int64_t offset;      /* index of the buffer's element 0 among those that share the seed, not negative */
  int32_t group, slot; /* which hyperparameters, which step count */
};

/* The hyperparameters of a group, all in double: decoupled and maximize are 0 or 1. */
struct ze_cuda_group {
  double lr, beta1, beta2, eps, weight_decay, decoupled, maximize;
};

/* What ze_cuda_gradient_factor finds out, and an update obeys. */
struct ze_cuda_factor {
  double factor;    /* multiplies the gradient: clip / divisor */
  double grad_norm; /* of the mean gradient, before clipping */
  double overflow;  /* 1: nothing is to be written; else 0 */
};

/* A segment as the update reads it: written by ze_cuda_adam_prepare, of no use to others. */
#define ZE_CUDA_RUN_BYTES 80

/* How many tiles the update cuts a segment into. */
ZE_API int64_t ze_cuda_tiles(int64_t begin, int64_t end);

/* Counts the step and writes runs[i] for segments[i]. steps[slot] += 1 where used[slot] > 0 (NULL: everywhere), save on
 * overflow, when no count and no run has any effect. A segment whose slot is not used stays as it is. */
ZE_API int ze_cuda_adam_prepare(int device, void* stream, const struct ze_cuda_segment* segments, int64_t num_segments,
                                const struct ze_cuda_group* groups, int64_t* steps, const double* used,
                                int64_t num_slots, const struct ze_cuda_factor* factor, void* runs);

/* Updates one buffer as ze_adam does each of its segments, in one launch. `runs` are those of its segments,
 * num_tiles the sum of their ze_cuda_tiles. reload_written is that of ze_adam_args. */
ZE_API int ze_cuda_adam_runs(int device, void* stream, float* param, const void* grad, int grad_dtype, void* exp_avg,
                             void* exp_avg_sq, int moments_dtype, void* low_precision_param,
                             int low_precision_dtype, int reload_written, const void* runs, int64_t num_runs, int64_t num_tiles);

struct ze_cuda_array {
  const void* data;
  int64_t numel;
  int32_t dtype;
};

/* How many doubles ze_cuda_squared_norm wants as workspace. `arrays` is the host's. */
ZE_API int64_t ze_cuda_squared_norm_workspace(const struct ze_cuda_array* arrays, int64_t num_arrays);

/* *result = sum of the squares of all elements of all arrays in double: the arrays' own sums added up one by one, each in
 * an order that its length alone decides. It is finite exactly if every element is. `arrays` is the host's. */
ZE_API int ze_cuda_squared_norm(int device, void* stream, const struct ze_cuda_array* arrays, int64_t num_arrays,
                                double* workspace, double* result);

/* Clipping (limit > 0) as torch.nn.utils.clip_grad_norm_ does it, of the gradient over divisor * *loss_scale, where
 * `squared_norm` is that of the gradient as it lies. loss_scale: NULL means 1. skip: a norm that is not finite is an
 * overflow; else the factor is what comes out. */
ZE_API int ze_cuda_gradient_factor(int device, void* stream, const double* squared_norm, const double* loss_scale,
                                   double divisor, double limit, int skip, struct ze_cuda_factor* factor);

struct ze_cuda_copy {
  const void* src;
  void* dst;
  int64_t numel;
  int32_t src_dtype;
};

/* dst = src * scale for each copy, or dst += where accumulate is not 0, computed in float and rounded once to nearest
 * even. No dst may overlap another copy's src or dst. `copies` is the host's; it takes a launch for every 64. */
ZE_API int ze_cuda_cast(int device, void* stream, const struct ze_cuda_copy* copies, int64_t num_copies, int dst_dtype,
                        float scale, int accumulate);

/* Writes a few bytes of the host's to the device, in stream order, as arguments of a kernel: nobody waits. */
ZE_API int ze_cuda_write(int device, void* stream, void* dst, const void* src, int64_t bytes);

#ifdef __cplusplus
}
#endif

#endif
