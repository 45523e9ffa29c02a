// Products of rows with a packed weight, in the fastest way that this processor supports.

#pragma once

#include "dot_products.h"
#include "quantized_products.h"
#include "tile_products.h"

#ifdef TIDEGATE_PRODUCTS

namespace tidegate {

inline bool g_uses_tiles = false;  // set by use_tiles before the first product

// Computes out = x · weightᵀ + bias (out += … if kAdd) for out (rows, linear.out) and x (rows, linear.in), with all
// threads of the enclosing parallel region. Assumes contiguous rows.
template <bool kAdd> void multiply(bf16 *out, const bf16 *x, const Linear &linear, Index rows) {
    if (linear.parts) return multiply_quantized<kAdd>(out, x, linear, rows);
#ifdef TIDEGATE_TILES
    if (g_uses_tiles && linear.in % kTileInputs == 0) return multiply_by_tiles<kAdd>(out, x, linear, rows);
#endif
    multiply_by_dots<kAdd>(out, x, linear, rows);
}

}  // namespace tidegate

#endif
