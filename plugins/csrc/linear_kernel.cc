// Compiled once per instruction set. A tile of 16 columns times a few rows is reduced at once: an exact integer dot
// product per block of 32 inputs, then one multiply-add into the float sums (and one for the group's minimum),
// block after block. A few rows read the packed weights as they come from memory, which limits them. Many rows
// first unpack a panel of the tile into the L1 cache, and all rows of a row block share it.
#include "linear_kernel.h"

#include <cmath>

#include "linear_simd.h"

namespace pagelet::PAGELET_ISA {
namespace {

constexpr int kParts = static_cast<int>(kTileColumns) / kWidth;  // registers for one value per column of a tile
constexpr int kPartBytes = 4 * kWidth;
constexpr size_t kMaxDirectRows = 2 * kRowsAtOnce;   // beyond, unpacking once pays
constexpr size_t kMaxRowBlock = 64;                  // rows whose sums for one tile stay in L1
constexpr size_t kActivationCacheBytes = 256 << 10;  // of L2, for a row block's activations
constexpr size_t kPanelBlocks = 24;                  // blocks of a tile unpacked at once: 15 KB, to stay in L1
constexpr size_t kPrefetchBytes = 2048;              // ahead of the packed weights

// How a group is stored: the codes of its blocks, then its scales, then its minimums.
struct PackedNibbles {
  using Dots = NibbleDots;
  static constexpr size_t kBlockBytes = 256, kValueBytes = 2;
  static constexpr bool kFromMemory = true;
  PAGELET_INLINE Bytes codes(const uint8_t* block, int chunk, int part) {
    const Bytes pair = load_bytes(block + 64 * (chunk % 4) + kPartBytes * part);
    return chunk < 4 ? low_nibbles(pair) : high_nibbles(pair);
  }
  PAGELET_INLINE Vec values(const uint8_t* p) { return load_halves(p); }
};
struct PackedBytes {
  using Dots = ByteDots;
  static constexpr size_t kBlockBytes = 512, kValueBytes = 2;
  static constexpr bool kFromMemory = true;
  PAGELET_INLINE Bytes codes(const uint8_t* block, int chunk, int part) {
    return load_bytes(block + 64 * chunk + kPartBytes * part);
  }
  PAGELET_INLINE Vec values(const uint8_t* p) { return load_halves(p); }
};
// A panel: 4-bit codes in bytes, and scales and minimums as floats behind every block.
struct PanelNibbles {
  using Dots = NibbleDots;
  static constexpr size_t kBlockBytes = 512, kValueBytes = 4;
  static constexpr bool kFromMemory = false;
  PAGELET_INLINE Bytes codes(const uint8_t* block, int chunk, int part) {
    return load_bytes(block + 64 * chunk + kPartBytes * part);
  }
  PAGELET_INLINE Vec values(const uint8_t* p) { return load(reinterpret_cast<const float*>(p)); }
};

template <typename Storage>
constexpr size_t value_bytes(bool asymmetric) {
  return (asymmetric ? 2 : 1) * kTileColumns * Storage::kValueBytes;
}

// Some groups of one tile.
struct Groups {
  const uint8_t* data;
  size_t count, blocks_per_group;
};

// y [kRows, 16] += one block times kRows rows, whose blocks lie row_stride apart.
template <typename Storage, bool kAsymmetric, int kOffset, int kRows>
PAGELET_INLINE void add_block(const uint8_t* block, const uint8_t* values, const ActivationBlock* activations,
                              size_t row_stride, Vec y[kRows][kParts]) {
  typename Storage::Dots dots[kRows][kParts];
  for (int pair = 0; pair < 4; ++pair) {
    for (int chunk = pair; chunk < 8; chunk += 4) {
      for (int p = 0; p < kParts; ++p) {
        const Bytes codes = Storage::codes(block, chunk, p);
        for (int r = 0; r < kRows; ++r) add_dot(dots[r][p], codes, activations[r * row_stride].codes + 4 * chunk);
      }
    }
  }
  for (int p = 0; p < kParts; ++p) {
    const Vec scale = Storage::values(values + Storage::kValueBytes * kWidth * p);
    for (int r = 0; r < kRows; ++r) {
      const ActivationBlock& a = activations[r * row_stride];
      y[r][p] = fmadd(to_floats(dots[r][p], a.sum, kOffset), mul(scale, set1(a.scale)), y[r][p]);
    }
    if (!kAsymmetric) continue;
    const Vec minimum = Storage::values(values + Storage::kValueBytes * (kTileColumns + kWidth * p));
    for (int r = 0; r < kRows; ++r) {
      y[r][p] = fmadd(minimum, set1(activations[r * row_stride].scaled_sum), y[r][p]);
    }
  }
}

// sums [kRows, 16] += groups times kRows rows.
template <typename Storage, bool kAsymmetric, int kOffset, int kRows>
void add_groups(const Groups& groups, const ActivationBlock* activations, size_t row_stride, float* sums) {
  Vec y[kRows][kParts];
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kParts; ++p) y[r][p] = load(sums + kTileColumns * r + kWidth * p);
  }
  const uint8_t* w = groups.data;
  for (size_t g = 0; g < groups.count; ++g) {
    const uint8_t* values = w + groups.blocks_per_group * Storage::kBlockBytes;
    for (; w < values; w += Storage::kBlockBytes, ++activations) {
      if (Storage::kFromMemory) {
        for (size_t line = 0; line <= Storage::kBlockBytes; line += 64) prefetch(w + kPrefetchBytes + line);
      }
      add_block<Storage, kAsymmetric, kOffset, kRows>(w, values, activations, row_stride, y);
    }
    w += value_bytes<Storage>(kAsymmetric);
  }
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kParts; ++p) store(sums + kTileColumns * r + kWidth * p, y[r][p]);
  }
}

