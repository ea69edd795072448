// The kernels of one instruction set, and the table that lists them. Internal to the library.
#pragma once

#include "../update.h"
#include "../packet.h"

namespace ze {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

// Elements that a kernel handles at a time: two cache lines of float, one of bf16 or fp16.
constexpr int64_t kBlock = 32;

// The arrays of ze_stream.
struct StreamArrays {
  float *a, *b, *c;
  const void* grad;
  void* low_precision_param;
};

// With `bypass_cache` the low-precision parameter is written by non-temporal stores: its element `begin` begins a cache
// line. With moments of 8 bits `begin` is a multiple of kMomentBlock.
using Update = void (*)(const ze_update_arrays&, int64_t begin, int64_t end, const UpdateFactors&, const Random&,
                        bool bypass_cache);

constexpr int64_t kMomentBlock = ZE_MOMENT_BLOCK;

// Functions on the elements [begin, end). Tables are indexed by ze_dtype. The table of update is indexed by the rule and
// the dtype of its moments; there is one function for rules without moments.
struct Kernels {
  const char* name;
  Update update[kRules][4];
  void (*decode_moment[2])(const void* codes, const float* scales, float* values, int64_t n);
  void (*encode_moment[2])(const float* values, void* codes, float* scales, int64_t n);
  double (*squared_norm[3])(const void* x, int64_t begin, int64_t end);
  uint64_t (*digest)(const void* words, int64_t n, uint64_t first_place);
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
