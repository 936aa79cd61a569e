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
// Stage 3,648 bytes, 3 stages for each of 4 warps: 47 KiB a block with scratch, 4 blocks a multiprocessor at no more
// than 128 registers: 16 warps with 2 tiles each on the way, 114 KiB in flight where 26-35 KiB cover the latency.
// Prediction: 85 % of the copy bandwidth for both loops at 16k tokens and batch >= 8.
//
// Grid: (splits * query head sets, KV heads, batch). A block takes one split of a sequence; each of its warps takes
// every fourth tile with its own pages, stages and softmax, and the warps are combined at the end. A second kernel
// combines the splits with the current BF16 token and rotates the output back once.
#include "decode_tile.cuh"

#ifndef MOST_STAGES
#define MOST_STAGES 4
#endif

constexpr int BLOCKS_PER_SM = WARPS_PER_SM / WARPS;
constexpr int STAGE_BUDGET = (WARPS_PER_SM == 16 ? 50 : 88) * 256;  // of a warp
constexpr int STAGES = STAGE_BUDGET / STAGE_BYTES < 2 ? 2 : smaller(STAGE_BUDGET / STAGE_BYTES, MOST_STAGES);
constexpr int COLUMN_THREADS = HEAD_DIM / 8, ROW_SETS = THREADS / COLUMN_THREADS;  // of the query's rotation
constexpr int ROWS_AT_ONCE = 16;  // of a matrix that a thread has on the way: 64 registers
constexpr int PASSES_AT_ONCE = ceil_div(smaller(HEAD_DIM, 128), 8 * WARPS);  // of the rotation of the output
constexpr int CHANNELS_A_THREAD = ceil_div(HEAD_DIM, THREADS);
constexpr int SCRATCH_FLOATS = QUERY_HEADS * HEAD_DIM * (ROW_SETS + 1);
static_assert(SCRATCH_FLOATS >= QUERY_HEADS * WARPS * (HEAD_DIM + 2), "the epilogue's sums must fit in the scratch");

// ---------------------------------------------------------------- the query

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
#pragma unroll ROWS_AT_ONCE
    for (int n = 0; n < ceil_div(HEAD_DIM, ROW_SETS); ++n) {
      const int i = n * ROW_SETS + set;
      if (HEAD_DIM % ROW_SETS && i >= HEAD_DIM) break;
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
  float unit;
};

constexpr int SHARED_BYTES =
    WARPS * STAGES * STAGE_BYTES + SCRATCH_FLOATS * 4 + QUERY_HEADS * static_cast<int>(sizeof(SharedQuery));

__device__ void prepare_query(const Arguments& arg, const float* z, int kv_head, int warp, int lane,
                              SharedQuery& shared) {
  const int g = lane / 4, t = lane % 4;
  const float unit = query_unit(z, lane);
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
  static_for<KINDS>([&](auto index) {
    constexpr int kind = index;
    if (warp != kind % WARPS) return;
    float dot = 0.0f;
    if (arg.means[kind] != nullptr) {
      const float* mean = arg.means[kind] + kv_head * arg.mean_stride;
#pragma unroll
      for (int i = lane; i < HEAD_DIM; i += LANES) dot += z[i] * mean[i];
    }
    dot = sum_over_warp(dot) * unit / CODE_UNIT;
    if (lane == 0) shared.means[kind] = dot;
  });
  if (threadIdx.x == 0) shared.unit = unit;
}

