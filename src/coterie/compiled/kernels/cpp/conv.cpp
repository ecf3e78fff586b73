// One layer for many clients; the sizes are macros (see kernels/conv.py).
#include "conv.h"

typedef Layer<CHANNELS, MAPS, HEIGHT, WIDTH, ROWS, COLUMNS, PAD_Y, PAD_X> The;

extern "C" void convolve(int clients, int images, const real* x, const real* w, const real* bias,
                         int relu, real* out) {
  for (int g = 0; g < clients; g++, w += The::FILTERS) {
    The::convolve(images, x, w, bias ? bias + g * MAPS : bias, relu, out);
    x += (size_t)images * The::IN;
    out += (size_t)images * The::OUT;
  }
}

#if PAD_Y < ROWS && PAD_X < COLUMNS
extern "C" void to_images(int clients, int images, const real* d, const real* w, real* out) {
  for (int g = 0; g < clients; g++, w += The::FILTERS) {
    The::to_images(images, d, w, out);
    d += (size_t)images * The::OUT;
    out += (size_t)images * The::IN;
  }
}
#endif

extern "C" void to_filters(int clients, int images, const real* d, const real* x, real* out) {
  for (int g = 0; g < clients; g++, out += The::FILTERS) {
    The::to_filters(images, d, x, out);
    d += (size_t)images * The::OUT;
    x += (size_t)images * The::IN;
  }
}
