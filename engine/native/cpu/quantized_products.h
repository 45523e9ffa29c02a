// Products of rows with an int8 weight, with dot product instructions for bytes (AVX512_VNNI).
//
// A row is rounded to 16-bit numbers, x = step · (256 · high + low) with signed bytes high and low. So its error is at
// most 1/65024 of its largest number, and all sums are exact integers: they do not depend on other rows or on threads.
// Knows matrices; does not know layers.

#pragma once

#include "buffer.h"
#include "linear.h"

#ifdef TIDEGATE_PRODUCTS

namespace tidegate {

constexpr Index kRowsAtOnce = 64;  // rows that a thread rounds and multiplies before the next ones

// Rows as bytes, and for each row its step and its sums of highs and of lows. The bytes of a block of rows lie in the
// order in which its product reads them: (in / 4, rows, 2, 4), highs before lows.
struct ByteRows {
    int8_t *bytes;
    float *steps;
    int32_t (*sums)[2];
};

// Rounds the n numbers of a row to n highs and n lows. If one of the numbers is NaN or infinite, step is NaN, and so is
// each product of the row.
inline void round_row(int8_t *high, int8_t *low, float &step, int32_t (&sums)[2], const bf16 *x, Index n) {
    constexpr float kLargest = 127 * 256;
    uint16_t largest = 0;
    for (Index k = 0; k < n; k++) {
        const uint16_t magnitude = x[k] & 0x7fff;
        largest = magnitude > largest ? magnitude : largest;
    }
    const bf16 bits = largest;
    const float most = load(&bits);
    const bool is_finite = largest < 0x7f80;
    step = is_finite ? most / kLargest : __builtin_nanf("");
    const float inverse = is_finite && most > 1e-30f ? kLargest / most : 0.0f;
    if (inverse == 0.0f) n = 0;
    int32_t high_sum = 0, low_sum = 0;
    for (Index k = 0; k < n; k++) {
        const int32_t number = int32_t(__builtin_rintf(load(x + k) * inverse));
        const int32_t upper = (number + 128) >> 8, lower = number - (upper << 8);
        high[k] = int8_t(upper), low[k] = int8_t(lower);
        high_sum += upper, low_sum += lower;
    }
    sums[0] = high_sum, sums[1] = low_sum;
}

// Rounds rows for blocks of kMost rows, then single rows. Each block of n rows begins at its first row · 2 · in.
template <int kMost> inline void round_rows(const ByteRows &to, const bf16 *x, Index rows, Index in) {
    thread_local Buffer<int8_t> t_row;
    int8_t *high = t_row.of(2 * in), *low = high + in;
    const Index in_blocks = rows - rows % kMost;
    for (Index r = 0; r < rows; r++) {
        std::memset(high, 0, size_t(2 * in));
        round_row(high, low, to.steps[r], to.sums[r], x + r * in, in);
        const Index together = r < in_blocks ? kMost : 1, own = r < in_blocks ? r % kMost : 0;
        int8_t *bytes = to.bytes + (r - own) * 2 * in + own * 8;
        for (Index k = 0; k < in; k += 4, bytes += together * 8)
            std::memcpy(bytes, high + k, 4), std::memcpy(bytes + 4, low + k, 4);
    }
}

// Adds to each of 16 sums the products of four codes and four signed bytes. GCC's function for this instruction copies
// the sums to and from memory.
inline void add_products(__m512i &sums, __m512i codes, __m512i bytes) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(bytes));
}

