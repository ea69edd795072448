// The kernels of one instruction set, and the table that lists them. Internal to the library.
#pragma once

#include "../adam.h"
#include "../packet.h"

namespace ze {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};
// Stands for the type of a low-precision copy where there is none.
struct none {};

// Elements that a kernel handles at a time: two cache lines of float, one of bf16 or fp16.
constexpr int64_t kBlock = 32;

// The arrays of ze_stream.
struct StreamArrays {
  float *a, *b, *c;
  const void* grad;
  void* low_precision_param;
};

// With `bypass_cache` the low-precision parameter is written by non-temporal stores.
using Adam = void (*)(const AdamArrays&, int64_t begin, int64_t end, const AdamFactors&, const Random&,
                      bool bypass_cache);

// Functions on the elements [begin, end). Tables are indexed by ze_dtype; for low_precision_param, 0 means none. The
// table of adam is indexed by the dtypes of moments, gradient and low_precision_param, and last by whether weight decay
// is decoupled.
struct Kernels {
  const char* name;
  Adam adam[2][3][3][2];
  double (*squared_norm[3])(const void* x, int64_t begin, int64_t end);
  void (*accumulate[3])(float* acc, const void* src, int64_t n, bool init);
  void (*cast[3])(const float* src, void* dst, int64_t n);
  void (*quantize[3])(const void* x, int64_t n, int bits, float* scale, uint8_t* codes, bf16* error, float decay);
  void (*dequantize)(const uint8_t* codes, float scale, int64_t n, int bits, float* sum, bool init);
  void (*stream[3][2])(const StreamArrays&, int64_t begin, int64_t end);
};

extern const Kernels kPortable;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif

// Returns the table in use.
const Kernels& kernels();

}  // namespace ze
