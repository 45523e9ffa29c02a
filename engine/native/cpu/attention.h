// Attention over paged KV: single decode rows, and prefill chunks. Knows rows, blocks and scores; does not know
// sequences or layers. Scores, weights and sums are floats. A layer's cache is (2, kv heads, slots, dim): all keys,
// then all values.
//
// Both kernels compute out = (Σ w · value) / (Σ w) with w = e^(score - best), over tiles of keys with a running maximum
// `best` (online softmax). The score is s = scaling · query · key, or softcap · tanh(s / softcap) with a softcap.
// attend and attend_tile each stay one function, because every part of their tile loops uses most of the local arrays.

#pragma once

#include <new>
#include <vector>

#include "numbers.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace tidegate {

struct Scoring {
    float scaling, softcap;  // softcap 0 means no softcap
    Index window;            // tokens that a row attends to, including itself; 0 means all
};

// Number of keys of a split. It is fixed, so that a sequence's rounding does not depend on other sequences.
constexpr Index kSplit = 512;
constexpr Index kTile = 16;       // keys scored at once
constexpr Index kMaxGroup = 64;   // most query heads per KV head
constexpr Index kMaxDim = 512;    // largest head size

// The running softmax of one query head over the keys so far: the highest score `best`, and total = Σ e^(score − best).
struct Partial {
    float best, total;
};

// Computes acc = Σ e^(score - best) · value and the softmax state, for `group` query heads of one row over keys [first,
// last) of one KV head, in one thread. kDim is the head size, or 0 if the head size is not known at compile time: loops
// of known length are twice as fast. Assumes group <= kMaxGroup and dim <= kMaxDim.
template <typename T, int kDim>
void attend(float *__restrict acc, Partial *__restrict state, const T *query, Index head_stride, Index group,
            const T *keys, const T *values, const Index *table, Index block_size, Index runtime_dim, Index first,
            Index last, Scoring rule) {
    const Index dim = kDim ? kDim : runtime_dim;
    constexpr Index kWidth = kDim ? kDim : kMaxDim;
    alignas(64) float scaled[kMaxGroup * kWidth], scores[kMaxGroup * kTile], tile_keys[kTile * kWidth],
        tile_values[kTile * kWidth];
    for (Index g = 0; g < group; g++) {
        for (Index d = 0; d < dim; d++) scaled[g * dim + d] = load(query + g * head_stride + d) * rule.scaling;
        for (Index d = 0; d < dim; d++) acc[g * dim + d] = 0.0f;
        state[g] = {-1e30f, 0.0f};
    }
    for (Index tile = first; tile < last;) {
        Index offset = tile % block_size, count = block_size - offset;
        count = count < kTile ? count : kTile;
        count = count < last - tile ? count : last - tile;
        Index slot = (table[tile / block_size] * block_size + offset) * dim;
        // Keys and values are converted to float once for all heads of the group.
        for (Index i = 0; i < count * dim; i++) tile_keys[i] = load(keys + slot + i);
        for (Index i = 0; i < count * dim; i++) tile_values[i] = load(values + slot + i);
        for (Index g = 0; g < group; g++) {
            const float *q = scaled + g * dim;
            float *s = scores + g * kTile, best = state[g].best, sum = 0.0f;
            for (Index j = 0; j < count; j++) {
                const float *k = tile_keys + j * dim;
                float product = 0.0f;
                for (Index d = 0; d < dim; d++) product += q[d] * k[d];
                s[j] = product;
            }
            if (rule.softcap > 0)
                for (Index j = 0; j < count; j++) s[j] = rule.softcap * hyperbolic_tangent(s[j] / rule.softcap);
            for (Index j = count; j < kTile; j++) s[j] = -1e30f;
            for (Index j = 0; j < kTile; j++) best = s[j] > best ? s[j] : best;
            for (Index j = 0; j < kTile; j++) s[j] = exponential(s[j] - best);
            for (Index j = 0; j < count; j++) sum += s[j];
            float shrink = exponential(state[g].best - best);
            state[g] = {best, state[g].total * shrink + sum};
            float *a = acc + g * dim;
            for (Index d = 0; d < dim; d++) a[d] *= shrink;
            for (Index j = 0; j < count; j++) {
                const float *v = tile_values + j * dim;
                for (Index d = 0; d < dim; d++) a[d] += s[j] * v[d];
            }
        }
        tile += count;
    }
}

