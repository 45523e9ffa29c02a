// A decoder layer's work between matrix products: normalisation, rotary embedding and activation, row by row. Knows
// rows; does not know sequences or attention. All threads of the enclosing parallel region compute a kernel together;
// one thread computes a row. Each kernel ends with a barrier. Rows are contiguous.

#pragma once

#include "numbers.h"

namespace tidegate {

// Returns Σ x² / n of one row.
template <typename T> inline float mean_square(const T *x, Index n) {
    float sum = 0.0f;
    for (Index i = 0; i < n; i++) {
        float v = load(x + i);
        sum += v * v;
    }
    return sum / float(n);
}

// A root-mean-square norm: norm(x) = x / sqrt(mean(x²) + eps) · weight.
struct Norm {
    const float *weight;  // null if this norm is left out
    float eps;
    int32_t rounds;  // whether x / sqrt(…) is rounded to the dtype before it is multiplied by the weight
};

// The function of a gate: g / (1 + e^-g), or GELU in its approximation by a hyperbolic tangent.
enum Activation : int32_t { kSilu = 0, kGeluTanh = 1 };

// Computes out = norm(x) for one row of n numbers; out may be x.
template <typename T> inline void normalise(T *out, const T *x, Norm norm, Index n) {
    float scale = 1.0f / __builtin_sqrtf(mean_square(x, n) + norm.eps);
    const float *weight = norm.weight;
    if (!norm.rounds) {
        for (Index i = 0; i < n; i++) store(out + i, load(x + i) * scale * weight[i]);
        return;
    }
    for (Index i = 0; i < n; i++) {
        T rounded;
        store(&rounded, load(x + i) * scale);
        store(out + i, load(&rounded) * weight[i]);
    }
}

// Computes out = norm(x) for x and out (rows, n).
template <typename T> void rms_norm(T *out, const T *x, Norm norm, Index rows, Index n) {
#pragma omp for
    for (Index r = 0; r < rows; r++) normalise(out + r * n, x + r * n, norm, n);
}

// Computes residual += scale · norm(x) for residual and x (rows, n), and overwrites x.
template <typename T> void add_branch(T *residual, T *x, Norm norm, float scale, Index rows, Index n) {
#pragma omp for
    for (Index r = 0; r < rows; r++) {
        T *sum = residual + r * n, *added = x + r * n;
        if (norm.weight) normalise(added, added, norm, n);
        for (Index i = 0; i < n; i++) store(sum + i, load(sum + i) + scale * load(added + i));
    }
}

// Computes residual += x, then out = norm(residual); all are (rows, n).
template <typename T> void add_rms_norm(T *out, T *residual, const T *x, Norm norm, Index rows, Index n) {
#pragma omp for
    for (Index r = 0; r < rows; r++) {
        T *sum = residual + r * n;
        const T *added = x + r * n;
        for (Index i = 0; i < n; i++) store(sum + i, load(sum + i) + load(added + i));
        normalise(out + r * n, sum, norm, n);
    }
}

// Computes out = activation(gate) · up for out (rows, n); each row of gate_up (rows, 2n) holds gate, then up. With
// z = √(2/π) · (g + 0.044715 g³), GELU is g · (1 + tanh z) / 2 = g / (1 + e^-2z).
template <typename T, Activation kActivation>
void activate_and_mul(T *out, const T *gate_up, Index rows, Index n) {
#pragma omp for
    for (Index r = 0; r < rows; r++) {
        const T *gate = gate_up + r * 2 * n, *up = gate + n;
        for (Index i = 0; i < n; i++) {
            float g = load(gate + i);
            float z = kActivation == kSilu ? g : 1.5957691216f * (g + 0.044715f * g * g * g);
            T rounded;
            store(&rounded, g / (1.0f + exponential(-z)));
            store(out + r * n + i, load(&rounded) * load(up + i));
        }
    }
}

template <typename T>
void activate_and_mul(T *out, const T *gate_up, Index rows, Index n, Activation activation) {
    if (activation == kSilu) return activate_and_mul<T, kSilu>(out, gate_up, rows, n);
    activate_and_mul<T, kGeluTanh>(out, gate_up, rows, n);
}

// Rotates the pairs (a, b) = (x[i], x[i + rotary / 2]) of one head: a becomes a · cos - b · sin, b becomes b · cos + a
// · sin.
template <typename T> inline void rotate(T *x, const T *cosines, const T *sines, Index rotary) {
    Index half = rotary / 2;
    for (Index i = 0; i < half; i++) {
        float a = load(x + i), b = load(x + half + i);
        store(x + i, a * load(cosines + i) - b * load(sines + i));
        store(x + half + i, b * load(cosines + half + i) + a * load(sines + half + i));
    }
}

// Normalises and rotates queries and keys of qkv (rows, (query + 2 · kv) · dim) in place, and copies keys and values to
// slots[row] of the layer's cache (2, kv, slots, dim). cosines and sines are (rows, rotary). Assumes that no two rows
// have the same slot, except padding rows.
template <typename T>
void rotate_and_write(T *qkv, T *cache, const Index *slots, const T *cosines, const T *sines, Norm query_norm,
                      Norm key_norm, Index rows, Index num_slots, Heads heads) {
    Index width = (heads.query + 2 * heads.kv) * heads.dim, plane = heads.kv * num_slots * heads.dim;
#pragma omp for
    for (Index r = 0; r < rows; r++) {
        T *row = qkv + r * width;
        for (Index h = 0; h < heads.query + heads.kv; h++) {
            T *x = row + h * heads.dim;
            Norm norm = h < heads.query ? query_norm : key_norm;
            if (norm.weight) normalise(x, x, norm, heads.dim);
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
