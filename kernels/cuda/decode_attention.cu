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
// Warp instructions for a tile of 16 tokens of a residual loop, from the SASS: 160 to take codes apart, 33 matrix
// products, 18 loads from shared memory, 73 copies and their addresses, 130 metadata, weights and softmax: 417, or 1.6 a
// code; 806 fit at the roofline. 230 are on the integer pipe: 115 of the 200 clocks a tile has there.
// Stage 3,648 bytes, 3 stages for each of 8 warps: 97 KiB a block with scratch, 2 blocks a multiprocessor at no more
// than 128 registers. Measured, residual / anchor loop: 92 / 89 % of the copy bandwidth at 16k tokens and batch 32, 83 /
// 77 % at batch 8, where what a block does once takes a tenth of its time; ../NOTES.md has all versions.
//
// Grid: (splits * query head sets, KV heads, batch). A block takes one split of a sequence; each of its warps takes
// every eighth tile with its own pages, stages and softmax, and the warps are combined at the end. A single split then
// takes in the current BF16 token; of several, the last block of a sequence to end merges them with it. The output is
// rotated back once.
#include "decode_tile.cuh"
#if LOOKUP
#include "decode_lookup.cuh"
#else
constexpr int TABLE_BYTES = 0;
#endif

constexpr int BLOCKS_PER_SM = WARPS_PER_SM / WARPS;
constexpr int STAGE_BUDGET = (WARPS_PER_SM == 16 ? 50 : 88) * 256;  // of a warp
constexpr int STAGES = STAGE_BUDGET / STAGE_BYTES < 2 ? 2 : smaller(STAGE_BUDGET / STAGE_BYTES, 4);
constexpr int SPAN = 64, SPANS = ceil_div(HEAD_DIM, SPAN);  // columns of the query's rotation that a warp works on
constexpr int STEPS = HEAD_DIM / 16, SETS = smaller(WARPS / SPANS, STEPS);  // sets of warps share the rows of a span
constexpr int STEPS_AT_ONCE = smaller(2, ceil_div(STEPS, SETS));            // of 16 rows, that a warp has on the way
constexpr int PASSES_AT_ONCE = ceil_div(smaller(HEAD_DIM, 128), 8 * WARPS);  // of the rotation of the output
constexpr int CHANNELS_A_THREAD = ceil_div(HEAD_DIM, THREADS);
constexpr int SPLITS_AT_ONCE = 8;  // whose values a thread has on the way
// With lookup tables z lies in their place, so that two blocks fit on a multiprocessor.
constexpr int SCRATCH_FLOATS =
    LOOKUP ? WARPS * (HEAD_DIM + 2) + HEAD_DIM : QUERY_HEADS * HEAD_DIM * (SETS + WARPS);
static_assert(WARPS >= KINDS, "each kind's means are worked on by a warp");
static_assert(SCRATCH_FLOATS >= QUERY_HEADS * (WARPS * (HEAD_DIM + 2) + HEAD_DIM), "the end's sums must fit in there");

// The tiles of a split.
struct Span {
  int length, begin, end;

  __device__ __forceinline__ Span(int length, int split, int splits) : length(length) {
    const int tiles = ceil_div(length, TILE_TOKENS), per_split = ceil_div(tiles, splits);
    begin = split * per_split, end = smaller(begin + per_split, tiles);
  }
};

// ---------------------------------------------------------------- hints to the second-level cache

// What a block reads last.
__device__ __forceinline__ void prefetch_end(const Arguments& arg, int row, int kv_head) {
  if (threadIdx.x != 0) return;
  if (arg.v_matrix != nullptr) prefetch(arg.v_matrix + kv_head * arg.v_matrix_stride, HEAD_DIM * HEAD_DIM * 2);
  const uint16_t* v = arg.v + row * arg.v_stride + kv_head * arg.v_head_stride;
  prefetch(v), prefetch(v + HEAD_DIM - 1);
}

