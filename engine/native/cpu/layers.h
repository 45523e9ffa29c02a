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
    const float *weight;  // (n,); null if this norm is left out
    float eps;
    int32_t rounds;  // whether x / sqrt(…) is rounded to the dtype before it is multiplied by the weight
    Index n;
};

// How a gate g and u, of the same input, become one number: g / (1 + e^-g) · u; GELU(g) · u, with GELU in its
// approximation by a hyperbolic tangent; or g / (1 + e^-1.702g) · (u + 1), with g and |u| at most 7 (gpt-oss).
enum Activation : int32_t { kSilu = 0, kGeluTanh = 1, kClamped = 2 };

// Computes out = norm(x) for norm.n numbers; out may be x.
template <typename T> inline void normalise(T *out, const T *x, Norm norm) {
    const Index n = norm.n;
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
    for (Index r = 0; r < rows; r++) normalise(out + r * n, x + r * n, norm);
}

// Computes residual += scale · norm(x) for residual and x (rows, n), and overwrites x.
template <typename T> void add_branch(T *residual, T *x, Norm norm, float scale, Index rows, Index n) {
#pragma omp for
    for (Index r = 0; r < rows; r++) {
        T *sum = residual + r * n, *added = x + r * n;
        if (norm.weight) normalise(added, added, norm);
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
        normalise(out + r * n, sum, norm);
    }
}

// Computes out (rows, n) from gates and ups; each row of gate_up (rows, 2n) holds the gates, then the ups. With
// z = √(2/π) · (g + 0.044715 g³), GELU is g · (1 + tanh z) / 2 = g / (1 + e^-2z).
template <typename T, Activation kActivation>
void activate_and_mul(T *out, const T *gate_up, Index rows, Index n) {
#pragma omp for
    for (Index r = 0; r < rows; r++) {
        const T *gate = gate_up + r * 2 * n, *up = gate + n;
        for (Index i = 0; i < n; i++) {
            float g = load(gate + i), u = load(up + i), z = g;
            if (kActivation == kGeluTanh) z = 1.5957691216f * (g + 0.044715f * g * g * g);
            if (kActivation == kClamped) {
                g = g > 7.0f ? 7.0f : g;
                u = u > 7.0f ? 8.0f : (u < -7.0f ? -6.0f : u + 1.0f);
                z = 1.702f * g;
            }
            T rounded;
            store(&rounded, g / (1.0f + exponential(-z)));
            store(out + r * n + i, load(&rounded) * u);
        }
    }
}

template <typename T>
void activate_and_mul(T *out, const T *gate_up, Index rows, Index n, Activation activation) {
    if (activation == kSilu) return activate_and_mul<T, kSilu>(out, gate_up, rows, n);
    if (activation == kClamped) return activate_and_mul<T, kClamped>(out, gate_up, rows, n);
    activate_and_mul<T, kGeluTanh>(out, gate_up, rows, n);
}

// Rotates pairs of one head's numbers, (x[i], x[half + i]) or (x[2i], x[2i + 1]) for i < half = rotary / 2: (a, b) becomes
// (a · cos - b · sin, b · cos + a · sin). Cosines and sines of the pairs are there twice: [0, half) and [half, rotary).
template <bool kInPairs, typename T> inline void rotate(T *x, const T *cosines, const T *sines, Index rotary) {
    const Index half = rotary / 2, step = kInPairs ? 2 : 1, apart = kInPairs ? 1 : half;
    for (Index i = 0; i < half; i++) {
        T *first = x + step * i, *second = first + apart;
        float a = load(first), b = load(second);
        store(first, a * load(cosines + i) - b * load(sines + i));
        store(second, b * load(cosines + half + i) + a * load(sines + half + i));
    }
}

// Normalises and rotates queries and keys of qkv (rows, (query + 2 · kv) · dim) in place, and copies keys and values to
// slots[row] of the layer's cache (2, kv, slots, dim). A norm of n numbers takes each n of them: those of a head, or all.
// cosines and sines are (rows, rotary). Assumes that no two rows have the same slot, except padding rows.
template <typename T>
void rotate_and_write(T *qkv, T *cache, const Index *slots, const T *cosines, const T *sines, Norm query_norm,
                      Norm key_norm, Index rows, Index num_slots, Heads heads) {
    Index width = (heads.query + 2 * heads.kv) * heads.dim, plane = heads.kv * num_slots * heads.dim;
#pragma omp for
    for (Index r = 0; r < rows; r++) {
        T *row = qkv + r * width, *keys = row + heads.query * heads.dim, *values = keys + heads.kv * heads.dim;
        if (query_norm.weight)
            for (T *x = row; x < keys; x += query_norm.n) normalise(x, x, query_norm);
        if (key_norm.weight)
            for (T *x = keys; x < values; x += key_norm.n) normalise(x, x, key_norm);
        auto turn = heads.in_pairs ? rotate<true, T> : rotate<false, T>;
        for (Index h = 0; h < heads.query + heads.kv; h++)
            turn(row + h * heads.dim, cosines + r * heads.rotary, sines + r * heads.rotary, heads.rotary);
        for (Index h = 0; h < heads.kv; h++) {
            Index slot = (h * num_slots + slots[r]) * heads.dim;
            std::memcpy(cache + slot, keys + h * heads.dim, heads.dim * sizeof(T));
            std::memcpy(cache + plane + slot, values + h * heads.dim, heads.dim * sizeof(T));
        }
    }
}

}  // namespace tidegate
