// Sums of weights that are floats, plain or FP8. Included by linear_kernel.cc only.
//
// An output element is one chain of multiply-adds over its inputs, ascending. FP8: each group is such a chain from
// zero, and its total times the scale is added to the element, group after group. A few rows read the weights as
// they come from memory, which limits them (FP8 by way of FP16, for which there are instructions): several tiles
// at once make enough chains. Many rows share a panel of a tile, converted to floats once, in the L1 cache.
#pragma once

#include "cache_simd.h"
#include "linear_kernel.h"
#include "simd.h"

namespace pagelet::PAGELET_ISA {
namespace {

// At most so many neighbouring tiles are summed at once.
constexpr size_t kMaxFloatTiles = 4;

// Neighbouring tiles, each [inputs][16]; FP8: [inputs / group_size] times [group_size][16] codes and 16 float
// scales.
struct FloatTiles {
  const uint8_t* data;
  size_t tile_bytes, count;
  size_t inputs, group_size;  // group_size: of FP8 only, and a divisor of inputs
};

constexpr int kTileVectors = static_cast<int>(kTileColumns) / kWidth;
#if defined(PAGELET_SIMD_AVX512) || defined(PAGELET_SIMD_NEON)  // 32 registers
constexpr int kFloatRows = 6, kMaxSums = 16;
#elif defined(PAGELET_SIMD_AVX2)
constexpr int kFloatRows = 6, kMaxSums = 8;
#else
constexpr int kFloatRows = 2, kMaxSums = 8;
#endif
constexpr size_t kPanelFloats = 4096;  // half of a 32 KiB L1 cache
constexpr size_t kPanelHalves = 4096;
constexpr size_t kMaxScaledRows = 96;  // rows that share a panel of FP8

PAGELET_INLINE size_t min_of(size_t a, size_t b) { return a < b ? a : b; }

// Tiles whose sums fit kMaxSums registers: with several rows, one tile's alone are chains enough.
PAGELET_INLINE constexpr int tiles_at_once(int rows) {
  return kMaxSums >= 4 * rows * kTileVectors ? 4 : kMaxSums >= 2 * rows * kTileVectors ? 2 : 1;
}

// kWidth weights as floats; those of E4M3 times 2^-8.
struct Float32 {
  static constexpr size_t kBytes = 4;
  PAGELET_INLINE Vec vector(const uint8_t* p) { return load(reinterpret_cast<const float*>(p)); }
};
struct Float16 {
  static constexpr size_t kBytes = 2;
  PAGELET_INLINE Vec vector(const uint8_t* p) { return load_half(reinterpret_cast<const uint16_t*>(p)); }
};
struct Bfloat16 {
  static constexpr size_t kBytes = 2;
  PAGELET_INLINE Vec vector(const uint8_t* p) { return load_bf16(reinterpret_cast<const uint16_t*>(p)); }
};
struct E4m3 {
  static constexpr size_t kBytes = 1;
  PAGELET_INLINE Vec vector(const uint8_t* p) { return load_e4m3(p); }
};

// Some inputs of neighbouring tiles: [tiles][inputs][16], the tiles `stride` bytes apart.
struct FloatWeights {
  const uint8_t* data;
  size_t stride, tiles, inputs;
};

// Rows of inputs, and of the sums that they are added to, each a stride apart.
struct FloatRows {
  const float* x;
  size_t x_stride;
  float* sums;
  size_t sums_stride, count;
};

PAGELET_INLINE FloatRows part_of(const FloatRows& rows, size_t first, size_t count) {
  return {rows.x + first * rows.x_stride, rows.x_stride, rows.sums + first * rows.sums_stride, rows.sums_stride,
          count};
}

// kRows rows times kTiles tiles.
template <typename Element, int kRows, int kTiles>
void add_float_block(const FloatWeights& weights, const float* x, size_t x_stride, float* sums, size_t sums_stride) {
  constexpr int kVectors = kTiles * kTileVectors;
  Vec sum[kRows][kVectors];
  PAGELET_UNROLL for (int r = 0; r < kRows; ++r) {
    PAGELET_UNROLL for (int v = 0; v < kVectors; ++v) sum[r][v] = load(sums + size_t(r) * sums_stride + v * kWidth);
  }
  const uint8_t* w = weights.data;
  for (size_t k = 0; k < weights.inputs; ++k, w += kTileColumns * Element::kBytes) {
    PAGELET_UNROLL for (int t = 0; t < kTiles; ++t) {
      Vec weight[kTileVectors];
      PAGELET_UNROLL for (int v = 0; v < kTileVectors; ++v) {
        weight[v] = Element::vector(w + size_t(t) * weights.stride + size_t(v * kWidth) * Element::kBytes);
      }
      PAGELET_UNROLL for (int r = 0; r < kRows; ++r) {
        const Vec input = set1(x[size_t(r) * x_stride + k]);
        PAGELET_UNROLL for (int v = 0; v < kTileVectors; ++v) {
          Vec& y = sum[r][t * kTileVectors + v];
          y = fmadd(weight[v], input, y);
        }
      }
    }
  }
  PAGELET_UNROLL for (int r = 0; r < kRows; ++r) {
    PAGELET_UNROLL for (int v = 0; v < kVectors; ++v) store(sums + size_t(r) * sums_stride + v * kWidth, sum[r][v]);
  }
}

// kRows rows times all tiles, as many at once as there are registers for.
template <typename Element, int kRows, int kTiles = tiles_at_once(kRows)>
void add_tiles(FloatWeights weights, const FloatRows& rows, float* sums) {
  for (; weights.tiles >= kTiles; weights.tiles -= kTiles) {
    add_float_block<Element, kRows, kTiles>(weights, rows.x, rows.x_stride, sums, rows.sums_stride);
    weights.data += kTiles * weights.stride;
    sums += kTiles * kTileColumns;
  }
  if constexpr (kTiles > 1) {
    if (weights.tiles) add_tiles<Element, kRows, kTiles / 2>(weights, rows, sums);
  }
}

// At most kRows rows.
template <typename Element, int kRows = kFloatRows>
void add_few_rows(const FloatWeights& weights, const FloatRows& rows) {
  if (rows.count == kRows) return add_tiles<Element, kRows>(weights, rows, rows.sums);
  if constexpr (kRows > 1) add_few_rows<Element, kRows - 1>(weights, rows);
}

// Any number of rows, in equal blocks: a single row at the end would have too few chains.
template <typename Element>
void add_rows_in_blocks(const FloatWeights& weights, const FloatRows& rows) {
  const size_t blocks = (rows.count + kFloatRows - 1) / kFloatRows;
  for (size_t b = 0; b < blocks; ++b) {
    const size_t first = b * rows.count / blocks, last = (b + 1) * rows.count / blocks;
    add_few_rows<Element>(weights, part_of(rows, first, last - first));
  }
}

// Converts weights into the panel, tile after tile; floats stay where they are.
template <typename Element>
FloatWeights panel_of(const FloatWeights& weights, float* panel) {
  if (Element::kBytes == sizeof(float)) return weights;
  const size_t count = weights.inputs * kTileColumns;
  for (size_t t = 0; t < weights.tiles; ++t) {
    const uint8_t* w = weights.data + t * weights.stride;
    float* out = panel + t * count;
    for (size_t i = 0; i < count; i += kWidth) store(out + i, Element::vector(w + i * Element::kBytes));
  }
  return {reinterpret_cast<const uint8_t*>(panel), count * sizeof(float), weights.tiles, weights.inputs};
}

template <typename Element>
void add_float_panels(const FloatWeights& weights, const FloatRows& rows) {
  constexpr size_t kPanelTiles = tiles_at_once(kFloatRows), kPanelInputs = kPanelFloats / kTileColumns / kPanelTiles;
  alignas(64) float panel[kPanelFloats];
  for (size_t t = 0; t < weights.tiles; t += kPanelTiles) {
    const size_t tiles = min_of(kPanelTiles, weights.tiles - t);
    for (size_t k = 0; k < weights.inputs; k += kPanelInputs) {
      const size_t inputs = min_of(kPanelInputs, weights.inputs - k);
      const uint8_t* w = weights.data + t * weights.stride + k * kTileColumns * Element::kBytes;
      add_rows_in_blocks<Float32>(
          panel_of<Element>({w, weights.stride, tiles, inputs}, panel),
          {rows.x + k, rows.x_stride, rows.sums + t * kTileColumns, rows.sums_stride, rows.count});
    }
  }
}

// A few rows times FP8, by way of panels of halves.
void add_half_panels(const FloatWeights& weights, const FloatRows& rows) {
  alignas(64) uint16_t panel[kPanelHalves];
  const size_t most = kPanelHalves / kTileColumns / weights.tiles;
  for (size_t k = 0; k < weights.inputs; k += most) {
    const size_t inputs = min_of(most, weights.inputs - k), count = inputs * kTileColumns;
    for (size_t t = 0; t < weights.tiles; ++t) {
      const uint8_t* codes = weights.data + t * weights.stride + k * kTileColumns;
      for (size_t i = 0; i < count; i += kTileColumns) halves_of_e4m3(codes + i, panel + t * count + i);
    }
    const auto* halves = reinterpret_cast<const uint8_t*>(panel);
    add_few_rows<Float16>({halves, count * sizeof(uint16_t), weights.tiles, inputs},
                          {rows.x + k, rows.x_stride, rows.sums, rows.sums_stride, rows.count});
  }
}

template <typename Element>
void add_float_rows(const FloatWeights& weights, const FloatRows& rows) {
  if (rows.count <= kFloatRows) return add_few_rows<Element>(weights, rows);
  add_float_panels<Element>(weights, rows);
}

template <>
void add_float_rows<E4m3>(const FloatWeights& weights, const FloatRows& rows) {
  if (rows.count <= kFloatRows) return add_half_panels(weights, rows);
  add_float_panels<E4m3>(weights, rows);
}

// sums += scales * totals, where the scales of a tile's columns lie `stride` bytes apart; [rows, 16 * tiles].
PAGELET_INLINE void add_scaled(const uint8_t* scales, size_t stride, size_t tiles, size_t rows, const float* totals,
                               float* sums) {
  for (size_t t = 0; t < tiles; ++t, scales += stride) {
    for (size_t c = 0; c < kTileColumns; c += kWidth) {
      const Vec scale = mul(load(reinterpret_cast<const float*>(scales) + c), set1(kE4m3Unit));
      for (size_t r = 0; r < rows; ++r) {
        const size_t i = (r * tiles + t) * kTileColumns + c;
        store(sums + i, fmadd(load(totals + i), scale, load(sums + i)));
      }
    }
  }
}

// Up to kMaxScaledRows rows times tiles of FP8.
void add_fp8_rows(const FloatTiles& tiles, const FloatRows& rows) {
  alignas(64) float totals[kMaxScaledRows * kMaxFloatTiles * kTileColumns];
  const size_t code_bytes = tiles.group_size * kTileColumns, group_bytes = code_bytes + kTileColumns * sizeof(float);
  const uint8_t* group = tiles.data;
  for (size_t k = 0; k < tiles.inputs; k += tiles.group_size, group += group_bytes) {
    memset(totals, 0, rows.count * rows.sums_stride * sizeof(float));
    add_float_rows<E4m3>({group, tiles.tile_bytes, tiles.count, tiles.group_size},
                   {rows.x + k, rows.x_stride, totals, rows.sums_stride, rows.count});
    add_scaled(group + code_bytes, tiles.tile_bytes, tiles.count, rows.count, totals, rows.sums);
  }
}

void add_fp8_tiles(const FloatTiles& tiles, const FloatRows& rows) {
  const size_t blocks = (rows.count + kMaxScaledRows - 1) / kMaxScaledRows;
  for (size_t b = 0; b < blocks; ++b) {
    const size_t first = b * rows.count / blocks, last = (b + 1) * rows.count / blocks;
    add_fp8_rows(tiles, part_of(rows, first, last - first));
  }
}

// sums [rows, 16 * tiles.count] += x [rows, inputs], row_stride apart, times 1 to kMaxFloatTiles tiles.
void add_float_tiles(WeightType type, const FloatTiles& tiles, const float* x, size_t row_stride, size_t rows,
                     float* sums) {
  const FloatRows all{x, row_stride, sums, tiles.count * kTileColumns, rows};
  const FloatWeights weights{tiles.data, tiles.tile_bytes, tiles.count, tiles.inputs};
  if (type == WeightType::fp8) return add_fp8_tiles(tiles, all);
  if (type == WeightType::bf16) return add_float_rows<Bfloat16>(weights, all);
  if (type == WeightType::f16) return add_float_rows<Float16>(weights, all);
  add_float_rows<Float32>(weights, all);
}

}  // namespace
}  // namespace pagelet::PAGELET_ISA
