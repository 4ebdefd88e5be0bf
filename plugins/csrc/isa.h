// Which instruction sets this library has kernels for, and which one runs here.
//
// A kernel source is compiled once per instruction set into the namespace pagelet::<isa>, where it defines a
// plain table of functions (say `const LinearKernel linear_kernel`). A baseline source that uses it writes
//     PAGELET_DECLARE_KERNEL(LinearKernel, linear_kernel)      // at namespace pagelet scope, once
//     const LinearKernel& kernel = PAGELET_KERNEL(LinearKernel, linear_kernel, selected_isa());
#pragma once

#include <cstddef>

namespace pagelet {

// Narrowest first: the last one that runs here is chosen. Two extra arguments reach every X.
#if (defined(__x86_64__) || defined(_M_X64)) && defined(PAGELET_HAS_AVXVNNI)
#define PAGELET_FOR_EACH_ISA(X, a, b) X(portable, a, b) X(avx2, a, b) X(avxvnni, a, b) X(avx512, a, b)
#elif defined(__x86_64__) || defined(_M_X64)  // the compiler is older than that instruction set
#define PAGELET_FOR_EACH_ISA(X, a, b) X(portable, a, b) X(avx2, a, b) X(avx512, a, b)
#elif defined(__aarch64__) || defined(_M_ARM64)
#define PAGELET_FOR_EACH_ISA(X, a, b) X(portable, a, b) X(neon, a, b) X(dotprod, a, b)
#else
#define PAGELET_FOR_EACH_ISA(X, a, b) X(portable, a, b)
#endif

#define PAGELET_ISA_ENUMERATOR(isa, a, b) isa,
enum class Isa : int { PAGELET_FOR_EACH_ISA(PAGELET_ISA_ENUMERATOR, , ) count };

const char* isa_name(Isa isa);

// True when both the CPU and the operating system support it.
bool isa_available(Isa isa);

// The widest available one, or the one that the environment variable PAGELET_ISA names. Settled on the first
// call. Throws std::runtime_error with the available names when PAGELET_ISA is unknown or cannot run here.
Isa selected_isa();

}  // namespace pagelet

#define PAGELET_DECLARE_ONE(isa, Table, name) \
  namespace isa {                             \
  extern const Table name;                    \
  }
#define PAGELET_ADDRESS_ONE(isa, Table, name) &isa::name,

#define PAGELET_DECLARE_KERNEL(Table, name) PAGELET_FOR_EACH_ISA(PAGELET_DECLARE_ONE, Table, name)
#define PAGELET_KERNEL(Table, name, chosen)                                                        \
  ([](::pagelet::Isa isa) -> const Table& {                                                        \
    static const Table* const tables[] = {PAGELET_FOR_EACH_ISA(PAGELET_ADDRESS_ONE, Table, name)}; \
    return *tables[static_cast<int>(isa)];                                                         \
  }(chosen))
