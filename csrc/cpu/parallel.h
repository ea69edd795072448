// Divides a range evenly among the threads of OpenMP, whose runtime torch has loaded.
#pragma once

#include <stdint.h>

namespace ze {

// With fewer elements than this a thread costs more time than it saves.
constexpr int64_t kGrain = 1 << 15;

// Calls f(begin, end) on disjoint ranges that cover [0, n); each begins at a multiple of `step`.
template <class F>
void parallel_for(int64_t n, int64_t step, int num_threads, F f) {
  const int64_t most = (n + kGrain - 1) / kGrain;
  const int threads = int(num_threads < most ? num_threads : most);
  if (threads <= 1) return f(int64_t(0), n);
  const int64_t steps = (n + step - 1) / step;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int t = 0; t < threads; ++t) {
    const int64_t begin = steps * t / threads * step, end = steps * (t + 1) / threads * step;
    f(begin, end < n ? end : n);
  }
}

}  // namespace ze
