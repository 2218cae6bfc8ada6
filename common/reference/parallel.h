/// \file
/// Spreading independent work over the machine's cores.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace flashsteps {

/// Calls `work(begin, end)` on every core with a part of [0, count) of its own, all parts about
/// equal, and waits. An exception from one of them is thrown on.
template <typename Work>
void parallel_for(int64_t count, Work&& work) {
  const int64_t threads =
      std::clamp<int64_t>(std::thread::hardware_concurrency(), 1, std::max<int64_t>(count, 1));
  std::vector<std::exception_ptr> failures(threads);
  const auto part = [&](int64_t t) {
    try {
      work(count * t / threads, count * (t + 1) / threads);
    } catch (...) {
      failures[t] = std::current_exception();
    }
  };
  std::vector<std::jthread> pool;
  for (int64_t t = 1; t < threads; ++t) pool.emplace_back(part, t);
  part(0);
  pool.clear();  // joins
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

}  // namespace flashsteps