// Computes out (rows, heads, dim), the attention of each row to its own context, which includes the row itself.
// query[r, h] is at r · row_stride + h · head_stride. `tables` is (rows, blocks). `lengths` (rows) are the tokens of
// each context. `sinks` (heads) are scores that take a share of the softmax and have no value; null means no sinks.
// First, the threads compute the splits of all rows and KV heads. Then they merge the splits of each row and query
// head. Assumes that the rows' own keys and values are in the cache.
template <typename T>
void paged_decode(T *out, const T *query, Index row_stride, Index head_stride, const T *cache, Index num_slots,
                  const Index *tables, Index table_stride, const Index *lengths, const float *sinks, Index rows,
                  Heads heads, Index block_size, Scoring rule, int threads) {
    Index group = heads.query / heads.kv, dim = heads.dim, plane = heads.kv * num_slots * dim;
    std::vector<Index> begins(rows + 1, 0);
    for (Index r = 0; r < rows; r++) begins[r + 1] = begins[r] + (lengths[r] + kSplit - 1) / kSplit;
    Index splits = begins[rows], stride = group * dim;
    std::vector<Index> owners(splits);
    for (Index r = 0; r < rows; r++)
        for (Index s = begins[r]; s < begins[r + 1]; s++) owners[s] = r;
    std::vector<float> acc(splits * heads.kv * stride);
    std::vector<Partial> states(splits * heads.kv * group);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(dynamic, 2)
        for (Index job = 0; job < splits * heads.kv; job++) {
            Index split = job / heads.kv, h = job % heads.kv, r = owners[split], length = lengths[r];
            Index first = (split - begins[r]) * kSplit, last = first + kSplit < length ? first + kSplit : length;
            Index visible = rule.window && length > rule.window ? length - rule.window : 0;
            first = first < visible ? visible : first;
            const T *keys = cache + h * num_slots * dim;
            auto kernel = dim == 32    ? attend<T, 32>
                          : dim == 64  ? attend<T, 64>
                          : dim == 96  ? attend<T, 96>
                          : dim == 128 ? attend<T, 128>
                          : dim == 256 ? attend<T, 256>
                                       : attend<T, 0>;
            kernel(acc.data() + job * stride, states.data() + job * group,
                   query + r * row_stride + h * group * head_stride, head_stride, group, keys, keys + plane,
                   tables + r * table_stride, block_size, dim, first, last, rule);
        }
#pragma omp for schedule(static)
        for (Index item = 0; item < rows * heads.query; item++) {
            Index r = item / heads.query, head = item % heads.query, h = head / group, g = head % group;
            float best = sinks ? sinks[head] : -1e30f, total = 0.0f;
            for (Index s = begins[r]; s < begins[r + 1]; s++) {
                float candidate = states[(s * heads.kv + h) * group + g].best;
                best = candidate > best ? candidate : best;
            }
            if (sinks) total = exponential(sinks[head] - best);
            alignas(64) float sum[kMaxDim];
            for (Index d = 0; d < dim; d++) sum[d] = 0.0f;
            for (Index s = begins[r]; s < begins[r + 1]; s++) {
                Index job = s * heads.kv + h;
                float weight = exponential(states[job * group + g].best - best);
                total += weight * states[job * group + g].total;
                const float *a = acc.data() + job * stride + g * dim;
                for (Index d = 0; d < dim; d++) sum[d] += weight * a[d];
            }
            for (Index d = 0; d < dim; d++) store(out + item * dim + d, sum[d] / total);
        }
    }
}

// --- prefill: the attention of many rows of one sequence to its context, in tiles of rows and tiles of keys ------

typedef float Lanes __attribute__((vector_size(64)));  // one number for each of 16 keys, or 16 numbers of a head
constexpr Index kLanes = 16;
constexpr Index kTileTokens = 32;  // tokens of one job
constexpr Index kStripe = 16;      // rows whose sums are kept in registers together

// Returns how many of `wide` lanes a row's sums are computed in at once: the most, up to 4, that divide them. Heads of 96
// numbers have 6 lanes, which 4 would overrun.
constexpr Index part_of(Index wide) { return wide % 4 == 0 ? 4 : wide % 3 == 0 ? 3 : wide % 2 == 0 ? 2 : 1; }

// A prefill chunk. The rows [first_row, first_row + tokens) of the queries are tokens of one sequence; the first token
// is at position `start`. The sequence's block table begins at index `table` of all block tables.
struct Chunk {
    Index first_row, tokens, start, table;
};

