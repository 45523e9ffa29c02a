// Products of rows with a packed bfloat16 weight, in the fastest way that this processor has.

#pragma once

#include "dot_products.h"
#include "tile_products.h"

#ifdef __AVX512BF16__

namespace tidegate {

inline bool g_uses_tiles = false;  // set before any product

// out (rows, linear.out) = or += x (rows, linear.in) · weightᵀ + bias. By all threads of the region around it.
template <bool kAdd> void multiply(bf16 *out, const bf16 *x, const Linear &linear, Index rows) {
#ifdef TIDEGATE_TILES
    if (g_uses_tiles && linear.in % kTileInputs == 0) return multiply_by_tiles<kAdd>(out, x, linear, rows);
#endif
    multiply_by_dots<kAdd>(out, x, linear, rows);
}

}  // namespace tidegate

#endif