// ---------------------------------------------------------------- the query

// A power of two that brings `largest` between 2^EXPONENT and twice that, and its reciprocal.
template <int EXPONENT>
struct Unit {
  float value, inverse;

  explicit __device__ __forceinline__ Unit(float largest) {
    const uint32_t least = (EXPONENT + 1u) << 23, bits = float_to_bits(largest) & 0x7f800000u;
    const uint32_t kept = bits < least ? least : bits;
    value = bits_to_float(((254u + EXPONENT) << 23) - kept), inverse = bits_to_float(kept - (EXPONENT << 23));
  }
};

// A warp's part of the rotation of the queries: products of 16 rows of the matrix a step with 64 columns. Lane 4g + t has
// columns 8g to 8g + 7 of rows 4t to 4t + 3, and these four values of query g.
struct RotationPart {
  uint32_t rows[STEPS_AT_ONCE][4][4];
  float q[STEPS_AT_ONCE][4];

  // From step `first` of this warp on.
  __device__ __forceinline__ void load(const uint16_t* queries, int64_t head_stride, const __half* matrix, int first) {
    const int warp = threadIdx.x / LANES, g = threadIdx.x % LANES / 4, t = threadIdx.x % 4;
    const int set = warp / SPANS, column = warp % SPANS * SPAN + 8 * g;
#pragma unroll
    for (int n = 0; n < STEPS_AT_ONCE; ++n) {
      const int step = (first + n) * SETS + set, row = 16 * step + 4 * t;
      const bool inside = set < SETS && step < STEPS;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        uint4 eight = {0, 0, 0, 0};
        if (inside && column < HEAD_DIM) {
          eight = *reinterpret_cast<const uint4*>(matrix + (row + r) * HEAD_DIM + column);
        }
        rows[n][r][0] = eight.x, rows[n][r][1] = eight.y, rows[n][r][2] = eight.z, rows[n][r][3] = eight.w;
        q[n][r] = inside && g < QUERY_HEADS ? bf16_to_float(queries[g * head_stride + row + r]) : 0.0f;
      }
    }
  }

  // sums[m]: of columns 8 (2t) + m and 8 (2t + 1) + m of query g.
  __device__ __forceinline__ void add_products(float (&sums)[8][2]) const {
    float largest = 0.0f;
#pragma unroll
    for (int n = 0; n < STEPS_AT_ONCE; ++n) {
#pragma unroll
      for (int r = 0; r < 4; ++r) largest = fmaxf(largest, fabsf(q[n][r]));
    }
    largest = fmaxf(largest, from_neighbour(largest, 1));
    const Unit<8> unit(fmaxf(largest, from_neighbour(largest, 2)));
#pragma unroll
    for (int m = 0; m < 8; ++m) {
      float products[4] = {};
#pragma unroll
      for (int n = 0; n < STEPS_AT_ONCE; ++n) {
        const uint32_t a[4] = {pack_half2(q[n][0] * unit.value, q[n][1] * unit.value), 0,
                               pack_half2(q[n][2] * unit.value, q[n][3] * unit.value), 0};
        constexpr uint32_t low = 0x5410, high = 0x7632;
        mma(products, a, permute_bytes(rows[n][0][m / 2], rows[n][1][m / 2], m % 2 ? high : low),
            permute_bytes(rows[n][2][m / 2], rows[n][3][m / 2], m % 2 ? high : low));
      }
      sums[m][0] += products[0] * unit.inverse, sums[m][1] += products[1] * unit.inverse;
    }
  }
};

