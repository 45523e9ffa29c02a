// Products of rows with packed weights, in the fastest way that this processor supports: of all rows with one weight, or
// of each group of rows with its own.

#pragma once

#include <vector>

#include "dot_products.h"
#include "quantized_products.h"
#include "tile_products.h"

#ifdef TIDEGATE_PRODUCTS

namespace tidegate {

inline bool g_uses_tiles = false;  // set by use_tiles before the first product

// Returns whether the products with `linear` use tiles.
inline bool is_tiled([[maybe_unused]] const Linear &linear) {
#ifdef TIDEGATE_TILES
    return g_uses_tiles && linear.in % kTileInputs == 0;
#else
    return false;
#endif
}

// Returns how many panels a thread computes at once. They are one job.
inline Index panels_of_job([[maybe_unused]] const Linear &linear, Index rows) {
#ifdef TIDEGATE_TILES
    if (is_tiled(linear)) return panels_by_tiles(rows);
#endif
    return panels_by_dots(rows);
}

inline Index num_jobs(const Linear &linear, Index rows) {
    if (linear.parts) return num_blocks(linear);
    const Index most = panels_of_job(linear, rows);
    return (linear.out / kPanel + most - 1) / most;
}

// Computes a job of out = x · weightᵀ + bias (out += … if kAdd) for all rows, in one thread.
template <bool kAdd>
inline void multiply_job(bf16 *out, const bf16 *x, const Linear &linear, Index rows, Index job,
                         [[maybe_unused]] TileShapes &shapes) {
    const Index first = job * panels_of_job(linear, rows);
#ifdef TIDEGATE_TILES
    if (is_tiled(linear)) return multiply_by_tiles<kAdd>(out, x, linear, rows, first, shapes);
#endif
    multiply_by_dots<kAdd>(out, x, linear, rows, first);
}

// Computes out = x · weightᵀ + bias (out += … if kAdd) for out (rows, linear.out) and x (rows, linear.in), with all
// threads of the enclosing parallel region. Assumes contiguous rows.
template <bool kAdd> void multiply(bf16 *out, const bf16 *x, const Linear &linear, Index rows) {
    if (linear.parts) return multiply_quantized<kAdd>(out, x, linear, rows);
    const Index jobs = num_jobs(linear, rows);
    TileShapes shapes;
#pragma omp for schedule(static)
    for (Index job = 0; job < jobs; job++) multiply_job<kAdd>(out, x, linear, rows, job, shapes);
}

// Rows [first, first + rows) belong to one of several weights.
struct Group {
    Index weight, first, rows;
};

// Computes out = x · weightᵀ + bias for each group of rows, with all threads of the enclosing parallel region. All
// `linears` have the same sizes. A row's results do not depend on other rows, and weights without rows are not read.
// Each thread rounds the rows of the groups whose quantised weights it multiplies. Assumes contiguous rows.
inline void multiply_groups(bf16 *out, const bf16 *x, const Linear *linears, const std::vector<Group> &groups) {
    thread_local RoundedRows t_rounded;
    Index jobs = 0, before = 0;  // jobs of all groups, and of those before this thread's current one
    for (const Group &group : groups) jobs += num_jobs(linears[group.weight], group.rows);
    const Group *group = groups.data(), *rounded = nullptr;
    TileShapes shapes;
#pragma omp for schedule(monotonic : dynamic)
    for (Index job = 0; job < jobs; job++) {
        for (Index own; job >= before + (own = num_jobs(linears[group->weight], group->rows)); group++) before += own;
        const Linear &linear = linears[group->weight];
        bf16 *to = out + group->first * linear.out;
        const bf16 *from = x + group->first * linear.in;
        if (linear.parts) {
            if (rounded != group) t_rounded.round(from, group->rows, linear.in);
            rounded = group;
            multiply_block(to, t_rounded, linear, group->rows, job - before);
        } else {
            multiply_job<false>(to, from, linear, group->rows, job - before, shapes);
        }
    }
}

}  // namespace tidegate

#endif
