// Sums of integer weights. Included by linear_kernel.cc only.
//
// A tile of 16 columns times a few rows is reduced at once: an exact integer dot product per block of 32 inputs,
// then one multiply-add into the float sums (and one for the group's minimum), block after block. A few rows read
// the packed weights as they come from memory, which limits them. Many rows first unpack a panel of the tile into
// the L1 cache, and all rows of a row block share it.
#pragma once

#include "linear_kernel.h"
#include "linear_simd.h"

namespace pagelet::PAGELET_ISA {
namespace {

constexpr int kParts = static_cast<int>(kTileColumns) / kWidth;  // registers for one value per column of a tile
constexpr int kPartBytes = 4 * kWidth;
constexpr size_t kMaxDirectRows = 2 * kRowsAtOnce;  // beyond, unpacking once pays
constexpr size_t kPanelBlocks = 24;                 // blocks of a tile unpacked at once: 15 KB, to stay in L1
constexpr size_t kPrefetchBytes = 2048;             // ahead of the packed weights

// The dot products of a block as straight code, which only real vector instructions are worth.
#if (defined(PAGELET_SIMD_AVX512) || defined(PAGELET_SIMD_AVX2) || defined(PAGELET_SIMD_NEON)) && \
    !defined(PAGELET_EMULATE_AVX512)
#define PAGELET_UNROLL_DOTS PAGELET_UNROLL
#else
#define PAGELET_UNROLL_DOTS
#endif

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

// Rows of activations, `stride` blocks apart, and their sums of one tile, `sums_stride` floats apart.
struct TileRows {
  const ActivationBlock* activations;
  size_t stride, count;
  float* sums;
  size_t sums_stride;

  TileRows from(size_t row) const {
    return {activations + row * stride, stride, count - row, sums + row * sums_stride, sums_stride};
  }
};

// y [kRows, 16] += one block times kRows rows, whose blocks lie row_stride apart.
template <typename Storage, bool kAsymmetric, int kOffset, int kRows>
PAGELET_INLINE void add_block(const uint8_t* block, const uint8_t* values, const ActivationBlock* activations,
                              size_t row_stride, Vec y[kRows][kParts]) {
  typename Storage::Dots dots[kRows][kParts];
  PAGELET_UNROLL_DOTS for (int pair = 0; pair < 4; ++pair) {
    PAGELET_UNROLL_DOTS for (int chunk = pair; chunk < 8; chunk += 4) {
      PAGELET_UNROLL_DOTS for (int p = 0; p < kParts; ++p) {
        const Bytes codes = Storage::codes(block, chunk, p);
        PAGELET_UNROLL_DOTS for (int r = 0; r < kRows; ++r) {
          add_dot(dots[r][p], chunk == 0, codes, activations[r * row_stride].codes + 4 * chunk);
        }
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

// sums += groups times the first kRows rows.
template <typename Storage, bool kAsymmetric, int kOffset, int kRows>
void add_groups(const Groups& groups, const TileRows& rows) {
  Vec y[kRows][kParts];
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kParts; ++p) y[r][p] = load(rows.sums + rows.sums_stride * r + kWidth * p);
  }
  const uint8_t* w = groups.data;
  const ActivationBlock* activations = rows.activations;
  for (size_t g = 0; g < groups.count; ++g) {
    const uint8_t* values = w + groups.blocks_per_group * Storage::kBlockBytes;
    for (; w < values; w += Storage::kBlockBytes, ++activations) {
      if (Storage::kFromMemory) {
        for (size_t line = 0; line <= Storage::kBlockBytes; line += 64) prefetch(w + kPrefetchBytes + line);
      }
      add_block<Storage, kAsymmetric, kOffset, kRows>(w, values, activations, rows.stride, y);
    }
    w += value_bytes<Storage>(kAsymmetric);
  }
  for (int r = 0; r < kRows; ++r) {
    for (int p = 0; p < kParts; ++p) store(rows.sums + rows.sums_stride * r + kWidth * p, y[r][p]);
  }
}

// The same for all rows: as many as possible at once, then the rest.
template <typename Storage, bool kAsymmetric, int kOffset, int kRows = kRowsAtOnce>
void add_rows(const Groups& groups, const TileRows& rows) {
  size_t done = 0;
  for (; rows.count - done >= kRows; done += kRows) {
    add_groups<Storage, kAsymmetric, kOffset, kRows>(groups, rows.from(done));
  }
  if constexpr (kRows > 1) {
    if (done < rows.count) add_rows<Storage, kAsymmetric, kOffset, kRows - 1>(groups, rows.from(done));
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

// sums += one tile times the rows, by way of panels.
template <bool kAsymmetric, int kOffset>
void add_rows_by_panels(const Groups& tile, TileRows rows) {
  alignas(64) uint8_t panel[kPanelBlocks * (PanelNibbles::kBlockBytes + value_bytes<PanelNibbles>(true))];
  const size_t panel_groups = kPanelBlocks / tile.blocks_per_group;
  const size_t group_bytes =
      tile.blocks_per_group * PackedNibbles::kBlockBytes + value_bytes<PackedNibbles>(kAsymmetric);
  for (size_t g = 0; g < tile.count; g += panel_groups) {
    const size_t count = tile.count - g < panel_groups ? tile.count - g : panel_groups;
    unpack<kAsymmetric>({tile.data + g * group_bytes, count, tile.blocks_per_group}, panel);
    const Groups unpacked{panel, count * tile.blocks_per_group, 1};
    add_rows<PanelNibbles, kAsymmetric, kOffset>(unpacked, rows);
    rows.activations += unpacked.count;
  }
}

// sums += one tile of the task times the rows.
void add_tile(const LinearTask& task, size_t tile, const TileRows& rows) {
  const Groups groups{task.weight + tile * task.tile_bytes, task.in_features / task.group_size,
                      task.group_size / kBlockInputs};
  if (task.type == WeightType::int8) return add_rows<PackedBytes, false, 0>(groups, rows);
  const bool direct = rows.count <= kMaxDirectRows;
  if (task.asymmetric) {
    return direct ? add_rows<PackedNibbles, true, 0>(groups, rows) : add_rows_by_panels<true, 0>(groups, rows);
  }
  return direct ? add_rows<PackedNibbles, false, 8>(groups, rows) : add_rows_by_panels<false, 8>(groups, rows);
}

}  // namespace
}  // namespace pagelet::PAGELET_ISA
