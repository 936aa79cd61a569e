// The writer: new tokens of one layer, all loops of a group, coded and stored into pages (docs/page_layout.md).
//
// Each warp codes 8 tokens of one head, K or V, loop by loop in coding order, and keeps everything in registers. The
// rotated states are the transposed product T^T x^T, m16n8k16 in f16 with f32 sums: rows are channels, columns tokens.
// The rows are so ordered that lane 4g + t holds channels 32j + 4g + (0 .. 3) of tokens 2t and 2t + 1, for all j:
//
//   sums over channels   j, then lanes 16, 8, 4 apart, then the four: the order that the codec's inner products have
//   groups               all lanes of a token, or (16 channels) half of them; results are scattered over the lanes on
//                        the way, so that each lane works out one scale and offset, not all of them
//   packing              four codes in a row are in one lane
//
// Every step is the codec's to the last bit: this file is compiled without contraction to fused multiply-adds, and the
// fused ones written here have exact products or results.
//
// Instructions, from the SASS: see ../NOTES.md. A tile of 8 tokens and 128 channels has 32 values in each lane; a loop
// takes 64 matrix products, 64 loads of the matrix from shared memory, and about 800 others, 25 a value.
//
// Grid: (blocks of tokens, heads, 2 * parts). With few tokens each part codes the anchor and its share of the loops.
#include "common.cuh"

#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
#ifndef FIRST_BITS  // of the loop that is coded first, the anchor
#define FIRST_BITS 4
#endif
#ifndef FIRST_GROUP
#define FIRST_GROUP 32
#endif
#ifndef OTHER_BITS  // of the others
#define OTHER_BITS 2
#endif
#ifndef OTHER_GROUP
#define OTHER_GROUP 32
#endif
#ifndef ROTATED  // whether there are rotations
#define ROTATED 1
#endif

constexpr int WARPS = 4, THREADS = WARPS * LANES;
constexpr int LANE_TOKENS = ROTATED ? 2 : 1;      // tokens of a lane: one makes shorter programs, a product needs two
constexpr int TILE_TOKENS = 4 * LANE_TOKENS;  // tokens of a warp at a time
constexpr int SPANS = HEAD_DIM / 32, STEPS = HEAD_DIM / 16;
constexpr int MOST_LOOPS = 16;
static_assert(HEAD_DIM == 64 || HEAD_DIM == 96 || HEAD_DIM == 128, "head size does not fit");
static_assert((FIRST_BITS == 2 || FIRST_BITS == 4) && (OTHER_BITS == 2 || OTHER_BITS == 4), "bits must be 2 or 4");

constexpr int MATRIX_BYTES = ROTATED ? HEAD_DIM * HEAD_DIM * 2 : 0;
constexpr int SUM_ROW = HEAD_DIM == 96 ? 99 : 0;  // floats of a token, of sums that go through shared memory
constexpr int SHARED_BYTES = MATRIX_BYTES + WARPS * TILE_TOKENS * SUM_ROW * 4;

enum Coefficient { UNIT = 0, LEAST_SQUARES = 1, NORM_RATIO = 2 };

// Every field has 8 bytes, so that callers in other languages can mirror it.
struct Arguments {
  uint16_t* words;  // pages [blocks, H, words of a head]
  int64_t block_stride, page_head_stride;
  const void* slots;  // [T], int64 or int32
  int64_t slots_are_wide;
  const uint16_t *k, *v;  // bf16 [L, T, H, D]
  int64_t loop_stride, token_stride, head_stride;
  const __half *k_matrix, *v_matrix;  // [H, D, D] or [D, D]
  int64_t k_matrix_stride, v_matrix_stride;
  const float* k_means;  // [L, H, D], or null
  int32_t* sanitised;    // or null
  float* rotated;        // [2, L, T, H, D] for tests, or null
  int64_t tokens, heads, page_tokens, blocks, parts;
  int64_t loops, coefficient, anchored, chained;  // anchored: the first loop in coding order is a reference
  int64_t loop[MOST_LOOPS], precision[MOST_LOOPS];  // in coding order; precision 0 is FIRST's, 1 OTHER's
  int64_t codes[MOST_LOOPS], metadata[MOST_LOOPS], alpha[MOST_LOOPS];  // first words, from the start of K or V
  int64_t k_start, v_start;
  double first_clip, other_clip;
};

// ---------------------------------------------------------------- the states of a tile

