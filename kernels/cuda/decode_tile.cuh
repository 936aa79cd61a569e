// One tile of 16 tokens of one warp: its copy from a page to shared memory, its scores, its values.
#pragma once

#include "decode_layout.cuh"

constexpr int ACCUMULATORS = QUERY_HEADS * PAIRS * ROW_TILES * 4;
constexpr int WARPS_PER_SM = ACCUMULATORS <= 32 ? 16 : 8;
constexpr int WARPS = 8, THREADS = WARPS * LANES;

// f16 holds p * 2^P_EXPONENT, so that small p keep their bits. The running maximum moves only when it is exceeded by
// more than SLACK (in log2), so p 2^P_EXPONENT <= 2^6; times an e4m3 scale it stays below the largest f16.
constexpr float P_EXPONENT = 4.0f, SLACK = 2.0f;
constexpr float CODE_UNIT = LOOKUP ? 1.0f : 16777216.0f;  // 2^24: what a code taken out at bit 0 is short of its value

// Every field has 8 bytes, so that callers in other languages can mirror it.
struct Arguments {
  const uint8_t* pages;  // [blocks, H, page bytes per head]
  int64_t page_stride, page_head_stride;
  const int32_t* block_table;  // [B, blocks per sequence]
  int64_t table_stride;
  const int32_t* lengths;  // [B], tokens of the past
  const uint16_t *q, *k, *v;  // bf16 of the current token: q [B, Hq, D]; k, v [B, H, D]
  int64_t q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride;
  const __half *k_matrix, *v_matrix;  // [D, D] or [H, D, D], or null
  int64_t k_matrix_stride, v_matrix_stride;
  const float* means[4];  // of K, by kind: [D] or [H, D], or null
  int64_t mean_stride;
  float* partial;  // [B, Hq, splits, D]
  float* lse;      // [B, Hq, splits], log2
  uint32_t* arrived;  // [B, Hq], splits that are done; zero before and after every launch
  void* out;       // [B, Hq, D], bf16 or f32
  int64_t out_stride, out_head_stride, out_is_float;
  int64_t batch, query_heads, kv_heads, splits;
  int64_t k_planes[4], v_planes[4];  // offset of each kind's planes within a head's part of a page
  double scale;
};

// ---------------------------------------------------------------- from global to shared memory

// Where a lane copies from within a head's part of a page, and to within a stage.
struct CopyPlaces {
  int codes, metadata_source[KINDS], metadata_target[KINDS], alpha_source, alpha_target;

  __device__ __forceinline__ CopyPlaces(const Arguments& arg, int lane) {
    codes = pin(swizzle(swizzled(codes_row(0)) ? codes_row(0) : codes_row(KINDS - 1), lane) * 16);
    static_for<KINDS>([&](auto index) {
      constexpr int kind = index, rows = PAGE_TOKENS * codes_row(kind);
      const bool is_v = metadata_row(kind) <= 16 && lane >= 16;  // then half a warp copies K's, the other half V's
      const int chunk = metadata_row(kind) <= 16 ? lane % 16 : lane;
      metadata_source[kind] = pin(static_cast<int>(is_v ? arg.v_planes[kind] : arg.k_planes[kind]) + rows + chunk * 16);
      metadata_target[kind] = pin(stage_metadata(is_v, kind) + chunk * 16);
      if (alpha_row(kind) > 0 && lane / 4 == kind - 1) {  // 2 chunks of K's and 2 of V's
        const int planes = static_cast<int>(lane % 4 < 2 ? arg.k_planes[kind] : arg.v_planes[kind]);
        alpha_source = planes + rows + PAGE_TOKENS * metadata_row(kind) + lane % 2 * 16;
      }
    });
    alpha_source = pin(alpha_source);
    alpha_target = STAGE_ALPHA + lane * 16;
  }
};

// Copy a plane of codes: 16 tokens of ROW bytes are ROW chunks of 16 bytes. `source` is the lane's chunk.
template <int ROW>
__device__ __forceinline__ void copy_codes(uint8_t* target, const uint8_t* source, int place, int lane) {
#pragma unroll
  for (int i = 0; i < ceil_div(ROW, LANES); ++i) {
    if (i * LANES + LANES <= ROW || i * LANES + lane < ROW) {
      copy_async(target + (swizzled(ROW) ? place : lane * 16) + i * LANES * 16, source + i * LANES * 16);
    }
  }
}

