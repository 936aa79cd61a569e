// Decode attention over packed pages, in code space.
//
// One query token per sequence attends to a past that is stored as codes (docs/page_layout.md). Nothing is
// dequantised: with the metadata folded out of the sums, in rotated space and for kinds k (the anchor, then the
// residuals on the way to the loop asked for) with weights w_k (products of coefficients alpha),
//
//   score_t = sum_k w_kt (q.mu_k + sum_j [s_ktj (sum_{i in j} q_i c_kti) + o_ktj (sum_{i in j} q_i)])
//   out_i   = sum_k sum_t (p_t w_kt s_ktj) c_kti + sum_k sum_t (p_t w_kt o_ktj)          j the group of channel i
//
// both inner sums are matrix products of codes, m16n8k16 in f16 with f32 sums. A group's partial sum must come out
// alone, so every (kind, group) has a column of its own: at g = 32, D = 128 the 4 + 4 groups of an anchor and a
// residual fill the 8 columns. Codes become f16 by one AND per two codes: they are f16 numbers below the normal range.
//
// Roofline, per token and KV head, K and V together, D = 128, g = 32, for a copy bandwidth of 4.3 TB/s over 132
// multiprocessors at 1.8 GHz (18.1 bytes a clock each):
//
//                     bytes   codes   codes a clock   instructions a code at 4 warps a clock
//   residual loop     228     512     40.7            3.15
//   anchor loop       144     256     32.2            3.98
//
// Warp instructions for a tile of 16 tokens of a residual loop, counted from the source: 152 to take codes apart, 33
// matrix products, 37 shared-memory loads, 30 for metadata and sums of the scores, 30 softmax, 40 weights of V, 35
// copies and their addresses: about 360, or 1.4 a code; 806 fit at the roofline, so the limit should be memory.
// Stage 3,648 bytes, 3 stages for each of 4 warps: 47 KiB a block with scratch, 4 blocks a multiprocessor at no more
// than 128 registers: 16 warps with 2 tiles each on the way, 114 KiB in flight where 26-35 KiB cover the latency.
// Prediction: 85 % of the copy bandwidth for both loops at 16k tokens and batch >= 8.
//
// Grid: (splits * query head sets, KV heads, batch). A block takes one split of a sequence; each of its warps takes
// every fourth tile with its own pages, stages and softmax, and the warps are combined at the end. A second kernel
// combines the splits with the current BF16 token and rotates the output back once.
#include "decode_layout.cuh"

constexpr int WARPS = 4, LANES = 32, THREADS = WARPS * LANES;
constexpr int ACCUMULATORS = QUERY_HEADS * PAIRS * ROW_TILES * 4;
constexpr int BLOCKS_PER_SM = ACCUMULATORS <= 32 ? 4 : 2;
constexpr int STAGE_BUDGET = (BLOCKS_PER_SM == 4 ? 50 : 100) * 1024 / WARPS;
constexpr int STAGES = STAGE_BUDGET / STAGE_BYTES < 2 ? 2 : smaller(STAGE_BUDGET / STAGE_BYTES, 4);
constexpr int COLUMN_THREADS = HEAD_DIM / 8, ROW_SETS = THREADS / COLUMN_THREADS;  // of the query's rotation
constexpr int SCRATCH_FLOATS = QUERY_HEADS * HEAD_DIM * (ROW_SETS + 1);
constexpr int SHARED_BYTES = WARPS * STAGES * STAGE_BYTES + SCRATCH_FLOATS * 4;
static_assert(SCRATCH_FLOATS >= QUERY_HEADS * WARPS * (HEAD_DIM + 2), "the epilogue's sums must fit in the scratch");

// f16 holds p * 2^P_EXPONENT, so that small p keep their bits. The running maximum moves only when it is exceeded by
// more than SLACK (in log2), so p 2^P_EXPONENT <= 2^6; times an e4m3 scale it stays below the largest f16.
constexpr float P_EXPONENT = 4.0f, SLACK = 2.0f;
constexpr float CODE_UNIT = 16777216.0f;  // 2^24: what a code taken out at bit 0 is short of its value
constexpr int MERGE_ROWS = 4;             // sequences that a block of the merging kernel serves

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
  void* out;       // [B, Hq, D], bf16 or f32
  int64_t out_stride, out_head_stride, out_is_float;
  int64_t batch, query_heads, kv_heads, splits;
  int64_t k_planes[4], v_planes[4];  // offset of each kind's planes within a head's part of a page
  double scale;
};