struct Values {
  float x[SPANS][4][LANE_TOKENS];  // channel 32 j + 4 g + i of token LANE_TOKENS t + n

  template <typename F>
  static __device__ __forceinline__ void each(F&& body) {
    static_for<SPANS * 4 * LANE_TOKENS>([&](auto index) {
      constexpr int n = index;
      body(Index<n / (4 * LANE_TOKENS)>{}, Index<n / LANE_TOKENS % 4>{}, Index<n % LANE_TOKENS>{});
    });
  }
};

// What a lane reads of a tile: rotated, a quarter of the channels of token g; else its own channels of its tokens.
struct Input {
  static constexpr int PAIRS = SPANS * 2 * LANE_TOKENS;
  uint32_t pairs[PAIRS];  // bf16

  __device__ __forceinline__ void load(const uint16_t* states, int64_t token_stride, bool (&inside)[LANE_TOKENS], int g,
                                       int t) {
    if constexpr (ROTATED) {
      const uint16_t* mine = states + g * token_stride + t * (HEAD_DIM / 4);
#pragma unroll
      for (int i = 0; i < SPANS; ++i) {
        uint4 eight = {0, 0, 0, 0};
        if (inside[0]) eight = reinterpret_cast<const uint4*>(mine)[i];
        pairs[4 * i] = eight.x, pairs[4 * i + 1] = eight.y, pairs[4 * i + 2] = eight.z, pairs[4 * i + 3] = eight.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < SPANS * LANE_TOKENS; ++i) {
        uint2 four = {0, 0};
        const int j = i / LANE_TOKENS, n = i % LANE_TOKENS;
        const uint16_t* mine = states + (LANE_TOKENS * t + n) * token_stride + 32 * j + 4 * g;
        if (inside[n]) four = *reinterpret_cast<const uint2*>(mine);
        pairs[2 * i] = four.x, pairs[2 * i + 1] = four.y;
      }
    }
  }

  // Whether a value is NaN, infinite or beyond the largest f16.
  __device__ __forceinline__ bool unclean() const {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) largest = max_of_halves(largest, pairs[i] & 0x7fff7fffu);
    return (largest & 0xffff) > 0x477f || largest >> 16 > 0x477f;
  }
};

// NaN as 0, clamped to the largest f16; counts what that changed.
__device__ __forceinline__ float sanitise(float x, int& changed) {
  const float clean = x == x ? fminf(fmaxf(x, -65504.0f), 65504.0f) : 0.0f;
  changed += clean != x;
  return clean;
}

// The matrix in shared memory, in the order in which lanes read their A operands: 16 bytes for each product.
__device__ __forceinline__ void load_matrix(const __half* matrix) {
  const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const uint16_t* bits = reinterpret_cast<const uint16_t*>(matrix);
  uint32_t* fragments = reinterpret_cast<uint32_t*>(shared_memory());
  const int t = lane % 4, half = lane / 4 % 2, low = lane / 8;  // of the channel's bits 2 to 4, `low` has two
#pragma unroll
  for (int n = 0; n < STEPS * STEPS / WARPS; ++n) {
    const int rest = n * WARPS + warp, step = rest % STEPS, g = rest / STEPS % 2 * 4 + low, j = rest / STEPS / 2;
    const int row = t * (HEAD_DIM / 4) + 4 * step + 2 * half;
    const uint2 even = *reinterpret_cast<const uint2*>(bits + row * HEAD_DIM + 32 * j + 4 * g);
    const uint2 odd = *reinterpret_cast<const uint2*>(bits + (row + 1) * HEAD_DIM + 32 * j + 4 * g);
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // channel 4g + i is row 8 (i % 2) + g of row tile 2j + i / 2
      const uint32_t a = i / 2 ? even.y : even.x, b = i / 2 ? odd.y : odd.x;
      const int place = ((2 * j + i / 2) * STEPS + step) * LANES + 4 * g + t;
      fragments[4 * place + 2 * half + i % 2] = permute_bytes(a, b, i % 2 ? 0x7632 : 0x5410);
    }
  }
}

