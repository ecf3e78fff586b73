// What a client's step needs besides loops over entries (see trace/writer.py).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>

#include "conv.h"
#include "pool.h"
#include "pooled.h"
#include "product.h"

// N entries, X apart; those of the result are OUT apart.
template <int N, int X, int OUT, typename T>
static inline void log_softmax(const T* x, T* out) {
  T most = x[0], total = 0;
  for (int i = 1; i < N; i++) most = x[i * X] > most || x[i * X] != x[i * X] ? x[i * X] : most;
  for (int i = 0; i < N; i++) total += std::exp(x[i * X] - most);
  const T less = most + std::log(total);
  for (int i = 0; i < N; i++) out[i * OUT] = x[i * X] - less;
}

template <int N, int TO, int D, int Y, typename T>
static inline void log_softmax_gradient(const T* d, const T* y, T* to) {
  T total = 0;
  for (int i = 0; i < N; i++) total += d[i * D];
  for (int i = 0; i < N; i++) to[i * TO] = d[i * D] - std::exp(y[i * Y]) * total;
}