// Copy a tile: subtile `sub` of the page of one head that begins at `page`.
__device__ __forceinline__ void copy_tile(uint8_t* stage, const uint8_t* page, int sub, const Arguments& arg,
                                          const CopyPlaces& places, int lane) {
  const uint8_t* mine = page + lane * 16;
  static_for<KINDS>([&](auto index) {
    constexpr int kind = index, row = codes_row(kind), metadata = metadata_row(kind);
    const int skipped = sub * TILE_TOKENS * row;
    copy_codes<row>(stage + stage_codes(0, kind), mine + static_cast<uint32_t>(arg.k_planes[kind]) + skipped,
                    places.codes, lane);
    copy_codes<row>(stage + stage_codes(1, kind), mine + static_cast<uint32_t>(arg.v_planes[kind]) + skipped,
                    places.codes, lane);
    const uint8_t* source = page + static_cast<uint32_t>(places.metadata_source[kind] + sub * TILE_TOKENS * metadata);
    uint8_t* target = stage + places.metadata_target[kind];
    if (lane % (metadata <= 16 ? 16 : 32) < metadata) copy_async(target, source);
    if constexpr (metadata > 16) {  // V's
      const uint32_t distance = static_cast<uint32_t>(arg.v_planes[kind] - arg.k_planes[kind]);
      if (lane < metadata) copy_async(target + metadata * TILE_TOKENS, source + distance);
    }
  });
  if constexpr (HAS_ALPHA && KINDS > 1) {
    const uint32_t source = places.alpha_source + sub * TILE_TOKENS * 2;
    if (lane < 4 * (KINDS - 1)) copy_async(stage + places.alpha_target, page + source);
  }
}

// The tiles of one warp, their pages looked up 32 at a time and far ahead of their use.
struct TileStream {
  const Arguments& arg;
  const int32_t* table;
  const uint8_t* pages;  // of this head
  uint8_t* stages;
  int lane, first, count, issued = 0;
  CopyPlaces places;
  int32_t blocks, next_blocks;

  __device__ __forceinline__ TileStream(const Arguments& arg, const int32_t* table, const uint8_t* pages,
                                        uint8_t* stages, int lane, int first, int count)
      : arg(arg), table(table), pages(pages), stages(stages), lane(lane), first(first), count(count),
        places(arg, lane) {
    blocks = look_up(lane);
    next_blocks = look_up(LANES + lane);
  }

  __device__ __forceinline__ int32_t look_up(int i) const {
    return i < count ? table[(first + i * WARPS) / SUBTILES] : 0;
  }

  // Start copying the next tile into `stage`, or nothing when there is none; either way one group of copies.
  __device__ __forceinline__ void issue(int stage) {
    if (issued < count) {
      const uint64_t block = static_cast<uint32_t>(from_lane(blocks, issued % LANES));
      const int sub = SUBTILES == 1 ? 0 : (first + issued * WARPS) % SUBTILES;
      copy_tile(stages + stage * STAGE_BYTES, pages + block * static_cast<uint32_t>(arg.page_stride), sub, arg, places, lane);
      if (++issued % LANES == 0) {
        blocks = next_blocks;
        next_blocks = look_up(issued + LANES + lane);
      }
    }
    commit_copies();
  }
};

// Zero metadata and coefficients of tokens from `valid` on: what lies there may be anything, and 0 * NaN is NaN.
__device__ __forceinline__ void clear_tail(uint8_t* stage, int valid, int lane) {
  static_for<2 * KINDS>([&](auto index) {
    constexpr int plane = index;
    constexpr int kv = plane % 2, kind = plane / 2, row = metadata_row(kind);
#pragma unroll 1
    for (int i = valid * row / 2 + lane; i < TILE_TOKENS * row / 2; i += LANES) {
      reinterpret_cast<uint16_t*>(stage + stage_metadata(kv, kind))[i] = 0;
    }
    if constexpr (alpha_row(kind) > 0) {
      if (lane >= valid && lane < TILE_TOKENS) reinterpret_cast<uint16_t*>(stage + stage_alpha(kv, kind))[lane] = 0;
    }
  });
  sync_warp();
}

// ---------------------------------------------------------------- codes, metadata, weights from a stage

