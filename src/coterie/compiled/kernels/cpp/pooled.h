// Gradients of a convolution at stride 1 whose result was max-pooled. Of every window one entry has
// a gradient at most, so that of SIZE x SIZE products one is computed.
//
// Both gradients are sums of products of an entry's slope with a patch. For a filter: of what its
// entries see of the image. For the image around a pixel: of the filters that have an entry there.
//
// Images lie with channels last, within a border of zeros: what a row of a filter meets lies side
// by side. Of many channels a BLOCK is taken at a time, so that an image of it stays in the nearest
// cache. What a row's last vector holds beyond its end is zero in a filter, and dropped in a sum.
#pragma once
#include <memory>

#include "vector.h"

// How far it is from one channel to the next, and from one pixel to the next.
struct Lie {
  ptrdiff_t channel, pixel;
  Lie(ptrdiff_t channel, ptrdiff_t pixel) : channel(channel), pixel(pixel) {}
};

// Entries in groups: the slope of each, and where its patch is.
template <int GROUPS, int MOST>
struct Entries {
  real slopes[GROUPS][MOST + 1];
  int places[GROUPS][MOST + 1];
  int counts[GROUPS];

  // One that has no gradient is overwritten by the next.
  inline void note(int group, int place, real slope, bool counts_for) {
    const int count = counts[group];
    slopes[group][count] = slope;
    places[group][count] = place;
    counts[group] = count + (counts_for & (slope != 0));
  }
};

template <int CI, int CO, int H, int W, int KY, int KX, int PY, int PX, int SIZE>
class Pooled {
  static constexpr int HIGH = H + 2 * PY, WIDE = W + 2 * PX;
  static constexpr int OUT_H = HIGH - KY + 1, OUT_W = WIDE - KX + 1, PIXELS = OUT_H * WIDE;
  static constexpr int POOL_H = OUT_H / SIZE, POOL_W = OUT_W / SIZE, WINDOWS = POOL_H * POOL_W;
  static constexpr int NEAREST = 42 * 1024;  // bytes of the nearest cache

  static constexpr int in_blocks(int count) { return (CI + count - 1) / count; }
  static constexpr bool fits(int block) {
    return KX * block <= REGISTERS * LANES &&
           (block <= LANES || HIGH * WIDE * block * (int)sizeof(real) <= NEAREST);
  }
  static constexpr int blocks(int count = 1) {
    return fits(in_blocks(count)) ? count : blocks(2 * count);
  }
  static_assert(KX <= REGISTERS * LANES, "a row of a filter's channel fits the registers");
  static constexpr int BLOCK = in_blocks(blocks()), BLOCKS = (CI + BLOCK - 1) / BLOCK;

  static constexpr int width(int lanes = 2) {
    return lanes >= LANES || lanes >= KX * BLOCK ? lanes : width(2 * lanes);
  }
  static constexpr int PART = width(), VECTORS = (KX * BLOCK + PART - 1) / PART;
  typedef typename Lanes<PART>::type part_t;

  static constexpr int ACROSS = WIDE * BLOCK, ROW = VECTORS * PART, FILTER = KY * ROW;
  static constexpr int IMAGE = HIGH * ACROSS + ROW;

  alignas(64) real image[IMAGE] = {};
  alignas(64) real filters[BLOCKS * CO * FILTER] = {};

  // ---- which entries have a gradient ----------------------------------------------------------

  // The pixel of each of N windows side by side that takes its gradient: the first that is largest.
  // None where ``positive`` and that is not.
  template <int N, int APART, int PIXEL>
  static inline void largest(const real* most, const real* y, bool positive, int* pixel) {
    for (int i = 0; i < N; i++) {
      int found = -1;
      for (int k = SIZE * SIZE - 1; k >= 0; k--) {
        const int row = k / SIZE, column = k % SIZE;
        const real here = y[i * APART + (row * OUT_W + column) * PIXEL];
        found = here == most[i] ? row * WIDE + column : found;
      }
      pixel[i] = most[i] > 0 || !positive ? found : -1;
    }
  }

