#include "isa.h"

#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(__x86_64__) || defined(_M_X64)
#ifdef _MSC_VER
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(_M_ARM64)
#include <windows.h>
#endif

namespace pagelet {
namespace {

constexpr int kIsaCount = static_cast<int>(Isa::count);

#define PAGELET_ISA_NAME(isa, a, b) #isa,
constexpr const char* kNames[] = {PAGELET_FOR_EACH_ISA(PAGELET_ISA_NAME, , )};

#if defined(__x86_64__) || defined(_M_X64)
struct CpuId {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

CpuId cpuid(uint32_t leaf, uint32_t subleaf = 0) {
  CpuId id;
#ifdef _MSC_VER
  int registers[4];
  __cpuidex(registers, static_cast<int>(leaf), static_cast<int>(subleaf));
  id = {uint32_t(registers[0]), uint32_t(registers[1]), uint32_t(registers[2]), uint32_t(registers[3])};
#else
  __get_cpuid_count(leaf, subleaf, &id.eax, &id.ebx, &id.ecx, &id.edx);
#endif
  return id;
}

// XCR0: the register state that the operating system saves at a context switch.
uint64_t saved_state() {
#ifdef _MSC_VER
  return _xgetbv(0);
#else
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t(high) << 32) | low;
#endif
}

bool all_set(uint64_t value, uint64_t bits) { return (value & bits) == bits; }

bool cpu_supports(Isa isa) {
  if (isa == Isa::portable) return true;
  constexpr uint32_t kFma = 1u << 12, kOsxsave = 1u << 27, kF16c = 1u << 29;      // leaf 1, ecx
  constexpr uint32_t kAvx2 = 1u << 5;                                             // leaf 7, ebx
  constexpr uint32_t kAvx512FDqBwVl = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // leaf 7, ebx
  constexpr uint32_t kAvx512Vnni = 1u << 11;                                      // leaf 7, ecx
  constexpr uint32_t kAvxVnni = 1u << 4;                                          // leaf 7.1, eax
  constexpr uint64_t kYmmState = 0x6, kZmmState = 0xe6;
  const CpuId basic = cpuid(1), extended = cpuid(7);
  if (!all_set(basic.ecx, kFma | kOsxsave | kF16c)) return false;
  const bool avx2 = all_set(extended.ebx, kAvx2) && all_set(saved_state(), kYmmState);
  if (isa == Isa::avx2 || !avx2) return avx2;
#ifdef PAGELET_EMULATE_AVX512
  return true;
#endif
#ifdef PAGELET_HAS_AVXVNNI
  if (isa == Isa::avxvnni) return extended.eax >= 1 && all_set(cpuid(7, 1).eax, kAvxVnni);
#else
  (void)kAvxVnni;
#endif
  return all_set(extended.ebx, kAvx512FDqBwVl) && all_set(extended.ecx, kAvx512Vnni) &&
         all_set(saved_state(), kZmmState);
}
#elif defined(__aarch64__) && defined(__linux__)
bool cpu_supports(Isa isa) {
  constexpr unsigned long kDotProduct = 1ul << 20;                         // HWCAP_ASIMDDP
  return isa != Isa::dotprod || (getauxval(AT_HWCAP) & kDotProduct) != 0;  // NEON is part of every aarch64
}
#elif defined(_M_ARM64)
bool cpu_supports(Isa isa) {
  constexpr DWORD kDotProduct = 43;  // PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE
  return isa != Isa::dotprod || IsProcessorFeaturePresent(kDotProduct);
}
#else
bool cpu_supports(Isa) { return true; }  // every Apple CPU has dot products
#endif

std::string available_names() {
  std::string names;
  for (int i = 0; i < kIsaCount; ++i) {
    if (isa_available(static_cast<Isa>(i))) names += (names.empty() ? "" : ", ") + std::string(kNames[i]);
  }
  return names;
}

Isa choose() {
  const char* wanted = std::getenv("PAGELET_ISA");
  for (int i = kIsaCount; i-- > 0;) {
    const Isa isa = static_cast<Isa>(i);
    if (wanted && *wanted && std::string(wanted) != kNames[i]) continue;
    if (isa_available(isa)) return isa;
  }
  throw std::runtime_error(
      "PAGELET_ISA is '" + std::string(wanted) +
      "', which this build or this CPU does not have: unset it, or set one of: " + available_names());
}

}  // namespace

const char* isa_name(Isa isa) { return kNames[static_cast<int>(isa)]; }

bool isa_available(Isa isa) { return cpu_supports(isa); }

Isa selected_isa() {
  static const Isa isa = choose();
  return isa;
}

}  // namespace pagelet

// For pagelet.plugins.native, through ctypes: null past the end.
#ifdef _WIN32
#define PAGELET_EXPORT extern "C" __declspec(dllexport)
#else
#define PAGELET_EXPORT extern "C" __attribute__((visibility("default")))
#endif

PAGELET_EXPORT const char* pagelet_available_isa(int index) {
  for (int i = 0; i < pagelet::kIsaCount; ++i) {
    const auto isa = static_cast<pagelet::Isa>(i);
    if (pagelet::isa_available(isa) && index-- == 0) return pagelet::isa_name(isa);
  }
  return nullptr;
}

// Null when PAGELET_ISA asks for one that cannot run here.
PAGELET_EXPORT const char* pagelet_selected_isa() {
  try {
    return pagelet::isa_name(pagelet::selected_isa());
  } catch (const std::exception&) {
    return nullptr;
  }
}
