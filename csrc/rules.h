// The rules of the fused updates, written once over the type V: a vector of floats on the CPU, a float on the GPU.
//
// A rule's `step` returns the new parameter from the old one, the gradient (already multiplied by grad_scale) and the
// moments, which it updates. Each operation rounds once, in this order, so that all kernels give the same bits.
// is_signed says of each moment whether it may be negative.
#pragma once

#include "update.h"

namespace ze {
namespace {

// Leaves the parameter alone: for elements without a gradient, whose moving average goes on.
template <class V>
struct AverageOnly {
  static constexpr int kMoments = 0;
  static ZE_LANES constexpr bool is_signed(int) { return false; }
  ZE_LANES explicit AverageOnly(const UpdateFactors&) {}
  ZE_LANES V step(V p, V, V*) const { return p; }
};

// arXiv 1412.6980, algorithm 1; decoupled weight decay: AdamW, 1711.05101.
template <class V, bool kDecoupled>
struct AdamRule {
  static constexpr int kMoments = 2;
  static ZE_LANES constexpr bool is_signed(int moment) { return moment == 0; }
  V decay, one_minus_beta1, beta2, one_minus_beta2, inv_root, eps, step_size;

  ZE_LANES explicit AdamRule(const UpdateFactors& k)
      : decay(fill<V>(k.decay)), one_minus_beta1(fill<V>(k.first)), beta2(fill<V>(k.beta2)),
        one_minus_beta2(fill<V>(k.second)), inv_root(fill<V>(k.inv_root)), eps(fill<V>(k.eps)),
        step_size(fill<V>(k.step_size)) {}

  ZE_LANES V step(V p, V g, V* m) const {
    if (!kDecoupled) g = g + decay * p;
    m[0] = m[0] + one_minus_beta1 * (g - m[0]);
    m[1] = beta2 * m[1] + one_minus_beta2 * g * g;
    const V denominator = square_root(m[1]) * inv_root + eps;
    if (kDecoupled) p = p * decay;
    return p - step_size * m[0] / denominator;
  }
};

// arXiv 2302.06675, algorithm 2.
template <class V>
struct LionRule {
  static constexpr int kMoments = 1;
  static ZE_LANES constexpr bool is_signed(int) { return true; }
  V decay, one_minus_beta1, one_minus_beta2, step_size;

  ZE_LANES explicit LionRule(const UpdateFactors& k)
      : decay(fill<V>(k.decay)), one_minus_beta1(fill<V>(k.first)), one_minus_beta2(fill<V>(k.second)),
        step_size(fill<V>(k.step_size)) {}

  ZE_LANES V step(V p, V g, V* m) const {
    const V difference = g - m[0];
    const V direction = sign_of(m[0] + one_minus_beta1 * difference);
    m[0] = m[0] + one_minus_beta2 * difference;
    return p * decay - step_size * direction;
  }
};

// torch.optim.SGD without momentum.
template <class V>
struct SgdRule {
  static constexpr int kMoments = 0;
  static ZE_LANES constexpr bool is_signed(int) { return false; }
  V decay, step_size;

  ZE_LANES explicit SgdRule(const UpdateFactors& k) : decay(fill<V>(k.decay)), step_size(fill<V>(k.step_size)) {}
  ZE_LANES V step(V p, V g, V*) const { return p - step_size * (g + decay * p); }
};

// torch.optim.SGD with momentum (Sutskever et al., ICML 2013), perhaps Nesterov's.
template <class V>
struct MomentumRule {
  static constexpr int kMoments = 1;
  static ZE_LANES constexpr bool is_signed(int) { return true; }
  V decay, momentum, one_minus_dampening, step_size;
  int32_t nesterov;

  ZE_LANES explicit MomentumRule(const UpdateFactors& k)
      : decay(fill<V>(k.decay)), momentum(fill<V>(k.first)), one_minus_dampening(fill<V>(k.second)),
        step_size(fill<V>(k.step_size)), nesterov(k.nesterov) {}

  ZE_LANES V step(V p, V g, V* m) const {
    g = g + decay * p;
    m[0] = momentum * m[0] + one_minus_dampening * g;
    return p - step_size * (nesterov ? g + momentum * m[0] : m[0]);
  }
};

// Duchi et al., JMLR 12 (2011), as in torch.optim.Adagrad.
template <class V>
struct AdagradRule {
  static constexpr int kMoments = 1;
  static ZE_LANES constexpr bool is_signed(int) { return false; }
  V decay, eps, step_size;

  ZE_LANES explicit AdagradRule(const UpdateFactors& k)
      : decay(fill<V>(k.decay)), eps(fill<V>(k.eps)), step_size(fill<V>(k.step_size)) {}

  ZE_LANES V step(V p, V g, V* m) const {
    g = g + decay * p;
    m[0] = m[0] + g * g;
    return p - step_size * g / (square_root(m[0]) + eps);
  }
};

}  // namespace
}  // namespace ze