// The states as they are coded, in f32; `changed` counts sanitised values.
__device__ __forceinline__ void take(const Input& input, int lane, Values& z, int& changed) {
  const bool unclean = any_lane(input.unclean());
  if constexpr (ROTATED) {
    uint32_t b[SPANS * 4];
    if (unclean) {
#pragma unroll
      for (int i = 0; i < SPANS * 4; ++i) {
        const float low = sanitise(bits_to_float(input.pairs[i] << 16), changed);
        b[i] = pack_half2(low, sanitise(bits_to_float(input.pairs[i] & 0xffff0000u), changed));
      }
    } else {
#pragma unroll
      for (int i = 0; i < SPANS * 4; ++i) {
        b[i] = pack_half2(bits_to_float(input.pairs[i] << 16), bits_to_float(input.pairs[i] & 0xffff0000u));
      }
    }
    const uint4* fragments = reinterpret_cast<const uint4*>(shared_memory()) + lane;
    static_for<2 * SPANS>([&](auto index) {
      constexpr int row_tile = index, j = row_tile / 2, i = row_tile % 2 * 2;
      float d[4] = {};
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const uint4 four = fragments[(row_tile * STEPS + step) * LANES];
        const uint32_t a[4] = {four.x, four.y, four.z, four.w};
        mma(d, a, b[2 * step], b[2 * step + 1]);
      }
      z.x[j][i][0] = d[0], z.x[j][i][1] = d[1], z.x[j][i + 1][0] = d[2], z.x[j][i + 1][1] = d[3];
    });
  } else {
    Values::each([&](auto j, auto i, auto n) {
      const uint32_t pair = input.pairs[(LANE_TOKENS * j + n) * 2 + i / 2];
      const float value = bits_to_float(i % 2 ? pair & 0xffff0000u : pair << 16);
      z.x[j][i][n] = unclean ? sanitise(value, changed) : value;
    });
  }
}

// ---------------------------------------------------------------- sums and groups

// Combine the N values of lanes that are MASK apart; of two or more, each lane goes on with half of them, the upper half
// in the lanes that have the bit of MASK.
template <int N, int MASK, typename Combine>
__device__ __forceinline__ void fold(float* values, int lane, Combine combine) {
  if constexpr (N == 1) {
    values[0] = combine(values[0], from_neighbour(values[0], MASK));
  } else {
    const bool upper = (lane & MASK) != 0;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float keep = upper ? values[i + N / 2] : values[i], give = upper ? values[i] : values[i + N / 2];
      values[i] = combine(keep, from_neighbour(give, MASK));
    }
  }
}

constexpr __host__ __device__ int at_least_one(int x) { return x < 1 ? 1 : x; }

// <a, b> of token 2t + lane / 16 (or t, with one token a lane), summed in the order of the codec: halves onto each other.
__device__ __forceinline__ float inner_product(const Values& a, const Values& b, int lane) {
  const auto add = [](float x, float y) { return x + y; };
  if constexpr (HEAD_DIM == 96) {  // halved down to 3, which are added in turn
    const int t = lane % 4, g = lane / 4, mine = LANE_TOKENS == 2 ? 2 * t + lane / 16 : t;
    float* sums = reinterpret_cast<float*>(shared_memory() + MATRIX_BYTES) +
                  threadIdx.x / LANES * TILE_TOKENS * SUM_ROW;
    Values::each([&](auto j, auto i, auto n) {
      sums[(LANE_TOKENS * t + n) * SUM_ROW + 32 * j + 4 * g + i] = a.x[j][i][n] * b.x[j][i][n];
    });
    sync_warp();
    float terms[32];
    const float* first = sums + smaller(lane / 3, TILE_TOKENS - 1) * SUM_ROW + lane % 3;
#pragma unroll
    for (int m = 0; m < 32; ++m) terms[m] = first[3 * m];
    static_for<5>([&](auto level) {
      constexpr int half = 16 >> level;
#pragma unroll
      for (int m = 0; m < half; ++m) terms[m] += terms[m + half];
    });
    sync_warp();
    return from_lane(terms[0], 3 * mine) + from_lane(terms[0], 3 * mine + 1) + from_lane(terms[0], 3 * mine + 2);
  } else {
    float sums[4 * LANE_TOKENS];  // token, then bit 0 and bit 1 of the channel
    static_for<4 * LANE_TOKENS>([&](auto index) {
      constexpr int n = index / 4, i = index % 4 / 2 + index % 2 * 2;
      float terms[SPANS];
#pragma unroll
      for (int j = 0; j < SPANS; ++j) terms[j] = a.x[j][i][n] * b.x[j][i][n];
#pragma unroll
      for (int half = SPANS / 2; half > 0; half /= 2) {
#pragma unroll
        for (int j = 0; j < half; ++j) terms[j] += terms[j + half];
      }
      sums[index] = terms[0];
    });
    fold<4 * LANE_TOKENS, 16>(sums, lane, add);
    fold<2 * LANE_TOKENS, 8>(sums, lane, add);
    fold<LANE_TOKENS, 4>(sums, lane, add);
    constexpr int upper = LANE_TOKENS == 2 ? 4 : 8;        // of the lane's bits, the one for bit 1 of the channel
    sums[0] += from_neighbour(sums[0], upper);             // channels 2 apart, then neighbours
    return sums[0] + from_neighbour(sums[0], 2 * upper);
  }
}