// Rotate the queries of this block, whose first rows and values are in `part`, into this warp's `z` [QUERY_HEADS, D].
__device__ void rotate_queries(const Arguments& arg, const uint16_t* queries, const __half* matrix, RotationPart& part,
                               float* scratch, float* z) {
  const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, g = lane / 4, t = lane % 4;
  if (matrix == nullptr) {
    for (int i = lane; i < QUERY_HEADS * HEAD_DIM; i += LANES) {
      z[i] = bf16_to_float(queries[i / HEAD_DIM * arg.q_head_stride + i % HEAD_DIM]);
    }
    sync_warp();
    return;
  }
  float sums[8][2] = {};
  part.add_products(sums);
  for (int first = STEPS_AT_ONCE; first * SETS < STEPS; first += STEPS_AT_ONCE) {
    part.load(queries, arg.q_head_stride, matrix, first);
    part.add_products(sums);
  }
  const int set = warp / SPANS, column = warp % SPANS * SPAN + 16 * t;
  if (set < SETS && g < QUERY_HEADS && column < HEAD_DIM) {
    float* target = scratch + (set * QUERY_HEADS + g) * HEAD_DIM + column;
#pragma unroll
    for (int m = 0; m < 8; ++m) target[m] = sums[m][0], target[8 + m] = sums[m][1];
  }
  sync_block();
#pragma unroll
  for (int i = lane; i < QUERY_HEADS * HEAD_DIM; i += LANES) {
    float total = 0.0f;
#pragma unroll
    for (int s = 0; s < SETS; ++s) total += scratch[s * QUERY_HEADS * HEAD_DIM + i];
    z[i] = total;
  }
  sync_warp();
}

// Value of z in `half` of a pair's B operand for `column`: zero outside the column's group, and divided by the place
// that the codes are taken out at.
__device__ __forceinline__ float query_value(const float* z, int pair, int column, int t, int k_pair, int half) {
  if constexpr (LOOKUP) return z[HEAD_DIM / 4 * t + 2 * k_pair + half];
  const int kind = 2 * pair + column / SLOTS, bits = bits_of(kind), channel = k_channel(bits, t, k_pair, half);
  const bool inside = kind < KINDS && slot_of(kind, channel) == column % SLOTS;
  return inside ? z[channel] / (1 << pick_position(bits, k_pick(bits, k_pair))) : 0.0f;
}

// What the warps of a block work out together of one query: B operands, sums of q by warp, column tile and column, and
// q.mu by kind; both over CODE_UNIT.
struct SharedQuery {
  uint32_t b[PAIRS * K_PAIRS][LANES];
  float sums[WARPS][PAIRS * COLUMN_TILES][8];
  float means[PAIRS * 2];
  float inverse_unit;
  float own, share;  // the current token's score, in log2, and its weight in the end
};

constexpr int SHARED_BYTES =
    WARPS * STAGES * STAGE_BYTES + TABLE_BYTES + SCRATCH_FLOATS * 4 +
    QUERY_HEADS * static_cast<int>(sizeof(SharedQuery));

// `means` are those of K of kind `warp`.
__device__ void prepare_query(const float* z, const float (&means)[HEAD_DIM / LANES], int warp, int lane,
                              SharedQuery& shared) {
  const int g = lane / 4, t = lane % 4;
  float largest = 0.0f;
#pragma unroll
  for (int i = lane; i < HEAD_DIM; i += LANES) largest = fmaxf(largest, fabsf(z[i]));
  const Unit<9> units(max_over_warp(largest));  // f16 keeps all bits of everything that matters
  const float unit = units.value;
  float total[PAIRS * COLUMN_TILES] = {};
  for (int i = warp; i < PAIRS * K_PAIRS; i += WARPS) {
    const int pair = i / K_PAIRS, p = i % K_PAIRS, bits = bits_of(2 * pair + g / SLOTS);
    const uint32_t b = pack_half2(query_value(z, pair, g, t, p, 0) * unit, query_value(z, pair, g, t, p, 1) * unit);
    const float sum = (low_half(b) + high_half(b)) * (1 << pick_position(bits, k_pick(bits, p)));
    shared.b[i][lane] = b;
#pragma unroll
    for (int tile = 0; tile < PAIRS * COLUMN_TILES; ++tile) {
      total[tile] += tile == pair * COLUMN_TILES + k_block(p) * BLOCK / COLUMN_TILE ? sum : 0.0f;
    }
  }
#pragma unroll
  for (int tile = 0; tile < PAIRS * COLUMN_TILES; ++tile) {
    float column = total[tile] / CODE_UNIT;
    column += from_neighbour(column, 1);
    column += from_neighbour(column, 2);
    if (t == 0) shared.sums[warp][tile][g] = column;
  }
  if (warp < KINDS) {
    float dot = 0.0f;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / LANES; ++i) dot += z[i * LANES + lane] * means[i];
    dot = sum_over_warp(dot) * unit / CODE_UNIT;
    if (lane == 0) shared.means[warp] = dot;
  }
  if (threadIdx.x == 0) shared.inverse_unit = units.inverse;
}

