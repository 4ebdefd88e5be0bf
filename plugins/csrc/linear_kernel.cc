// Compiled once per instruction set. Rows are taken in blocks that the caches hold, and a strip of the weight is
// reduced for all rows of a block before the next: the sums start from the bias (linear_tiles.h, linear_float.h
// add to them), and the last touch puts them into the output.
#include "linear_kernel.h"

#include "linear_activations.h"
#include "linear_float.h"
#include "linear_rows.h"
#include "linear_tiles.h"

namespace pagelet::PAGELET_ISA {
namespace {

constexpr size_t kMaxRowBlock = 64;                  // rows whose sums for one strip stay in L1
constexpr size_t kMinRowBlock = 8;                   // fewer would read the weights too often
constexpr size_t kActivationCacheBytes = 256 << 10;  // of L2, for a row block's activations

// Some rows of a task, and one strip's sums for them: [rows, tiles, 16].
struct Strip {
  size_t row, rows;
  size_t first_tile, tiles;
  float* sums;
  size_t stride() const { return tiles * kTileColumns; }
};

// Where a tile's columns are in the output, and how many of them are there.
struct Columns {
  size_t first, count;
};
PAGELET_INLINE Columns columns_of(const LinearTask& task, size_t tile) {
  const size_t first = (task.gated ? tile / 2 : tile) * kTileColumns, left = task.columns - first;
  return {first, left < kTileColumns ? left : kTileColumns};
}

void start_from_bias(const LinearTask& task, const Strip& strip) {
  if (!task.bias) {
    memset(strip.sums, 0, strip.rows * strip.stride() * sizeof(float));
    return;
  }
  for (size_t t = 0; t < strip.tiles; ++t) {
    const size_t tile = strip.first_tile + t;
    const Columns columns = columns_of(task, tile);
    const float* bias = task.bias + (task.gated ? tile % 2 * task.columns : 0) + columns.first;
    for (size_t r = 0; r < strip.rows; ++r) {
      float* sums = strip.sums + r * strip.stride() + t * kTileColumns;
      for (size_t c = 0; c < kTileColumns; ++c) sums[c] = c < columns.count ? bias[c] : 0.0f;
    }
  }
}

void add_products(const LinearTask& task, const Strip& strip) {
  if (!is_integer(task.type)) {
    const FloatTiles tiles{task.weight + strip.first_tile * task.tile_bytes, task.tile_bytes, strip.tiles,
                           task.in_features, task.group_size};
    const float* input = task.input + strip.row * task.in_features;
    return add_float_tiles(task.type, tiles, input, task.in_features, strip.rows, strip.sums);
  }
  const size_t blocks = task.in_features / kBlockInputs;
  for (size_t t = 0; t < strip.tiles; ++t) {
    add_tile(task, strip.first_tile + t,
             {task.activations + strip.row * blocks, blocks, strip.rows, strip.sums + t * kTileColumns,
              strip.stride()});
  }
}

// One tile's columns of one row, and of a gated layer the tile behind it, become columns of the output.
PAGELET_INLINE void finish(const LinearTask& task, float* sums) {
  for (size_t c = 0; c < kTileColumns; c += kWidth) {
    const Vec x = load(sums + c);
    const Vec y = task.gated ? gated(task.activation, x, load(sums + kTileColumns + c)) : activated(task.activation, x);
    store(sums + c, mul(y, set1(task.output_scale)));
  }
}

void write_rows(const LinearTask& task, const Strip& strip) {
  for (size_t t = 0; t < strip.tiles; t += task.gated ? 2 : 1) {
    const Columns columns = columns_of(task, strip.first_tile + t);
    for (size_t r = 0; r < strip.rows; ++r) {
      float* sums = strip.sums + r * strip.stride() + t * kTileColumns;
      const size_t at = (strip.row + r) * task.columns + columns.first;
      finish(task, sums);
      if (task.residual) {
        for (size_t c = 0; c < columns.count; ++c) sums[c] += task.residual[at + c];
      }
      memcpy(task.out + at, sums, columns.count * sizeof(float));
    }
  }
}

// As many rows as the caches hold, in equal blocks.
size_t rows_per_block(const LinearTask& task) {
  const size_t row_bytes = is_integer(task.type) ? task.in_features / kBlockInputs * sizeof(ActivationBlock)
                                                 : task.in_features * sizeof(float);
  size_t most = kActivationCacheBytes / row_bytes;
  most = most > kMaxRowBlock ? kMaxRowBlock : most < kMinRowBlock ? kMinRowBlock : most;
  const size_t count = (task.rows + most - 1) / most;
  const size_t rows = (task.rows + count - 1) / count;
  return (rows + kRowsAtOnce - 1) / kRowsAtOnce * kRowsAtOnce;
}

void multiply(const LinearTask& task, size_t first, size_t last) {
  alignas(64) float sums[kMaxRowBlock * kMaxFloatTiles * kTileColumns];
  const size_t row_block = rows_per_block(task), tiles = tile_count(task), strip_tiles = tiles_per_strip(task);
  for (size_t row = 0; row < task.rows; row += row_block) {
    const size_t rows = task.rows - row < row_block ? task.rows - row : row_block;
    for (size_t s = first; s < last; ++s) {
      const size_t tile = s * strip_tiles, left = tiles - tile;
      const Strip strip{row, rows, tile, left < strip_tiles ? left : strip_tiles, sums};
      start_from_bias(task, strip);
      add_products(task, strip);
      write_rows(task, strip);
    }
  }
}

}  // namespace

extern const LinearKernel linear_kernel;
const LinearKernel linear_kernel{normalize, quantize, multiply};

}  // namespace pagelet::PAGELET_ISA