// This lane's share of it.
__device__ __forceinline__ void load_query(const Arguments& arg, const SharedQuery& shared, int lane, Query& query) {
  const int t = lane % 4;
  query.factor = static_cast<float>(arg.scale * 1.4426950408889634) * CODE_UNIT / shared.unit;
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

// What the end needs is brought to the second-level cache while the warps are combined.
__device__ __forceinline__ void prefetch_finish(const Arguments& arg, int row, int kv_head) {
  constexpr int line = 128, lines = HEAD_DIM * HEAD_DIM * 2 / line;
  if (arg.v_matrix != nullptr) {
    const __half* matrix = arg.v_matrix + kv_head * arg.v_matrix_stride;
    for (int i = threadIdx.x; i < lines; i += THREADS) prefetch(matrix + i * (line / 2));
  }
  const int i = threadIdx.x * (line / 2);
  if (i < HEAD_DIM) {
    prefetch(arg.k + row * arg.k_stride + kv_head * arg.k_head_stride + i);
    prefetch(arg.v + row * arg.v_stride + kv_head * arg.v_head_stride + i);
  }
}

// Attention of QUERY_HEADS query heads over the tiles from `begin` to `end` of a sequence's past.
__device__ __forceinline__ void attend_split(const Arguments& arg, int row, int head, int kv_head, int split, int begin,
                                             int end, int length, float* scratch) {
  const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  uint8_t* stages = shared_memory() + warp * STAGES * STAGE_BYTES;
  float* rotated = scratch + QUERY_HEADS * HEAD_DIM * ROW_SETS;

  const int count = begin + warp < end ? ceil_div(end - begin - warp, WARPS) : 0;
  TileStream stream(arg, arg.block_table + row * arg.table_stride, arg.pages + kv_head * arg.page_head_stride, stages,
                    lane, begin + warp, count);
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) stream.issue(stage);

  rotate_queries(arg, row, head, kv_head, scratch, rotated);
  SharedQuery* shared = reinterpret_cast<SharedQuery*>(rotated + QUERY_HEADS * HEAD_DIM);
#pragma unroll
  for (int h = 0; h < QUERY_HEADS; ++h) {
    prepare_query(arg, rotated + h * HEAD_DIM, kv_head, warp, lane, shared[h]);
  }
  sync_block();
  Query query[QUERY_HEADS];
#pragma unroll
  for (int h = 0; h < QUERY_HEADS; ++h) load_query(arg, shared[h], lane, query[h]);

  const ReadPlaces places(lane / 4, lane % 4);
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
    score_tile(tile, places, query, lane, scores);
#pragma unroll
    for (int h = 0; h < QUERY_HEADS; ++h) {
      if (valid < TILE_TOKENS) {
        if (lane / 4 * 2 >= valid) scores[h][0] = -INFINITY;
        if (lane / 4 * 2 + 1 >= valid) scores[h][1] = -INFINITY;
      }
      softmax_tile(scores[h], run[h]);
    }
    add_values(tile, places, scores, lane, run);
    stage = stage == STAGES - 1 ? 0 : stage + 1;
  }
  prefetch_finish(arg, row, kv_head);
  write_split(arg, run, scratch, row, head, split);
}

// ---------------------------------------------------------------- splits and the current token

// Score of the current token, in log2.
__device__ __forceinline__ float own_score(const Arguments& arg, int row, int head, int kv_head, int lane) {
  const uint16_t* q = arg.q + row * arg.q_stride + head * arg.q_head_stride + lane;
  const uint16_t* k = arg.k + row * arg.k_stride + kv_head * arg.k_head_stride + lane;
  float dot = 0.0f;
#pragma unroll
  for (int i = 0; i < HEAD_DIM; i += LANES) dot += bf16_to_float(q[i]) * bf16_to_float(k[i]);
  return sum_over_warp(dot) * static_cast<float>(arg.scale * 1.4426950408889634);
}

// The weighted sum of the splits of one query head into `past` [D], in rotated space; returns the current token's weight.
__device__ float merge_splits(const Arguments& arg, int row, int head, int kv_head, float* past) {
  const int lane = threadIdx.x % LANES, splits = static_cast<int>(arg.splits);
  const int64_t place = (row * arg.query_heads + head) * arg.splits;
  float maximum = -INFINITY;
  for (int s = lane; s < splits; s += LANES) maximum = fmaxf(maximum, load_past_cache(arg.lse + place + s));
  const float own = own_score(arg, row, head, kv_head, lane);
  maximum = fmaxf(max_over_warp(maximum), own);
  float total = exp2f(own - maximum), sums[CHANNELS_A_THREAD] = {};
  const float current = total;
  for (int first = 0; first < splits; first += LANES) {
    float share = 0.0f;
    if (first + lane < splits) share = exp2f(load_past_cache(arg.lse + place + first + lane) - maximum);
    total += sum_over_warp(share);
#pragma unroll 8
    for (int s = 0; s < smaller(LANES, splits - first); ++s) {
      const float weight = from_lane(share, s);
      const float* values = arg.partial + (place + first + s) * HEAD_DIM;
#pragma unroll
      for (int i = 0; i < CHANNELS_A_THREAD; ++i) {
        const int channel = i * THREADS + threadIdx.x;
        const float value = channel < HEAD_DIM ? load_past_cache(values + channel) : 0.0f;
        sums[i] += weight > 0.0f ? weight * value : 0.0f;  // an empty split was not written
      }
    }
  }
#pragma unroll
  for (int i = 0; i < CHANNELS_A_THREAD; ++i) {
    const int channel = i * THREADS + threadIdx.x;
    if (channel < HEAD_DIM) past[channel] = sums[i] / total;
  }
  return current / total;
}

