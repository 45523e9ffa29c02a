// Rows of activations as signed bytes, 32 inputs with a common step, in the order in which products read them.
// Knows rows; does not know weights.

#pragma once

#include "buffer.h"
#include "linear.h"

#ifdef TIDEGATE_PRODUCTS

namespace tidegate {

constexpr Index kRowGroup = 32;  // inputs of a row with a common step

// What is known of a block of n rows that are multiplied together; one number a row lies beside the next row's.
struct RowBlock {
    const int8_t *bytes;         // (in / 4, n, 4)
    const float *steps, *whole;  // (in / 32, n): the step, and the step times the sum of the group's bytes
    const int32_t *minus16, *minus32;  // (in / 16, n), (in / 32, n): -128 times the sum of 16 or 32 bytes

    template <int kGroup> const int32_t *minus() const { return kGroup == 16 ? minus16 : minus32; }
};

// Returns the largest magnitude of 32 numbers, as the bits of a bfloat16.
inline uint16_t largest_of(__m512i numbers) {
    const __m512i magnitudes = _mm512_and_si512(numbers, _mm512_set1_epi16(0x7fff));
    const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(magnitudes), _mm512_extracti64x4_epi64(magnitudes, 1));
    const __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    const __m128i inverted = _mm_xor_si128(quarter, _mm_set1_epi16(-1));  // there is an instruction for the smallest
    return uint16_t(~_mm_extract_epi16(_mm_minpos_epu16(inverted), 0));
}

class RoundedRows {
  public:
    // Rounds `rows` rows of n inputs, a multiple of 32, for blocks of 8, 4, 2 and 1 rows.
    void round(const bf16 *x, Index rows, Index n) {
        in = n;
        int8_t *bytes = bytes_.of(rows * n);
        float *steps = steps_.of(rows * n / kRowGroup), *whole = whole_.of(rows * n / kRowGroup);
        int32_t *minus16 = minus16_.of(rows * n / 16), *minus32 = minus32_.of(rows * n / kRowGroup);
        for (Index r = 0, block; r < rows; r += block) {
            block = block_of(rows - r);
            for (Index own = 0; own < block; own++)
                for (Index g = 0; g < n / kRowGroup; g++) {
                    const Index at = r * n / kRowGroup + g * block + own;
                    int32_t halves[2];
                    round_group(bytes + r * n + g * kRowGroup * block + own * 4, block, steps[at], halves,
                                x + (r + own) * n + g * kRowGroup);
                    minus16[r * n / 16 + 2 * g * block + own] = -128 * halves[0];
                    minus16[r * n / 16 + (2 * g + 1) * block + own] = -128 * halves[1];
                    minus32[at] = -128 * (halves[0] + halves[1]);
                    whole[at] = steps[at] * float(halves[0] + halves[1]);
                }
        }
        last = {bytes, steps, whole, minus16, minus32};
    }

    // Returns how many rows the next block has, if `left` rows are left.
    static Index block_of(Index left) { return left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1; }

    // Returns the block that begins with row `r`.
    RowBlock at(Index r) const {
        const Index groups = r * in / kRowGroup;
        return {last.bytes + r * in, last.steps + groups, last.whole + groups, last.minus16 + 2 * groups,
                last.minus32 + groups};
    }

  private:
    // Rounds 32 numbers to bytes, four of which lie side by side in every 4 · `block` bytes, and sums each half. If one
    // of the numbers is NaN or infinite, the step is NaN, and so is each product of the row.
    static void round_group(int8_t *to, Index block, float &step, int32_t (&halves)[2], const bf16 *x) {
        const __m512i numbers = _mm512_loadu_si512(x);
        const bf16 largest = largest_of(numbers);
        const float most = load(&largest);
        const bool is_finite = largest < 0x7f80;
        step = is_finite ? most / 127.0f : __builtin_nanf("");
        const __m512 inverse = _mm512_set1_ps(is_finite && most > 1e-30f ? 127.0f / most : 0.0f);
        alignas(16) int32_t fours[8];
        for (int h = 0; h < 2; h++) {
            const __m256i half = h ? _mm512_extracti64x4_epi64(numbers, 1) : _mm512_castsi512_si256(numbers);
            const __m512 floats = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
            const __mmask16 finite = is_finite ? 0xffff : 0;
            const __m512i rounded = _mm512_maskz_cvtps_epi32(finite, _mm512_mul_ps(floats, inverse));
            _mm_store_si128((__m128i *)(fours + 4 * h), _mm512_cvtsepi32_epi8(rounded));
            halves[h] = _mm512_reduce_add_epi32(rounded);
        }
        for (int k = 0; k < 8; k++) std::memcpy(to + k * 4 * block, fours + k, 4);
    }

    Buffer<int8_t> bytes_;
    Buffer<float> steps_, whole_;
    Buffer<int32_t> minus16_, minus32_;
    RowBlock last{};
    Index in = 0;
};

}  // namespace tidegate

#endif
