// Number types of the kernels: float and bfloat16 in memory, float in registers.

#pragma once

#include <cstdint>
#include <cstring>

namespace tidegate {

using bf16 = uint16_t;
using Index = int64_t;

// Whether products multiply floats. On Intel's processors, a dot product of two bfloat16 numbers in each of 16 lanes
// takes three times as long as a multiplication of 16 floats, so the two multiplications in its place are faster.
#ifdef __AVX512BF16__
inline bool g_multiplies_floats = (__builtin_cpu_init(), __builtin_cpu_is("intel"));
#else
constexpr bool g_multiplies_floats = true;
#endif

// While one exists, its thread takes denormal numbers for 0, as bfloat16 dot products always do. Intel's processors take
// up to 300 times as long for multiplications of floats with denormal numbers.
#ifdef __SSE__
class DenormalsAreZero {
  public:
    DenormalsAreZero() { __builtin_ia32_ldmxcsr(before_ | kFlushToZero | kDenormalsAreZero); }
    ~DenormalsAreZero() { __builtin_ia32_ldmxcsr(before_); }
    DenormalsAreZero(const DenormalsAreZero &) = delete;

  private:
    static constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x40;
    const unsigned before_ = __builtin_ia32_stmxcsr();
};
#else
class DenormalsAreZero {};
#endif

// Reads a number from memory as a float.
inline float load(const float *p) { return *p; }
inline float load(const bf16 *p) {
    uint32_t bits = uint32_t(*p) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Writes a float to memory; bfloat16 is rounded to nearest.
inline void store(float *p, float value) { *p = value; }
inline void store(bf16 *p, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
    bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    *p = bf16(is_nan ? 0x7fc0 : rounded);
}

// Returns e^x, with x clamped to [-87, 88]. The error is at most 2 units in the last place for x <= 0 and slightly
// above 0. With x = whole · ln 2 + f, the function computes e^f by the Taylor polynomial of degree 6, and 2^whole by
// setting the exponent bits. It has no branches, so that loops over it can be vectorised.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float y = x * 1.44269504f;
    float whole = __builtin_floorf(y);
    float f = (y - whole) * 0.693147181f;
    float high = 0.166666667f + f * (0.0416666667f + f * (0.00833333333f + f * 0.00138888889f));
    float p = 1.0f + f * (1.0f + f * (0.5f + f * high));
    uint32_t bits = uint32_t(int32_t(whole) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    return p * scale;
}

// Returns tanh(x) = (e^2x - 1) / (e^2x + 1), with x clamped to [-15, 15]. Beyond this range, the result in float is ±1.
inline float hyperbolic_tangent(float x) {
    float clipped = x > 15.0f ? 15.0f : (x < -15.0f ? -15.0f : x);
    float e = exponential(2.0f * clipped);
    return (e - 1.0f) / (e + 1.0f);
}

// The number of query heads and of KV heads, the size of a head, and how many of a head's numbers are rotated. Numbers are
// rotated with the one beside them if in_pairs, else with the one half of the rotated numbers away.
struct Heads {
    Index query, kv, dim, rotary;
    int32_t in_pairs;
};

}  // namespace tidegate