__device__ __forceinline__ void write_channel(const Arguments& arg, int row, int head, int channel, float value) {
  const int64_t place = row * arg.out_stride + head * arg.out_head_stride + channel;
  if (arg.out_is_float) static_cast<float*>(arg.out)[place] = value;
  else static_cast<uint16_t*>(arg.out)[place] = float_to_bf16(value);
}

// out = (past sum) U_V^T + the current token's share. Four lanes share a channel of the output, a row of the matrix.
__device__ void finish(const Arguments& arg, int row, int head, int kv_head, float* past) {
  const int warp = threadIdx.x / LANES, g = threadIdx.x % LANES / 4, t = threadIdx.x % 4;
  float current[QUERY_HEADS];
#pragma unroll
  for (int h = 0; h < QUERY_HEADS; ++h) {
    current[h] = merge_splits(arg, row, head + h, kv_head, past + h * HEAD_DIM);
  }
  sync_block();
  const __half* matrix = arg.v_matrix == nullptr ? nullptr : arg.v_matrix + kv_head * arg.v_matrix_stride;
#pragma unroll PASSES_AT_ONCE
  for (int first = 0; first < HEAD_DIM; first += 8 * WARPS) {
    const int channel = first + warp * 8 + g;
    if (HEAD_DIM % (8 * WARPS) && channel >= HEAD_DIM) break;
    float sums[QUERY_HEADS] = {};
    if (matrix != nullptr) {
#pragma unroll
      for (int j = 8 * t; j < HEAD_DIM; j += 32) {
        const uint4 eight = *reinterpret_cast<const uint4*>(matrix + channel * HEAD_DIM + j);
        const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int h = 0; h < QUERY_HEADS; ++h) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float* two = past + h * HEAD_DIM + j + 2 * i;
            sums[h] += two[0] * low_half(words[i]) + two[1] * high_half(words[i]);
          }
        }
      }
    }
    const float own = bf16_to_float(arg.v[row * arg.v_stride + kv_head * arg.v_head_stride + channel]);
#pragma unroll
    for (int h = 0; h < QUERY_HEADS; ++h) {
      float value = sums[h];
      value += from_neighbour(value, 1);
      value += from_neighbour(value, 2);
      if (matrix == nullptr) value = past[h * HEAD_DIM + channel];
      if (t == 0) write_channel(arg, row, head + h, channel, value + current[h] * own);
    }
  }
}

// Attention of QUERY_HEADS query heads over one split of a sequence's past; the last block of a sequence merges them.
__global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) decode_attention_kernel(const Arguments arg) {
  const int sets = static_cast<int>(arg.query_heads / arg.kv_heads) / QUERY_HEADS;
  const int split = blockIdx.x / sets, kv_head = blockIdx.y, row = blockIdx.z, splits = static_cast<int>(arg.splits);
  const int head = (kv_head * sets + blockIdx.x % sets) * QUERY_HEADS;
  const int length = arg.lengths[row], tiles = ceil_div(length, TILE_TOKENS), per_split = ceil_div(tiles, splits);
  const int begin = split * per_split, end = smaller(begin + per_split, tiles);
  float* scratch = reinterpret_cast<float*>(shared_memory() + WARPS * STAGES * STAGE_BYTES);
  if (begin < end) {
    attend_split(arg, row, head, kv_head, split, begin, end, length, scratch);
  } else if (threadIdx.x < QUERY_HEADS) {
    arg.lse[(row * arg.query_heads + head + threadIdx.x) * arg.splits + split] = -INFINITY;
  }
  if (last_to_arrive(arg.arrived + row * arg.query_heads + head, splits)) finish(arg, row, head, kv_head, scratch);
}

extern "C" {

// Sizes that a caller checks its mirror of Arguments against.
int decode_attention_arguments_bytes() { return sizeof(Arguments); }

// The kernel, on a stream; returns a cudaError_t.
int decode_attention(const Arguments* arguments, void* stream) {
  const Arguments& arg = *arguments;
  const int sets = static_cast<int>(arg.query_heads / arg.kv_heads) / QUERY_HEADS;
  const dim3 grid(static_cast<unsigned>(arg.splits * sets), static_cast<unsigned>(arg.kv_heads),
                  static_cast<unsigned>(arg.batch));
  return launch(decode_attention_kernel, grid, THREADS, SHARED_BYTES, stream, arg);
}
}
