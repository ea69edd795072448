/* The C interface of zeroengine's CPU library.
 *
 * The interface is plain C without torch: Python loads the library with ctypes, and one build serves every torch
 * version. Counts (`n`) are elements. Pointers need only the alignment of their element type. A function marked
 * "single thread" starts no threads of its own, and the caller may call it from several.
 */
#ifndef ZEROENGINE_H
#define ZEROENGINE_H

#include <stddef.h>
#include <stdint.h>

#include "api.h"

#ifdef __cplusplus
extern "C" {
#endif

#define ZE_ABI_VERSION 7

/* ZE_8BIT is for moments alone: see csrc/dynamic_code.h. */
enum ze_dtype { ZE_F32 = 0, ZE_BF16 = 1, ZE_F16 = 2, ZE_8BIT = 3 };

/* The elements that share one scale in moments of 8 bits. */
#define ZE_MOMENT_BLOCK 256

enum ze_status { ZE_OK = 0, ZE_BAD_DTYPE = -1, ZE_UNSUPPORTED = -2, ZE_NO_MEMORY = -3 };

ZE_API int ze_abi_version(void);

/* The instruction set in use: "avx512", "avx2" or "portable". All of them give the same bits. */
ZE_API const char* ze_cpu_isa(void);

/* Selects another instruction set; NULL or "" means the best that this CPU has. Not thread safe.
 * Returns ZE_UNSUPPORTED if the name is unknown or this CPU lacks the instruction set. */
ZE_API int ze_cpu_set_isa(const char* name);

/* The rules of ze_update, and the moments that each keeps. */
enum ze_rule {
  ZE_AVERAGE_ONLY = 0, /* the parameter stays, and only its moving average goes on */
  ZE_ADAM = 1,         /* arXiv 1412.6980, algorithm 1: exp_avg, exp_avg_sq; grad += weight_decay * param */
  ZE_ADAMW = 2,        /* arXiv 1711.05101: the same with param *= 1 - lr * weight_decay */
  ZE_LION = 3,         /* arXiv 2302.06675, algorithm 2: exp_avg; decay as AdamW's */
  ZE_SGD = 4,          /* torch.optim.SGD without momentum: no moments; decay as Adam's */
  ZE_MOMENTUM_SGD = 5, /* with momentum: momentum_buffer */
  ZE_ADAGRAD = 6       /* torch.optim.Adagrad: sum */
};

/* The arguments of an update, held in double and rounded to float once. `step` counts from 1 and includes this step.
 * `grad_scale` multiplies the gradient before anything else uses it. Only stochastic rounding uses `seed` and `offset`.
 */
struct ze_update_args {
  double lr, beta1, beta2; /* momentum SGD: beta1 is the momentum, beta2 the dampening; Adagrad: beta1 is lr_decay */
  double eps, weight_decay, grad_scale;
  double average_weight; /* of the new param in the moving average: 1 - decay */
  int64_t step;
  uint64_t seed;
  int64_t offset; /* index of element 0 among the elements that share the seed, not negative; with moments of 8 bits a
                     multiple of ZE_MOMENT_BLOCK */
  int32_t rule;
  int32_t maximize;
  int32_t nesterov; /* momentum SGD */
};

/* The arrays of an update, of n elements each. A dtype is a ze_dtype, and is ignored where its array is NULL.
 *
 * param: the master weights, or parameters of 16 bits without masters.
 * grad: read only; NULL for ZE_AVERAGE_ONLY.
 * moments: those of the rule, in its order: ZE_F32, ZE_BF16 or ZE_8BIT.
 * scales: of moments of 8 bits: one for each block of ZE_MOMENT_BLOCK elements. Element 0 begins a block.
 * low_precision_param: NULL, or ZE_BF16 or ZE_F16: receives the updated param rounded to nearest even, which is ZE_F32
 *     then.
 * reload_written: 1: where low_precision_param is not param rounded, it was written from outside, and param takes its
 *     value before the step. It is read first then, and compared by its bits.
 * average: NULL, or ZE_F32 or ZE_BF16: the moving average, average += average_weight * (param - average). */
struct ze_update_arrays {
  void* param;
  const void* grad;
  void* moments[2];
  float* scales[2];
  void* low_precision_param;
  void* average;
  int32_t param_dtype, grad_dtype, moments_dtype, low_precision_dtype, average_dtype;
  int32_t reload_written;
};

/* One step in one pass. All is computed in float.
 *
 * Moments of 8 bits (csrc/dynamic_code.h), and moments, averages and parameters in bf16, are rounded stochastically at
 * the end, by bits that are a pure function of seed and offset + i: the expected value is the float, a bf16 value stays
 * as it is, and a finite one stays finite. Parameters in fp16 are rounded to nearest even.
 *
 * An element's result depends on that element alone (with moments of 8 bits: on its block): neither on n, its alignment
 * or its position beyond offset + i, nor on num_threads or the instruction set.
 *
 * Returns ZE_BAD_DTYPE for a rule or a dtype that is unknown or does not fit. */
ZE_API int ze_update(const struct ze_update_arrays* arrays, int64_t n, const struct ze_update_args* args,
                     int num_threads);

/* Neighboring elements with the same hyperparameters and step count. */
struct ze_update_part {
  struct ze_update_arrays arrays; /* from the part's first element on */
  int64_t n;
  int64_t step;   /* of the first update */
  uint64_t seed;  /* stochastic rounding uses seed + the step of the update */
  int64_t offset; /* as in ze_update_args */
  int32_t group;  /* index of the hyperparameters */
};

/* ze_update of each part in order. groups: the arguments of each group but for step, seed and offset. num_steps: the
 * updates of these parts before this one. */
ZE_API int ze_update_parts(const struct ze_update_part* parts, int64_t num_parts, const struct ze_update_args* groups,
                           int64_t num_steps, int num_threads);

/* Moments of 8 bits as floats, and floats as such moments, rounded to nearest. is_signed: whether a moment may be
 * negative. Element 0 begins a block. Single thread. */
ZE_API void ze_decode_moment(const void* codes, const float* scales, float* values, int64_t n, int is_signed);
ZE_API void ze_encode_moment(const float* values, void* codes, float* scales, int64_t n, int is_signed);

struct ze_array {
  const void* data;
  int64_t numel;
  int32_t dtype;
};

/* *result = sum of the squares of all elements in double, array by array. It does not depend on num_threads or the
 * instruction set. It is finite exactly if every element is: the squares of finite floats cannot overflow a double. */
ZE_API int ze_squared_norm(const struct ze_array* arrays, int64_t num_arrays, double* result, int num_threads);

/* Returns the digest of `bytes` bytes: see csrc/digest.h. first_word: the place of their first word in the whole tensor.
 * It does not depend on the alignment, on num_threads or on the instruction set. */
ZE_API uint64_t ze_digest(const void* data, int64_t bytes, int64_t first_word, int num_threads);

/* acc = src if init is not 0, else acc += src, in float. Single thread. The buffers must not overlap,
 * except that src may be acc itself if it is float. */
ZE_API int ze_accumulate(float* acc, const void* src, int src_dtype, int64_t n, int init);

/* dst = src rounded to nearest even; a NaN stays a NaN. Single thread. The buffers must not overlap. */
ZE_API int ze_cast(const float* src, void* dst, int dst_dtype, int64_t n);

/* Quantized packets: integers of 8 or 4 bits, with one scale for every block of 256 elements.
 *
 * A packet of n elements holds a float scale for each block, zeros up to a multiple of 16 bytes, the integers in order,
 * and zeros up to a multiple of 16 bytes: ze_packet_bytes(n, bits) bytes in all. An integer of 4 bits is in two's
 * complement, and the first of a pair is in the lower half of its byte.
 *
 * The scale of a block is its largest magnitude divided by 127 (8 bits) or 7 (4 bits), but at least 2^-126. An element
 * is rounded to the nearest multiple of the scale, ties to even. A block with an element that is not finite has NaN as
 * its scale, so that all of its elements are NaN in the end. */
#define ZE_QUANTIZED_BLOCK 256

/* Returns -1 if bits is not 8 or 4. */
ZE_API int64_t ze_packet_bytes(int64_t n, int bits);

/* Packs num_slices slices of n elements each, which follow one another in src, into as many packets, 16-byte aligned.
 *
 * error: NULL, or bf16[num_slices * n], which is added to src first, in float. Then it is replaced by
 * decay * error + (1 - decay) * (what was lost), or by zeros in a block that is not finite. */
ZE_API int ze_quantize(const void* src, int src_dtype, int64_t n, int64_t num_slices, int bits, void* packets,
                       void* error, float decay, int num_threads);

/* Slice s of target, n elements, becomes the sum of num_sources packets, added in float in order and rounded once.
 * The packets of a slice follow one another, and those of the next slice follow them. accumulate: the old values are
 * added last. */
ZE_API int ze_dequantize_sum(void* target, int target_dtype, int accumulate, int64_t n, int64_t num_slices,
                             int64_t num_sources, int bits, const void* packets, int num_threads);

/* Asks for huge pages over [address, address + bytes), best before the pages are touched.
 * Returns ZE_UNSUPPORTED if the system has none. */
ZE_API int ze_advise_huge(void* address, size_t bytes);

/* Adam's memory traffic without its arithmetic, the reference of benchmarks/update.py: reads g,
 * reads and writes a, b and c, and where `low_precision_param` is not NULL writes uint16_t[n], 64-byte aligned. */
ZE_API void ze_stream(float* a, float* b, float* c, const void* g, int g_dtype, void* low_precision_param, int64_t n,
                      int num_threads);

/* Exchange between processes of one host (csrc/cpu/exchange.cpp). Counters have 32 bits and wrap around. */

/* Stores value for other processes to see, after all earlier writes, and wakes the processes that wait for it. */
ZE_API void ze_post(uint32_t* counter, uint32_t value);

ZE_API uint32_t ze_load(const uint32_t* counter);

/* Waits for the counter. Returns 1 when it has reached value, or 0 after about timeout_us microseconds. */
ZE_API int ze_wait(const uint32_t* counter, uint32_t value, int timeout_us);

/* Reads `bytes` bytes completely. Returns their count, or -errno. */
ZE_API int64_t ze_pread(int fd, void* target, int64_t bytes, int64_t offset);

/* Maps `bytes` of fd at address, which is reserved already. Writes reach the file if shared is not 0, and
 * else stay with this process. What is shared lies in huge pages, where the address and the offset in
 * the file are equal modulo 2 MiB and the system has them. Returns 0 or -errno. */
ZE_API int ze_map(void* address, int64_t bytes, int fd, int64_t offset, int shared);

/* Frees the memory and keeps the addresses reserved, so that a use faults. Returns 0 or -errno. */
ZE_API int ze_unmap(void* address, int64_t bytes);

/* target = (accumulate: +=) source 0 + source 1 + ..., added in float in that order, rounded once.
 * A source is local[s] or, if that is NULL, read from fds[s] at offsets[s]. target may be a local
 * source. Returns n, a ze_status, or -errno. Single thread. */
ZE_API int64_t ze_sum(void* target, int target_dtype, int accumulate, int64_t n, int source_dtype,
                      int num_sources, const void* const* local, const int* fds, const int64_t* offsets);

#ifdef __cplusplus
}
#endif

#endif
