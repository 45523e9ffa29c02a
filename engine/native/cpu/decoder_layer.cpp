// C entry points for Python, on processors that multiply bfloat16: a whole decoder layer in one call, and a linear
// layer. Knows the order of a layer's parts; the headers contain the arithmetic of the parts.

#include "attention.h"
#include "buffer.h"
#include "experts.h"
#include "layers.h"
#include "products.h"

using namespace tidegate;

// Returns whether this library has matrix products.
extern "C" int has_products() {
#ifdef TIDEGATE_PRODUCTS
    return 1;
#else
    return 0;
#endif
}

// Returns whether products use tiles from now on. They do if tiles are wanted, the processor has them and Linux grants
// them.
extern "C" int use_tiles([[maybe_unused]] int wanted) {
#ifdef TIDEGATE_TILES
    return g_uses_tiles = wanted && ask_for_tiles();
#else
    return 0;
#endif
}

#ifdef TIDEGATE_PRODUCTS

// Makes products without tiles multiply floats, or not, and returns whether they do. By itself, the library chooses what
// is faster.
extern "C" int use_floats([[maybe_unused]] int wanted) {
#ifdef __AVX512BF16__
    g_multiplies_floats = wanted;
#endif
    return g_multiplies_floats;
}

namespace {

// The arguments of a layer that do not change between steps.
struct Layer {
    Linear qkv, out;
    Linear gate_up, down;  // unused with experts
    Linear router;         // unused without experts
    Norm input, attended, mlp, computed, query, key;
    Experts experts;
    Heads heads;
    Scoring scoring;
    const float *sinks;  // (heads.query,), or null
    Activation activation;
    float residual_scale;
    bf16 *cache;
    Index num_slots, block_size;
};

// The arguments of a step, which are the same for all layers. Decode rows come before the rows of prefill chunks.
struct Step {
    Index rows;                   // decode rows and rows of prefill chunks
    const bf16 *cosines, *sines;  // (rows, rotary)
    const Index *slots;           // (rows,): where keys and values are written
    Index decode_rows;
    const Index *block_table;     // (decode_rows, blocks)
    Index table_stride;
    const Index *lengths;         // (decode_rows,): tokens of each row's context
    Index num_chunks;
    const Index *chunk_tables;    // the chunks' block tables, end to end
    const Chunk *chunks;          // (num_chunks,)
    int32_t threads;
};

// What one part of a layer passes to the next.
thread_local Buffer<bf16> t_normed, t_qkv, t_attended, t_gate_up, t_activated, t_logits, t_gathered;
thread_local Routing t_routing;

// Computes hidden += residual_scale · norm(x · weightᵀ) for hidden (rows, linear.out) and x (rows, linear.in), with all
// threads of the enclosing parallel region. Uses `product`, which is like hidden.
void multiply_and_add(bf16 *hidden, bf16 *product, const bf16 *x, const Linear &linear, Norm norm, const Layer &layer,
                      Index rows) {
    if (!norm.weight && layer.residual_scale == 1.0f) return multiply<true>(hidden, x, linear, rows);
    multiply<false>(product, x, linear, rows);
    add_branch(hidden, product, norm, layer.residual_scale, rows, linear.out);
}

// Returns norm(x) for x (rows, n): `normed`, or x if the norm is left out. All threads of the enclosing parallel region
// compute it.
const bf16 *normed_or_same(bf16 *normed, const bf16 *x, Norm norm, Index rows, Index n) {
    if (!norm.weight) return x;
    rms_norm(normed, x, norm, rows, n);
    return normed;
}

// Computes the MLP of a layer for hidden (rows, n), in place. Uses `normed`, which is like hidden.
void add_mlp(bf16 *hidden, bf16 *normed, const Layer &layer, Index rows, int threads) {
    const Index n = layer.qkv.in, inner = layer.down.in;
    bf16 *gate_up = t_gate_up.of(rows * 2 * inner), *activated = t_activated.of(rows * inner);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        multiply<false>(gate_up, normed_or_same(normed, hidden, layer.mlp, rows, n), layer.gate_up, rows);
        activate_and_mul(activated, gate_up, rows, inner, layer.activation);
        multiply_and_add(hidden, normed, activated, layer.down, layer.computed, layer, rows);
    }
}

// Computes the experts of a layer for hidden (rows, n), in place. Uses `normed`, which is like hidden.
void add_experts(bf16 *hidden, bf16 *normed, const Layer &layer, Index rows, int threads) {
    const Index n = layer.qkv.in, inner = layer.experts.down->in;
    Routing &routing = t_routing;
    routing.prepare(layer.experts, rows);
    const Index pairs = routing.pairs();
    bf16 *logits = t_logits.of(rows * layer.router.out), *gathered = t_gathered.of(pairs * n);
    bf16 *gate_up = t_gate_up.of(pairs * 2 * inner), *activated = t_activated.of(pairs * inner);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const bf16 *x = normed_or_same(normed, hidden, layer.mlp, rows, n);
        multiply<false>(logits, x, layer.router, rows);
        routing.choose_all(logits, layer.router.out);
        routing.gather(gathered, x, n);
        multiply_groups(gate_up, gathered, layer.experts.gate_up, routing.groups);
        activate_and_mul(activated, gate_up, pairs, inner, layer.activation);
        multiply_groups(gathered, activated, layer.experts.down, routing.groups);
        routing.add_up(normed, gathered, n);
        add_branch(hidden, normed, layer.computed, layer.residual_scale, rows, n);
    }
}

}  // namespace

extern "C" {

// Computes out = x · weightᵀ + bias for out (rows, linear.out) and x (rows, linear.in), with `threads` threads.
void linear_bfloat16(bf16 *out, const bf16 *x, const Linear *linear, Index rows, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    multiply<false>(out, x, *linear, rows);
}

// Computes a layer (`LayerForm` in layer_parts.py) for hidden (rows, n), in place, with step->threads threads. Writes the
// rows' keys and values to the cache. Assumes contiguous rows.
void decoder_layer_bfloat16(bf16 *hidden, const Layer *layer, const Step *step) {
    const Index rows = step->rows, n = layer->qkv.in, width = layer->qkv.out;
    const Heads heads = layer->heads;
    const Index query_width = heads.query * heads.dim;
    bf16 *normed = t_normed.of(rows * n), *qkv = t_qkv.of(rows * width), *attended = t_attended.of(rows * query_width);
#pragma omp parallel num_threads(step->threads) if (step->threads > 1)
    {
        multiply<false>(qkv, normed_or_same(normed, hidden, layer->input, rows, n), layer->qkv, rows);
        rotate_and_write(qkv, layer->cache, step->slots, step->cosines, step->sines, layer->query, layer->key, rows,
                         layer->num_slots, heads);
    }
    if (step->decode_rows)
        paged_decode(attended, qkv, width, heads.dim, layer->cache, layer->num_slots, step->block_table,
                     step->table_stride, step->lengths, layer->sinks, step->decode_rows, heads, layer->block_size,
                     layer->scoring, step->threads);
    if (step->num_chunks)
        paged_prefill(attended + step->decode_rows * query_width, qkv + step->decode_rows * width, width,
                      heads.dim, layer->cache, layer->num_slots, step->chunk_tables, step->chunks, step->num_chunks,
                      layer->sinks, heads, layer->block_size, layer->scoring, step->threads);
#pragma omp parallel num_threads(step->threads) if (step->threads > 1)
    multiply_and_add(hidden, normed, attended, layer->out, layer->attended, *layer, rows);
    (layer->experts.count ? add_experts : add_mlp)(hidden, normed, *layer, rows, step->threads);
}

}  // extern "C"

#endif