// Groups of GROUP channels of a tile: a lane has its share of ITEMS of them, token by token, and works out MINE.
template <int GROUP>
struct Groups {
  static_assert(GROUP == 16 || GROUP == 32 || GROUP == 64 || GROUP == 128, "group size does not fit");
  static constexpr int PER_TOKEN = GROUP == 16 ? 2 * SPANS : HEAD_DIM / GROUP;
  static constexpr int GROUP_SPANS = at_least_one(GROUP / 32);
  static constexpr int COUNT = SPANS / GROUP_SPANS, PADDED = COUNT == 3 ? 4 : COUNT, ITEMS = LANE_TOKENS * PADDED;
  static constexpr int FIRST_MASK = GROUP == 16 ? 8 : 16, FOLDS = GROUP == 16 ? 2 : 3;
  static constexpr int MINE = at_least_one(ITEMS >> FOLDS);

  template <typename Combine>
  static __device__ __forceinline__ void reduce(float (&items)[ITEMS], int lane, Combine combine) {
    if constexpr (GROUP != 16) fold<ITEMS, 16>(items, lane, combine);
    fold<at_least_one(GROUP == 16 ? ITEMS : ITEMS / 2), 8>(items, lane, combine);
    fold<at_least_one(GROUP == 16 ? ITEMS / 2 : ITEMS / 4), 4>(items, lane, combine);
  }

  // Which item a lane works out as its m-th, and the lane that works out an item for this one.
  static __device__ __forceinline__ int item(int lane, int m) {
    int index = 0, size = ITEMS;
#pragma unroll
    for (int mask = FIRST_MASK; mask >= 4; mask /= 2) {
      if (size > 1) size /= 2, index += (lane & mask) ? size : 0;
    }
    return index + m;
  }
  static __device__ __forceinline__ int source(int lane, int item) {
    int from = lane, size = ITEMS;
#pragma unroll
    for (int mask = FIRST_MASK; mask >= 4; mask /= 2) {
      if (size > 1) {
        size /= 2;
        from = item / size % 2 ? from | mask : from & ~mask;
      }
    }
    return from;
  }
  // Of lanes that work out the same item, the first.
  static __device__ __forceinline__ bool is_first(int lane) {
    int size = ITEMS;
    bool first = true;
#pragma unroll
    for (int mask = FIRST_MASK; mask >= 4; mask /= 2) {
      if (size == 1) first = first && (lane & mask) == 0;
      size = at_least_one(size / 2);
    }
    return first;
  }
};

// ---------------------------------------------------------------- storing

// Where the tokens of a lane are stored.
struct Targets {
  uint16_t* page[LANE_TOKENS];  // K or V of the token's page and head
  int token[LANE_TOKENS];       // within the page
  bool stored[LANE_TOKENS];
  int is_v;

  // Element n, which stays in a register.
  template <typename T>
  static __device__ __forceinline__ T of(const T (&values)[LANE_TOKENS], int n) {
    return n ? values[LANE_TOKENS - 1] : values[0];
  }

  // Word `word` of the 16-bit words of token n in a plane with `width` of them for each token; V interleaves pairs.
  __device__ __forceinline__ void store(int n, int plane, int width, int word, uint32_t value) const {
    const int slot = of(token, n);
    const int row = is_v ? slot / 2 * 2 * width + slot % 2 : slot * width;
    if (of(stored, n)) of(page, n)[plane + row + (word << is_v)] = static_cast<uint16_t>(value);
  }
  // The same where V does not interleave.
  __device__ __forceinline__ void store_plain(int n, int plane, int width, int word, uint32_t value) const {
    if (of(stored, n)) of(page, n)[plane + of(token, n) * width + word] = static_cast<uint16_t>(value);
  }
};