// The two matrix products of a tile of 16 keys: queries with keys, and weights with values. This version computes in
// float and works on any processor.
template <typename T, int kDim> struct Tile {
    static constexpr Index kWide = kDim / kLanes;
    std::vector<float> queries;
    alignas(64) float keys[kDim * kLanes], values[kLanes * kDim];

    explicit Tile(Index rows) : queries(rows * kDim, 0.0f) {}

    void set_query(Index r, const T *query) {
        for (Index d = 0; d < kDim; d++) queries[r * kDim + d] = load(query + d);
    }

    void set_key(Index j, const T *key, const T *value) {
        for (Index d = 0; d < kDim; d++) keys[d * kLanes + j] = load(key + d);
        for (Index d = 0; d < kDim; d++) values[j * kDim + d] = load(value + d);
    }

    void arrange() {}

    // Computes scores[r][key] = query[r] · key; `rows` must be a multiple of kStripe.
    void score(Lanes *scores, Index rows) const {
        const Lanes *lanes = reinterpret_cast<const Lanes *>(keys);
        for (Index r = 0; r < rows; r += kStripe) {
            Lanes sums[kStripe] = {};
            for (Index d = 0; d < kDim; d++)
#pragma GCC unroll 16
                for (Index i = 0; i < kStripe; i++) sums[i] += queries[(r + i) * kDim + d] * lanes[d];
#pragma GCC unroll 16
            for (Index i = 0; i < kStripe; i++) scores[r + i] = sums[i];
        }
    }

    // Computes acc[r] += Σ weights[r][key] · value[key]; `rows` must be a multiple of 4.
    void add_values(Lanes *acc, const Lanes *weights, Index rows) const {
        constexpr Index kPart = part_of(kWide);
        const Lanes *lanes = reinterpret_cast<const Lanes *>(values);
        for (Index r = 0; r < rows; r += 4)
            for (Index c = 0; c < kWide; c += kPart) {
                Lanes sums[4][kPart];
#pragma GCC unroll 16
                for (Index i = 0; i < 4; i++)
#pragma GCC unroll 16
                    for (Index w = 0; w < kPart; w++) sums[i][w] = acc[(r + i) * kWide + c + w];
                for (Index j = 0; j < kLanes; j++)
#pragma GCC unroll 16
                    for (Index i = 0; i < 4; i++)
#pragma GCC unroll 16
                        for (Index w = 0; w < kPart; w++) sums[i][w] += weights[r + i][j] * lanes[j * kWide + c + w];
#pragma GCC unroll 16
                for (Index i = 0; i < 4; i++)
#pragma GCC unroll 16
                    for (Index w = 0; w < kPart; w++) acc[(r + i) * kWide + c + w] = sums[i][w];
            }
    }
};

#ifdef __AVX512BF16__

