// Which lane of a warp holds which code, which column of a matrix product holds which group, and where a tile's bytes
// lie in shared memory: compile-time arithmetic only. See decode_attention.cu for what it is for.
#pragma once

#include "common.cuh"

// A variant of the kernel is chosen by these macros; the defaults are Ouro-1.4B's residual loop at INT2/4 g=32.
#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef PAGE_TOKENS
#define PAGE_TOKENS 16
#endif
#ifndef KINDS  // stored loops that are read: 1 an anchor or a loop coded alone, 2 an anchor and a residual, 3-4 a chain
#define KINDS 2
#endif
#ifndef FIRST_BITS  // of kind 0
#define FIRST_BITS 4
#endif
#ifndef FIRST_GROUP
#define FIRST_GROUP 32
#endif
#ifndef OTHER_BITS  // of the other kinds
#define OTHER_BITS 2
#endif
#ifndef OTHER_GROUP
#define OTHER_GROUP 32
#endif
#ifndef HAS_ALPHA  // whether the other kinds store a coefficient
#define HAS_ALPHA 1
#endif
#ifndef QUERY_HEADS  // query heads of one KV head that a block serves together
#define QUERY_HEADS 1
#endif
#ifndef LOOKUP  // whether codes become values through tables in shared memory, to measure that way (decode_lookup.cuh)
#define LOOKUP 0
#endif

constexpr int TILE_TOKENS = 16;  // tokens of one matrix product
constexpr int SUBTILES = PAGE_TOKENS / TILE_TOKENS;

constexpr __host__ __device__ int bits_of(int kind) { return kind == 0 ? FIRST_BITS : OTHER_BITS; }
constexpr __host__ __device__ int group_of(int kind) { return kind == 0 ? FIRST_GROUP : OTHER_GROUP; }

static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM <= 256 && HEAD_DIM % FIRST_GROUP == 0 && HEAD_DIM % OTHER_GROUP == 0,
              "head size and group sizes do not fit");
static_assert((FIRST_BITS == 2 || FIRST_BITS == 4) && (OTHER_BITS == 2 || OTHER_BITS == 4), "bits must be 2 or 4");
static_assert(PAGE_TOKENS % TILE_TOKENS == 0 && KINDS >= 1 && KINDS <= 4, "page size or number of kinds");

// Columns. The 8 columns of a product are groups of channels: all 8 of one kind, or 4 of each of a pair of kinds. As
// many channels as have a column each make a column tile.
constexpr int SLOTS = KINDS == 1 ? 8 : 4;
constexpr int PAIRS = ceil_div(KINDS, 2);
constexpr int SMALLEST_GROUP = KINDS == 1 ? FIRST_GROUP : smaller(FIRST_GROUP, OTHER_GROUP);
constexpr int COLUMN_TILE = smaller(128, SLOTS * SMALLEST_GROUP);
constexpr int COLUMN_TILES = ceil_div(HEAD_DIM, COLUMN_TILE);

// Group, counted within its column tile, of a channel.
constexpr __host__ __device__ int slot_of(int kind, int channel) { return channel % COLUMN_TILE / group_of(kind); }

// Rows of codes are read in blocks of 128 or 64 channels; of D = 96, the second block has 32.
constexpr int BLOCK = HEAD_DIM % 128 == 0 && COLUMN_TILE == 128 ? 128 : 64;
constexpr int BLOCKS = ceil_div(HEAD_DIM, BLOCK);
constexpr __host__ __device__ int block_width(int block) { return smaller(BLOCK, HEAD_DIM - block * BLOCK); }

// Bit positions. The codes of one 32-bit word are taken out two at a time, one from each half, by a shift and a mask:
// the pair is then two f16 numbers below the normal range, code * 2^(position - 24), exact and in no need of an offset.
constexpr __host__ __device__ int pick_shift(int bits, int pick) { return pick * bits / 8 * 8; }
constexpr __host__ __device__ int pick_position(int bits, int pick) { return pick * bits % 8; }
constexpr __host__ __device__ uint32_t pick_mask(int bits, int pick) {
  return ((1u << bits) - 1) * 0x00010001u << pick_position(bits, pick);
}

// K. Product row g is token 2g of the tile, row g + 8 token 2g + 1. Lane 4g + t holds a quarter of each block of both,
// pair by pair: pairs 2s and 2s + 1 go to columns 2t, 2t + 1 and 2t + 8, 2t + 9 of step s (16 channels).
constexpr int K_PAIRS = HEAD_DIM / 8;
constexpr __host__ __device__ int k_block(int pair) { return pair / (BLOCK / 8); }
constexpr __host__ __device__ int k_codes_per_word(int bits, int block) {
  return smaller(32 / bits, block_width(block) / 4);
}
constexpr __host__ __device__ int k_pick(int bits, int pair) {
  return pair % (BLOCK / 8) % (k_codes_per_word(bits, k_block(pair)) / 2);
}
constexpr __host__ __device__ int k_word(int bits, int pair) {
  return pair % (BLOCK / 8) / (k_codes_per_word(bits, k_block(pair)) / 2);
}
// Channel that lane t of its four holds in `half` of a pair.
constexpr __host__ __device__ int k_channel(int bits, int t, int pair, int half) {
  const int block = k_block(pair), per_word = k_codes_per_word(bits, block);
  return block * BLOCK + t * block_width(block) / 4 + k_word(bits, pair) * per_word + k_pick(bits, pair) +
         half * per_word / 2;
}
// Byte, within a row of codes, at which a lane's part of a block begins, and the bytes it has there.
constexpr __host__ __device__ int k_part(int bits, int t, int block) {
  return (block * BLOCK + t * block_width(block) / 4) * bits / 8;
}
constexpr __host__ __device__ int k_part_bytes(int bits, int block) { return block_width(block) / 4 * bits / 8; }

