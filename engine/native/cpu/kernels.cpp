// C entry points for Python: the kernels of layers.h and attention.h for float and bfloat16.

#include "attention.h"
#include "layers.h"

using namespace tidegate;

// A parallel region of `threads` threads, unless there is only one row.
#define TIDEGATE_PRAGMA(text) _Pragma(#text)
#define TIDEGATE_TEAM(threads, rows) TIDEGATE_PRAGMA(omp parallel num_threads(threads) if (threads > 1 && rows > 1))

#define TIDEGATE_KERNELS(T, NAME)                                                                                      \
    void rms_norm_##NAME(T *out, const T *x, Norm norm, Index rows, Index n, int threads) {                            \
        TIDEGATE_TEAM(threads, rows)                                                                                   \
        rms_norm(out, x, norm, rows, n);                                                                               \
    }                                                                                                                  \
    void add_rms_norm_##NAME(T *out, T *residual, const T *x, Norm norm, Index rows, Index n, int threads) {           \
        TIDEGATE_TEAM(threads, rows)                                                                                   \
        add_rms_norm(out, residual, x, norm, rows, n);                                                                 \
    }                                                                                                                  \
    void activate_and_mul_##NAME(T *out, const T *gate_up, Index rows, Index n, int activation, int threads) {         \
        TIDEGATE_TEAM(threads, rows)                                                                                   \
        activate_and_mul(out, gate_up, rows, n, Activation(activation));                                               \
    }                                                                                                                  \
    void rotate_and_write_##NAME(T *qkv, T *cache, const Index *slots, const T *cosines, const T *sines,               \
                                 Norm query_norm, Norm key_norm, Index rows, Index num_slots, Index query_heads,       \
                                 Index kv_heads, Index dim, Index rotary, int in_pairs, int threads) {                 \
        TIDEGATE_TEAM(threads, rows)                                                                                   \
        rotate_and_write(qkv, cache, slots, cosines, sines, query_norm, key_norm, rows, num_slots,                     \
                         Heads{query_heads, kv_heads, dim, rotary, in_pairs});                                         \
    }                                                                                                                  \
    void paged_decode_##NAME(T *out, const T *query, Index row_stride, Index head_stride, const T *cache,              \
                             Index num_slots, const Index *tables, Index table_stride, const Index *lengths,           \
                             const float *sinks, Index rows, Index query_heads, Index kv_heads, Index dim,             \
                             Index block_size, float scaling, float softcap, Index window, int threads) {              \
        paged_decode(out, query, row_stride, head_stride, cache, num_slots, tables, table_stride, lengths, sinks,      \
                     rows, Heads{query_heads, kv_heads, dim, 0, 0}, block_size, Scoring{scaling, softcap, window},     \
                     threads);                                                                                         \
    }                                                                                                                  \
    void paged_prefill_##NAME(T *out, const T *query, Index row_stride, Index head_stride, const T *cache,             \
                              Index num_slots, const Index *tables, const Index *chunks, Index num_chunks,             \
                              const float *sinks, Index query_heads, Index kv_heads, Index dim, Index block_size,      \
                              float scaling, float softcap, Index window, int threads) {                               \
        paged_prefill(out, query, row_stride, head_stride, cache, num_slots, tables,                                   \
                      reinterpret_cast<const Chunk *>(chunks), num_chunks, sinks,                                      \
                      Heads{query_heads, kv_heads, dim, 0, 0}, block_size, Scoring{scaling, softcap, window},         \
                      threads);                                                                                        \
    }

extern "C" {
TIDEGATE_KERNELS(float, float32)
TIDEGATE_KERNELS(bf16, bfloat16)
}