  // All entries of one image, told to ``note``; ``last``: channels are last in ``most`` and ``y``.
  template <class Note>
  static inline void find(const real* g, Lie way, const real* most, const real* y, bool last,
                          bool positive, Note note) {
    if (last) {
      int pixel[CO];
      for (int at = 0; at < WINDOWS; at++) {
        const int row = at / POOL_W * SIZE, column = at % POOL_W * SIZE;
        largest<CO, 1, CO>(most + at * CO, y + (row * OUT_W + column) * CO, positive, pixel);
        for (int o = 0; o < CO; o++) {
          const real slope = g[o * way.channel + at * way.pixel];
          note(o, row * WIDE + column + pixel[o], slope, pixel[o] >= 0);
        }
      }
      return;
    }
    int pixel[WINDOWS];
    for (int o = 0; o < CO; o++) {
      for (int v = 0; v < POOL_H; v++)
        largest<POOL_W, SIZE, 1>(most + o * WINDOWS + v * POOL_W,
                                 y + (o * OUT_H + v * SIZE) * OUT_W, positive, pixel + v * POOL_W);
      for (int v = 0; v < POOL_H; v++)
        for (int u = 0; u < POOL_W; u++) {
          const int at = v * POOL_W + u;
          const real slope = g[o * way.channel + at * way.pixel];
          note(o, (v * WIDE + u) * SIZE + pixel[at], slope, pixel[at] >= 0);
        }
    }
  }

  // ---- products -------------------------------------------------------------------------------

  static inline part_t get(const real* from) { return *(const part_t*)from; }

  // Onto T rows that are OWN apart: the patches of a group's entries, times their slopes.
  template <int T, int OWN, int STEP, int OTHER, class Group>
  static inline void add_up(const Group& all, int group, real* own, const real* patches) {
    part_t total[T][VECTORS];
#pragma GCC unroll 24
    for (int t = 0; t < T; t++)
#pragma GCC unroll 24
      for (int v = 0; v < VECTORS; v++) total[t][v] = get(own + t * OWN + v * PART);
    for (int e = 0; e < all.counts[group]; e++) {
      const real slope = all.slopes[group][e];
      const real* patch = patches + all.places[group][e] * STEP;
#pragma GCC unroll 24
      for (int t = 0; t < T; t++)
#pragma GCC unroll 24
        for (int v = 0; v < VECTORS; v++) total[t][v] += slope * get(patch + t * OTHER + v * PART);
    }
#pragma GCC unroll 24
    for (int t = 0; t < T; t++)
#pragma GCC unroll 24
      for (int v = 0; v < VECTORS; v++) *(part_t*)(own + t * OWN + v * PART) = total[t][v];
  }

  // Rows that are added up together: as many as there are registers for.
  static constexpr int AT_ONCE = REGISTERS / VECTORS < KY ? REGISTERS / VECTORS : KY;
  // For an image no more than what all filters have of them stays in the nearest cache.
  static constexpr int NEAR = NEAREST / (CO * ROW * (int)sizeof(real));
  static constexpr int NEAR_AT_ONCE = NEAR < 1 ? 1 : NEAR < AT_ONCE ? NEAR : AT_ONCE;

  typedef Entries<CO, WINDOWS> ByFilter;
  typedef Entries<PIXELS, CO> ByPixel;

  template <int T>
  inline void onto_filters(const ByFilter& all, int block, int k) {
    real* filter = filters + block * CO * FILTER + k * ROW;
    for (int o = 0; o < CO; o++, filter += FILTER)
      add_up<T, ROW, BLOCK, ACROSS>(all, o, filter, image + k * ACROSS);
  }

  template <int T>
  inline void onto_image(const ByPixel& all, int block, int k) {
    for (int p = 0; p < PIXELS; p++)
      if (all.counts[p])
        add_up<T, ACROSS, FILTER, ROW>(all, p, image + k * ACROSS + p * BLOCK,
                                       filters + block * CO * FILTER + k * ROW);
  }

  // ---- images and filters as others have them -------------------------------------------------

