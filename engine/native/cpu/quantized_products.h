// Products of rows with a weight of 4 or 8 bits by groups, with dot product instructions for bytes (AVX512_VNNI).
//
// Rows are rounded to signed bytes, too: 32 inputs have a common step, 1/127 of their largest number. The sums of a
// group are exact integers; the groups' sums are added as floats, in the order of the inputs. So a result does not
// depend on other rows or on threads. Knows matrices; does not know layers.

#pragma once

#include "buffer.h"
#include "rounded_rows.h"

#ifdef TIDEGATE_PRODUCTS

namespace tidegate {

// Adds to each of 16 sums the products of four codes and four signed bytes, which are the same for all sums. GCC's
// function for this instruction copies the sums to and from memory.
inline void add_products(__m512i &sums, __m512i codes, const int8_t *four) {
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(codes), "m"(*(const int32_t *)four));
}

inline __m512 read_halves(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }

// Adds to sums[r] the products of one group's codes, `kInputs` inputs of 16 outputs, and of row r's bytes.
template <int kBits, int kInputs, int kRows>
inline void add_group(__m512i (&sums)[kRows], const uint8_t *codes, const int8_t *bytes) {
    const __m512i nibbles = _mm512_set1_epi8(15);
#pragma GCC unroll 8
    for (int k = 0; k < kInputs; k += 4) {
        __m512i four;
        if constexpr (kBits == 8) {
            four = _mm512_loadu_si512(codes + k * kPanel);
        } else {
            const __m512i both = _mm512_loadu_si512(codes + k / 8 * 64);
            four = _mm512_and_si512(k % 8 ? _mm512_srli_epi16(both, 4) : both, nibbles);
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; r++) add_products(sums[r], four, bytes + (k * kRows + 4 * r));
    }
}

// Computes the rows of a block for the outputs of panels [first, first + kPanels) of a part, in one thread. `out` is
// where the block's first row and the part's first output are.
template <int kBits, int kGroup, bool kOffsets, int kRows, int kPanels, bool kAdd>
inline void multiply_groups(bf16 *out, const RowBlock &x, const Linear &linear, const Part &part, Index first) {
    constexpr Index kHalves = kRowGroup / kGroup;  // groups of the weight in a group of the rows
    constexpr Index kBytes = kGroup * kPanel * kBits / 8;
    const Index groups = linear.in / kGroup;
    __m512 total[kPanels][kRows] = {};
    for (Index g = 0; g < groups; g += kHalves)
#pragma GCC unroll 8
        for (int p = 0; p < kPanels; p++)
#pragma GCC unroll 2
            for (Index h = 0; h < kHalves; h++) {
                const Index at = (first + p) * groups + g + h;
                const int32_t *minus = x.minus<kGroup>() + (g + h) * kRows;
                const float *steps = x.steps + g / kHalves * kRows;
                __m512i sums[kRows];
#pragma GCC unroll 8
                for (int r = 0; r < kRows; r++) {
                    sums[r] = kOffsets ? _mm512_setzero_si512() : _mm512_set1_epi32(minus[r]);
                    if constexpr (kBits == 4 && !kOffsets) sums[r] = _mm512_srai_epi32(sums[r], 4);
                }
                add_group<kBits, kGroup, kRows>(sums, part.codes + at * kBytes, x.bytes + (g + h) * kGroup * kRows);
                const __m512 scales = read_halves(part.scales + at * kPanel);
#pragma GCC unroll 8
                for (int r = 0; r < kRows; r++)
                    total[p][r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[r]),
                                                  _mm512_mul_ps(scales, _mm512_set1_ps(steps[r])), total[p][r]);
                if constexpr (kOffsets) {
                    const __m512 offsets = read_halves(part.offsets + at * kPanel);
                    const float *whole = x.whole + g * kRows;
#pragma GCC unroll 8
                    for (int r = 0; r < kRows; r++)
                        total[p][r] = _mm512_fmadd_ps(offsets, _mm512_set1_ps(whole[r]), total[p][r]);
                }
            }
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; p++)
#pragma GCC unroll 8
        for (int r = 0; r < kRows; r++) {
            const Index panel = first + p;
            const __m512 sum = _mm512_fmadd_ps(total[p][r], _mm512_loadu_ps(part.units + panel * kPanel),
                                               bias_of(linear, part.first / kPanel + panel));
            bf16 *to = out + r * linear.out + panel * kPanel;
            narrow(to, kAdd ? _mm512_add_ps(widen(to), sum) : sum);
        }
}

constexpr Index kPanelsTogether = 4;  // panels that a thread computes one after another or at once

