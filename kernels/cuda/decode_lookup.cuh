// The paper's way to take codes apart, for measurement beside the code-space kernel: a code becomes a value through a
// table in shared memory, one load a code, and K and V are rebuilt before the products.
//
// A table is of one token and group, 2^bits values scale * code + offset in f16, those of kind 0 times the coefficient,
// so that the tables of both kinds add up to the value. A warp has tables of one of K and V at a time: 16 tokens, 4
// groups. Thread 4g + t builds those of a token pair and a group, as words of both tokens in its own bank, and all
// lookups of a warp are in different banks:
//   K: tokens 2g, 2g + 1 and group t, which only this thread reads: it has their 32 codes
//   V: token pair t (g even) or t + 4 (g odd) and group g / 2. This thread has 16 codes of both pairs; it looks up those
//      of its own pair first, so in odd rows g of the product tokens t and t + 4 are exchanged. Odd columns have the
//      weights in that order, and an odd row takes its sums from there.
#pragma once

#include "decode_tile.cuh"

static_assert(HEAD_DIM == 128 && KINDS <= 2 && FIRST_GROUP == 32 && OTHER_GROUP == 32 && QUERY_HEADS == 1,
              "lookup tables are laid out for 4 groups of 32 channels, at most two loops and one query head");

constexpr int TABLE_ROW = THREADS * 4;  // one entry of all threads of a block
constexpr __host__ __device__ int table_of(int kind) { return kind == 0 ? 0 : TABLE_ROW << bits_of(0); }
constexpr int TABLE_BYTES = table_of(KINDS - 1) + (TABLE_ROW << bits_of(KINDS - 1));

// A code as f16 pair, both halves alike.
constexpr __host__ __device__ uint32_t code_half2(uint32_t code) {
  uint32_t exponent = 0;
  while (code >> exponent > 1) ++exponent;
  return code == 0 ? 0 : (15 + exponent << 10 | (code << 10 - exponent & 0x3ff)) * 0x00010001u;
}

// Build this thread's tables of token pair `token_pair` and `group`.
__device__ __forceinline__ void build_tables(const uint8_t* stage, SharedPlace mine, int kv, int token_pair, int group) {
  float w[2];
  weigh(stage, kv, 0, token_pair, w);
  static_for<KINDS>([&](auto index) {
    constexpr int kind = index, row = metadata_row(kind);
    const uint8_t* metadata = stage + stage_metadata(kv, kind) + 2 * token_pair * row + 2 * group;
    const uint32_t even = load_metadata(metadata, true), odd = load_metadata(metadata + row, true);
    uint32_t scales = fp8_pair_to_half2(permute_bytes(even, odd, 0x0040));
    uint32_t offsets = fp8_pair_to_half2(permute_bytes(even, odd, 0x0051));
    if constexpr (kind == 0 && KINDS > 1 && HAS_ALPHA) {
      const uint32_t weights = pack_half2(w[0], w[1]);
      scales = multiply_half2(weights, scales), offsets = multiply_half2(weights, offsets);
    }
    static_for<1 << bits_of(kind)>([&](auto index) {
      constexpr int code = index;
      store_shared(mine + (table_of(kind) + code * TABLE_ROW), multiply_add_half2(scales, code_half2(code), offsets));
    });
  });
  sync_warp();
}

// Value of the code at bit POSITION of a word, by the tables of the thread whose words begin at `theirs`.
template <int KIND, int POSITION>
__device__ __forceinline__ uint32_t look_up(SharedPlace theirs, uint32_t word, int odd) {
  constexpr int row_bit = 10;
  static_assert(TABLE_ROW == 1 << row_bit, "an entry's place is a shifted code");
  const uint32_t code = keep_bits<((1u << bits_of(KIND)) - 1) << POSITION>(word);
  const uint32_t place = POSITION < row_bit ? code << (row_bit - POSITION & 31) : code >> (POSITION - row_bit & 31);
  return load_shared_half(theirs + place + (table_of(KIND) + 2 * odd));
}