  static constexpr int channels(int block) {
    return CI - block * BLOCK < BLOCK ? CI - block * BLOCK : BLOCK;
  }

  // A block of an image's channels, into or out of the border of zeros.
  template <bool IN, class Entry>
  inline void move(int block, Entry* x, Lie way) {
    for (int row = 0; row < H; row++)
      for (int column = 0; column < W; column++)
        for (int c = 0; c < channels(block); c++) {
          real& inside = image[(row + PY) * ACROSS + (column + PX) * BLOCK + c];
          Entry& outside = x[(block * BLOCK + c) * way.channel + (row * W + column) * way.pixel];
          if constexpr (IN) inside = outside;
          if constexpr (!IN) outside = inside;
        }
  }

  // All filters, from or to the order that torch has them in.
  template <bool IN, class Entry>
  inline void turn(Entry* w) {
    for (int o = 0; o < CO; o++)
      for (int c = 0; c < CI; c++)
        for (int ky = 0; ky < KY; ky++)
          for (int kx = 0; kx < KX; kx++, w++) {
            real* filter = filters + (c / BLOCK * CO + o) * FILTER;
            real& inside = filter[ky * ROW + kx * BLOCK + c % BLOCK];
            if constexpr (IN) inside = *w;
            if constexpr (!IN) *w = inside;
          }
  }

 public:
  static constexpr int IN = CI * H * W, OUT = CO * OUT_H * OUT_W, POOLED = CO * WINDOWS;
  static constexpr int WEIGHTS = CO * CI * KY * KX;

  // The derivatives for the filters and their biases.
  static NOT_INLINE void to_filters(int images, const real* g, Lie slopes, const real* most,
                                    const real* y, bool last, bool positive, const real* x,
                                    Lie inputs, real* to, real* biases) {
    auto here = std::make_unique<Pooled>();
    auto all = std::make_unique<ByFilter>();
    memset(biases, 0, CO * sizeof(real));
    for (int n = 0; n < images; n++, g += POOLED, most += POOLED, y += OUT, x += IN) {
      memset(all->counts, 0, sizeof all->counts);
      find(g, slopes, most, y, last, positive,
           [&](int o, int pixel, real slope, bool any) { all->note(o, pixel, slope, any); });
      for (int o = 0; o < CO; o++) biases[o] += sum(all->slopes[o], all->counts[o]);
      for (int block = 0; block < BLOCKS; block++) {
        here->template move<true>(block, x, inputs);
        int k = 0;
        for (; k + AT_ONCE <= KY; k += AT_ONCE)
          here->template onto_filters<AT_ONCE>(*all, block, k);
        if constexpr (KY % AT_ONCE != 0)
          here->template onto_filters<KY % AT_ONCE>(*all, block, k);
      }
    }
    here->template turn<false>(to);
  }

  // The derivative for the images, whose channels are last.
  static NOT_INLINE void to_images(int images, const real* g, Lie slopes, const real* most,
                                   const real* y, bool last, bool positive, const real* w,
                                   real* to) {
    auto here = std::make_unique<Pooled>();
    auto all = std::make_unique<ByPixel>();
    here->template turn<true>(w);
    for (int n = 0; n < images; n++, g += POOLED, most += POOLED, y += OUT, to += IN) {
      memset(all->counts, 0, sizeof all->counts);
      find(g, slopes, most, y, last, positive, [&](int o, int pixel, real slope, bool any) {
        all->note(any ? pixel : 0, o, slope, any);
      });
      for (int block = 0; block < BLOCKS; block++) {
        memset(here->image, 0, sizeof here->image);
        int k = 0;
        for (; k + NEAR_AT_ONCE <= KY; k += NEAR_AT_ONCE)
          here->template onto_image<NEAR_AT_ONCE>(*all, block, k);
        if constexpr (KY % NEAR_AT_ONCE != 0)
          here->template onto_image<KY % NEAR_AT_ONCE>(*all, block, k);
        here->template move<false>(block, to, {1, CI});
      }
    }
  }
};