// This lane's share of it.
__device__ __forceinline__ void load_query(const Arguments& arg, const SharedQuery& shared, int lane, Query& query) {
  const int t = lane % 4;
  query.factor = static_cast<float>(arg.scale * 1.4426950408889634) * CODE_UNIT * shared.inverse_unit;
  static_for<PAIRS>([&](auto index) {
    constexpr int pair = index;
#pragma unroll
    for (int p = 0; p < K_PAIRS; ++p) query.b[pair][p] = shared.b[pair * K_PAIRS + p][lane];
#pragma unroll
    for (int tile = 0; tile < COLUMN_TILES; ++tile) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float sum = 0.0f;
        for (int w = 0; w < WARPS; ++w) sum += shared.sums[w][pair * COLUMN_TILES + tile][2 * t + c];
        query.sum[pair][tile][c] = sum;
      }
    }
    const int kind = 2 * pair + 2 * t / SLOTS;
    query.mean[pair] = t % (SLOTS / 2) == 0 && kind < KINDS ? shared.means[kind] : 0.0f;
  });
  if constexpr (LOOKUP) {
    static_for<LOOKUP ? KINDS : 1>([&](auto kind) { query.mean[kind] = shared.means[kind]; });
  }
}

// ---------------------------------------------------------------- the end of a split

// Whether groups of all kinds are alike: a channel's sums then lie in columns of the same number.
constexpr bool ALIKE = KINDS == 1 || FIRST_GROUP == OTHER_GROUP;

// Whether this lane has the columns of a channel's group, and which of its two is it.
__device__ __forceinline__ bool holds(int slot, int t) { return slot / 2 == t % (SLOTS / 2); }

// The value of channel v_channel(g, row_tile, half), in lanes that hold it (all lanes, unless ALIKE): each kind's sum is
// in the column of the channel's group.
template <int ROW_TILE>
__device__ __forceinline__ float collect(const Running& run, int g, int t, int half) {
  if constexpr (LOOKUP) {
    const float* sums = run.out[0][ROW_TILE] + 2 * half;
    return g % 2 ? sums[1] : sums[0];
  }
  constexpr int tile = v_block(ROW_TILE) * BLOCK / COLUMN_TILE;
  const int channel = v_channel(g, ROW_TILE, half);
  float value = 0.0f;
  static_for<PAIRS>([&](auto index) {
    constexpr int pair = index;
    static_for<8 / SLOTS>([&](auto index) {
      constexpr int which = index, kind = 2 * pair + which;
      if constexpr (kind < KINDS) {
        const float unit = CODE_UNIT / (1 << pick_position(bits_of(kind), v_pick(bits_of(kind), ROW_TILE, half)));
        const int slot = slot_of(kind, channel);
        const float* sums = run.out[pair][ROW_TILE] + 2 * half;
        const float* offsets = run.offsets[pair][tile];
        const float sum = slot % 2 ? sums[1] : sums[0], offset = slot % 2 ? offsets[1] : offsets[0];
        if (2 * t / SLOTS == which && (ALIKE || holds(slot, t))) value += sum * unit + offset;
      }
    });
  });
  if constexpr (SLOTS == 4) value += from_neighbour(value, 2);
  if constexpr (!ALIKE) value += from_neighbour(value, 1);
  return value;
}

