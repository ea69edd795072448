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

#define ZE_ABI_VERSION 4

enum ze_dtype { ZE_F32 = 0, ZE_BF16 = 1, ZE_F16 = 2 };

enum ze_status { ZE_OK = 0, ZE_BAD_DTYPE = -1, ZE_UNSUPPORTED = -2, ZE_NO_MEMORY = -3 };

ZE_API int ze_abi_version(void);

/* The instruction set in use: "avx512", "avx2" or "portable". All of them give the same bits. */
ZE_API const char* ze_cpu_isa(void);

/* Selects another instruction set; NULL or "" means the best that this CPU has. Not thread safe.
 * Returns ZE_UNSUPPORTED if the name is unknown or this CPU lacks the instruction set. */
ZE_API int ze_cpu_set_isa(const char* name);

/* Adam's arguments, held in double and rounded to float once. `step` counts from 1 and includes this
 * step. `grad_scale` multiplies the gradient before anything else uses it. Only bf16 moments use `seed`
 * and `offset`. */
struct ze_adam_args {
  double lr, beta1, beta2, eps, weight_decay, grad_scale;
  int64_t step;
  uint64_t seed;
  int64_t offset; /* index of element 0 among the elements that share the seed, not negative */
  int32_t decoupled; /* 1: AdamW, param *= 1 - lr * weight_decay; 0: Adam, grad += weight_decay * param */
  int32_t maximize;
  int32_t reload_written; /* 1: where low_precision_param is not param rounded, it was written from outside, and param
                             takes its value before the step */
};

/* One step of Adam (arXiv 1412.6980, algorithm 1) or AdamW (1711.05101) in one pass.
 *
 * param: float[n], exp_avg and exp_avg_sq: moments_dtype[n] (ZE_F32 or ZE_BF16), updated in place.
 * grad: grad_dtype[n], read only.
 * low_precision_param: NULL, or low_precision_dtype[n] (ZE_BF16 or ZE_F16), receives the updated param rounded to
 * nearest even; with reload_written it is read first, and compared by its bits.
 *
 * All is computed in float. bf16 moments are rounded stochastically at the end, by bits that are a pure function of
 * seed and offset + i: the expected value is the float, a bf16 value stays as it is, and a finite one stays finite.
 * An element's result depends on that element alone: neither on n, its alignment or its position beyond offset + i,
 * nor on num_threads or the instruction set. ZE_BAD_DTYPE for an unknown code. */
ZE_API int ze_adam(float* param, const void* grad, int grad_dtype, void* exp_avg, void* exp_avg_sq,
                   int moments_dtype, void* low_precision_param, int low_precision_dtype, int64_t n,
                   const struct ze_adam_args* args, int num_threads);

/* *result = sum of x[i]^2 in double. It does not depend on num_threads or the instruction set. It is
 * finite exactly if every element is: the squares of finite floats cannot overflow a double. */
ZE_API int ze_squared_norm(const void* x, int dtype, int64_t n, double* result, int num_threads);

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
