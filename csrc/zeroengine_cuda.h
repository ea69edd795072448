/* The C interface of zeroengine's CUDA library.
 *
 * The interface is plain C without torch: Python loads the library with ctypes, and one build serves every torch
 * version. CUDA's runtime is linked in statically. It shares the device's primary context with torch, so pointers and
 * streams are the same.
 *
 * A function that takes a `stream` (a cudaStream_t; NULL is the default stream) only issues work to it and returns
 * without waiting. It makes `device` the calling thread's current device, and may be captured in a CUDA graph. Pointers
 * are to that device's memory unless they are marked as host memory. Host memory is read before the function returns,
 * so a captured graph replays the values from the time of capture. Counts (`n`, `numel`) are elements. Pointers need
 * the alignment of their element type; kernels are fast with 16 bytes.
 *
 * Results are 0, a negative ze_status, or a positive cudaError_t; ze_cuda_message explains them.
 */
#ifndef ZEROENGINE_CUDA_H
#define ZEROENGINE_CUDA_H

#include "zeroengine.h"

#ifdef __cplusplus
extern "C" {
#endif

#define ZE_CUDA_ABI_VERSION 5

ZE_API int ze_cuda_abi_version(void);

/* The architectures that this library has machine code for, as in "80 90 100+PTX". */
ZE_API const char* ze_cuda_architectures(void);

/* The meaning of a result of the functions below, as a static string. */
ZE_API const char* ze_cuda_message(int result);

/* Returns 0 if the kernels run on `device`, or else why not (an old driver, no code for its architecture). */
ZE_API int ze_cuda_probe(int device);

/* ze_update of zeroengine.h, with the same bits except for the payload of NaNs. `arrays` and `args` are host memory. */
ZE_API int ze_cuda_update(int device, void* stream, const struct ze_update_arrays* arrays, int64_t n,
                          const struct ze_update_args* args);

/* Updates whose step counts, learning rates, gradient factor and overflow flag are in device memory, so that the host
 * does not wait for them. ze_cuda_update_prepare counts the step and computes the factors of any number of segments,
 * also of several buffers. Then ze_cuda_update_buffers updates the segments of some buffers. */

/* Neighboring elements of one buffer with the same hyperparameters and step count. A buffer's segments ascend and do
 * not overlap; elements between them are not changed. With moments of 8 bits a segment begins at a multiple of
 * ZE_MOMENT_BLOCK. */
struct ze_cuda_segment {
  int64_t begin, end;  /* in the buffer */
  int64_t first_tile;  /* sum of ze_cuda_tiles over the buffer's segments before this one */
  uint64_t seed;       /* stochastic rounding uses seed + step */
  int64_t offset;      /* index of the buffer's element 0 among the elements that share the seed, not negative */
  int32_t group, slot; /* index of the hyperparameters, index of the step count */
};

/* The hyperparameters of a group, as in ze_update_args, all in double. */
struct ze_cuda_group {
  double lr, beta1, beta2, eps, weight_decay, average_weight, rule, maximize, nesterov;
};

/* The result of ze_cuda_gradient_factor, which an update obeys. */
struct ze_cuda_factor {
  double factor;    /* multiplies the gradient: clip / divisor */
  double grad_norm; /* of the mean gradient, before clipping */
  double overflow;  /* 1: the update writes nothing; else 0 */
};

/* The size of a segment as the update reads it: written by ze_cuda_update_prepare, opaque to callers. */
#define ZE_CUDA_RUN_BYTES 88

/* The number of tiles that the update cuts a segment into. */
ZE_API int64_t ze_cuda_tiles(int64_t begin, int64_t end);

/* Counts the step and writes runs[i] for segments[i]. steps[slot] += 1 where used[slot] > 0 (NULL: everywhere), except
 * on overflow, when no count changes and the runs have no effect. A segment whose slot is not used takes
 * ZE_AVERAGE_ONLY, with seed + the largest step count of all slots. */
ZE_API int ze_cuda_update_prepare(int device, void* stream, const struct ze_cuda_segment* segments,
                                  int64_t num_segments, const struct ze_cuda_group* groups, int64_t* steps,
                                  const double* used, int64_t num_slots, const struct ze_cuda_factor* factor,
                                  void* runs);

struct ze_cuda_buffer {
  struct ze_update_arrays arrays;
  const void* runs; /* those of the buffer's segments */
  int64_t num_runs;
  int64_t num_tiles; /* the sum of ze_cuda_tiles over the segments */
};

/* Updates all segments of each buffer, as ze_update would, in one launch for each buffer. `buffers` is host memory.
 * Segments may have different rules, of which some take fewer moments than the arrays have. A segment with
 * ZE_AVERAGE_ONLY is not changed where there is no average. */
ZE_API int ze_cuda_update_buffers(int device, void* stream, const struct ze_cuda_buffer* buffers, int64_t num_buffers);

/* The number of doubles that ze_cuda_squared_norm needs as workspace. `arrays` is host memory. */
ZE_API int64_t ze_cuda_squared_norm_workspace(const struct ze_array* arrays, int64_t num_arrays);

/* *result = sum of the squares of all elements of all arrays in double. Each array is summed in an order that depends
 * only on its length, and then the sums are added in order. The result is finite exactly if every element is. `arrays`
 * is host memory. */
ZE_API int ze_cuda_squared_norm(int device, void* stream, const struct ze_array* arrays, int64_t num_arrays,
                                double* workspace, double* result);

/* Computes the factor of the gradient: 1 / (divisor * *loss_scale), and clipping to `limit`, if that is above 0, as in
 * torch.nn.utils.clip_grad_norm_. `squared_norm` is that of the gradient before division. A loss_scale of NULL means 1.
 * If skip is not 0, a norm that is not finite is an overflow; otherwise the factor is used whatever it is. */
ZE_API int ze_cuda_gradient_factor(int device, void* stream, const double* squared_norm, const double* loss_scale,
                                   double divisor, double limit, int skip, struct ze_cuda_factor* factor);

struct ze_cuda_copy {
  const void* src;
  void* dst;
  int64_t numel;
  int32_t src_dtype;
};

/* dst = src * scale for each copy, or dst += src * scale if accumulate is not 0, computed in float and rounded once to
 * nearest even. No dst may overlap another copy's src or dst. `copies` is host memory; 64 copies take one launch. */
ZE_API int ze_cuda_cast(int device, void* stream, const struct ze_cuda_copy* copies, int64_t num_copies, int dst_dtype,
                        float scale, int accumulate);

/* Adds ze_digest of zeroengine.h to *result, which is 8-byte aligned. `data` may have any alignment. */
ZE_API int ze_cuda_digest(int device, void* stream, const void* data, int64_t bytes, int64_t first_word,
                          uint64_t* result);

/* Writes a few bytes of host memory to the device in stream order. They travel as arguments of a kernel, so the host
 * does not wait. */
ZE_API int ze_cuda_write(int device, void* stream, void* dst, const void* src, int64_t bytes);

/* ze_quantize and ze_dequantize_sum of zeroengine.h, with the same bits. Packets are 16-byte aligned. */
ZE_API int ze_cuda_quantize(int device, void* stream, const void* src, int src_dtype, int64_t n, int64_t num_slices,
                            int bits, void* packets, void* error, float decay);
ZE_API int ze_cuda_dequantize_sum(int device, void* stream, void* target, int target_dtype, int accumulate, int64_t n,
                                  int64_t num_slices, int64_t num_sources, int bits, const void* packets);

#ifdef __cplusplus
}
#endif

#endif