template <int WORDS>
__device__ __forceinline__ void load_words(const uint8_t* source, uint32_t* words) {
  if constexpr (WORDS == 4) {
    const uint4 x = *reinterpret_cast<const uint4*>(source);
    words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
  } else if constexpr (WORDS == 2) {
    const uint2 x = *reinterpret_cast<const uint2*>(source);
    words[0] = x.x, words[1] = x.y;
  } else {
    words[0] = *reinterpret_cast<const uint32_t*>(source);
  }
}

template <int BITS>
__device__ __forceinline__ uint32_t pick_codes(uint32_t word, int pick) {
  return (word >> pick_shift(BITS, pick)) & pick_mask(BITS, pick);
}

// Where a lane reads within a stage, token by token or token pair by token pair.
struct ReadPlaces {
  int k[KINDS][BLOCKS][2];              // codes of tokens 2g, 2g + 1
  int v[KINDS][BLOCKS][2];              // codes of token pairs t, t + 4
  int k_metadata[PAIRS][COLUMN_TILES];  // of column 2t, token 2g
  int v_metadata[PAIRS][COLUMN_TILES];  // of column g, token 2t
  int k_stride[PAIRS], v_stride[PAIRS];  // from a token's metadata to the next one's

  __device__ __forceinline__ ReadPlaces(int g, int t) {
    static_for<KINDS>([&](auto kind_index) {
      constexpr int kind = kind_index, bits = bits_of(kind), row = codes_row(kind);
      static_for<BLOCKS>([&](auto block_index) {
        constexpr int block = block_index;
        const int in_k = 2 * g * row + k_part(bits, t, block), in_v = t * 2 * row + v_part(bits, g, block);
        k[kind][block][0] = pin(stage_codes(0, kind) + place<row>(in_k));
        v[kind][block][0] = pin(stage_codes(1, kind) + place<row>(in_v));
        k[kind][block][1] = k[kind][block][0] + row;
        v[kind][block][1] = v[kind][block][0] + 8 * row;
        if constexpr (swizzled(row)) k[kind][block][1] = pin(stage_codes(0, kind) + place<row>(in_k + row));
        if constexpr (swizzled(row) && row == 32) {
          v[kind][block][1] = pin(stage_codes(1, kind) + place<row>(in_v + 8 * row));
        }
        if constexpr (LOOKUP) {  // the pair whose table is this thread's comes first
          const int first = v[kind][block][0], second = v[kind][block][1];
          v[kind][block][0] = pin(g % 2 ? second : first), v[kind][block][1] = pin(g % 2 ? first : second);
        }
      });
    });
    static_for<PAIRS>([&](auto pair_index) {
      constexpr int pair = pair_index;
      k_stride[pair] = metadata_stride(pair, 2 * t), v_stride[pair] = metadata_stride(pair, g);
      static_for<COLUMN_TILES>([&](auto tile_index) {
        constexpr int tile = tile_index;
        k_metadata[pair][tile] = pin(metadata_place(0, pair, tile, 2 * t) + 2 * g * k_stride[pair]);
        v_metadata[pair][tile] = pin(metadata_place(1, pair, tile, g) + 2 * t * v_stride[pair]);
      });
    });
  }

  template <int ROW>
  static __device__ __forceinline__ int place(int offset) {
    return swizzle(ROW, offset / 16) * 16 + offset % 16;
  }

  // Where the metadata of a column of kinds 2 pair and 2 pair + 1 begins (token 0); anywhere for an idle column.
  static __device__ __forceinline__ int metadata_place(int kv, int pair, int tile, int column) {
    int place = 0;
    static_for<2>([&](auto which) {
      const int kind = smaller(2 * pair + which, KINDS - 1);
      const int group = tile * (COLUMN_TILE / group_of(kind)) + column % SLOTS;
      if (column / SLOTS == which) place = stage_metadata(kv, kind) + 2 * group;
    });
    return place;
  }

  // The same for all kinds where they have equal groups: a constant, then.
  static __device__ __forceinline__ int metadata_stride(int pair, int column) {
    if constexpr (metadata_row(0) == metadata_row(KINDS - 1)) return metadata_row(0);
    return metadata_row(smaller(2 * pair + column / SLOTS, KINDS - 1));
  }
};

