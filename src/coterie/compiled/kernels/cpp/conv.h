// Convolutions of a client's images with its own filters, at stride 1, for layers of few channels.
// All sizes are known when this is compiled, so that whole blocks of sums stay in registers.
//
// Images lie with a border of zeros in rows of WIDE entries, and a row's vectors run on into the
// next row: no masks, and every register is full. What is computed beyond the end of a row is
// garbage, and dropped when the sums are stored.
#pragma once
#include <vector>

#include "vector.h"

// Planes of H x W entries within a border of zeros, which is there already.
template <int C, int H, int W, int Y, int X>
static inline void frame(const real* planes, real* to) {
  for (int c = 0; c < C; c++)
    for (int y = 0; y < H; y++)
      memcpy(to + (c * (H + 2 * Y) + y + Y) * (W + 2 * X) + X, planes + (c * H + y) * W,
             W * sizeof(real));
}

// out[o][y][x] = sum over i, ky, kx of w[o][i][ky][kx] * in[i][y + ky][x + kx]
template <int I, int O, int HIGH, int WIDE, int KY, int KX>
struct Correlation {
  static constexpr int Y = HIGH - KY + 1, X = WIDE - KX + 1, PLANE = HIGH * WIDE, TAPS = KY * KX;
  static constexpr int TOGETHER =
      O % 8 == 0 ? 8 : O % 6 == 0 ? 6 : O % 5 == 0 ? 5 : O % 4 == 0 ? 4 : O > 6 ? 6 : O;
  static constexpr int VECTORS = REGISTERS / TOGETHER > 6 ? 6 : REGISTERS / TOGETHER;
  static constexpr int STEP = VECTORS * LANES, PLACES = (Y - 1) * WIDE + X;
  static constexpr int ROOM = (PLACES + STEP - 1) / STEP * STEP;
  static constexpr int IN = I * PLANE + ROOM - PLACES;  // entries of ``in``, with what runs over

  std::vector<real> in = std::vector<real>(IN), sums = std::vector<real>(TOGETHER * ROOM);

  // The sums of B filters at STEP places.
  template <int B>
  inline void block(const real* w, int place) {
    vector_t total[B][VECTORS];
#pragma GCC unroll 8
    for (int b = 0; b < B; b++)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) total[b][v] = vector_t{};
    for (int i = 0; i < I; i++)
      for (int ky = 0; ky < KY; ky++) {
        const real* row = in.data() + i * PLANE + ky * WIDE + place;
        const real* weight = w + (i * KY + ky) * KX;
#pragma GCC unroll 8
        for (int kx = 0; kx < KX; kx++) {
          vector_t x[VECTORS];
#pragma GCC unroll 8
          for (int v = 0; v < VECTORS; v++) x[v] = load(row + kx + v * LANES);
#pragma GCC unroll 8
          for (int b = 0; b < B; b++)
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) total[b][v] += x[v] * weight[b * I * TAPS + kx];
        }
      }
#pragma GCC unroll 8
    for (int b = 0; b < B; b++)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++)
        store(sums.data() + b * ROOM + place + v * LANES, total[b][v]);
  }

  template <int B>
  inline void filters(const real* w, const real* bias, bool relu, real* out) {
    for (int place = 0; place < PLACES; place += STEP) block<B>(w, place);
#pragma GCC unroll 8
    for (int b = 0; b < B; b++) {
      const real more = bias ? bias[b] : 0;
      for (int y = 0; y < Y; y++) {
        const real* from = sums.data() + b * ROOM + y * WIDE;
        real* to = out + (b * Y + y) * X;
        for (int x = 0; x < X; x++) to[x] = from[x] + more;
        if (relu)
          for (int x = 0; x < X; x++) to[x] = to[x] < 0 ? 0 : to[x];
      }
    }
  }

  // All filters on the image that lies in ``in``.
  void image(const real* w, const real* bias, bool relu, real* out) {
    int o = 0;
    for (; o + TOGETHER <= O; o += TOGETHER)
      filters<TOGETHER>(w + o * I * TAPS, bias ? bias + o : bias, relu, out + o * Y * X);
    if constexpr (O % TOGETHER != 0)
      filters<O % TOGETHER>(w + o * I * TAPS, bias ? bias + o : bias, relu, out + o * Y * X);
  }
};

// A layer: CI channels of H x W entries, CO filters of KY x KX, a border of PY and PX zeros.
template <int CI, int CO, int H, int W, int KY, int KX, int PY, int PX>
struct Layer {
  static constexpr int TAPS = KY * KX, HIGH = H + 2 * PY, WIDE = W + 2 * PX;
  static constexpr int OUT_H = HIGH - KY + 1, OUT_W = WIDE - KX + 1;
  static constexpr int IN = CI * H * W, OUT = CO * OUT_H * OUT_W, FILTERS = CO * CI * TAPS;

