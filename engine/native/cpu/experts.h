// The experts of a layer: which of them each row has, and the rows of each expert. Knows rows and shares; does not know
// what experts compute.

#pragma once

#include "buffer.h"
#include "products.h"

#ifdef TIDEGATE_PRODUCTS

namespace tidegate {

struct Experts {
    Index count;         // of all experts; 0: the layer has none
    Index chosen;        // experts that the router chooses for a row
    Index always;        // experts that every row has, the last ones
    int32_t normalises;  // whether the shares of the chosen experts are parts of their own sum, or of all experts'
    const Linear *gate_up, *down;  // (count,) each
};

// Chooses the experts of a row: those of the highest logits, of equal ones the first, and those that it always has. Writes
// their numbers and shares. The logits are those of the router and, of a layer with experts for every row, the one of
// their share.
inline void choose(Index *ids, float *shares, const bf16 *logits, Experts experts) {
    const Index routed = experts.count - experts.always, chosen = experts.chosen;
    Index found = 0;
    for (Index e = 0; e < routed; e++) {
        const float logit = load(logits + e);
        Index at = found < chosen ? found++ : chosen;
        for (; at > 0 && logit > load(logits + ids[at - 1]); at--)
            if (at < chosen) ids[at] = ids[at - 1];
        if (at < chosen) ids[at] = e;
    }
    const float highest = load(logits + ids[0]);
    float total = 0.0f;
    for (Index i = 0; i < (experts.normalises ? chosen : routed); i++)
        total += exponential(load(logits + (experts.normalises ? ids[i] : i)) - highest);
    for (Index i = 0; i < chosen; i++) shares[i] = exponential(load(logits + ids[i]) - highest) / total;
    for (Index i = 0; i < experts.always; i++) {
        ids[chosen + i] = routed + i;
        shares[chosen + i] = 1.0f / (1.0f + exponential(-load(logits + routed)));
    }
}

// The pairs of a row and one of its experts, in the order of experts and then of rows. All threads of the enclosing
// parallel region call `choose_all`, `gather` and `add_up` together.
class Routing {
  public:
    // Makes room for `rows` rows; called by one thread.
    void prepare(Experts of, Index rows) {
        experts = of, num_rows = rows, each = of.chosen + of.always;
        ids = id_buffer.of(pairs()), places = place_buffer.of(pairs()), shares = share_buffer.of(pairs());
    }

    Index pairs() const { return num_rows * each; }

    // Chooses the experts of all rows of logits (rows, stride), and groups the rows by expert.
    void choose_all(const bf16 *logits, Index stride) {
#pragma omp for
        for (Index r = 0; r < num_rows; r++)
            choose(ids + r * each, shares + r * each, logits + r * stride, experts);
#pragma omp single
        group();
    }

    // Computes out[pair] = x[row of the pair] for rows of n numbers.
    void gather(bf16 *out, const bf16 *x, Index n) const {
#pragma omp for
        for (Index i = 0; i < pairs(); i++) std::memcpy(out + places[i] * n, x + i / each * n, n * sizeof(bf16));
    }

    // Computes out[row] = Σ share · x[pair] over the row's pairs, in the order of its own choices.
    void add_up(bf16 *out, const bf16 *x, Index n) const {
        constexpr Index kSome = 256;
#pragma omp for
        for (Index r = 0; r < num_rows; r++)
            for (Index first = 0; first < n; first += kSome) {
                const Index some = n - first < kSome ? n - first : kSome;
                float sums[kSome] = {};
                for (Index i = r * each; i < (r + 1) * each; i++) {
                    const bf16 *from = x + places[i] * n + first;
                    for (Index k = 0; k < some; k++) sums[k] += shares[i] * load(from + k);
                }
                for (Index k = 0; k < some; k++) store(out + r * n + first + k, sums[k]);
            }
    }

    std::vector<Group> groups;  // one for each expert that a row has

  private:
    void group() {
        std::vector<Index> next(experts.count + 1, 0);
        for (Index i = 0; i < pairs(); i++) next[ids[i] + 1]++;
        groups.clear();
        for (Index e = 0; e < experts.count; e++) {
            if (next[e + 1]) groups.push_back({e, next[e], next[e + 1]});
            next[e + 1] += next[e];
        }
        for (Index i = 0; i < pairs(); i++) places[i] = next[ids[i]]++;
    }

    Experts experts = {};
    Index num_rows = 0, each = 0;  // rows, and experts of a row
    Index *ids = nullptr, *places = nullptr;  // by row and choice: the expert, and the pair's number
    float *shares = nullptr;
    Buffer<Index> id_buffer, place_buffer;
    Buffer<float> share_buffer;
};

}  // namespace tidegate

#endif