// This warp's values of the queries, their largest score and total weight into the scratch.
__device__ __forceinline__ void write_warp(const Running (&run)[QUERY_HEADS], float* scratch) {
  const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int h = 0; h < QUERY_HEADS; ++h) {
    float* mine = scratch + (h * WARPS + warp) * (HEAD_DIM + 2);
    static_for<ROW_TILES * 2>([&](auto index) {
      constexpr int i = index;
      const float value = collect<i / 2>(run[h], g, t, i % 2);
      const int channel = v_channel(g, i / 2, i % 2);
      if (ALIKE ? t < SLOTS / 2 && holds(slot_of(0, channel), t) : t == 0) mine[channel] = value;
    });
    const float total = sum_over_warp(run[h].total) / 4;  // the four lanes of a row hold the same tokens
    if (lane == 0) mine[HEAD_DIM] = run[h].maximum, mine[HEAD_DIM + 1] = total;
  }
}

// Combine the warps: of the only split with the current token, into `past` [QUERY_HEADS, D]; else into memory.
__device__ __forceinline__ void combine_warps(const Arguments& arg, const float* scratch, SharedQuery* shared, int row,
                                              int head, int split, float* past) {
  constexpr int width = HEAD_DIM + 2;
  for (int i = threadIdx.x; i < QUERY_HEADS * HEAD_DIM; i += THREADS) {
    const int h = i / HEAD_DIM, channel = i % HEAD_DIM;
    const float* warps = scratch + h * WARPS * width;
    const bool only = arg.splits == 1;
    float maximum = only ? shared[h].own : -INFINITY, value = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) maximum = fmaxf(maximum, warps[w * width + HEAD_DIM]);
    const float own = only ? exp2_fast(shared[h].own - maximum + P_EXPONENT) : 0.0f;
    float total = own;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float share = exp2_fast(warps[w * width + HEAD_DIM] - maximum);
      total += share * warps[w * width + HEAD_DIM + 1];
      value += share * warps[w * width + channel];
    }
    if (only) {
      past[i] = value / total;
      if (channel == 0) shared[h].share = own / total;
    } else {
      const int64_t place = ((row * arg.query_heads) + head + h) * arg.splits + split;
      arg.partial[place * HEAD_DIM + channel] = value / total;
      if (channel == 0) arg.lse[place] = maximum + log2f(total) - P_EXPONENT;
    }
  }
}

// Scores of the current token, in log2.
__device__ __forceinline__ void score_current(const Arguments& arg, int row, int head, int kv_head,
                                              SharedQuery* shared) {
  const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, h = WARPS - 1 - warp;
  if (h >= QUERY_HEADS) return;
  const uint16_t* q = arg.q + row * arg.q_stride + (head + h) * arg.q_head_stride + lane;
  const uint16_t* k = arg.k + row * arg.k_stride + kv_head * arg.k_head_stride + lane;
  float dot = 0.0f;
#pragma unroll
  for (int i = 0; i < HEAD_DIM; i += LANES) dot += bf16_to_float(q[i]) * bf16_to_float(k[i]);
  dot = sum_over_warp(dot) * static_cast<float>(arg.scale * 1.4426950408889634);
  if (lane == 0) shared[h].own = dot;
}

