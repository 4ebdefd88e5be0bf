// Memory that a thread keeps between calls, so that the steady state allocates nothing.
#pragma once

#include <cstddef>

namespace pagelet {

// At least `count` floats, 64-byte aligned, not initialised; valid until the thread's next call. Throws
// std::bad_alloc.
float* thread_scratch(size_t count);

}  // namespace pagelet