// A lane's codes of block BLOCK_INDEX of a token of K.
template <int KIND, int BLOCK_INDEX>
__device__ __forceinline__ void load_k(const uint8_t* source, uint32_t* words) {
  constexpr int bytes = k_part_bytes(bits_of(KIND), BLOCK_INDEX);
  if constexpr (bytes >= 4) {
    load_words<bytes / 4>(source, words);
  } else {  // 8 codes: the second byte becomes the upper half
    words[0] = permute_bytes(*reinterpret_cast<const uint16_t*>(source), 0, 0x4140);
  }
}

// A lane's codes of block BLOCK_INDEX of a token pair of V.
template <int KIND, int BLOCK_INDEX>
__device__ __forceinline__ void load_v(const uint8_t* source, int g, uint32_t* words) {
  constexpr int bits = bits_of(KIND);
  load_words<v_part_words(bits, BLOCK_INDEX)>(source, words);
  if constexpr (v_part_is_half(bits, BLOCK_INDEX)) words[0] >>= v_part_shift(bits, g);
}

// Coefficients of tokens 2 pair and 2 pair + 1, multiplied on to w: the weight of `kind` is that of all later kinds.
__device__ __forceinline__ void weigh(const uint8_t* stage, int kv, int kind, int pair, float (&w)[2]) {
  w[0] = w[1] = 1.0f;
  static_for<KINDS>([&](auto index) {
    constexpr int later = index;
    if constexpr (alpha_row(later) > 0) {
      const uint32_t both = *reinterpret_cast<const uint32_t*>(stage + stage_alpha(kv, later) + pair * 4);
      w[0] *= kind < later ? bits_to_float(both << 16) : 1.0f;
      w[1] *= kind < later ? bits_to_float(both & 0xffff0000u) : 1.0f;
    }
  });
}

// Whether a column stands for a group at all.
__device__ __forceinline__ bool column_used(int pair, int tile, int column) {
  const int kind = 2 * pair + column / SLOTS, size = kind == 0 ? FIRST_GROUP : OTHER_GROUP;
  return kind < KINDS && column % SLOTS < COLUMN_TILE / size &&
         tile * COLUMN_TILE + column % SLOTS * size < HEAD_DIM;
}

// Scale and offset of a group as 16 bits; zero, which is harmless, for an idle column.
__device__ __forceinline__ uint32_t load_metadata(const uint8_t* source, bool used) {
  const uint32_t bytes = *reinterpret_cast<const uint16_t*>(source);
  return EVERY_COLUMN || used ? bytes : 0;
}

// The same of columns 2t and 2t + 1, as f16 pairs.
__device__ __forceinline__ void load_two(const uint8_t* source, bool first_used, bool second_used, uint32_t (&both)[2]) {
  if constexpr (WIDE_METADATA) {
    const uint32_t word = *reinterpret_cast<const uint32_t*>(source), kept = EVERY_COLUMN || first_used ? word : 0;
    both[0] = fp8_pair_to_half2(kept), both[1] = fp8_pair_to_half2(kept >> 16);
  } else {
    both[0] = fp8_pair_to_half2(load_metadata(source, first_used));
    both[1] = fp8_pair_to_half2(load_metadata(source + 2, second_used));
  }
}

// ---------------------------------------------------------------- scores and values

__device__ __forceinline__ float sum_over_warp(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += from_neighbour(x, mask);
  return x;
}

__device__ __forceinline__ float max_over_warp(float x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x = fmaxf(x, from_neighbour(x, mask));
  return x;
}

// A lane's share of the query: B operands of K's products, and per column it sees in their results the sums of q.
struct Query {
  uint32_t b[PAIRS][K_PAIRS];
  float sum[PAIRS][COLUMN_TILES][2];  // columns 2t, 2t + 1; over CODE_UNIT
  float mean[LOOKUP ? KINDS : PAIRS];  // q.mu of the lane's kind, over CODE_UNIT, in one lane of the four
  float factor;                       // from sums to log2 of a softmax weight
};

// Softmax and sums of a warp over its tiles, for one query head.
struct Running {
  float out[PAIRS][ROW_TILES][4] = {};
  float offsets[PAIRS][COLUMN_TILES][4] = {};
  float maximum = -INFINITY, total = 0.0f;  // of the lane's own tokens
};

