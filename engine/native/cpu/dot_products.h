// Products of a few rows with a packed bfloat16 weight, with bfloat16 dot product instructions (AVX512_BF16).
//
// The sums of a block of rows × panels stay in registers for all inputs. Knows matrices; does not know layers.

#pragma once

#include "linear.h"

#ifdef TIDEGATE_PRODUCTS

namespace tidegate {

// Computes kRows rows of out = x · weightᵀ + bias (out += … if kAdd) for the outputs of panels [first, first +
// kPanels), in one thread. The loops must be unrolled completely, so that the sums stay in registers.
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

// Computes all rows for kPanels panels in one thread: first blocks of kMost rows, then a block of kMost / 2 rows, then
// single rows. The panels stay in the processor's cache.
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

// Computes all rows for all panels, with all threads of the enclosing parallel region; each thread has a share of the
// panels.
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

// Computes out = x · weightᵀ + bias (out += … if kAdd) for out (rows, linear.out) and x (rows, linear.in), with all
// threads of the enclosing parallel region. With few rows, a block has many panels, so that more of the weight is
// loaded from memory at the same time. With many rows, a block has few panels, which leaves registers for rows.
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