// The same for any number of rows: as many as possible at once, then the rest.
template <typename Storage, bool kAsymmetric, int kOffset, int kRows = kRowsAtOnce>
void add_rows(const Groups& groups, const ActivationBlock* activations, size_t row_stride, size_t rows, float* sums) {
  for (; rows >= kRows; rows -= kRows) {
    add_groups<Storage, kAsymmetric, kOffset, kRows>(groups, activations, row_stride, sums);
    activations += kRows * row_stride;
    sums += kRows * kTileColumns;
  }
  if constexpr (kRows > 1) {
    if (rows) add_rows<Storage, kAsymmetric, kOffset, kRows - 1>(groups, activations, row_stride, rows, sums);
  }
}

// `groups` holds at most kPanelBlocks blocks.
template <bool kAsymmetric>
void unpack(const Groups& groups, uint8_t* panel) {
  const uint8_t* w = groups.data;
  for (size_t g = 0; g < groups.count; ++g) {
    const uint8_t* values = w + groups.blocks_per_group * PackedNibbles::kBlockBytes;
    for (; w < values; w += PackedNibbles::kBlockBytes) {
      for (size_t offset = 0; offset < PackedNibbles::kBlockBytes; offset += kPartBytes) {
        const Bytes pair = load_bytes(w + offset);
        store_bytes(panel + offset, low_nibbles(pair));
        store_bytes(panel + 256 + offset, high_nibbles(pair));
      }
      panel += PanelNibbles::kBlockBytes;
      for (size_t i = 0; i < (kAsymmetric ? 2 : 1) * kTileColumns; i += kWidth) {
        store(reinterpret_cast<float*>(panel) + i, load_halves(values + 2 * i));
      }
      panel += value_bytes<PanelNibbles>(kAsymmetric);
    }
    w += value_bytes<PackedNibbles>(kAsymmetric);
  }
}

// sums [rows, 16] += one tile times the rows, by way of panels.
template <bool kAsymmetric, int kOffset>
void add_rows_by_panels(const Groups& tile, const ActivationBlock* activations, size_t row_stride, size_t rows,
                        float* sums) {
  alignas(64) uint8_t panel[kPanelBlocks * (PanelNibbles::kBlockBytes + value_bytes<PanelNibbles>(true))];
  const size_t panel_groups = kPanelBlocks / tile.blocks_per_group;
  const size_t group_bytes =
      tile.blocks_per_group * PackedNibbles::kBlockBytes + value_bytes<PackedNibbles>(kAsymmetric);
  for (size_t g = 0; g < tile.count; g += panel_groups) {
    const size_t count = tile.count - g < panel_groups ? tile.count - g : panel_groups;
    unpack<kAsymmetric>({tile.data + g * group_bytes, count, tile.blocks_per_group}, panel);
    const Groups unpacked{panel, count * tile.blocks_per_group, 1};
    add_rows<PanelNibbles, kAsymmetric, kOffset>(unpacked, activations + g * tile.blocks_per_group, row_stride, rows,
                                                 sums);
  }
}