// Computes kRows rows from `row` on of out = x · weightᵀ + bias (out += … if kAdd) for the outputs of panels [first,
// first + kPanels), in one thread. A code is 128 larger than the weight, so 128 times the sum of a row is taken off.
template <int kRows, int kPanels, bool kAdd>
inline void multiply_byte_block(bf16 *out, const ByteRows &x, Index row, const Linear &linear, Index first) {
    __m512i sums[2 * kRows][kPanels];
#pragma GCC unroll 16
    for (int r = 0; r < 2 * kRows; r++)
#pragma GCC unroll 16
        for (int p = 0; p < kPanels; p++) sums[r][p] = _mm512_set1_epi32(-128 * x.sums[row + r / 2][r % 2]);
    const Index stride = linear.in * kPanel;
    const uint8_t *codes = linear.codes + first * stride;
    const int8_t *bytes = x.bytes + row * 2 * linear.in;
    for (Index k = 0; k < linear.in; k += 4) {
        __m512i panel[kPanels];
#pragma GCC unroll 16
        for (int p = 0; p < kPanels; p++) panel[p] = _mm512_loadu_si512(codes + p * stride + k * kPanel);
#pragma GCC unroll 16
        for (int r = 0; r < 2 * kRows; r++) {
            int32_t four;
            std::memcpy(&four, bytes + (2 * kRows * k + 4 * r), sizeof four);
            const __m512i inputs = _mm512_set1_epi32(four);
#pragma GCC unroll 16
            for (int p = 0; p < kPanels; p++) add_products(sums[r][p], panel[p], inputs);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 16
        for (int p = 0; p < kPanels; p++) {
            const __m512 high = _mm512_cvtepi32_ps(sums[2 * r][p]), low = _mm512_cvtepi32_ps(sums[2 * r + 1][p]);
            const __m512 scale =
                _mm512_mul_ps(_mm512_set1_ps(x.steps[row + r]), _mm512_loadu_ps(linear.scales + (first + p) * kPanel));
            const __m512 whole = _mm512_fmadd_ps(high, _mm512_set1_ps(256.0f), low);
            const __m512 sum = _mm512_fmadd_ps(whole, scale, bias_of(linear, first + p));
            bf16 *to = out + r * linear.out + (first + p) * kPanel;
            narrow(to, kAdd ? _mm512_add_ps(widen(to), sum) : sum);
        }
}

// Computes all rows for kPanels panels in one thread: first blocks of kMost rows, then single rows.
template <int kMost, int kPanels, bool kAdd>
inline void multiply_byte_panels(bf16 *out, const ByteRows &x, const Linear &linear, Index rows, Index first) {
    Index r = 0;
    for (; r + kMost <= rows; r += kMost)
        multiply_byte_block<kMost, kPanels, kAdd>(out + r * linear.out, x, r, linear, first);
    for (; r < rows; r++) multiply_byte_block<1, kPanels, kAdd>(out + r * linear.out, x, r, linear, first);
}

// Computes all rows for this thread's share of the panels. Does not wait for the other threads.
template <int kMost, int kPanels, bool kAdd>
inline void multiply_bytes_in_blocks(bf16 *out, const ByteRows &rounded, const bf16 *x, const Linear &linear,
                                     Index rows) {
    round_rows<kMost>(rounded, x, rows, linear.in);
    const Index panels = linear.out / kPanel, blocks = (panels + kPanels - 1) / kPanels;
#pragma omp for schedule(static) nowait
    for (Index b = 0; b < blocks; b++) {
        const Index first = b * kPanels;
        if (first + kPanels <= panels)
            multiply_byte_panels<kMost, kPanels, kAdd>(out, rounded, linear, rows, first);
        else
            for (Index p = first; p < panels; p++) multiply_byte_panels<kMost, 1, kAdd>(out, rounded, linear, rows, p);
    }
}

// Computes out = x · weightᵀ + bias (out += … if kAdd) for out (rows, linear.out) and x (rows, linear.in), with all
// threads of the enclosing parallel region. Each thread rounds all rows for itself, which takes less time than waiting
// for others would with few threads.
template <bool kAdd> void multiply_by_bytes(bf16 *out, const bf16 *x, const Linear &linear, Index rows) {
    thread_local Buffer<int8_t> t_bytes;
    float steps[kRowsAtOnce];
    int32_t sums[kRowsAtOnce][2];
    const ByteRows rounded{t_bytes.of((rows < kRowsAtOnce ? rows : kRowsAtOnce) * 2 * linear.in), steps, sums};
    for (Index done = 0; done < rows; done += kRowsAtOnce) {
        const Index now = rows - done < kRowsAtOnce ? rows - done : kRowsAtOnce;
        bf16 *to = out + done * linear.out;
        const bf16 *from = x + done * linear.in;
        if (now == 1)
            multiply_bytes_in_blocks<1, 8, kAdd>(to, rounded, from, linear, now);
        else if (now < 4)
            multiply_bytes_in_blocks<2, 5, kAdd>(to, rounded, from, linear, now);
        else
            multiply_bytes_in_blocks<4, 3, kAdd>(to, rounded, from, linear, now);
    }
#pragma omp barrier
}

}  // namespace tidegate

#endif