// Attention of QUERY_HEADS query heads over a split of a sequence's past, warp by warp into the scratch.
__device__ __forceinline__ void attend_split(const Arguments& arg, RotationPart& part, int row, int head, int kv_head,
                                             const Span& span, float* scratch, SharedQuery* shared) {
  const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  uint8_t* stages = shared_memory() + warp * STAGES * STAGE_BYTES;
  const int first = span.begin + warp, count = first < span.end ? ceil_div(span.end - first, WARPS) : 0;
  TileStream stream(arg, arg.block_table + row * arg.table_stride, arg.pages + kv_head * arg.page_head_stride, stages,
                    lane, first, count);
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) stream.issue(stage);

  float means[HEAD_DIM / LANES] = {};
  if (warp < KINDS && arg.means[warp] != nullptr) {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / LANES; ++i) means[i] = arg.means[warp][kv_head * arg.mean_stride + i * LANES + lane];
  }
  const __half* matrix = arg.k_matrix == nullptr ? nullptr : arg.k_matrix + kv_head * arg.k_matrix_stride;
  uint8_t* tables = shared_memory() + WARPS * STAGES * STAGE_BYTES;
  float* z = LOOKUP ? reinterpret_cast<float*>(tables) + warp * HEAD_DIM
                    : scratch + QUERY_HEADS * HEAD_DIM * (SETS + warp);
  rotate_queries(arg, arg.q + row * arg.q_stride + head * arg.q_head_stride, matrix, part, scratch, z);
#pragma unroll
  for (int h = 0; h < QUERY_HEADS; ++h) prepare_query(z + h * HEAD_DIM, means, warp, lane, shared[h]);
  sync_block();
  Query query[QUERY_HEADS];
#pragma unroll
  for (int h = 0; h < QUERY_HEADS; ++h) load_query(arg, shared[h], lane, query[h]);
  score_current(arg, row, head, kv_head, shared);

  const ReadPlaces places(lane / 4, lane % 4);
#if LOOKUP
  const SharedPlace mine = shared_place(tables + threadIdx.x * 4);
#endif
  Running run[QUERY_HEADS];
  int stage = 0;
  for (int i = 0; i < count; ++i) {
    wait_for_copies<STAGES - 2>();
    sync_warp();  // every lane's copies have landed, and every lane is done with the stage before
    stream.issue(stage == 0 ? STAGES - 1 : stage - 1);
    uint8_t* tile = stages + stage * STAGE_BYTES;
    const int valid = span.length - (first + i * WARPS) * TILE_TOKENS;
    if (valid < TILE_TOKENS) clear_tail(tile, valid, lane);
    float scores[QUERY_HEADS][2];
#if LOOKUP
    score_tile_by_lookup(tile, mine, places, query[0], lane, scores[0]);
#else
    score_tile(tile, places, query, lane, scores);
#endif
#pragma unroll
    for (int h = 0; h < QUERY_HEADS; ++h) {
      if (valid < TILE_TOKENS) {
        if (lane / 4 * 2 >= valid) scores[h][0] = -INFINITY;
        if (lane / 4 * 2 + 1 >= valid) scores[h][1] = -INFINITY;
      }
      softmax_tile(scores[h], run[h]);
    }
#if LOOKUP
    add_values_by_lookup(tile, mine, places, scores[0], lane, run[0]);
#else
    add_values(tile, places, scores, lane, run);
#endif
    stage = stage == STAGES - 1 ? 0 : stage + 1;
  }
  prefetch_end(arg, row, kv_head);
  write_warp(run, scratch);
}

// ---------------------------------------------------------------- splits and the current token

