// Memory that a thread keeps between calls, so that the steady state allocates nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace pagelet {

// At least `count` floats, 64-byte aligned, not initialised; valid until the thread's next call. Throws
// std::bad_alloc.
float* thread_scratch(size_t count);

// Pieces of that memory of these sizes in bytes, each 64-byte aligned.
template <size_t kCount>
std::array<uint8_t*, kCount> thread_scratch_pieces(const size_t (&bytes)[kCount]) {
  size_t offsets[kCount + 1] = {};
  for (size_t i = 0; i < kCount; ++i) offsets[i + 1] = offsets[i] + (bytes[i] + 63) / 64 * 64;
  auto* memory = reinterpret_cast<uint8_t*>(thread_scratch(offsets[kCount] / sizeof(float)));
  std::array<uint8_t*, kCount> pieces;
  for (size_t i = 0; i < kCount; ++i) pieces[i] = memory + offsets[i];
  return pieces;
}

}  // namespace pagelet
