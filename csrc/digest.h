// The digest of a tensor. The kernels of CPU and GPU share its terms.
//
// [Note: Digest] The digest of a tensor is a number of 64 bits: the sum modulo 2^64, over the words of 8 bytes of the
// tensor's contiguous bytes, of mix(word + (place + 1) * kPlaceStride). The last word is padded with zero bytes. `place`
// counts words from the first byte of the whole tensor. `mix`, the finalizer of splitmix64, maps no two words to one
// number, so a change of a single word always changes the digest, and changes of several words cancel with a
// probability of about 2^-64. Being a sum, it does not depend on the order in which words are read, and the digests of
// parts that begin at multiples of 8 bytes of the tensor add up to the digest of the whole.
#pragma once

#include "update.h"

namespace ze {
namespace {

constexpr uint64_t kPlaceStride = 0x9e3779b97f4a7c15;

ZE_SHARED uint64_t digest_term(uint64_t word, uint64_t place) { return mix(word + (place + 1) * kPlaceStride); }

}  // namespace
}  // namespace ze