// Store a lane's codes: four of each span and token, `packed` [span / words of 32 bits] by token.
template <int BITS>
__device__ __forceinline__ void store_codes(const Targets& targets, int plane, int lane,
                                            const uint32_t (&packed)[SPANS][LANE_TOKENS]) {
  constexpr int width = HEAD_DIM * BITS / 16;
  const int g = lane / 4;
  if constexpr (BITS == 4) {
#pragma unroll
    for (int j = 0; j < SPANS; ++j) {
#pragma unroll
      for (int n = 0; n < LANE_TOKENS; ++n) targets.store(n, plane, width, 8 * j + g, packed[j][n]);
    }
  } else {  // a word is two lanes' bytes: the even one stores the first token, the odd one the second
    const int n = g % 2;
#pragma unroll
    for (int j = 0; j < SPANS; ++j) {
      const uint32_t mine = Targets::of(packed[j], n), others = from_neighbour(Targets::of(packed[j], 1 - n), 4);
      const uint32_t word = n ? others | mine << 8 : mine | others << 8;
      if (n < LANE_TOKENS) targets.store(n, plane, width, 4 * j + g / 2, word);
    }
  }
}

// ---------------------------------------------------------------- one loop

// x / LEVELS, correctly rounded, as for every significand by trial (tests): the remainder corrects the last bit. A division
// takes a long way round where x is 0, as in groups of tokens that are not there.
template <int LEVELS>
__device__ __forceinline__ float divide(float x) {
  constexpr float inverse = 1.0f / LEVELS;
  const float quotient = x * inverse;
  return fmaf(fmaf(-quotient, LEVELS, x), inverse, quotient);
}

// Codes and metadata of `x` into the planes of a loop; x becomes the values that they stand for.
template <int BITS, int GROUP>
__device__ __forceinline__ void quantise(Values& x, float clip, const Targets& targets, int codes, int metadata,
                                         int lane) {
  using G = Groups<GROUP>;
  constexpr int levels = (1 << BITS) - 1;
  float low[G::ITEMS] = {}, high[G::ITEMS] = {};
  static_for<LANE_TOKENS * G::COUNT>([&](auto index) {
    constexpr int n = index / G::COUNT, first = index % G::COUNT * G::GROUP_SPANS;
    float least = x.x[first][0][n], most = least;
    static_for<4 * G::GROUP_SPANS>([&](auto inner) {
      constexpr int j = first + inner / 4, i = inner % 4;
      least = fminf(least, x.x[j][i][n]), most = fmaxf(most, x.x[j][i][n]);
    });
    low[n * G::PADDED + index % G::COUNT] = least, high[n * G::PADDED + index % G::COUNT] = most;
  });
  G::reduce(low, lane, [](float a, float b) { return fminf(a, b); });
  G::reduce(high, lane, [](float a, float b) { return fmaxf(a, b); });
  uint32_t bytes[G::MINE];
  float inverse[G::MINE];
  const bool first = G::is_first(lane);
#pragma unroll
  for (int m = 0; m < G::MINE; ++m) {
    const float width = (high[m] - low[m]) * clip;
    bytes[m] = float_pair_to_fp8(divide<levels>(width) + 0.0f, (low[m] + high[m] - width) * 0.5f + 0.0f);
    const float scale = low_half(fp8_pair_to_half2(bytes[m]));
    inverse[m] = 1.000001f / (scale > 0.0f ? scale : 1.0f);
    const int item = G::item(lane, m), n = item / G::PADDED, index = item % G::PADDED;
    const int group = GROUP == 16 ? 2 * index + lane / 16 : index;
    if (first && index < G::COUNT) targets.store_plain(n, metadata, G::PER_TOKEN, group, bytes[m]);
  }

  // The code is the number of c with (x - offset) / scale > c + 1/2. A quotient a little too large gives it or one more,
  // and (c - 1/2) scale, exact in f32, decides, as the correctly rounded quotient would: scale has 4 bits.
  constexpr float whole = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to a whole number
  uint32_t packed[SPANS][LANE_TOKENS];
  static_for<LANE_TOKENS * G::COUNT>([&](auto index) {
    constexpr int n = index / G::COUNT, item = n * G::PADDED + index % G::COUNT;
    const int source = G::source(lane, item);
    const uint32_t pair = fp8_pair_to_half2(from_lane(bytes[item % G::MINE], source));
    const float scale = low_half(pair), offset = high_half(pair), over = from_lane(inverse[item % G::MINE], source);
    const float step = scale > 0.0f ? scale : 1.0f, half_step = -0.5f * step;
    static_for<G::GROUP_SPANS>([&](auto span) {
      constexpr int j = index % G::COUNT * G::GROUP_SPANS + span;
      float word = whole;
      static_for<4>([&](auto channel) {
        constexpr int i = channel;
        const float above = x.x[j][i][n] - offset;
        float code = fminf(above * over, static_cast<float>(levels)) + whole - whole;
        if (above <= fmaf(code, step, half_step)) code -= 1.0f;
        code = fmaxf(code, 0.0f);
        word = fmaf(code, 1 << BITS * i, word);
        x.x[j][i][n] = fmaf(scale, code, offset);
      });
      packed[j][n] = float_to_bits(word) & ((1u << 4 * BITS) - 1);
    });
  });
  store_codes<BITS>(targets, codes, lane, packed);
}

