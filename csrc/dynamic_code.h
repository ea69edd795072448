// The code of 8-bit moments, written once over the type V: a vector of floats on the CPU, a float on the GPU.
//
// [Note: A dynamic code] A moment is kept as a whole number for each element and one scale for each block of 256
// elements, which is the block's largest magnitude. Numbers stand for fractions of it up to 1, in ranges between powers
// of 8. Range k has 2^k numbers at equal distances, so large fractions are precise and small ones are still there:
//
//     range        0             1                  2           ...      7
//     numbers      1             2, 3               4 to 7               128 to 255
//     fractions    up to 8^-7    8^-7 to 8^-6       8^-6 to 8^-5         1/8 to 1
//
// This is the dynamic code of Dettmers et al. (arXiv 2110.02861, section 1.3) with powers of 8 for powers of 10: the
// exponent of a float then says which range it is in. A moment without a sign has the ranges 0 to 7 and numbers up to
// 255. One with a sign has the ranges 0 to 6 and numbers from -127 to 127. Within a range both directions are linear,
// and the line of range 0 goes through zero.
//
// Numbers are rounded stochastically: a random value in [0, 1) is added before what follows the point is dropped, so
// that the expected value is the float. Rounding to nearest would lose every change below half a distance, such as the
// decay of Adam's second moment. Only a value above zero never becomes zero where moments have no sign, because a
// parameter is divided by its root.
#pragma once

#include "update.h"

namespace ze {
namespace {

constexpr float kLargestScale = 3.402823466e38f, kSmallestScale = 1.17549435e-38f;

// The line of range k of `ranges`: fraction = slope * number + start. On the CPU these are tables.
template <class V>
ZE_LANES constexpr float fraction_slope(int k, int ranges) {
  return k ? 0.875f * power_of_2<V>(2 * k + 3 - 3 * ranges) : power_of_2<V>(3 - 3 * ranges);
}
template <class V>
ZE_LANES constexpr float fraction_start(int k, int ranges) {
  return k ? (0.875f * power_of_2<V>(-k) - 0.75f) * power_of_2<V>(3 * k + 3 - 3 * ranges) : 0.0f;
}
// Its inverse: number = slope * fraction + start.
template <class V>
ZE_LANES constexpr float number_slope(int k, int ranges) {
  return k ? 8.0f / 7.0f * power_of_2<V>(3 * ranges - 3 - 2 * k) : power_of_2<V>(3 * ranges - 3);
}
template <class V>
ZE_LANES constexpr float number_start(int k, int) {
  return k ? 6.0f / 7.0f * power_of_2<V>(k) - 1.0f : 0.0f;
}

// Returns the fractions of the scale that numbers, which are not negative, stand for.
template <int kRanges, class V>
ZE_LANES V fraction_of(V number) {
  // The exponent of a number is its range, and 0 is on the line of range 0.
  const auto range = exponent_of(larger(number, fill<V>(1)));
  return number * pick<kRanges, fraction_slope<V>, V>(range) + pick<kRanges, fraction_start<V>, V>(range);
}

// Returns the numbers of fractions, not rounded yet.
template <int kRanges, class V>
ZE_LANES V number_of(V fraction) {
  // Range k has three exponents. What is outside of all ranges, or a NaN, takes the first or the last one.
  const V inside = smaller(larger(fraction, fill<V>(power_of_2<V>(-3 * kRanges))), fill<V>(0.99999994f));
  const auto range = third_of(exponent_of(inside) + whole<V>(3 * kRanges));
  const V number = fraction * pick<kRanges, number_slope<V>, V>(range) + pick<kRanges, number_start<V>, V>(range);
  return smaller(number, fill<V>(float((1 << kRanges) - 1)));
}

// Returns the scale of a block whose largest magnitude is `magnitude`.
ZE_LANES float scale_of(float magnitude) {
  if (!(magnitude < kLargestScale)) return kLargestScale;
  return magnitude > kSmallestScale ? magnitude : kSmallestScale;
}

}  // namespace
}  // namespace ze