// Computes a block of rows for up to 4 panels from `first` on: with few rows, several panels at once.
template <int kBits, int kGroup, bool kOffsets, int kRows, bool kAdd>
inline void multiply_panels(bf16 *out, const RowBlock &x, const Linear &linear, const Part &part, Index first,
                            Index panels) {
    constexpr int kAtOnce = 8 / kRows < kPanelsTogether ? 8 / kRows : kPanelsTogether;
    Index p = 0;
    for (; p + kAtOnce <= panels; p += kAtOnce)
        multiply_groups<kBits, kGroup, kOffsets, kRows, kAtOnce, kAdd>(out, x, linear, part, first + p);
    for (; p < panels; p++) multiply_groups<kBits, kGroup, kOffsets, kRows, 1, kAdd>(out, x, linear, part, first + p);
}

// Returns the number of blocks of a part: up to 4 panels each.
inline Index num_blocks(const Part &part) {
    return (part.out / kPanel + kPanelsTogether - 1) / kPanelsTogether;
}

// Computes all rows for a block of a part's panels, in one thread.
template <int kBits, int kGroup, bool kOffsets, bool kAdd>
void multiply_block(bf16 *out, const RoundedRows &x, const Linear &linear, const Part &part, Index rows, Index number) {
    const Index first = number * kPanelsTogether, left = part.out / kPanel - first;
    const Index some = left < kPanelsTogether ? left : kPanelsTogether;
    for (Index r = 0; r < rows; r += x.block_of(rows - r)) {
        bf16 *to = out + r * linear.out + part.first;
        const RowBlock block = x.at(r);
        switch (x.block_of(rows - r)) {
        case 8:
            multiply_panels<kBits, kGroup, kOffsets, 8, kAdd>(to, block, linear, part, first, some);
            break;
        case 4:
            multiply_panels<kBits, kGroup, kOffsets, 4, kAdd>(to, block, linear, part, first, some);
            break;
        case 2:
            multiply_panels<kBits, kGroup, kOffsets, 2, kAdd>(to, block, linear, part, first, some);
            break;
        default:
            multiply_panels<kBits, kGroup, kOffsets, 1, kAdd>(to, block, linear, part, first, some);
        }
    }
}

template <bool kAdd>
void multiply_block(bf16 *out, const RoundedRows &x, const Linear &linear, const Part &part, Index rows, Index number) {
    if (part.bits == 4 && part.offsets) return multiply_block<4, 32, true, kAdd>(out, x, linear, part, rows, number);
    if (part.bits == 4) return multiply_block<4, 32, false, kAdd>(out, x, linear, part, rows, number);
    if (part.offsets) return multiply_block<8, 32, true, kAdd>(out, x, linear, part, rows, number);
    if (part.group == 16) return multiply_block<8, 16, false, kAdd>(out, x, linear, part, rows, number);
    multiply_block<8, 32, false, kAdd>(out, x, linear, part, rows, number);
}

// Returns the number of blocks of all parts of a quantised weight.
inline Index num_blocks(const Linear &linear) {
    Index blocks = 0;
    for (Index p = 0; p < linear.num_parts; p++) blocks += num_blocks(linear.parts[p]);
    return blocks;
}

// Computes out = x · weightᵀ + bias of all rows for a block of a quantised weight, in one thread.
inline void multiply_block(bf16 *out, const RoundedRows &x, const Linear &linear, Index rows, Index number) {
    const Part *part = linear.parts;
    for (; number >= num_blocks(*part); part++) number -= num_blocks(*part);
    multiply_block<false>(out, x, linear, *part, rows, number);
}

constexpr Index kRowsAtOnce = 64;  // rows that a thread rounds and multiplies before the next ones

// Computes out = x · weightᵀ + bias (out += … if kAdd) for out (rows, linear.out) and x (rows, linear.in), with all
// threads of the enclosing parallel region. Each thread rounds all rows for itself, which takes less time than waiting
// for others would with few threads.
template <bool kAdd> void multiply_quantized(bf16 *out, const bf16 *x, const Linear &linear, Index rows) {
    thread_local RoundedRows t_rounded;
    for (Index done = 0; done < rows; done += kRowsAtOnce) {
        const Index now = rows - done < kRowsAtOnce ? rows - done : kRowsAtOnce;
        t_rounded.round(x + done * linear.in, now, linear.in);
        for (Index p = 0; p < linear.num_parts; p++) {
            const Part &part = linear.parts[p];
#pragma omp for schedule(static) nowait
            for (Index block = 0; block < num_blocks(part); block++)
                multiply_block<kAdd>(out + done * linear.out, t_rounded, linear, part, now, block);
        }
    }
#pragma omp barrier
}

}  // namespace tidegate

#endif