// The coefficient of the lane's tokens (Sec. 3.2), after storing it; `energy` and what is divided by it belong to one
// token of the lane, as in inner_product.
__device__ __forceinline__ void find_alpha(const Arguments& arg, const Values& z, const Values& reference, float energy,
                                           const Targets& targets, int plane, int lane, float (&alpha)[LANE_TOKENS]) {
  if (arg.coefficient == UNIT) {
    for (float& one : alpha) one = 1.0f;
    return;
  }
  const bool valid = energy >= 1.1754943508222875e-38f && energy < INFINITY;
  float product, divisor = valid ? energy : 1.0f;
  if (arg.coefficient == LEAST_SQUARES) {
    product = inner_product(z, reference, lane);
  } else {
    product = square_root(inner_product(z, z, lane)), divisor = square_root(divisor);
  }
  const float quotient = (valid ? product : 1.0f) / divisor;
  const uint32_t bits = float_to_bf16((valid ? quotient : 0.0f) + 0.0f);
  const int n = lane / 16;
  if ((lane & 12) == 0 && n < LANE_TOKENS) targets.store_plain(n, plane, 1, 0, bits);
  const float mine = bits_to_float(bits << 16);
  alpha[0] = mine;
  if constexpr (LANE_TOKENS == 2) {
    const float others = from_neighbour(mine, 16);
    alpha[0] = n ? others : mine, alpha[1] = n ? mine : others;
  }
}

