// Max pooling over windows of SIZE x SIZE entries that do not overlap. The largest entry is not
// remembered but found again: of equal ones the first takes the gradient, as in torch.
//
// Entries are INNER apart: a plane's channels come last in memory, or there is one (INNER = 1).
#pragma once
#include "vector.h"

template <int H, int W, int SIZE, int INNER>
struct Windows {
  static constexpr int OUT_H = H / SIZE, OUT_W = W / SIZE, ACROSS = W * INNER;

  // A NaN is larger than everything, as in torch.
  static inline real larger(real a, real b) { return a > b || a != a ? a : b; }

  static NOT_INLINE void pool(ptrdiff_t planes, const real* x, real* out) {
    for (ptrdiff_t p = 0; p < planes; p++, x += H * ACROSS)
      for (int y = 0; y < OUT_H; y++, out += OUT_W * INNER) {
        const real* rows = x + y * SIZE * ACROSS;
        for (int at = 0; at < OUT_W; at++)
          for (int c = 0; c < INNER; c++) {
            const real* corner = rows + at * SIZE * INNER + c;
            real most = corner[0];
            for (int k = 1; k < SIZE * SIZE; k++)
              most = larger(corner[k / SIZE * ACROSS + k % SIZE * INNER], most);
            out[at * INNER + c] = most;
          }
      }
  }

  // ``positive``: windows whose largest entry is not positive give nothing back.
  static NOT_INLINE void spread(ptrdiff_t planes, const real* d, const real* x, const real* out,
                         int positive, real* to) {
    if (H % SIZE || W % SIZE) memset(to, 0, planes * H * ACROSS * sizeof(real));
    for (ptrdiff_t p = 0; p < planes; p++, x += H * ACROSS, to += H * ACROSS)
      for (int y = 0; y < OUT_H; y++, d += OUT_W * INNER, out += OUT_W * INNER) {
        const real* rows = x + y * SIZE * ACROSS;
        real* into = to + y * SIZE * ACROSS;
        for (int at = 0; at < OUT_W; at++)
          for (int c = 0; c < INNER; c++) {
            const size_t corner = at * SIZE * INNER + c;
            const real most = out[at * INNER + c];
            real left = most > 0 || !positive ? d[at * INNER + c] : 0;
            for (int k = 0; k < SIZE * SIZE; k++) {
              const size_t place = corner + k / SIZE * ACROSS + k % SIZE * INNER;
              const bool here = rows[place] == most;
              into[place] = here ? left : 0;
              left = here ? 0 : left;
            }
          }
      }
  }
};
