// Products of a few rows with a packed bfloat16 weight, by the processor's own bfloat16 dot products (AVX512_BF16).
//
// A block of rows × panels is summed in registers over all inputs. Knows matrices; not layers.

#pragma once

#include "linear.h"

#ifdef __AVX512BF16__

namespace tidegate {

// A block's sums, for panels [first, first + kPanels), written to `out` or added to what is there. Its loops must be
// unrolled whole, or the sums would not stay in registers.
template <int kRows, int kPanels, bool kAdd>
inline void multiply_block(bf16 *out, const bf16 *x, const Linear &linear, Index first) {
    __m512 sums[kRows][kPanels];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 16
        for (int p = 0; p < kPanels; p++)
            sums[r][p] = bias_of(linear, first + p);
    const Index stride = linear.in * kPanel;
    const bf16 *weight = linear.weight + first * stride;
    for (Index k = 0; k < linear.in; k += 2) {
        __m512bh panel[kPanels];
#pragma GCC unroll 16
        for (int p = 0; p < kPanels; p++) panel[p] = (__m512bh)_mm512_loadu_si512(weight + p * stride + k * kPanel);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; r++) {
            int32_t pair;
            std::memcpy(&pair, x + r * linear.in + k, sizeof pair);
            const __m512bh inputs = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 16
            for (int p = 0; p < kPanels; p++) sums[r][p] = _mm512_dpbf16_ps(sums[r][p], inputs, panel[p]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 16
        for (int p = 0; p < kPanels; p++) {
            bf16 *to = out + r * linear.out + (first + p) * kPanel;
            narrow(to, kAdd ? _mm512_add_ps(widen(to), sums[r][p]) : sums[r][p]);
        }
}

// All rows for some panels, a few rows at a time: the panels stay in the cache.
template <int kMost, int kPanels, bool kAdd>
inline void multiply_panels(bf16 *out, const bf16 *x, const Linear &linear, Index rows, Index first) {
    Index r = 0;
    for (; r + kMost <= rows; r += kMost)
        multiply_block<kMost, kPanels, kAdd>(out + r * linear.out, x + r * linear.in, linear, first);
    if constexpr (kMost > 1) {
        out += r * linear.out, x += r * linear.in, rows -= r;
        if (rows >= kMost / 2) {
            multiply_block<kMost / 2, kPanels, kAdd>(out, x, linear, first);
            out += kMost / 2 * linear.out, x += kMost / 2 * linear.in, rows -= kMost / 2;
        }
        if (rows) multiply_panels<1, kPanels, kAdd>(out, x, linear, rows, first);
    }
}

// By all threads of the region around it, each with its share of the panels.
template <int kMost, int kPanels, bool kAdd>
inline void multiply_in_blocks(bf16 *out, const bf16 *x, const Linear &linear, Index rows) {
    const Index panels = linear.out / kPanel, blocks = (panels + kPanels - 1) / kPanels;
#pragma omp for schedule(static)
    for (Index b = 0; b < blocks; b++) {
        const Index first = b * kPanels;
        if (first + kPanels <= panels)
            multiply_panels<kMost, kPanels, kAdd>(out, x, linear, rows, first);
        else
            for (Index p = first; p < panels; p++) multiply_panels<kMost, 1, kAdd>(out, x, linear, rows, p);
    }
}

// out (rows, linear.out) = or += x (rows, linear.in) · weightᵀ + bias. Few rows take many panels at once, so that more of
// the weight is on its way from memory; many rows take few, which leaves registers for rows.
template <bool kAdd> void multiply_by_dots(bf16 *out, const bf16 *x, const Linear &linear, Index rows) {
    if (rows == 1)
        multiply_in_blocks<1, 8, kAdd>(out, x, linear, rows);
    else if (rows <= 4)
        multiply_in_blocks<4, 6, kAdd>(out, x, linear, rows);
    else
        multiply_in_blocks<8, 3, kAdd>(out, x, linear, rows);
}

}  // namespace tidegate

#endif
