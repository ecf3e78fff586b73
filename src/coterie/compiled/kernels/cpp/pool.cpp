// Windows of many planes; the sizes are macros (see kernels/pool.py).
#include "pool.h"

typedef Windows<HEIGHT, WIDTH, WINDOW, CHANNELS> The;

extern "C" void pool(ptrdiff_t planes, const real* x, real* out) { The::pool(planes, x, out); }

extern "C" void spread(ptrdiff_t planes, const real* d, const real* x, const real* out,
                       int positive, real* to) {
  The::spread(planes, d, x, out, positive, to);
}