__device__ __forceinline__ void pack_tile(const Arguments& arg, int tile, int head, int is_v, int part, int lane) {
  const int g = lane / 4, t = lane % 4, tokens = static_cast<int>(arg.tokens);
  const auto slot_of = [&](int token) {
    if (token >= tokens) return static_cast<int64_t>(-1);
    return arg.slots_are_wide ? static_cast<const int64_t*>(arg.slots)[token]
                              : static_cast<int64_t>(static_cast<const int32_t*>(arg.slots)[token]);
  };
  Targets targets;
  targets.is_v = is_v;
#pragma unroll
  for (int n = 0; n < LANE_TOKENS; ++n) {
    const int64_t slot = slot_of(tile * TILE_TOKENS + LANE_TOKENS * t + n), kept = slot < 0 ? 0 : slot;
    targets.stored[n] = slot >= 0;
    targets.token[n] = static_cast<int>(kept % arg.page_tokens);
    targets.page[n] = arg.words + kept / arg.page_tokens * arg.block_stride + head * arg.page_head_stride +
                      (is_v ? arg.v_start : arg.k_start);
  }
  bool inside[LANE_TOKENS];
#pragma unroll
  for (int n = 0; n < LANE_TOKENS; ++n) inside[n] = ROTATED ? slot_of(tile * TILE_TOKENS + g) >= 0 : targets.stored[n];
  const uint16_t* states = (is_v ? arg.v : arg.k) + tile * TILE_TOKENS * arg.token_stride + head * arg.head_stride;

  const int anchored = static_cast<int>(arg.anchored), parts = static_cast<int>(arg.parts);
  const int loops = static_cast<int>(arg.loops);
  const auto next_of = [&](int entry) { return entry == 0 && anchored ? 1 + part : entry + parts; };
  int entry = anchored ? 0 : part;
  Input input;
  Values reference = {};
  float energy = 0.0f;
  int changed = 0;
  if (entry < loops) input.load(states + arg.loop[entry] * arg.loop_stride, arg.token_stride, inside, g, t);
#pragma unroll 1
  for (; entry < loops; entry = next_of(entry)) {
    const bool predicted = anchored && entry > 0, own = !(anchored && entry == 0) || part == 0;
    const int64_t loop = arg.loop[entry];
    Values z;
    int found = 0;
    take(input, lane, z, found);
    if (own) changed += found;
    if (next_of(entry) < loops) {
      input.load(states + arg.loop[next_of(entry)] * arg.loop_stride, arg.token_stride, inside, g, t);
    }
    if (arg.rotated != nullptr) {
      Values::each([&](auto j, auto i, auto n) {
        const int64_t token = tile * TILE_TOKENS + LANE_TOKENS * t + n;
        float* row = arg.rotated + (((is_v * arg.loops + loop) * tokens + token) * arg.heads + head) * HEAD_DIM;
        if (targets.stored[n] && own) row[32 * j + 4 * g + i] = z.x[j][i][n];
      });
    }
    Targets mine = targets;
#pragma unroll
    for (int n = 0; n < LANE_TOKENS; ++n) mine.stored[n] = targets.stored[n] && own;
    float alpha[LANE_TOKENS] = {};
    if (predicted) {
      find_alpha(arg, z, reference, energy, mine, static_cast<int>(arg.alpha[entry]), lane, alpha);
      Values::each([&](auto j, auto i, auto n) { z.x[j][i][n] -= alpha[n] * reference.x[j][i][n]; });
    }
    const bool has_means = !is_v && arg.k_means != nullptr;
    const float* means = has_means ? arg.k_means + (loop * arg.heads + head) * HEAD_DIM + 4 * g : nullptr;
    if (has_means) Values::each([&](auto j, auto i, auto n) { z.x[j][i][n] -= means[32 * j + i]; });
    const int codes = static_cast<int>(arg.codes[entry]), metadata = static_cast<int>(arg.metadata[entry]);
    constexpr bool alike = FIRST_BITS == OTHER_BITS && FIRST_GROUP == OTHER_GROUP;
    if (alike || arg.precision[entry] == 0) {
      quantise<FIRST_BITS, FIRST_GROUP>(z, static_cast<float>(arg.first_clip), mine, codes, metadata, lane);
    } else {
      quantise<OTHER_BITS, OTHER_GROUP>(z, static_cast<float>(arg.other_clip), mine, codes, metadata, lane);
    }
    if (anchored && (entry == 0 || arg.chained)) {
      Values::each([&](auto j, auto i, auto n) {
        const float value = predicted ? alpha[n] * reference.x[j][i][n] + z.x[j][i][n] : z.x[j][i][n];
        reference.x[j][i][n] = has_means ? value + means[32 * j + i] : value;
      });
      energy = inner_product(reference, reference, lane);
    }
  }
  if (arg.sanitised != nullptr && changed > 0) add_atomically(arg.sanitised, changed);
}

__global__ void __launch_bounds__(THREADS, 3) pack_kv_kernel(const Arguments arg) {
  const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES, parts = static_cast<int>(arg.parts);
  const int head = blockIdx.y, is_v = blockIdx.z / parts, part = blockIdx.z % parts;
  if constexpr (ROTATED) {
    load_matrix(is_v ? arg.v_matrix + head * arg.v_matrix_stride : arg.k_matrix + head * arg.k_matrix_stride);
    sync_block();
  }
  const int stride = static_cast<int>(arg.blocks) * WARPS;
  for (int tile = blockIdx.x * WARPS + warp; tile * TILE_TOKENS < arg.tokens; tile += stride) {
    pack_tile(arg, tile, head, is_v, part, lane);
  }
}

extern "C" {

// A caller checks its mirror of Arguments against this.
int pack_kv_arguments_bytes() { return sizeof(Arguments); }

// The kernel, on a stream; returns a cudaError_t.
int pack_kv(const Arguments* arguments, void* stream) {
  const Arguments& arg = *arguments;
  const dim3 grid(static_cast<unsigned>(arg.blocks), static_cast<unsigned>(arg.heads),
                  static_cast<unsigned>(2 * arg.parts));
  return launch(pack_kv_kernel, grid, THREADS, SHARED_BYTES, stream, arg);
}
}
