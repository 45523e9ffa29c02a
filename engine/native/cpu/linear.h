// The packed weight of a linear layer, and functions that handle 16 outputs at once. Does not know how products are
// computed.
//
// A bfloat16 weight (out, in) is packed in panels of 16 outputs: (out / 16, in / 2, 16, 2). One 64-byte load reads the
// weights of a pair of inputs for 16 outputs, and 16 such loads fill an AMX tile. Codes of 8 bits are packed likewise with
// four inputs: (out / 16, in / 4, 16, 4). Codes of 4 bits are (out / 16, in / 8, 16, 4) bytes, each with one of the first
// four inputs in its lower half and one of the next four in its upper half.

#pragma once

#include "numbers.h"

// Bytes are multiplied by instructions for that, and bfloat16 numbers also without.
#if defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define TIDEGATE_PRODUCTS
#include <immintrin.h>

namespace tidegate {

constexpr Index kPanel = 16;  // outputs of a panel

// A quantised weight of some of a layer's outputs (`GroupedWeight` in grouped_weight.py). A weight is unit · (scale ·
// (code - zero) + offset), where zero is half of the codes' range if there are no offsets, else 0.
struct Part {
    const uint8_t *codes;             // packed in panels
    const uint16_t *scales, *offsets;  // (out / 16, in / group, 16), float16; offsets may be null
    const float *units;               // (out,)
    Index first, out;                 // the first of the outputs, and their number; multiples of 16
    int32_t bits, group;              // bits of a code; inputs of a group
};

struct Linear {
    const bf16 *weight;  // packed in panels; null for a quantised weight
    const Part *parts;   // of a quantised weight
    Index num_parts;
    const bf16 *bias;  // (out,), or null
    Index out, in;     // a multiple of 16, and a multiple of 2 (bfloat16) or 32 (quantised)
};

// Reads 16 bfloat16 numbers as floats.
inline __m512 widen(const bf16 *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

// Writes 16 floats as bfloat16, rounded to nearest.
inline void narrow(bf16 *p, __m512 sums) {
#ifdef __AVX512BF16__
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(sums));
#else
    alignas(64) float numbers[kPanel];
    _mm512_store_ps(numbers, sums);
    for (int i = 0; i < kPanel; i++) store(p + i, numbers[i]);
#endif
}

// Returns the biases of a panel, or zeros if the layer has no bias.
inline __m512 bias_of(const Linear &linear, Index panel) {
    return linear.bias ? widen(linear.bias + panel * kPanel) : _mm512_setzero_ps();
}

}  // namespace tidegate

#endif