// The weighted sum of the splits of one query head into `past` [D], in rotated space.
__device__ void merge_splits(const Arguments& arg, int row, int head, SharedQuery& shared, float* past) {
  const int lane = threadIdx.x % LANES, splits = static_cast<int>(arg.splits);
  const int64_t place = (row * arg.query_heads + head) * arg.splits;
  float values[SPLITS_AT_ONCE][CHANNELS_A_THREAD];
  const auto load_values = [&](int first) {
#pragma unroll
    for (int s = 0; s < SPLITS_AT_ONCE; ++s) {
#pragma unroll
      for (int i = 0; i < CHANNELS_A_THREAD; ++i) {
        const int channel = i * THREADS + threadIdx.x;
        const bool inside = first + s < splits && channel < HEAD_DIM;
        values[s][i] = inside ? load_past_cache(arg.partial + (place + first + s) * HEAD_DIM + channel) : 0.0f;
      }
    }
  };
  const auto load_lse = [&](int split) {
    return split < splits ? load_past_cache(arg.lse + place + split) : -INFINITY;
  };
  float lse = load_lse(lane);
  load_values(0);  // on the way together
  float maximum = fmaxf(shared.own, lse);
  for (int s = LANES + lane; s < splits; s += LANES) maximum = fmaxf(maximum, load_lse(s));
  maximum = max_over_warp(maximum);
  const float own = exp2f(shared.own - maximum);
  float total = own, sums[CHANNELS_A_THREAD] = {};
  for (int first = 0; first < splits; first += SPLITS_AT_ONCE) {
    if (first > 0) load_values(first);
    if (first > 0 && first % LANES == 0) lse = load_lse(first + lane);
#pragma unroll
    for (int s = 0; s < SPLITS_AT_ONCE; ++s) {
      const float weight = exp2f(from_lane(lse, (first + s) % LANES) - maximum);
      total += weight;
#pragma unroll
      for (int i = 0; i < CHANNELS_A_THREAD; ++i) {
        sums[i] += weight > 0.0f ? weight * values[s][i] : 0.0f;  // an empty split was not written
      }
    }
  }
#pragma unroll
  for (int i = 0; i < CHANNELS_A_THREAD; ++i) {
    const int channel = i * THREADS + threadIdx.x;
    if (channel < HEAD_DIM) past[channel] = sums[i] / total;
  }
  if (threadIdx.x == 0) shared.share = own / total;
}

__device__ __forceinline__ void write_channel(const Arguments& arg, int row, int head, int channel, float value) {
  const int64_t place = row * arg.out_stride + head * arg.out_head_stride + channel;
  if (arg.out_is_float) static_cast<float*>(arg.out)[place] = value;
  else static_cast<uint16_t*>(arg.out)[place] = float_to_bf16(value);
}

// What a thread needs of the rotation of the output: four lanes share a channel, a row of the matrix.
struct OutputRows {
  uint4 matrix[PASSES_AT_ONCE][ceil_div(HEAD_DIM, 32)];
  float own[PASSES_AT_ONCE];

  static __device__ __forceinline__ int channel_of(int pass) {
    return (pass * WARPS + threadIdx.x / LANES) * 8 + threadIdx.x % LANES / 4;
  }

  // From pass `first` on.
  __device__ __forceinline__ void load(const Arguments& arg, int row, int kv_head, int first) {
#pragma unroll
    for (int p = 0; p < PASSES_AT_ONCE; ++p) {
      const int channel = channel_of(first + p);
      if (HEAD_DIM % (8 * WARPS) && channel >= HEAD_DIM) break;
      if (arg.v_matrix != nullptr) {
        const __half* mine = arg.v_matrix + kv_head * arg.v_matrix_stride + channel * HEAD_DIM + 8 * (threadIdx.x % 4);
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 32; ++j) matrix[p][j] = *reinterpret_cast<const uint4*>(mine + 32 * j);
      }
      own[p] = bf16_to_float(arg.v[row * arg.v_stride + kv_head * arg.v_head_stride + channel]);
    }
  }

  // out = past U_V^T + the current token's share.
  __device__ __forceinline__ void write(const Arguments& arg, int row, int head, int first, const float* past,
                                        const SharedQuery* shared) const {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int p = 0; p < PASSES_AT_ONCE; ++p) {
      const int channel = channel_of(first + p);
      if (HEAD_DIM % (8 * WARPS) && channel >= HEAD_DIM) break;
#pragma unroll
      for (int h = 0; h < QUERY_HEADS; ++h) {
        const float* values = past + h * HEAD_DIM;
        float value = 0.0f;
        if (arg.v_matrix == nullptr) {
          value = values[channel];
        } else {
#pragma unroll
          for (int j = 0; j < HEAD_DIM / 32; ++j) {
            const uint32_t words[4] = {matrix[p][j].x, matrix[p][j].y, matrix[p][j].z, matrix[p][j].w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const float* two = values + 32 * j + 8 * t + 2 * i;
              value += two[0] * low_half(words[i]) + two[1] * high_half(words[i]);
            }
          }
          value += from_neighbour(value, 1);
          value += from_neighbour(value, 2);
        }
        if (t == 0) write_channel(arg, row, head + h, channel, value + shared[h].share * own[p]);
      }
    }
  }
};

