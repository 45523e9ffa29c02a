// A decoder layer between its matrix products: normalisation, rotary embedding and activation, row by row. Knows rows; not
// sequences or attention. Each function is done by all threads of the parallel region around it, and ends together.

#pragma once

#include "numbers.h"

namespace tidegate {

template <typename T> inline float mean_square(const T *x, Index n) {
    float sum = 0.0f;
    for (Index i = 0; i < n; i++) {
        float v = load(x + i);
        sum += v * v;
    }
    return sum / float(n);
}

// out = x / rms(x) · weight, one row; the normalised value is rounded to T before the weight, as models are trained.
template <typename T> inline void normalise(T *out, const T *x, const T *weight, Index n, float eps) {
    float scale = 1.0f / __builtin_sqrtf(mean_square(x, n) + eps);
    for (Index i = 0; i < n; i++) {
        T rounded;
        store(&rounded, load(x + i) * scale);
        store(out + i, load(&rounded) * load(weight + i));
    }
}

template <typename T>
void rms_norm(T *out, const T *x, const T *weight, Index rows, Index n, float eps) {
#pragma omp for
    for (Index r = 0; r < rows; r++) normalise(out + r * n, x + r * n, weight, n, eps);
}

// residual += x; out = normalised residual.
template <typename T>
void add_rms_norm(T *out, T *residual, const T *x, const T *weight, Index rows, Index n, float eps) {
#pragma omp for
    for (Index r = 0; r < rows; r++) {
        T *sum = residual + r * n;
        const T *added = x + r * n;
        for (Index i = 0; i < n; i++) store(sum + i, load(sum + i) + load(added + i));
        normalise(out + r * n, sum, weight, n, eps);
    }
}

// out (rows, n) = silu(gate) · up of gate_up (rows, 2n).
template <typename T> void silu_and_mul(T *out, const T *gate_up, Index rows, Index n) {
#pragma omp for
    for (Index r = 0; r < rows; r++) {
        const T *gate = gate_up + r * 2 * n, *up = gate + n;
        for (Index i = 0; i < n; i++) {
            float g = load(gate + i);
            T rounded;
            store(&rounded, g / (1.0f + exponential(-g)));
            store(out + r * n + i, load(&rounded) * load(up + i));
        }
    }
}

// Rotates pairs (i, i + half) of the first `rotary` numbers.
template <typename T> inline void rotate(T *x, const T *cosines, const T *sines, Index rotary) {
    Index half = rotary / 2;
    for (Index i = 0; i < half; i++) {
        float a = load(x + i), b = load(x + half + i);
        store(x + i, a * load(cosines + i) - b * load(sines + i));
        store(x + half + i, b * load(cosines + half + i) + a * load(sines + half + i));
    }
}

// On qkv (rows, (query + 2·kv) · dim), in place: queries and keys normalised (where weights are given) and rotated;
// keys and values also go to their slots. The cache of one layer is (2, kv, slots, dim).
template <typename T>
void rotate_and_write(T *qkv, T *cache, const Index *slots, const T *cosines, const T *sines, const T *query_norm,
                      const T *key_norm, float eps, Index rows, Index num_slots, Heads heads) {
    Index width = (heads.query + 2 * heads.kv) * heads.dim, plane = heads.kv * num_slots * heads.dim;
#pragma omp for
    for (Index r = 0; r < rows; r++) {
        T *row = qkv + r * width;
        for (Index h = 0; h < heads.query + heads.kv; h++) {
            T *x = row + h * heads.dim;
            const T *norm = h < heads.query ? query_norm : key_norm;
            if (norm) normalise(x, x, norm, heads.dim, eps);
            rotate(x, cosines + r * heads.rotary, sines + r * heads.rotary, heads.rotary);
        }
        const T *keys = row + heads.query * heads.dim, *values = keys + heads.kv * heads.dim;
        for (Index h = 0; h < heads.kv; h++) {
            Index slot = (h * num_slots + slots[r]) * heads.dim;
            std::memcpy(cache + slot, keys + h * heads.dim, heads.dim * sizeof(T));
            std::memcpy(cache + plane + slot, values + h * heads.dim, heads.dim * sizeof(T));
        }
    }
}

}  // namespace tidegate