// The same two products with bfloat16 dot product instructions, which add two products at once. Scores use pairs of
// numbers of a head, and values use pairs of keys.
template <int kDim> struct DotTile {
    static constexpr Index kWide = kDim / kLanes, kPairs = kDim / 2;
    std::vector<bf16> queries;
    alignas(64) uint32_t keys[kPairs * kLanes], values[kLanes / 2 * kDim];
    const bf16 *value_rows[kLanes];

    explicit DotTile(Index rows) : queries(rows * kDim, 0) {}

    void set_query(Index r, const bf16 *query) { std::memcpy(&queries[r * kDim], query, kDim * sizeof(bf16)); }

    void set_key(Index j, const bf16 *key, const bf16 *value) {
        uint32_t pairs[kPairs];
        std::memcpy(pairs, key, sizeof pairs);
        for (Index d = 0; d < kPairs; d++) keys[d * kLanes + j] = pairs[d];
        value_rows[j] = value;
    }

    // Interleaves the values of each pair of keys.
    void arrange() {
        for (Index j = 0; j < kLanes; j += 2)
            for (Index w = 0; w < kWide; w++) {
                __m512i even = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(value_rows[j] + w * kLanes)));
                __m512i odd =
                    _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(value_rows[j + 1] + w * kLanes)));
                _mm512_store_si512(values + (j / 2 * kWide + w) * kLanes,
                                   _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
            }
    }

    // Returns the pair of numbers at `p`, repeated in all lanes.
    static __m512bh pair(const bf16 *p) {
        int32_t both;
        std::memcpy(&both, p, sizeof both);
        return (__m512bh)_mm512_set1_epi32(both);
    }

    void score(Lanes *scores, Index rows) const {
        for (Index r = 0; r < rows; r += kStripe) {
            __m512 sums[kStripe] = {};
            for (Index d = 0; d < kPairs; d++) {
                const __m512bh panel = (__m512bh)_mm512_load_si512(keys + d * kLanes);
#pragma GCC unroll 16
                for (Index i = 0; i < kStripe; i++)
                    sums[i] = _mm512_dpbf16_ps(sums[i], pair(&queries[(r + i) * kDim + 2 * d]), panel);
            }
#pragma GCC unroll 16
            for (Index i = 0; i < kStripe; i++) scores[r + i] = (Lanes)sums[i];
        }
    }

    void add_values(Lanes *acc, const Lanes *weights, Index rows) const {
        constexpr Index kPart = part_of(kWide);
        for (Index r = 0; r < rows; r += 4) {
            alignas(64) bf16 own[4][kLanes];
            for (Index i = 0; i < 4; i++)
                _mm256_store_si256((__m256i *)own[i], (__m256i)_mm512_cvtneps_pbh((__m512)weights[r + i]));
            for (Index c = 0; c < kWide; c += kPart) {
                __m512 sums[4][kPart];
#pragma GCC unroll 16
                for (Index i = 0; i < 4; i++)
#pragma GCC unroll 16
                    for (Index w = 0; w < kPart; w++) sums[i][w] = (__m512)acc[(r + i) * kWide + c + w];
                for (Index j = 0; j < kLanes / 2; j++) {
                    __m512bh panel[kPart];
#pragma GCC unroll 16
                    for (Index w = 0; w < kPart; w++)
                        panel[w] = (__m512bh)_mm512_load_si512(values + (j * kWide + c + w) * kLanes);
#pragma GCC unroll 16
                    for (Index i = 0; i < 4; i++)
#pragma GCC unroll 16
                        for (Index w = 0; w < kPart; w++)
                            sums[i][w] = _mm512_dpbf16_ps(sums[i][w], pair(own[i] + 2 * j), panel[w]);
                }
#pragma GCC unroll 16
                for (Index i = 0; i < 4; i++)
#pragma GCC unroll 16
                    for (Index w = 0; w < kPart; w++) acc[(r + i) * kWide + c + w] = (Lanes)sums[i][w];
            }
        }
    }
};

#endif

// Replaces the 16 scores of a row by weights e^(score - best); keys of the tile outside [first, last) get weight 0.
// `best` and `total` (one per lane) are the row's running softmax, which is updated. Returns the factor by which the
// row's former sums of values must be multiplied.
inline float weigh(Lanes &scores, float &best, Lanes &total, Index first, Index last, Scoring rule) {
    Lanes s = scores * rule.scaling;
    if (rule.softcap > 0)
        for (Index j = 0; j < kLanes; j++) s[j] = rule.softcap * hyperbolic_tangent(s[j] / rule.softcap);
    const bool is_edge = first > 0 || last < kLanes;
    if (is_edge)
        for (Index j = 0; j < kLanes; j++) s[j] = j >= first && j < last ? s[j] : -1e30f;
    bool is_higher = false;
    for (Index j = 0; j < kLanes; j++) is_higher |= s[j] > best;
    float shrink = 1.0f;
    if (is_higher) {
        float highest = best;
        for (Index j = 0; j < kLanes; j++) highest = s[j] > highest ? s[j] : highest;
        shrink = exponential(best - highest);
        best = highest;
        total *= shrink;
    }
    for (Index j = 0; j < kLanes; j++) s[j] = exponential(s[j] - best);
    if (is_edge)
        for (Index j = 0; j < kLanes; j++) s[j] = j >= first && j < last ? s[j] : 0.0f;
    total += s;
    scores = s;
    return shrink;
}