// Attention of QUERY_HEADS query heads over one split of a sequence's past; the last block of a sequence merges them.
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) decode_attention_kernel(const Arguments arg) {
  const int sets = static_cast<int>(arg.query_heads / arg.kv_heads) / QUERY_HEADS;
  const int split = blockIdx.x / sets, kv_head = blockIdx.y, row = blockIdx.z, splits = static_cast<int>(arg.splits);
  const int head = (kv_head * sets + blockIdx.x % sets) * QUERY_HEADS;
  float* scratch = reinterpret_cast<float*>(shared_memory() + WARPS * STAGES * STAGE_BYTES + TABLE_BYTES);
  SharedQuery* shared = reinterpret_cast<SharedQuery*>(scratch + SCRATCH_FLOATS);
  float* past = scratch + QUERY_HEADS * WARPS * (HEAD_DIM + 2);

  RotationPart part;
  if (arg.k_matrix != nullptr) {
    part.load(arg.q + row * arg.q_stride + head * arg.q_head_stride, arg.q_head_stride,
              arg.k_matrix + kv_head * arg.k_matrix_stride, 0);
  }
  const Span span(arg.lengths[row], split, splits);
  OutputRows rows;
  if (span.begin < span.end) {
    attend_split(arg, part, row, head, kv_head, span, scratch, shared);
    if (splits == 1) rows.load(arg, row, kv_head, 0);
    sync_block();
    combine_warps(arg, scratch, shared, row, head, split, past);
  } else {
    score_current(arg, row, head, kv_head, shared);
    if (threadIdx.x < QUERY_HEADS) {
      arg.lse[(row * arg.query_heads + head + threadIdx.x) * arg.splits + split] = -INFINITY;
    }
  }
  if (splits > 1 || span.begin >= span.end) {
    if (!last_to_arrive(arg.arrived + row * arg.query_heads + head, splits)) return;
    rows.load(arg, row, kv_head, 0);
#pragma unroll
    for (int h = 0; h < QUERY_HEADS; ++h) merge_splits(arg, row, head + h, shared[h], past + h * HEAD_DIM);
  }
  sync_block();
  rows.write(arg, row, head, 0, past, shared);
  for (int first = PASSES_AT_ONCE; first * 8 * WARPS < HEAD_DIM; first += PASSES_AT_ONCE) {
    rows.load(arg, row, kv_head, first);
    rows.write(arg, row, head, first, past, shared);
  }
}

extern "C" {

// Sizes that a caller checks its mirror of Arguments against.
int decode_attention_arguments_bytes() { return sizeof(Arguments); }

// Dynamic shared memory of a block.
int decode_attention_shared_bytes() { return SHARED_BYTES; }

// The kernel, on a stream; returns a cudaError_t.
int decode_attention(const Arguments* arguments, void* stream) {
  const Arguments& arg = *arguments;
  const int sets = static_cast<int>(arg.query_heads / arg.kv_heads) / QUERY_HEADS;
  const dim3 grid(static_cast<unsigned>(arg.splits * sets), static_cast<unsigned>(arg.kv_heads),
                  static_cast<unsigned>(arg.batch));
  return launch(decode_attention_kernel, grid, THREADS, SHARED_BYTES, stream, arg);
}
}