  static NOT_INLINE void convolve(int images, const real* x, const real* w, const real* bias, bool relu,
                       real* out) {
    Correlation<CI, CO, HIGH, WIDE, KY, KX> all;
    for (int n = 0; n < images; n++, x += IN, out += OUT) {
      frame<CI, H, W, PY, PX>(x, all.in.data());
      all.image(w, bias, relu, out);
    }
  }

  // The derivative for the images: a correlation with the filters turned around.
  static NOT_INLINE void to_images(int images, const real* d, const real* w, real* out) {
    static_assert(PY < KY && PX < KX, "no more zeros around an image than a filter reaches");
    constexpr int Y = KY - 1 - PY, X = KX - 1 - PX;
    Correlation<CO, CI, OUT_H + 2 * Y, OUT_W + 2 * X, KY, KX> all;
    std::vector<real> turned(FILTERS);
    for (int o = 0; o < CO; o++)
      for (int i = 0; i < CI; i++)
        for (int k = 0; k < TAPS; k++)
          turned[(i * CO + o) * TAPS + TAPS - 1 - k] = w[(o * CI + i) * TAPS + k];
    for (int n = 0; n < images; n++, d += OUT, out += IN) {
      frame<CO, OUT_H, OUT_W, Y, X>(d, all.in.data());
      all.image(turned.data(), nullptr, false, out);
    }
  }

  static constexpr int IMAGE = CI * HIGH * WIDE, PLACES = OUT_H * WIDE;
  static constexpr int ROOM = (PLACES + LANES - 1) / LANES * LANES;
  static constexpr int TOGETHER = REGISTERS / KX > 8 ? 8 : REGISTERS / KX < 1 ? 1 : REGISTERS / KX;

  // Of B filters: the products of their gradients with the images, shifted by every tap.
  template <int B>
  static inline void taps(int images, const real* in, const real* d, real* out) {
    for (int i = 0; i < CI; i++)
      for (int ky = 0; ky < KY; ky++) {
        vector_t total[B][KX];
#pragma GCC unroll 8
        for (int b = 0; b < B; b++)
#pragma GCC unroll 8
          for (int kx = 0; kx < KX; kx++) total[b][kx] = vector_t{};
        for (int n = 0; n < images; n++) {
          const real* x = in + (size_t)n * IMAGE + i * HIGH * WIDE + ky * WIDE;
          const real* y = d + (size_t)n * CO * ROOM;
          for (int place = 0; place < PLACES; place += LANES) {
            vector_t slope[B];
#pragma GCC unroll 8
            for (int b = 0; b < B; b++) slope[b] = load(y + b * ROOM + place);
#pragma GCC unroll 8
            for (int kx = 0; kx < KX; kx++) {
              const vector_t shifted = load(x + place + kx);
#pragma GCC unroll 8
              for (int b = 0; b < B; b++) total[b][kx] += slope[b] * shifted;
            }
          }
        }
#pragma GCC unroll 8
        for (int b = 0; b < B; b++)
#pragma GCC unroll 8
          for (int kx = 0; kx < KX; kx++)
            out[((b * CI + i) * KY + ky) * KX + kx] = sum<LANES>(total[b][kx]);
      }
  }

  // The derivative for the filters.
  static NOT_INLINE void to_filters(int images, const real* d, const real* x, real* out) {
    const size_t all = (size_t)images * IMAGE + WIDE * KY + LANES;  // with what runs over the end
    std::vector<real> in(all), wide((size_t)images * CO * ROOM);
    for (int n = 0; n < images; n++, x += IN) {
      frame<CI, H, W, PY, PX>(x, in.data() + (size_t)n * IMAGE);
      for (int o = 0; o < CO; o++)
        for (int y = 0; y < OUT_H; y++, d += OUT_W)
          memcpy(wide.data() + ((size_t)n * CO + o) * ROOM + y * WIDE, d, OUT_W * sizeof(real));
    }
    int o = 0;
    for (; o + TOGETHER <= CO; o += TOGETHER)
      taps<TOGETHER>(images, in.data(), wide.data() + o * ROOM, out + o * CI * TAPS);
    if constexpr (CO % TOGETHER != 0)
      taps<CO % TOGETHER>(images, in.data(), wide.data() + o * ROOM, out + o * CI * TAPS);
  }
};
