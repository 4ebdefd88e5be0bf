// How an op hands its work items to the host's threads, without knowing the host.
#pragma once

#include <atomic>
#include <cstddef>
#include <exception>

namespace pagelet {

struct ParallelFor {
  const void* host;
  const void* context;
  void (*run)(const ParallelFor&, size_t total, void (*body)(void*, size_t), void* data);
};

// Calls body(i) for every i < total, on the host's threads. The first exception is thrown again here: none
// may reach the host's threads.
template <typename Body>
void for_each(const ParallelFor& parallel_for, size_t total, const Body& body) {
  struct State {
    const Body& body;
    std::atomic_flag failed = ATOMIC_FLAG_INIT;
    std::exception_ptr error;
  } state{body, ATOMIC_FLAG_INIT, nullptr};
  if (total <= 1) {
    if (total == 1) body(size_t{0});
    return;
  }
  const auto call = [](void* data, size_t i) {
    auto& shared = *static_cast<State*>(data);
    try {
      shared.body(i);
    } catch (...) {
      if (!shared.failed.test_and_set()) shared.error = std::current_exception();
    }
  };
  parallel_for.run(parallel_for, total, call, &state);
  if (state.error) std::rethrow_exception(state.error);
}

}  // namespace pagelet