template <int I>
struct Index {
  constexpr __host__ __device__ operator int() const { return I; }
};

// body(0), body(1), ... body(N - 1), each with its index as a constant.
template <int N, int I = 0, typename F>
__device__ __forceinline__ void static_for(F&& body) {
  if constexpr (I < N) {
    body(Index<I>{});
    static_for<N, I + 1>(body);
  }
}

// ---------------------------------------------------------------- tiles: global memory to shared memory

// Copy one plane of a tile, ROW bytes a token; SWIZZLE is 0 for none, 1 for K's codes, 2 for V's.
template <int ROW, int SWIZZLE>
__device__ __forceinline__ void copy_plane(uint8_t* target, const uint8_t* source, int lane) {
#pragma unroll
  for (int i = 0; i < ceil_div(ROW, LANES); ++i) {  // 16 tokens of ROW bytes are ROW chunks of 16 bytes
    const int chunk = i * LANES + lane;
    const int place = SWIZZLE == 1 ? swizzle_k(ROW, chunk) : SWIZZLE == 2 ? swizzle_v(ROW, chunk) : chunk;
    if (chunk < ROW) copy_async(target + place * 16, source + chunk * 16);
  }
}

// Copy a tile: subtile `sub` of the page of one head that begins at `page`.
__device__ __forceinline__ void copy_tile(uint8_t* stage, const uint8_t* page, int sub, const Arguments& arg, int lane) {
  static_for<KINDS>([&](auto index) {
    constexpr int kind = index;
    constexpr int codes = codes_row(kind), metadata = metadata_row(kind), half = 16;
    const uint8_t *k = page + arg.k_planes[kind], *v = page + arg.v_planes[kind];
    copy_plane<codes, 1>(stage + stage_codes(0, kind), k + sub * TILE_TOKENS * codes, lane);
    copy_plane<codes, 2>(stage + stage_codes(1, kind), v + sub * TILE_TOKENS * codes, lane);
    const int skipped = PAGE_TOKENS * codes + sub * TILE_TOKENS * metadata;
    if constexpr (metadata <= half) {  // K's and V's at once, by half a warp each
      const int chunk = lane % half;
      const uint8_t* source = (lane < half ? k : v) + skipped + chunk * 16;
      const int place = lane < half ? stage_metadata(0, kind) : stage_metadata(1, kind);
      if (chunk < metadata) copy_async(stage + place + chunk * 16, source);
    } else {
      copy_plane<metadata, 0>(stage + stage_metadata(0, kind), k + skipped, lane);
      copy_plane<metadata, 0>(stage + stage_metadata(1, kind), v + skipped, lane);
    }
    if constexpr (alpha_row(kind) > 0) {
      const uint8_t* source = (lane < 2 ? k : v) + PAGE_TOKENS * (codes + metadata) + (sub * 2 + lane % 2) * 16;
      if (lane < 4) copy_async(stage + stage_alpha(0, kind) + lane * 16, source);
    }
  });
}

// The tiles of one warp, their pages looked up 32 at a time and far ahead of their use.
struct TileStream {
  const Arguments& arg;
  const int32_t* table;
  const uint8_t* pages;  // of this head
  uint8_t* stages;
  int lane, first, count, issued = 0;
  int32_t blocks, next_blocks;

  __device__ __forceinline__ TileStream(const Arguments& arg, const int32_t* table, const uint8_t* pages,
                                        uint8_t* stages, int lane, int first, int count)
      : arg(arg), table(table), pages(pages), stages(stages), lane(lane), first(first), count(count) {
    blocks = look_up(lane);
    next_blocks = look_up(LANES + lane);
  }

  __device__ __forceinline__ int32_t look_up(int i) const {
    return i < count ? table[(first + i * WARPS) / SUBTILES] : 0;
  }

