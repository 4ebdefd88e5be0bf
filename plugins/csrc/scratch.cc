#include "scratch.h"

#include <cstdint>
#include <memory>

namespace pagelet {

float* thread_scratch(size_t count) {
  constexpr size_t kAlignment = 64 / sizeof(float);
  thread_local std::unique_ptr<float[]> memory;
  thread_local size_t capacity = 0;
  if (capacity < count) {
    capacity = 0;
    memory.reset(new float[count + kAlignment]);
    capacity = count;
  }
  const auto address = reinterpret_cast<uintptr_t>(memory.get());
  return reinterpret_cast<float*>((address + 63) & ~uintptr_t(63));
}

}  // namespace pagelet