// log2 weights of tokens 2g and 2g + 1 of the tile, for every query head.
__device__ __forceinline__ void score_tile(const uint8_t* stage, const ReadPlaces& places,
                                           const Query (&query)[QUERY_HEADS], int lane,
                                           float (&scores)[QUERY_HEADS][2]) {
  const int g = lane / 4, t = lane % 4;
  static_for<PAIRS>([&](auto index) {
    constexpr int pair = index;
    constexpr bool two = 2 * pair + 1 < KINDS;
    const int kind = 2 * pair + 2 * t / SLOTS;
    float sums[QUERY_HEADS][2];
#pragma unroll
    for (int h = 0; h < QUERY_HEADS; ++h) sums[h][0] = sums[h][1] = query[h].mean[pair];
    static_for<COLUMN_TILES>([&](auto index) {
      constexpr int tile = index;
      float products[2][QUERY_HEADS][4] = {}, others[2][QUERY_HEADS][4] = {};  // two sums: half the latency
      static_for<two ? 2 : 1>([&](auto index) {
        constexpr int which = index;
        constexpr int source = 2 * pair + which, bits = bits_of(source);
        static_for<BLOCKS>([&](auto index) {
          constexpr int block = index;
          if constexpr (block * BLOCK / COLUMN_TILE == tile) {
            uint32_t even[4], odd[4];
            load_k<source, block>(stage + places.k[source][block][0], even);
            load_k<source, block>(stage + places.k[source][block][1], odd);
            static_for<block_width(block) / 16>([&](auto index) {
              constexpr int step = index;
              constexpr int p = block * (BLOCK / 8) + 2 * step, w0 = k_word(bits, p), w1 = k_word(bits, p + 1);
              const uint32_t a[4] = {
                  pick_codes<bits>(even[w0], k_pick(bits, p)), pick_codes<bits>(odd[w0], k_pick(bits, p)),
                  pick_codes<bits>(even[w1], k_pick(bits, p + 1)), pick_codes<bits>(odd[w1], k_pick(bits, p + 1))};
#pragma unroll
              for (int h = 0; h < QUERY_HEADS; ++h) {
                mma(step % 2 ? others[which][h] : products[which][h], a, query[h].b[pair][p], query[h].b[pair][p + 1]);
              }
            });
          }
        });
      });
      float scale[2][2], offset[2][2];  // token, column
#pragma unroll
      for (int token = 0; token < 2; ++token) {
        uint32_t both[2];
        load_two(stage + places.k_metadata[pair][tile] + token * places.k_stride[pair],
                 column_used(pair, tile, 2 * t), column_used(pair, tile, 2 * t + 1), both);
#pragma unroll
        for (int c = 0; c < 2; ++c) scale[token][c] = low_half(both[c]), offset[token][c] = high_half(both[c]);
      }
#pragma unroll
      for (int h = 0; h < QUERY_HEADS; ++h) {
#pragma unroll
        for (int token = 0; token < 2; ++token) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int i = 2 * token + c;
            const float first = products[0][h][i] + others[0][h][i], second = products[1][h][i] + others[1][h][i];
            const float product = two && 2 * t / SLOTS == 1 ? second : first;
            sums[h][token] = fmaf(scale[token][c], product, sums[h][token]);
            sums[h][token] = fmaf(offset[token][c], query[h].sum[pair][tile][c], sums[h][token]);
          }
        }
      }
    });
    float w[2];
    weigh(stage, 0, kind, g, w);
#pragma unroll
    for (int h = 0; h < QUERY_HEADS; ++h) {
#pragma unroll
      for (int token = 0; token < 2; ++token) {
        scores[h][token] = (pair == 0 ? 0.0f : scores[h][token]) + w[token] * sums[h][token];
      }
    }
  });
#pragma unroll
  for (int h = 0; h < QUERY_HEADS; ++h) {
#pragma unroll
    for (int token = 0; token < 2; ++token) {
      float x = scores[h][token];
      x += from_neighbour(x, 1);
      x += from_neighbour(x, 2);
      scores[h][token] = x * query[h].factor;
    }
  }
}