  // Start copying the next tile into `stage`, or nothing when there is none; either way one group of copies.
  __device__ __forceinline__ void issue(int stage) {
    if (issued < count) {
      const int64_t block = from_lane(blocks, issued % LANES);
      const int sub = SUBTILES == 1 ? 0 : (first + issued * WARPS) % SUBTILES;
      copy_tile(stages + stage * STAGE_BYTES, pages + block * arg.page_stride, sub, arg, lane);
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

// A lane's codes of block `block` of a token of K.
template <int KIND, int BLOCK_INDEX>
__device__ __forceinline__ void load_k(const uint8_t* plane, int token, int t, uint32_t* words) {
  constexpr int bits = bits_of(KIND), row = codes_row(KIND), bytes = k_part_bytes(bits, BLOCK_INDEX);
  const int offset = token * row + k_part(bits, t, BLOCK_INDEX);
  const uint8_t* source = plane + swizzle_k(row, offset / 16) * 16 + offset % 16;
  if constexpr (bytes >= 4) {
    load_words<bytes / 4>(source, words);
  } else {  // 8 codes: the second byte becomes the upper half
    words[0] = permute_bytes(*reinterpret_cast<const uint16_t*>(source), 0, 0x4140);
  }
}

// A lane's codes of block `block` of a token pair of V.
template <int KIND, int BLOCK_INDEX>
__device__ __forceinline__ void load_v(const uint8_t* plane, int pair, int g, uint32_t* words) {
  constexpr int bits = bits_of(KIND), row = codes_row(KIND);
  const int offset = pair * 2 * row + v_part(bits, g, BLOCK_INDEX);
  load_words<v_part_words(bits, BLOCK_INDEX)>(plane + swizzle_v(row, offset / 16) * 16 + offset % 16, words);
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

// Where the metadata of a column begins (token 0): `column` of column tile `tile` of kinds 2 pair and 2 pair + 1.
__device__ __forceinline__ int metadata_place(int kv, int pair, int tile, int column) {
  int place = 0;
  static_for<2>([&](auto index) {
    constexpr int which = index;
    const int kind = 2 * pair + which, group = tile * (COLUMN_TILE / group_of(kind)) + column % SLOTS;
    if (kind < KINDS && column / SLOTS == which) place = stage_metadata(kv, kind) + 2 * group;
  });
  return place;
}

// Bytes from a token's metadata to the next one's.
__device__ __forceinline__ int metadata_stride(int pair, int column) {
  const int kind = 2 * pair + column / SLOTS;
  return kind < KINDS ? metadata_row(kind) : 0;
}

// Whether a column stands for a group at all.
__device__ __forceinline__ bool column_used(int pair, int tile, int column) {
  const int kind = 2 * pair + column / SLOTS, size = kind == 0 ? FIRST_GROUP : OTHER_GROUP;
  return kind < KINDS && column % SLOTS < COLUMN_TILE / size &&
         tile * COLUMN_TILE + column % SLOTS * size < HEAD_DIM;
}

constexpr __host__ __device__ bool every_column_used() {
  return HEAD_DIM % COLUMN_TILE == 0 && KINDS % 2 == (SLOTS == 8) && COLUMN_TILE == SLOTS * FIRST_GROUP &&
         (KINDS == 1 || COLUMN_TILE == SLOTS * OTHER_GROUP);
}

// Scale and offset of a group as 16 bits; zero, which is harmless, for a column that stands for none.
__device__ __forceinline__ uint32_t load_metadata(const uint8_t* source, bool used) {
  const uint32_t bytes = *reinterpret_cast<const uint16_t*>(source);
  return every_column_used() || used ? bytes : 0;
}

// ---------------------------------------------------------------- the query

// A lane's share of the query: B operands of K's products, and per column it sees in their results the sums of q.
struct Query {
  uint32_t b[PAIRS][K_PAIRS];
  float sum[PAIRS][COLUMN_TILES][2];  // columns 2t, 2t + 1; over CODE_UNIT
  float mean[PAIRS];                  // q.mu of the lane's kind, over CODE_UNIT, in one lane of the four
  float factor;                       // from sums to log2 of a softmax weight
};

// Rotate the queries of this block into `rotated` [QUERY_HEADS, D].
__device__ void rotate_queries(const Arguments& arg, int row, int head, int kv_head, float* scratch, float* rotated) {
  const int thread = threadIdx.x;
  const uint16_t* q = arg.q + row * arg.q_stride + head * arg.q_head_stride;
  if (arg.k_matrix == nullptr) {
    for (int i = thread; i < QUERY_HEADS * HEAD_DIM; i += THREADS) {
      rotated[i] = bf16_to_float(q[i / HEAD_DIM * arg.q_head_stride + i % HEAD_DIM]);
    }
    sync_block();
    return;
  }
  const __half* matrix = arg.k_matrix + kv_head * arg.k_matrix_stride;
  const int set = thread / COLUMN_THREADS, column = thread % COLUMN_THREADS * 8;
  float sums[QUERY_HEADS][8] = {};
  if (set < ROW_SETS) {
#pragma unroll 8
    for (int i = set; i < HEAD_DIM; i += ROW_SETS) {
      const uint4 eight = *reinterpret_cast<const uint4*>(matrix + i * HEAD_DIM + column);
      const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
      for (int h = 0; h < QUERY_HEADS; ++h) {
        const float x = bf16_to_float(q[h * arg.q_head_stride + i]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          sums[h][2 * j] += x * low_half(words[j]);
          sums[h][2 * j + 1] += x * high_half(words[j]);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < QUERY_HEADS; ++h) {
#pragma unroll
      for (int j = 0; j < 8; ++j) scratch[(set * QUERY_HEADS + h) * HEAD_DIM + column + j] = sums[h][j];
    }
  }
  sync_block();
  for (int i = thread; i < QUERY_HEADS * HEAD_DIM; i += THREADS) {
    float total = 0.0f;
    for (int s = 0; s < ROW_SETS; ++s) total += scratch[s * QUERY_HEADS * HEAD_DIM + i];
    rotated[i] = total;
  }
  sync_block();
}

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

// The power of two that brings the largest |z| near 2^9, where f16 keeps all bits of everything that matters.
__device__ float query_unit(const float* z, int lane) {
  float largest = 0.0f;
  for (int i = lane; i < HEAD_DIM; i += LANES) largest = fmaxf(largest, fabsf(z[i]));
  largest = max_over_warp(largest);
  return largest > 1e-30f && largest < 1e30f ? exp2f(static_cast<float>(9 - ilogbf(largest))) : 1.0f;
}

// Value of z in `half` of a pair's B operand for `column`: zero outside the column's group, and divided by the place
// that the codes are taken out at.
__device__ __forceinline__ float query_value(const float* z, int pair, int column, int t, int k_pair, int half) {
  float value = 0.0f;
  static_for<2>([&](auto index) {
    constexpr int which = index;
    const int kind = 2 * pair + which, bits = bits_of(kind), channel = k_channel(bits, t, k_pair, half);
    if (kind < KINDS && column / SLOTS == which && slot_of(kind, channel) == column % SLOTS) {
      value = z[channel] / (1 << pick_position(bits, k_pick(bits, k_pair)));
    }
  });
  return value;
}

__device__ void prepare_query(const Arguments& arg, const float* z, int kv_head, int lane, Query& query) {
  const int g = lane / 4, t = lane % 4;
  const float unit = query_unit(z, lane);
  query.factor = static_cast<float>(arg.scale * 1.4426950408889634) * CODE_UNIT / unit;
  static_for<PAIRS>([&](auto index) {
    constexpr int pair = index;
    float total[COLUMN_TILES] = {};
    static_for<K_PAIRS>([&](auto index) {
      constexpr int p = index;
      constexpr int tile = k_block(p) * BLOCK / COLUMN_TILE;
      const uint32_t b = pack_half2(query_value(z, pair, g, t, p, 0) * unit, query_value(z, pair, g, t, p, 1) * unit);
      const int kind = 2 * pair + g / SLOTS, bits = kind == 0 ? FIRST_BITS : OTHER_BITS;
      query.b[pair][p] = b;
      total[tile] += (low_half(b) + high_half(b)) * (1 << pick_position(bits, k_pick(bits, p)));
    });
    static_for<COLUMN_TILES>([&](auto index) {
      constexpr int tile = index;
      float column = total[tile] / CODE_UNIT;
      column += from_neighbour(column, 1);
      column += from_neighbour(column, 2);
      query.sum[pair][tile][0] = from_lane(column, 8 * t);
      query.sum[pair][tile][1] = from_lane(column, 8 * t + 4);
    });
    query.mean[pair] = 0.0f;
    static_for<2>([&](auto index) {
      constexpr int which = index;
      constexpr int kind = 2 * pair + which;
      if constexpr (kind < KINDS) {
        if (arg.means[kind] != nullptr) {
          const float* mean = arg.means[kind] + kv_head * arg.mean_stride;
          float dot = 0.0f;
          for (int i = lane; i < HEAD_DIM; i += LANES) dot += z[i] * mean[i];
          dot = sum_over_warp(dot) * unit / CODE_UNIT;
          if (t == which * SLOTS / 2) query.mean[pair] = dot;
        }
      }
    });
  });
}

// ---------------------------------------------------------------- one tile

// Softmax and sums of a warp over its tiles, for one query head.
struct Running {
  float out[PAIRS][ROW_TILES][4] = {};
  float offsets[PAIRS][COLUMN_TILES][4] = {};
  float maximum = -INFINITY, total = 0.0f;  // of the lane's own tokens
};

// log2 weights of tokens 2g and 2g + 1 of the tile, for every query head.
__device__ __forceinline__ void score_tile(const uint8_t* stage, const Query (&query)[QUERY_HEADS], int lane,
                                           float (&scores)[QUERY_HEADS][2]) {
  const int g = lane / 4, t = lane % 4;
  static_for<PAIRS>([&](auto index) {
    constexpr int pair = index;
    constexpr bool two = 2 * pair + 1 < KINDS;
    const int kind = 2 * pair + 2 * t / SLOTS, stride = metadata_stride(pair, 2 * t);
    float sums[QUERY_HEADS][2];
#pragma unroll
    for (int h = 0; h < QUERY_HEADS; ++h) sums[h][0] = sums[h][1] = query[h].mean[pair];
    static_for<COLUMN_TILES>([&](auto index) {
      constexpr int tile = index;
      float products[2][QUERY_HEADS][4] = {};
      static_for<two ? 2 : 1>([&](auto index) {
        constexpr int which = index;
        constexpr int source = 2 * pair + which, bits = bits_of(source);
        const uint8_t* plane = stage + stage_codes(0, source);
        static_for<BLOCKS>([&](auto index) {
          constexpr int block = index;
          if constexpr (block * BLOCK / COLUMN_TILE == tile) {
            uint32_t even[4], odd[4];
            load_k<source, block>(plane, 2 * g, t, even);
            load_k<source, block>(plane, 2 * g + 1, t, odd);
            static_for<block_width(block) / 16>([&](auto index) {
              constexpr int step = index;
              constexpr int p = block * (BLOCK / 8) + 2 * step, w0 = k_word(bits, p), w1 = k_word(bits, p + 1);
              const uint32_t a[4] = {
                  pick_codes<bits>(even[w0], k_pick(bits, p)), pick_codes<bits>(odd[w0], k_pick(bits, p)),
                  pick_codes<bits>(even[w1], k_pick(bits, p + 1)), pick_codes<bits>(odd[w1], k_pick(bits, p + 1))};
#pragma unroll
              for (int h = 0; h < QUERY_HEADS; ++h) {
                mma(products[which][h], a, query[h].b[pair][p], query[h].b[pair][p + 1]);
              }
            });
          }
        });
      });
      float scale[2][2], offset[2][2];  // token, column
#pragma unroll
      for (int token = 0; token < 2; ++token) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int column = 2 * t + c;
          const uint8_t* source = stage + metadata_place(0, pair, tile, 2 * t) + 2 * c + (2 * g + token) * stride;
          const uint32_t both = fp8_pair_to_half2(load_metadata(source, column_used(pair, tile, column)));
          scale[token][c] = low_half(both), offset[token][c] = high_half(both);
        }
      }
#pragma unroll
      for (int h = 0; h < QUERY_HEADS; ++h) {
#pragma unroll
        for (int token = 0; token < 2; ++token) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int i = 2 * token + c;
            const float product = two && 2 * t / SLOTS == 1 ? products[1][h][i] : products[0][h][i];
            sums[h][token] += scale[token][c] * product + offset[token][c] * query[h].sum[pair][tile][c];
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
__device__ __forceinline__ void add_values(const uint8_t* stage, const float (&p)[QUERY_HEADS][2], int lane,
                                           Running (&run)[QUERY_HEADS]) {
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
      const uint8_t* metadata = stage + metadata_place(1, pair, tile, g);
      const int stride = metadata_stride(pair, g);
      const bool used = column_used(pair, tile, g);
      uint32_t scaled[QUERY_HEADS][2], shifted[QUERY_HEADS][2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int token = 2 * t + 8 * half;
        const uint32_t even = load_metadata(metadata + token * stride, used);
        const uint32_t odd = load_metadata(metadata + (token + 1) * stride, used);
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
          const uint8_t* plane = stage + stage_codes(1, source);
          static_for<BLOCKS>([&](auto index) {
            constexpr int block = index;
            if constexpr (block * BLOCK / COLUMN_TILE == tile) {
              uint32_t first[4], second[4];
              load_v<source, block>(plane, t, g, first);
              load_v<source, block>(plane, t + 4, g, second);
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

// ---------------------------------------------------------------- the end of a split

// This lane's share of channel v_channel(g, row_tile, half): each kind's sum is in the column of the channel's group.
template <int ROW_TILE>
__device__ __forceinline__ float collect(const Running& run, int g, int t, int half) {
  constexpr int tile = v_block(ROW_TILE) * BLOCK / COLUMN_TILE;
  const int channel = v_channel(g, ROW_TILE, half);
  float value = 0.0f;
  static_for<PAIRS>([&](auto index) {
    constexpr int pair = index;
    static_for<4>([&](auto index) {
      constexpr int i = index;
      constexpr int which = i / 2, c = i % 2, kind = 2 * pair + which;
      if constexpr (kind < KINDS) {
        const float unit = CODE_UNIT / (1 << pick_position(bits_of(kind), v_pick(bits_of(kind), ROW_TILE, half)));
        if (which * SLOTS + slot_of(kind, channel) == 2 * t + c) {
          value += run.out[pair][ROW_TILE][2 * half + c] * unit + run.offsets[pair][tile][c];
        }
      }
    });
  });
  return value;
}

// Combine the warps and write the split's values, divided by their weight, and the log2 of that weight.
__device__ void write_split(const Arguments& arg, const Running (&run)[QUERY_HEADS], float* scratch, int row, int head,
                            int split) {
  const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, g = lane / 4, t = lane % 4;
  constexpr int width = HEAD_DIM + 2;
  sync_block();  // the scratch has been the query's
#pragma unroll
  for (int h = 0; h < QUERY_HEADS; ++h) {
    float* mine = scratch + (h * WARPS + warp) * width;
    static_for<ROW_TILES * 2>([&](auto index) {
      constexpr int i = index;
      float value = collect<i / 2>(run[h], g, t, i % 2);
      value += from_neighbour(value, 1);
      value += from_neighbour(value, 2);
      if (t == 0) mine[v_channel(g, i / 2, i % 2)] = value;
    });
    const float total = sum_over_warp(run[h].total) / 4;  // the four lanes of a row hold the same tokens
    if (lane == 0) mine[HEAD_DIM] = run[h].maximum, mine[HEAD_DIM + 1] = total;
  }
  sync_block();
  for (int i = threadIdx.x; i < QUERY_HEADS * HEAD_DIM; i += THREADS) {
    const float* warps = scratch + i / HEAD_DIM * WARPS * width;
    float maximum = -INFINITY, total = 0.0f, value = 0.0f;
    for (int w = 0; w < WARPS; ++w) maximum = fmaxf(maximum, warps[w * width + HEAD_DIM]);
    for (int w = 0; w < WARPS; ++w) {
      const float share = exp2_fast(warps[w * width + HEAD_DIM] - maximum);
      total += share * warps[w * width + HEAD_DIM + 1];
      value += share * warps[w * width + i % HEAD_DIM];
    }
    const int64_t place = ((row * arg.query_heads) + head + i / HEAD_DIM) * arg.splits + split;
    arg.partial[place * HEAD_DIM + i % HEAD_DIM] = value / total;
    if (i % HEAD_DIM == 0) arg.lse[place] = maximum + log2f(total) - P_EXPONENT;
  }
}

// Attention of QUERY_HEADS query heads over one split of a sequence's past.
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) decode_attention_kernel(const Arguments arg) {
  const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const int sets = static_cast<int>(arg.query_heads / arg.kv_heads) / QUERY_HEADS;
  const int split = blockIdx.x / sets, kv_head = blockIdx.y, row = blockIdx.z;
  const int head = (kv_head * sets + blockIdx.x % sets) * QUERY_HEADS;
  const int length = arg.lengths[row], tiles = ceil_div(length, TILE_TOKENS);
  const int per_split = ceil_div(tiles, static_cast<int>(arg.splits));
  const int begin = split * per_split, end = smaller(begin + per_split, tiles);
  if (begin >= end) {
    if (threadIdx.x < QUERY_HEADS) arg.lse[(row * arg.query_heads + head + threadIdx.x) * arg.splits + split] = -INFINITY;
    return;
  }
  uint8_t* stages = shared_memory() + warp * STAGES * STAGE_BYTES;
  float* scratch = reinterpret_cast<float*>(shared_memory() + WARPS * STAGES * STAGE_BYTES);
  float* rotated = scratch + QUERY_HEADS * HEAD_DIM * ROW_SETS;

  const int count = begin + warp < end ? ceil_div(end - begin - warp, WARPS) : 0;
  TileStream stream(arg, arg.block_table + row * arg.table_stride, arg.pages + kv_head * arg.page_head_stride, stages,
                    lane, begin + warp, count);
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) stream.issue(stage);

  rotate_queries(arg, row, head, kv_head, scratch, rotated);
  Query query[QUERY_HEADS];
#pragma unroll
  for (int h = 0; h < QUERY_HEADS; ++h) prepare_query(arg, rotated + h * HEAD_DIM, kv_head, lane, query[h]);

  Running run[QUERY_HEADS];
  int stage = 0;
  for (int i = 0; i < count; ++i) {
    wait_for_copies<STAGES - 2>();
    sync_warp();  // every lane's copies have landed, and every lane is done with the stage before
    stream.issue(stage == 0 ? STAGES - 1 : stage - 1);
    uint8_t* tile = stages + stage * STAGE_BYTES;
    const int valid = length - (begin + warp + i * WARPS) * TILE_TOKENS;
    if (valid < TILE_TOKENS) clear_tail(tile, valid, lane);
    float scores[QUERY_HEADS][2];
    score_tile(tile, query, lane, scores);
#pragma unroll
    for (int h = 0; h < QUERY_HEADS; ++h) {
      if (valid < TILE_TOKENS) {
        if (lane / 4 * 2 >= valid) scores[h][0] = -INFINITY;
        if (lane / 4 * 2 + 1 >= valid) scores[h][1] = -INFINITY;
      }
      softmax_tile(scores[h], run[h]);
    }
    add_values(tile, scores, lane, run);
    stage = stage == STAGES - 1 ? 0 : stage + 1;
  }
  write_split(arg, run, scratch, row, head, split);
}

// ---------------------------------------------------------------- splits and the current token

// Weight of each split and of the current token in one row, and the weighted sum of the splits in rotated space.
__device__ void merge_row(const Arguments& arg, int row, int head, int kv_head, int lane, float* past, float* current) {
  const uint16_t* q = arg.q + row * arg.q_stride + head * arg.q_head_stride;
  const uint16_t* k = arg.k + row * arg.k_stride + kv_head * arg.k_head_stride;
  float dot = 0.0f;
  for (int i = lane; i < HEAD_DIM; i += LANES) dot += bf16_to_float(q[i]) * bf16_to_float(k[i]);
  const float own = sum_over_warp(dot) * static_cast<float>(arg.scale * 1.4426950408889634);

  const int splits = static_cast<int>(arg.splits);
  const int64_t place = (row * arg.query_heads + head) * arg.splits;
  float maximum = own;
  for (int s = 0; s < splits; ++s) maximum = fmaxf(maximum, arg.lse[place + s]);
  float total = exp2f(own - maximum), sums[HEAD_DIM / LANES] = {};
  *current = total;
  for (int s = 0; s < splits; ++s) {
    const float share = exp2f(arg.lse[place + s] - maximum);
    total += share;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / LANES; ++i) {  // an empty split was not written
      if (share > 0.0f) sums[i] += share * arg.partial[(place + s) * HEAD_DIM + i * LANES + lane];
    }
  }
  *current /= total;
#pragma unroll
  for (int i = 0; i < HEAD_DIM / LANES; ++i) past[i * LANES + lane] = sums[i] / total;
}

__device__ __forceinline__ void write_channel(const Arguments& arg, int row, int head, int kv_head, int channel,
                                              float past, float current) {
  const float own = bf16_to_float(arg.v[row * arg.v_stride + kv_head * arg.v_head_stride + channel]);
  const int64_t place = row * arg.out_stride + head * arg.out_head_stride + channel;
  const float value = past + current * own;
  if (arg.out_is_float) static_cast<float*>(arg.out)[place] = value;
  else static_cast<uint16_t*>(arg.out)[place] = float_to_bf16(value);
}

// out = (past sum) U_V^T + the current token's share, for MERGE_ROWS sequences of one query head.
__global__ void __launch_bounds__(THREADS) merge_splits_kernel(const Arguments arg) {
  const int thread = threadIdx.x, warp = thread / LANES, lane = thread % LANES;
  const int head = blockIdx.x, kv_head = head / static_cast<int>(arg.query_heads / arg.kv_heads);
  const int first = blockIdx.y * MERGE_ROWS, rows = smaller(MERGE_ROWS, static_cast<int>(arg.batch) - first);
  float* past = reinterpret_cast<float*>(shared_memory());  // [MERGE_ROWS, D], then [MERGE_ROWS]
  float* current = past + MERGE_ROWS * HEAD_DIM;
  for (int r = warp; r < MERGE_ROWS; r += WARPS) {
    if (r < rows) {
      float share;
      merge_row(arg, first + r, head, kv_head, lane, past + r * HEAD_DIM, &share);
      if (lane == 0) current[r] = share;
    } else {
      for (int i = lane; i < HEAD_DIM; i += LANES) past[r * HEAD_DIM + i] = 0.0f;
    }
  }
  sync_block();
  if (arg.v_matrix == nullptr) {
    for (int i = thread; i < rows * HEAD_DIM; i += THREADS) {
      write_channel(arg, first + i / HEAD_DIM, head, kv_head, i % HEAD_DIM, past[i], current[i / HEAD_DIM]);
    }
    return;
  }
  const __half* matrix = arg.v_matrix + kv_head * arg.v_matrix_stride;
  for (int channel = warp; channel < HEAD_DIM; channel += WARPS) {
    float sums[MERGE_ROWS] = {};
#pragma unroll
    for (int j = 2 * lane; j < HEAD_DIM; j += 2 * LANES) {
      const uint32_t two = *reinterpret_cast<const uint32_t*>(matrix + channel * HEAD_DIM + j);
#pragma unroll
      for (int r = 0; r < MERGE_ROWS; ++r) {
        sums[r] += past[r * HEAD_DIM + j] * low_half(two) + past[r * HEAD_DIM + j + 1] * high_half(two);
      }
    }
#pragma unroll
    for (int r = 0; r < MERGE_ROWS; ++r) {
      const float value = sum_over_warp(sums[r]);
      if (lane == r && r < rows) write_channel(arg, first + r, head, kv_head, channel, value, current[r]);
    }
  }
}

extern "C" {

// Sizes that a caller checks its mirror of Arguments against.
int decode_attention_arguments_bytes() { return sizeof(Arguments); }

// Blocks of the first kernel that fit on a multiprocessor: what the number of splits is chosen by.
int decode_attention_blocks_per_sm() { return BLOCKS_PER_SM; }

// Both kernels, on a stream; returns a cudaError_t.
int decode_attention(const Arguments* arguments, void* stream) {
  const Arguments& arg = *arguments;
  const int sets = static_cast<int>(arg.query_heads / arg.kv_heads) / QUERY_HEADS;
  const dim3 grid(static_cast<unsigned>(arg.splits * sets), static_cast<unsigned>(arg.kv_heads),
                  static_cast<unsigned>(arg.batch));
  const int status = launch(decode_attention_kernel, grid, THREADS, SHARED_BYTES, stream, arg);
  if (status != 0) return status;
  const dim3 merge_grid(static_cast<unsigned>(arg.query_heads),
                        static_cast<unsigned>(ceil_div(static_cast<int>(arg.batch), MERGE_ROWS)));
  const int merge_bytes = MERGE_ROWS * (HEAD_DIM + 1) * 4;
  return launch(merge_splits_kernel, merge_grid, THREADS, merge_bytes, stream, arg);
}
}