// Log2 weights of tokens 2g and 2g + 1 of the tile.
__device__ __forceinline__ void score_tile_by_lookup(const uint8_t* stage, SharedPlace mine, const ReadPlaces& places,
                                                     const Query& query, int lane, float (&scores)[2]) {
  const int g = lane / 4, t = lane % 4;
  build_tables(stage, mine, 0, g, t);
  uint32_t words[2][KINDS][4];  // token, kind
  static_for<2 * KINDS>([&](auto index) {
    constexpr int token = index % 2, kind = index / 2;
    load_k<kind, 0>(stage + places.k[kind][0][token], words[token][kind]);
  });
  float products[2][4] = {};  // two sums: half the latency
  static_for<HEAD_DIM / 16>([&](auto index) {
    constexpr int step = index;
    uint32_t a[4];
    static_for<4>([&](auto index) {
      constexpr int token = index % 2, pair = 2 * step + index / 2;
      static_for<KINDS>([&](auto index) {
        constexpr int kind = index, bits = bits_of(kind), position = 2 * pair * bits;
        const uint32_t word = words[token][kind][position / 32];
        const uint32_t two = permute_bytes(look_up<kind, position % 32>(mine, word, token),
                                           look_up<kind, position % 32 + bits>(mine, word, token), 0x5410);
        uint32_t& sum = a[2 * (pair % 2) + token];
        if constexpr (kind == 0) sum = two;
        else sum = add_half2(sum, two);
      });
    });
    mma(products[step % 2], a, query.b[0][2 * step], query.b[0][2 * step + 1]);
  });
  float w[2];
  weigh(stage, 0, 0, g, w);
#pragma unroll
  for (int token = 0; token < 2; ++token) {
    float score = products[0][2 * token] + products[1][2 * token] + w[token] * query.mean[0];
    if constexpr (KINDS > 1) score += query.mean[KINDS - 1];
    scores[token] = score * query.factor;
  }
}

// Add the tile's values, weighted by p.
__device__ __forceinline__ void add_values_by_lookup(const uint8_t* stage, SharedPlace mine, const ReadPlaces& places,
                                                     const float (&p)[2], int lane, Running& run) {
  const int g = lane / 4, t = lane % 4, exchanged = g % 2 * 4;
  sync_warp();  // every lane is done with the tables of K
  build_tables(stage, mine, 1, t + exchanged, g / 2);
  const uint32_t weights = pack_half2(p[0], p[1]);
  const uint32_t own = from_lane(weights, 4 * (t + exchanged)), other = from_lane(weights, 4 * (t + 4 - exchanged));
  const SharedPlace theirs[2] = {mine, mine ^ 16};  // of thread i and thread i ^ 4
  uint32_t words[2][KINDS][4];  // own token pair and the other, kind
  static_for<2 * KINDS>([&](auto index) {
    constexpr int which = index % 2, kind = index / 2;
    load_v<kind, 0>(stage + places.v[kind][0][which], g, words[which][kind]);
  });
  static_for<ROW_TILES>([&](auto index) {
    constexpr int row_tile = index;
    uint32_t a[4];
    static_for<4>([&](auto index) {
      constexpr int half = index % 2, which = index / 2, place = index;
      static_for<KINDS>([&](auto index) {
        constexpr int kind = index, bits = bits_of(kind), position = bits * v_pick(bits, row_tile, half);
        const uint32_t word = words[which][kind][v_word(bits, row_tile)];
        const uint32_t two = permute_bytes(look_up<kind, position>(theirs[which], word, 0),
                                           look_up<kind, position + 16>(theirs[which], word, 1), 0x5410);
        if constexpr (kind == 0) a[place] = two;
        else a[place] = add_half2(a[place], two);
      });
    });
    mma(run.out[0][row_tile], a, own, other);
  });
}
