// A linear layer's weight as the products want it, and sixteen outputs at a time of it. Knows no way to multiply.
//
// A weight (out, in) is packed in panels of 16 outputs: (out / 16, in / 2, 16, 2), so that one load has a pair of inputs
// for 16 outputs, and 16 such loads are what a tile of AMX takes.

#pragma once

#include "numbers.h"

#ifdef __AVX512BF16__
#include <immintrin.h>

namespace tidegate {

constexpr Index kPanel = 16;  // outputs

struct Linear {
    const bf16 *weight;  // packed
    const bf16 *bias;    // or null
    Index out, in;       // multiples of 16 and 2
};

inline __m512 widen(const bf16 *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

inline void narrow(bf16 *p, __m512 sums) { _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(sums)); }

inline __m512 bias_of(const Linear &linear, Index panel) {
    return linear.bias ? widen(linear.bias + panel * kPanel) : _mm512_setzero_ps();
}

}  // namespace tidegate

#endif