void add_tile(const LinearTask& task, const Groups& tile, const ActivationBlock* activations, size_t rows,
              float* sums) {
  const bool direct = rows <= kMaxDirectRows;
  switch (task.storage) {
    case LinearStorage::int4_asymmetric:
      return direct ? add_rows<PackedNibbles, true, 0>(tile, activations, task.blocks, rows, sums)
                    : add_rows_by_panels<true, 0>(tile, activations, task.blocks, rows, sums);
    case LinearStorage::int4_symmetric:
      return direct ? add_rows<PackedNibbles, false, 8>(tile, activations, task.blocks, rows, sums)
                    : add_rows_by_panels<false, 8>(tile, activations, task.blocks, rows, sums);
    case LinearStorage::int8_symmetric:
      return add_rows<PackedBytes, false, 0>(tile, activations, task.blocks, rows, sums);
  }
}

// As many rows as the caches hold, in equal blocks.
size_t rows_per_block(const LinearTask& task) {
  size_t most = kActivationCacheBytes / (task.blocks * sizeof(ActivationBlock));
  most = most > kMaxRowBlock ? kMaxRowBlock : most < kMaxDirectRows ? kMaxDirectRows : most;
  const size_t count = (task.rows + most - 1) / most;
  const size_t rows = (task.rows + count - 1) / count;
  return (rows + kRowsAtOnce - 1) / kRowsAtOnce * kRowsAtOnce;
}

void multiply(const LinearTask& task, size_t first_tile, size_t last_tile) {
  const size_t row_block = rows_per_block(task);
  alignas(64) float sums[kMaxRowBlock * kTileColumns];
  for (size_t row = 0; row < task.rows; row += row_block) {
    const size_t rows = task.rows - row < row_block ? task.rows - row : row_block;
    for (size_t t = first_tile; t < last_tile; ++t) {
      const size_t column = t * kTileColumns, left = task.out_features - column;
      const size_t columns = left < kTileColumns ? left : kTileColumns;
      for (size_t r = 0; r < rows; ++r) {
        for (size_t c = 0; c < kTileColumns; ++c) {
          sums[r * kTileColumns + c] = task.bias && c < columns ? task.bias[column + c] : 0.0f;
        }
      }
      const Groups tile{task.weight + t * task.tile_bytes, task.blocks / task.blocks_per_group,
                        task.blocks_per_group};
      add_tile(task, tile, task.activations + row * task.blocks, rows, sums);
      for (size_t r = 0; r < rows; ++r) {
        std::memcpy(task.out + (row + r) * task.out_features + column, sums + r * kTileColumns,
                    columns * sizeof(float));
      }
    }
  }
}

// The largest |x| by its bits, which order like the values; a NaN or an infinity is at least 0x7f800000.
PAGELET_INLINE uint32_t largest_bits(const float* x) {
  uint32_t largest = 0;
  for (size_t i = 0; i < kBlockInputs; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, sizeof bits);
    bits &= 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

void quantize(const float* x, size_t blocks, ActivationBlock* out) {
  constexpr uint32_t kInfinity = 0x7f800000u, kSmallest = (127u - 100u) << 23;  // 2^-100: 127 / x stays finite
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds half to even, into the low bits
  for (size_t b = 0; b < blocks; ++b, x += kBlockInputs) {
    const uint32_t largest = largest_bits(x);
    if (largest >= kInfinity || largest < kSmallest) {
      out[b] = ActivationBlock{};
      if (largest >= kInfinity) out[b].scale = out[b].scaled_sum = NAN;
      continue;
    }
    float maximum;
    std::memcpy(&maximum, &largest, sizeof maximum);
    const float inverse = 127.0f / maximum;
    int32_t sum = 0;
    for (size_t i = 0; i < kBlockInputs; ++i) {
      const float shifted = x[i] * inverse + kRound;
      int32_t bits;
      std::memcpy(&bits, &shifted, sizeof bits);
      const int32_t code = bits - 0x4b400000;
      out[b].codes[i] = static_cast<int8_t>(code);
      sum += code;
    }
    out[b].scale = maximum / 127.0f;
    out[b].sum = sum;
    out[b].scaled_sum = out[b].scale * static_cast<float>(sum);
  }
}

}  // namespace

extern const LinearKernel linear_kernel;
const LinearKernel linear_kernel{quantize, multiply};

}  // namespace pagelet::PAGELET_ISA