// Computes causal attention for tokens [first_token, last_token) of a chunk and the query heads of one KV head, in one
// thread. A row is a pair of token and query head; each tile of 16 keys is computed for all of these rows.
template <typename Tile, int kDim, typename T>
void attend_tile(T *out, const T *query, Index row_stride, Index head_stride, const T *keys, const T *values,
                 const Index *table, Index block_size, Index kv_head, Index query_heads, Index group,
                 const float *sinks, Chunk chunk, Index first_token, Index last_token, Scoring rule) {
    constexpr Index kWide = kDim / kLanes;
    const DenormalsAreZero zero;
    Index rows = (last_token - first_token) * group, padded = (rows + kStripe - 1) / kStripe * kStripe;
    Tile products(padded);
    std::vector<float> bests(padded, -1e30f);
    Lanes *acc = new (std::align_val_t(64)) Lanes[padded * kWide]();
    Lanes *scores = new (std::align_val_t(64)) Lanes[padded];
    Lanes *totals = new (std::align_val_t(64)) Lanes[padded]();
    for (Index r = 0; r < rows; r++) {
        Index row = chunk.first_row + first_token + r / group, head = kv_head * group + r % group;
        products.set_query(r, query + row * row_stride + head * head_stride);
        if (sinks) bests[r] = sinks[head], totals[r][0] = 1.0f;
    }
    Index first_position = chunk.start + first_token, end = chunk.start + last_token;
    Index visible = rule.window && first_position >= rule.window ? first_position - rule.window + 1 : 0;
    for (Index tile = visible / kLanes * kLanes; tile < end; tile += kLanes) {
        Index count = end - tile < kLanes ? end - tile : kLanes;
        for (Index j = 0; j < kLanes; j++) {
            Index position = tile + (j < count ? j : 0);
            Index slot = (table[position / block_size] * block_size + position % block_size) * kDim;
            products.set_key(j, keys + slot, values + slot);
        }
        products.arrange();
        products.score(scores, padded);
        for (Index r = 0; r < rows; r++) {
            Index own = first_position + r / group;  // the row's position
            Index last = own + 1 - tile < kLanes ? own + 1 - tile : kLanes;
            Index first = rule.window ? own - rule.window + 1 - tile : 0;
            float shrink = weigh(scores[r], bests[r], totals[r], first, last, rule);
            if (shrink != 1.0f)
                for (Index w = 0; w < kWide; w++) acc[r * kWide + w] *= shrink;
        }
        products.add_values(acc, scores, padded);
    }
    for (Index r = 0; r < rows; r++) {
        Index row = chunk.first_row + first_token + r / group, head = kv_head * group + r % group;
        const float *sum = reinterpret_cast<float *>(acc + r * kWide);
        float total = 0.0f;
        for (Index j = 0; j < kLanes; j++) total += totals[r][j];
        for (Index d = 0; d < kDim; d++) store(out + (row * query_heads + head) * kDim + d, sum[d] / total);
    }
    ::operator delete[](acc, std::align_val_t(64));
    ::operator delete[](scores, std::align_val_t(64));
    ::operator delete[](totals, std::align_val_t(64));
}

// Returns attend_tile with the faster products.
template <typename T, int kDim> auto tile_kernel() {
#ifdef __AVX512BF16__
    if constexpr (sizeof(T) == sizeof(bf16))
        if (!g_multiplies_floats) return attend_tile<DotTile<kDim>, kDim, T>;
#endif
    return attend_tile<Tile<T, kDim>, kDim, T>;
}

// Computes out (rows, heads, dim): the causal attention of each chunk's tokens to their sequence, up to the token's own
// position. query and sinks are as in paged_decode. `tables` holds the block tables of all chunks, end to end. A job of
// a thread is kTileTokens tokens and one KV head. Assumes a head size of 16, 32, 64, 96, 128 or 256, and that the
// chunks' own keys and values are in the cache.
template <typename T>
void paged_prefill(T *out, const T *query, Index row_stride, Index head_stride, const T *cache, Index num_slots,
                   const Index *tables, const Chunk *chunks, Index num_chunks, const float *sinks, Heads heads,
                   Index block_size, Scoring rule, int threads) {
    struct Job {
        Index chunk, first_token, kv_head;
    };
    std::vector<Job> jobs;
    for (Index c = 0; c < num_chunks; c++)
        for (Index token = 0; token < chunks[c].tokens; token += kTileTokens)
            for (Index h = 0; h < heads.kv; h++) jobs.push_back({c, token, h});
    Index plane = heads.kv * num_slots * heads.dim;
    auto kernel = heads.dim == 16    ? tile_kernel<T, 16>()
                  : heads.dim == 32  ? tile_kernel<T, 32>()
                  : heads.dim == 64  ? tile_kernel<T, 64>()
                  : heads.dim == 96  ? tile_kernel<T, 96>()
                  : heads.dim == 128 ? tile_kernel<T, 128>()
                                     : tile_kernel<T, 256>();
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (threads > 1)
    for (Index i = 0; i < Index(jobs.size()); i++) {
        Job job = jobs[jobs.size() - 1 - i];  // long jobs first: later tokens attend to more keys
        Chunk chunk = chunks[job.chunk];
        Index last = job.first_token + kTileTokens;
        const T *keys = cache + job.kv_head * num_slots * heads.dim;
        kernel(out, query, row_stride, head_stride, keys, keys + plane, tables + chunk.table, block_size, job.kv_head,
               heads.query, heads.query / heads.kv, sinks, chunk, job.first_token,
               last < chunk.tokens ? last : chunk.tokens, rule);
    }
}

}  // namespace tidegate
