// One pooled layer for many clients; the sizes are macros (see kernels/pool.py).
#include "pooled.h"

typedef Pooled<CHANNELS, MAPS, HEIGHT, WIDTH, ROWS, COLUMNS, PAD_Y, PAD_X, WINDOW> The;

extern "C" void to_filters(int clients, int images, const real* g, const ptrdiff_t* slopes,
                           const real* most, const real* y, int last, int positive, const real* x,
                           const ptrdiff_t* inputs, real* to, real* biases) {
  for (int i = 0; i < clients; i++, to += The::WEIGHTS, biases += MAPS) {
    const size_t n = (size_t)i * images;
    The::to_filters(images, g + n * The::POOLED, {slopes[0], slopes[1]}, most + n * The::POOLED,
                    y + n * The::OUT, last, positive, x + n * The::IN, {inputs[0], inputs[1]}, to,
                    biases);
  }
}

extern "C" void to_images(int clients, int images, const real* g, const ptrdiff_t* slopes,
                          const real* most, const real* y, int last, int positive, const real* w,
                          real* to) {
  for (int i = 0; i < clients; i++, w += The::WEIGHTS) {
    const size_t n = (size_t)i * images;
    The::to_images(images, g + n * The::POOLED, {slopes[0], slopes[1]}, most + n * The::POOLED,
                   y + n * The::OUT, last, positive, w, to + n * The::IN);
  }
}
