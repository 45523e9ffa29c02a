// Products of a few rows with a packed bfloat16 weight, with bfloat16 dot product instructions (AVX512_BF16), or with
// floats where these are faster or there are no such instructions.
//
// The sums of a block of rows × panels stay in registers for all inputs. Knows matrices; does not know layers.

#pragma once

#include <vector>

#include "linear.h"

#ifdef TIDEGATE_PRODUCTS

namespace tidegate {

#ifdef __AVX512BF16__

// Adds to sums[r][p] the products of row r of x with panel p, two inputs at once. The loops must be unrolled completely,
// so that the sums stay in registers.
template <int kRows, int kPanels>
[[gnu::always_inline]] inline void add_dots(__m512 (&sums)[kRows][kPanels], const bf16 *x, const bf16 *weight,
                                            Index in) {
    for (Index k = 0; k < in; k += 2) {
        __m512bh panel[kPanels];
#pragma GCC unroll 16
        for (int p = 0; p < kPanels; p++) panel[p] = (__m512bh)_mm512_loadu_si512(weight + (p * in + k) * kPanel);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; r++) {
            int32_t pair;
            std::memcpy(&pair, x + r * in + k, sizeof pair);
            const __m512bh inputs = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 16
            for (int p = 0; p < kPanels; p++) sums[r][p] = _mm512_dpbf16_ps(sums[r][p], inputs, panel[p]);
        }
    }
}

#endif

// The same with floats, one input after the other. The rows are widened for all panels, a weight when it is read.
template <int kRows, int kPanels>
[[gnu::always_inline]] inline void add_floats(__m512 (&sums)[kRows][kPanels], const bf16 *x, const bf16 *weight,
                                              Index in) {
    const DenormalsAreZero zero;
    thread_local std::vector<float> t_wide;
    t_wide.resize(kRows * in);
    float *wide = t_wide.data();
    for (Index k = 0; k < kRows * in; k++) wide[k] = load(x + k);
    const __m512i upper = _mm512_set1_epi32(0xffff0000);
    for (Index k = 0; k < in; k += 2) {
        __m512 first[kPanels], second[kPanels];
#pragma GCC unroll 16
        for (int p = 0; p < kPanels; p++) {
            const __m512i pairs = _mm512_loadu_si512(weight + (p * in + k) * kPanel);
            first[p] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
            second[p] = _mm512_castsi512_ps(_mm512_and_si512(pairs, upper));
        }
#pragma GCC unroll 16
        for (int r = 0; r < kRows; r++) {
            const __m512 one = _mm512_set1_ps(wide[r * in + k]), other = _mm512_set1_ps(wide[r * in + k + 1]);
#pragma GCC unroll 16
            for (int p = 0; p < kPanels; p++) {
                sums[r][p] = _mm512_fmadd_ps(one, first[p], sums[r][p]);
                sums[r][p] = _mm512_fmadd_ps(other, second[p], sums[r][p]);
            }
        }
    }
}

// Computes kRows rows of out = x · weightᵀ + bias (out += … if kAdd) for the outputs of panels [first, first +
// kPanels), in one thread.
template <int kRows, int kPanels, bool kAdd>
inline void multiply_block(bf16 *out, const bf16 *x, const Linear &linear, Index first) {
    __m512 sums[kRows][kPanels];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 16
        for (int p = 0; p < kPanels; p++) sums[r][p] = bias_of(linear, first + p);
    const bf16 *weight = linear.weight + first * linear.in * kPanel;
#ifdef __AVX512BF16__
    if (!g_multiplies_floats)
        add_dots(sums, x, weight, linear.in);
    else
#endif
        add_floats(sums, x, weight, linear.in);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 16
        for (int p = 0; p < kPanels; p++) {
            bf16 *to = out + r * linear.out + (first + p) * kPanel;
            narrow(to, kAdd ? _mm512_add_ps(widen(to), sums[r][p]) : sums[r][p]);
        }
}

// Computes all rows for kPanels panels in one thread: blocks of kMost rows, and what is left in blocks of half as many.
// The panels stay in the processor's cache.
template <int kMost, int kPanels, bool kAdd>
inline void multiply_panels(bf16 *out, const bf16 *x, const Linear &linear, Index rows, Index first) {
    for (; rows >= kMost; rows -= kMost, out += kMost * linear.out, x += kMost * linear.in)
        multiply_block<kMost, kPanels, kAdd>(out, x, linear, first);
    if constexpr (kMost > 1) {
        if (rows) multiply_panels<kMost / 2, kPanels, kAdd>(out, x, linear, rows, first);
    }
}

// Computes all rows for up to kPanels panels from `first` on, in one thread.
template <int kMost, int kPanels, bool kAdd>
inline void multiply_up_to(bf16 *out, const bf16 *x, const Linear &linear, Index rows, Index first) {
    const Index panels = linear.out / kPanel;
    if (first + kPanels <= panels)
        multiply_panels<kMost, kPanels, kAdd>(out, x, linear, rows, first);
    else
        for (Index p = first; p < panels; p++) multiply_panels<kMost, 1, kAdd>(out, x, linear, rows, p);
}

// Returns how many panels a thread computes at once. With few rows they are many, so that more of the weight is loaded
// from memory at the same time. With many rows they are few, which leaves registers for rows.
inline Index panels_by_dots(Index rows) { return rows == 1 ? 8 : rows <= 4 ? 6 : 3; }

// Computes out = x · weightᵀ + bias (out += … if kAdd) for out (rows, linear.out) and x (rows, linear.in), for up to
// panels_by_dots(rows) panels from `first` on, in one thread.
template <bool kAdd>
inline void multiply_by_dots(bf16 *out, const bf16 *x, const Linear &linear, Index rows, Index first) {
    if (rows == 1)
        multiply_up_to<1, 8, kAdd>(out, x, linear, rows, first);
    else if (rows <= 4)
        multiply_up_to<4, 6, kAdd>(out, x, linear, rows, first);
    else
        multiply_up_to<8, 3, kAdd>(out, x, linear, rows, first);
}

}  // namespace tidegate

#endif
