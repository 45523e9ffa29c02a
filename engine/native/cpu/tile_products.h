// Products of any number of rows with a packed bfloat16 weight, with the processor's matrix tiles (AMX_BF16).
//
// A tile register holds the inputs of 16 rows (16 × 32), the weights of a panel (32 inputs × 16 outputs), or sums (16 ×
// 16). A row's sums do not depend on other rows. Knows matrices; does not know layers.

#pragma once

#include "linear.h"

#if defined(__AMX_BF16__) && defined(TIDEGATE_PRODUCTS) && defined(__linux__)
#define TIDEGATE_TILES
#include <sys/syscall.h>
#include <unistd.h>

namespace tidegate {

constexpr Index kTileRows = 16, kTileInputs = 32;
constexpr Index kAhead = 4 * kTileInputs;  // prefetch distance in inputs: four steps of the loop

// Asks Linux for permission to use the tile registers; returns whether it was granted.
inline bool ask_for_tiles() {
    constexpr long kAsk = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kAsk, kTileData) == 0;
}

// The shapes of a thread's tile registers, which are configured only when they change. Tiles 0 to 3 hold sums. Tile 4
// holds the inputs of the first 16 rows. Tile 5 holds the inputs of the next rows. If there are no more rows, tile 5
// holds a part of the weight, as tiles 6 and 7 do.
class TileShapes {
  public:
    ~TileShapes() {
        if (upper) _tile_release();
    }

    void set(Index upper_rows, Index lower_rows) {
        if (upper_rows == upper && lower_rows == lower) return;
        upper = upper_rows, lower = lower_rows;
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } shapes;
        const Index below = lower ? lower : upper, weights = kTileInputs / 2;
        const Index rows[8] = {upper, upper, below, below, upper, lower ? lower : weights, weights, weights};
        for (int t = 0; t < 8; t++) shapes.bytes[t] = 64, shapes.rows[t] = uint8_t(rows[t]);
        _tile_loadconfig(&shapes);
    }

  private:
    Index upper = 0, lower = 0;
};

using TileSums = float[kTileRows][kPanel];

// Writes the sums of `rows` rows, plus bias, to the outputs of a panel in `out`. If kAdd, adds them to `out` instead.
template <bool kAdd>
inline void write_sums(bf16 *out, const Linear &linear, Index panel, Index rows, const TileSums &sums) {
    const __m512 bias = bias_of(linear, panel);
    for (Index r = 0; r < rows; r++) {
        bf16 *to = out + r * linear.out + panel * kPanel;
        const __m512 sum = _mm512_add_ps(bias, _mm512_load_ps(sums[r]));
        narrow(to, kAdd ? _mm512_add_ps(widen(to), sum) : sum);
    }
}

// Computes out = x · weightᵀ + bias (out += … if kAdd) for up to 16 rows and up to 4 panels from `first` on, in one
// thread. Assumes that TileShapes is set to (rows, 0). The tile calls are not in a loop, because tile numbers must be
// constants.
template <bool kAdd>
inline void multiply_few_rows(bf16 *out, const bf16 *x, const Linear &linear, Index rows, Index first, Index panels) {
    const bf16 *w[4];
    for (Index p = 0; p < 4; p++) w[p] = linear.weight + (first + (p < panels ? p : 0)) * linear.in * kPanel;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const Index stride = linear.in * sizeof(bf16);
    for (Index k = 0; k < linear.in; k += kTileInputs) {
        for (Index p = 0; p < panels; p++)
            for (Index line = 0; line < kTileInputs / 2; line++)
                _mm_prefetch(w[p] + (k + kAhead) * kPanel + line * 32, _MM_HINT_T0);
        _tile_loadd(4, x + k, stride);
        _tile_loadd(5, w[0] + k * kPanel, 64);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(6, w[1] + k * kPanel, 64);
        _tile_dpbf16ps(1, 4, 6);
        _tile_loadd(7, w[2] + k * kPanel, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(5, w[3] + k * kPanel, 64);
        _tile_dpbf16ps(3, 4, 5);
    }
    alignas(64) TileSums sums[4];
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    for (Index p = 0; p < panels; p++) write_sums<kAdd>(out, linear, first + p, rows, sums[p]);
}

// Computes out = x · weightᵀ + bias (out += … if kAdd) for 17 to 32 rows and one or two panels from `first` on, in one
// thread. Assumes that TileShapes is set to (16, rows - 16).
template <bool kAdd>
inline void multiply_many_rows(bf16 *out, const bf16 *x, const Linear &linear, Index rows, Index first, Index panels) {
    const bf16 *left = linear.weight + first * linear.in * kPanel;
    const bf16 *right = panels > 1 ? left + linear.in * kPanel : left;
    const bf16 *below = x + kTileRows * linear.in;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    const Index stride = linear.in * sizeof(bf16);
    for (Index k = 0; k < linear.in; k += kTileInputs) {
        _tile_loadd(4, x + k, stride);
        _tile_loadd(6, left + k * kPanel, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, right + k * kPanel, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, below + k, stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    alignas(64) TileSums sums[4];
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    for (Index p = 0; p < panels; p++) {
        write_sums<kAdd>(out, linear, first + p, kTileRows, sums[p]);
        write_sums<kAdd>(out + kTileRows * linear.out, linear, first + p, rows - kTileRows, sums[2 + p]);
    }
}

// Returns how many panels a thread computes at once.
inline Index panels_by_tiles(Index rows) { return rows > kTileRows ? 2 : 4; }

// Computes out = x · weightᵀ + bias (out += … if kAdd) for out (rows, linear.out) and x (rows, linear.in), for up to
// panels_by_tiles(rows) panels from `first` on, in one thread. The panels stay in the processor's cache for all rows.
// Assumes that linear.in is a multiple of kTileInputs.
template <bool kAdd>
inline void multiply_by_tiles(bf16 *out, const bf16 *x, const Linear &linear, Index rows, Index first,
                              TileShapes &shapes) {
    const Index panels = linear.out / kPanel - first, most = panels_by_tiles(rows), some = panels < most ? panels : most;
    for (Index r = 0; r < rows; r += 2 * kTileRows) {
        const Index left = rows - r, now = left < 2 * kTileRows ? left : 2 * kTileRows;
        bf16 *to = out + r * linear.out;
        const bf16 *from = x + r * linear.in;
        if (now > kTileRows) {
            shapes.set(kTileRows, now - kTileRows);
            multiply_many_rows<kAdd>(to, from, linear, now, first, some);
        } else {
            shapes.set(now, 0);
            multiply_few_rows<kAdd>(to, from, linear, now, first, some);
        }
    }
}

}  // namespace tidegate

#else

namespace tidegate {

struct TileShapes {};  // of a processor without tiles

}  // namespace tidegate

#endif