// V. Product rows are channels and its depth tokens: columns 2t, 2t + 1 are token pair t, 2t + 8 and 2t + 9 pair t + 4.
// Lane 4g + t holds an eighth of each block; its channels 2i and 2i + 1 are rows g and g + 8 of row tile i.
constexpr int ROW_TILES = HEAD_DIM / 16;
constexpr __host__ __device__ int v_block(int row_tile) { return row_tile / (BLOCK / 16); }
constexpr __host__ __device__ int v_codes_per_word(int bits) { return 16 / bits; }
constexpr __host__ __device__ int v_channel(int g, int row_tile, int half) {
  const int block = v_block(row_tile);
  return block * BLOCK + g * block_width(block) / 8 + 2 * (row_tile % (BLOCK / 16)) + half;
}
constexpr __host__ __device__ int v_pick(int bits, int row_tile, int half) {
  return (2 * (row_tile % (BLOCK / 16)) + half) % v_codes_per_word(bits);
}
constexpr __host__ __device__ int v_word(int bits, int row_tile) {
  return 2 * (row_tile % (BLOCK / 16)) / v_codes_per_word(bits);
}
// Byte, within the interleaved row of a token pair, at which the words of a lane's part of a block begin. A part of
// half a word (2-bit codes, 32 channels) begins inside it: the word is then shifted by v_part_shift first.
constexpr __host__ __device__ int v_part(int bits, int g, int block) {
  return (block * BLOCK + g * block_width(block) / 8) / v_codes_per_word(bits) * 4;
}
constexpr __host__ __device__ int v_part_words(int bits, int block) {
  return ceil_div(block_width(block) / 8, v_codes_per_word(bits));
}
constexpr __host__ __device__ bool v_part_is_half(int bits, int block) {
  return block_width(block) / 8 < v_codes_per_word(bits);
}
constexpr __host__ __device__ int v_part_shift(int bits, int g) { return g % 2 * 4 * bits; }

// A tile in shared memory: code planes of K and V, then metadata and coefficients. 16-byte chunks of code planes are
// reordered so that the lanes which read together hit different banks.
constexpr __host__ __device__ int codes_row(int kind) { return HEAD_DIM * bits_of(kind) / 8; }
constexpr __host__ __device__ int metadata_row(int kind) { return 2 * HEAD_DIM / group_of(kind); }
constexpr __host__ __device__ int alpha_row(int kind) { return HAS_ALPHA && kind > 0 ? 2 : 0; }

constexpr __host__ __device__ bool swizzled(int row) { return HEAD_DIM == 128 && (row == 64 || row == 32); }
// Place of a chunk of a code plane: among the 8 of its 128-byte line, by the line's number modulo 4.
constexpr __host__ __device__ int swizzle(int row, int chunk) {
  return swizzled(row) ? chunk ^ (chunk >> 3 & 1) * 6 ^ (chunk >> 3 & 2) : chunk;
}

// Offsets within a stage; kv is 0 for K and 1 for V.
constexpr __host__ __device__ int stage_codes(int kv, int kind) {
  int offset = 0;
  for (int k = 0; k < KINDS; ++k) offset += (k < kind ? 2 : kv) * (k <= kind ? codes_row(k) * TILE_TOKENS : 0);
  return offset;
}
constexpr int STAGE_METADATA = stage_codes(0, KINDS - 1) + 2 * codes_row(KINDS - 1) * TILE_TOKENS;
constexpr __host__ __device__ int stage_metadata(int kv, int kind) {
  int offset = STAGE_METADATA;
  for (int k = 0; k < kind; ++k) offset += 2 * metadata_row(k) * TILE_TOKENS;
  return offset + kv * metadata_row(kind) * TILE_TOKENS;
}
constexpr int STAGE_ALPHA = stage_metadata(1, KINDS - 1) + metadata_row(KINDS - 1) * TILE_TOKENS;
constexpr __host__ __device__ int stage_alpha(int kv, int kind) {
  return STAGE_ALPHA + (2 * (kind - 1) + kv) * 2 * TILE_TOKENS;
}
constexpr int STAGE_BYTES = STAGE_ALPHA + (HAS_ALPHA ? (KINDS - 1) * 4 * TILE_TOKENS : 0);
static_assert(STAGE_BYTES % 16 == 0, "stages must keep the alignment of their planes");

// A column's scale and offset of two neighbouring groups can be read as one word.
constexpr bool WIDE_METADATA = metadata_row(0) % 4 == 0 && COLUMN_TILE / group_of(0) % 2 == 0 &&
                               metadata_row(KINDS - 1) % 4 == 0 && COLUMN_TILE / group_of(KINDS - 1) % 2 == 0;
// No column stands idle.
constexpr bool EVERY_COLUMN = HEAD_DIM % COLUMN_TILE == 0 && KINDS % 2 == (SLOTS == 8) &&
                              COLUMN_TILE == SLOTS * group_of(0) && COLUMN_TILE == SLOTS * group_of(KINDS - 1);
