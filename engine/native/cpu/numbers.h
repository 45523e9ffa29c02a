// Numbers as the kernels see them: float and bfloat16 in memory, float in registers.

#pragma once

#include <cstdint>
#include <cstring>

namespace tidegate {

using bf16 = uint16_t;
using Index = int64_t;

inline float load(const float *p) { return *p; }
inline float load(const bf16 *p) {
    uint32_t bits = uint32_t(*p) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline void store(float *p, float value) { *p = value; }
inline void store(bf16 *p, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
    bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    *p = bf16(is_nan ? 0x7fc0 : rounded);
}

// e^x to within 2 units in the last place for x <= 0 and little above; branch-free, so that loops over it vectorise.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float y = x * 1.44269504f;
    float whole = __builtin_floorf(y);
    float f = (y - whole) * 0.693147181f;
    float p = 1.0f + f * (1.0f + f * (0.5f + f * (0.166666667f + f * (0.0416666667f + f * (0.00833333333f + f * 0.00138888889f)))));
    uint32_t bits = uint32_t(int32_t(whole) + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    return p * scale;
}

inline float hyperbolic_tangent(float x) {
    float clipped = x > 15.0f ? 15.0f : (x < -15.0f ? -15.0f : x);
    float e = exponential(2.0f * clipped);
    return (e - 1.0f) / (e + 1.0f);
}

struct Heads {
    Index query, kv, dim, rotary;
};

}  // namespace tidegate
