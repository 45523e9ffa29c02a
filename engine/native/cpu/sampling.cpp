// Samples the next token of each row of logits, in two or three passes. Knows numbers; does not know sequences.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "numbers.h"

namespace tidegate {
namespace {

constexpr Index kPart = 1024;      // weights of this many tokens are summed in float; these sums are added in double
constexpr Index kBuckets = 4096;   // equal parts of a row's range of logits
constexpr float kLowest = -std::numeric_limits<float>::infinity();

// The sampling parameters of one row. Temperature 0 means greedy. top_p 1, min_p 0 and top_k 0 switch these options
// off, as in the API. `uniform` is a random number in (0, 1).
struct Rule {
    float temperature, uniform, top_p, min_p;
    int64_t top_k;
};

// Returns the highest logit, or NaN if any logit is NaN.
template <typename T> float highest_of(const T *logits, Index n) {
    float best = kLowest;
    uint32_t broken = 0;
    for (Index i = 0; i < n; i++) {
        float x = load(logits + i);
        best = x > best ? x : best;
        broken |= x != x;
    }
    return broken ? std::numeric_limits<float>::quiet_NaN() : best;
}

// The tokens of a row, counted and summed in buckets by logit; the first bucket has the highest logits. A threshold's
// bucket is found from the counts and sums, so that only the tokens of that bucket are sorted. The weight of a logit x
// is e^((x - best) · inverse).
template <typename T> class Buckets {
  public:
    Buckets(const T *logits, Index n, float best, float inverse)
        : logits_(logits), n_(n), best_(best), inverse_(inverse) {
        float lowest = best;
        for (Index i = 0; i < n; i++) {
            float x = load(logits + i);
            lowest = x < lowest && x > kLowest ? x : lowest;
        }
        scale_ = best > lowest ? float(kBuckets - 1) / (best - lowest) : 0.0f;
        for (Index i = 0; i < n; i++) {
            float x = load(logits + i);
            if (x == kLowest) continue;
            Index b = place(x);
            counts_[b] += 1;
            masses_[b] += exponential((x - best) * inverse);
        }
    }

    // Returns the lowest logit among the `count` likeliest tokens.
    float lowest_of(Index count) {
        Index before = 0;
        for (Index b = 0; b < kBuckets; b++) {
            if (before + counts_[b] >= count) return sorted(b)[count - before - 1];
            before += counts_[b];
        }
        return kLowest;
    }

    // Returns the lowest logit of the smallest set of likeliest tokens whose weights sum to at least `share` · total.
    // Only logits of at least `cutoff` count; total is the sum of their weights.
    float lowest_of_mass(double share, float cutoff) {
        double total = 0.0;
        for (Index b = 0; b < kBuckets; b++) total += mass(b, cutoff);
        double before = 0.0, wanted = share * total;
        for (Index b = 0; b < kBuckets; b++) {
            double own = mass(b, cutoff);
            if (before + own < wanted) {
                before += own;
                continue;
            }
            float last = best_;
            for (float x : sorted(b)) {
                if (x < cutoff || (before >= wanted && x < last)) break;
                last = x;
                before += exponential((x - best_) * inverse_);
            }
            return last;
        }
        return cutoff;
    }

  private:
    // Returns the bucket of a logit.
    Index place(float x) const { return Index((best_ - x) * scale_); }

    // Returns the sum of a bucket's weights, without logits below `cutoff`.
    double mass(Index b, float cutoff) {
        if (counts_[b] == 0 || cutoff == kLowest || b < place(cutoff)) return masses_[b];
        if (b > place(cutoff)) return 0.0;
        double sum = 0.0;
        for (float x : sorted(b))
            if (x >= cutoff) sum += exponential((x - best_) * inverse_);
        return sum;
    }

    // Returns the logits of a bucket in descending order.
    std::vector<float> sorted(Index b) const {
        std::vector<float> found;
        for (Index i = 0; i < n_; i++) {
            float x = load(logits_ + i);
            if (x > kLowest && place(x) == b) found.push_back(x);
        }
        std::sort(found.begin(), found.end(), [](float a, float c) { return a > c; });
        return found;
    }

    const T *logits_;
    Index n_;
    float best_, inverse_, scale_;
    std::vector<int64_t> counts_ = std::vector<int64_t>(kBuckets, 0);
    std::vector<double> masses_ = std::vector<double>(kBuckets, 0.0);
};

// Returns the lowest logit that is kept. top_k is applied first, and top_p to the tokens that top_k keeps. min_p is
// applied to all tokens.
template <typename T> float lowest_kept(const T *logits, Index n, float best, float inverse, const Rule &rule) {
    float lowest = rule.min_p > 0 ? best + std::log(rule.min_p) / inverse : kLowest;
    if (rule.top_k == 0 && rule.top_p >= 1.0f) return lowest;
    Buckets<T> buckets(logits, n, best, inverse);
    float cutoff = rule.top_k > 0 && rule.top_k < n ? buckets.lowest_of(rule.top_k) : kLowest;
    if (rule.top_p < 1.0f) cutoff = buckets.lowest_of_mass(rule.top_p, cutoff);
    return cutoff > lowest ? cutoff : lowest;
}

// Returns the weight e^((x - best) · inverse) of token i's logit x, or 0 if x is below `lowest`.
template <typename T> inline float weight(const T *logits, Index i, float best, float inverse, float lowest) {
    float x = load(logits + i);
    return x >= lowest && x > kLowest ? exponential((x - best) * inverse) : 0.0f;
}

// Returns a row's token, in one thread: the first token whose cumulative weight exceeds rule.uniform · (the sum of all
// weights). A greedy row gets the first token with the highest logit. Returns -1 if the highest logit is not finite.
template <typename T> Index draw(const T *logits, Index n, const Rule &rule) {
    float best = highest_of(logits, n);
    if (!std::isfinite(best)) return -1;
    if (rule.temperature == 0.0f) {
        for (Index i = 0; i < n; i++)
            if (load(logits + i) == best) return i;
    }
    float inverse = 1.0f / rule.temperature;
    float lowest = lowest_kept(logits, n, best, inverse, rule);
    std::vector<double> sums((n + kPart - 1) / kPart);
    double total = 0.0;
    for (Index p = 0; p < Index(sums.size()); p++) {
        Index last = std::min(n, (p + 1) * kPart);
        float sum = 0.0f;
        for (Index i = p * kPart; i < last; i++) sum += weight(logits, i, best, inverse, lowest);
        sums[p] = sum;
        total += sum;
    }
    double left = rule.uniform * total;
    Index part = 0;
    while (part + 1 < Index(sums.size()) && left >= sums[part]) left -= sums[part++];
    Index chosen = -1;
    for (Index p = part; p < Index(sums.size()) && chosen < 0; p++) {  // skips parts without weight
        Index last = std::min(n, (p + 1) * kPart);
        for (Index i = p * kPart; i < last; i++) {
            float own = weight(logits, i, best, inverse, lowest);
            if (own <= 0.0f) continue;
            chosen = i;
            left -= own;
            if (left < 0.0) return chosen;
        }
    }
    return chosen;  // reached if rounding moved the target past the end of its part
}

// Computes out[r] = draw(row r) for logits (rows, n), which must be contiguous. Each row is drawn by one thread.
template <typename T>
void draw_tokens(Index *out, const T *logits, const Rule *rules, Index rows, Index n, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (threads > 1 && rows > 1)
    for (Index r = 0; r < rows; r++) out[r] = draw(logits + r * n, n, rules[r]);
}

}  // namespace
}  // namespace tidegate

using namespace tidegate;

extern "C" {
void draw_tokens_float32(Index *out, const float *logits, const Rule *rules, Index rows, Index n, int threads) {
    draw_tokens(out, logits, rules, rows, n, threads);
}
void draw_tokens_bfloat16(Index *out, const bf16 *logits, const Rule *rules, Index rows, Index n, int threads) {
    draw_tokens(out, logits, rules, rows, n, threads);
}
}