// Turn scores into p 2^P_EXPONENT, after moving the running maximum where they exceed it.
__device__ __forceinline__ void softmax_tile(float (&scores)[2], Running& run) {
  const float largest = fmaxf(scores[0], scores[1]);
  if (any_lane(largest > run.maximum + SLACK)) {
    const float maximum = fmaxf(run.maximum, max_over_warp(largest));
    const float shrink = exp2_fast(run.maximum - maximum);
    run.maximum = maximum;
    run.total *= shrink;
    static_for<PAIRS>([&](auto index) {
      constexpr int pair = index;
      static_for<ROW_TILES * 4>([&](auto index) {
        constexpr int i = index;
         run.out[pair][i / 4][i % 4] *= shrink; });
      static_for<COLUMN_TILES * 4>([&](auto index) {
        constexpr int i = index;
         run.offsets[pair][i / 4][i % 4] *= shrink; });
    });
  }
#pragma unroll
  for (int token = 0; token < 2; ++token) {
    scores[token] = exp2_fast(scores[token] - run.maximum + P_EXPONENT);
    run.total += scores[token];
  }
}

// Add the tile's values, weighted by p.
__device__ __forceinline__ void add_values(const uint8_t* stage, const ReadPlaces& places,
                                           const float (&p)[QUERY_HEADS][2], int lane, Running (&run)[QUERY_HEADS]) {
  const int g = lane / 4, t = lane % 4;
  float w[2];
  weigh(stage, 1, t, g, w);
  uint32_t weighted[QUERY_HEADS];  // of token pair g for kind t, from where other lanes fetch it
#pragma unroll
  for (int h = 0; h < QUERY_HEADS; ++h) weighted[h] = pack_half2(p[h][0] * w[0], p[h][1] * w[1]);
  static_for<PAIRS>([&](auto index) {
    constexpr int pair = index;
    const int which_column = g / SLOTS, kind = smaller(2 * pair + which_column, KINDS - 1);
    uint32_t weight[QUERY_HEADS][2];
#pragma unroll
    for (int h = 0; h < QUERY_HEADS; ++h) {
      weight[h][0] = from_lane(weighted[h], 4 * t + kind);
      weight[h][1] = from_lane(weighted[h], 4 * (t + 4) + kind);
    }
    static_for<COLUMN_TILES>([&](auto index) {
      constexpr int tile = index;
      const uint8_t* metadata = stage + places.v_metadata[pair][tile];
      const int stride = places.v_stride[pair];
      const bool used = column_used(pair, tile, g);
      uint32_t scaled[QUERY_HEADS][2], shifted[QUERY_HEADS][2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t even = load_metadata(metadata + 8 * half * stride, used);
        const uint32_t odd = load_metadata(metadata + (8 * half + 1) * stride, used);
        const uint32_t scales = fp8_pair_to_half2(permute_bytes(even, odd, 0x0040));
        const uint32_t offsets = fp8_pair_to_half2(permute_bytes(even, odd, 0x0051));
#pragma unroll
        for (int h = 0; h < QUERY_HEADS; ++h) {
          scaled[h][half] = multiply_half2(weight[h][half], scales);
          shifted[h][half] = multiply_half2(weight[h][half], offsets);
        }
      }
      const uint32_t ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
#pragma unroll
      for (int h = 0; h < QUERY_HEADS; ++h) mma(run[h].offsets[pair][tile], ones, shifted[h][0], shifted[h][1]);
      static_for<2>([&](auto index) {
        constexpr int which = index;
        constexpr int source = 2 * pair + which, bits = bits_of(source);
        if constexpr (source < KINDS) {
          static_for<BLOCKS>([&](auto index) {
            constexpr int block = index;
            if constexpr (block * BLOCK / COLUMN_TILE == tile) {
              uint32_t first[4], second[4];
              load_v<source, block>(stage + places.v[source][block][0], g, first);
              load_v<source, block>(stage + places.v[source][block][1], g, second);
              static_for<block_width(block) / 16>([&](auto index) {
                constexpr int i = index;
                constexpr int row_tile = block * (BLOCK / 16) + i, word = v_word(bits, row_tile);
                constexpr int low = v_pick(bits, row_tile, 0), high = v_pick(bits, row_tile, 1);
                const uint32_t a[4] = {pick_codes<bits>(first[word], low), pick_codes<bits>(first[word], high),
                                       pick_codes<bits>(second[word], low), pick_codes<bits>(second[word], high)};
#pragma unroll
                for (int h = 0; h < QUERY_HEADS; ++h) {
                  const bool mine = which_column == which;
                  mma(run[h].out[pair][row_tile], a, mine ? scaled[h][0] : 0, mine ? scaled[h][1] : 0);
                }
              });
            }
          });
        }
      });
    });
  });
}
