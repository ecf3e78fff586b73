// Products of small matrices of known sizes and strides, one thread.
#pragma once
#include "vector.h"

// Room for so many entries: on the heap where a thread's stack might not hold them.
template <size_t COUNT, bool FEW = COUNT * sizeof(real) <= 65536>
struct Room {
  real at[COUNT];
};
template <size_t COUNT>
struct Room<COUNT, false> {
  real* at = new real[COUNT];
  ~Room() { delete[] at; }
};

// c[m][n] (+)= scale * sum over k of a[m][k] * b[k][n]. A is anywhere: entry (m, k) lies at
// m * AM + k * AK. How B lies chooses the way.
template <int M, int N, int K, int AM, int AK, int BK, int BN, int CM, bool ONTO>
struct Product {
  // B and C in rows: vectors of columns, blocks of R rows.
  template <int R, int V>
  static inline void block(const real* a, const real* b, ptrdiff_t across, real* c, ptrdiff_t down,
                           real scale) {
    vector_t total[R][V];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) total[r][v] = vector_t{};
    for (int k = 0; k < K; k++) {
      vector_t row[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) row[v] = load(b + k * across + v * LANES);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) total[r][v] += row[v] * a[r * AM + k * AK];
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) {
        real* to = c + r * down + v * LANES;
        store(to, ONTO ? load(to) + total[r][v] * scale : total[r][v] * scale);
      }
  }

  template <int V>
  static inline void columns(const real* a, const real* b, ptrdiff_t across, real* c,
                             ptrdiff_t down, real scale) {
    constexpr int R = REGISTERS / V > 8 ? 8 : REGISTERS / V;
    int m = 0;
    for (; m + R <= M; m += R)
      block<R, V>(a + (ptrdiff_t)m * AM, b, across, c + m * down, down, scale);
    if constexpr (M % R != 0)
      block<M % R, V>(a + (ptrdiff_t)m * AM, b, across, c + m * down, down, scale);
  }

  static inline void by_rows(const real* a, const real* b, real* c, real scale) {
    constexpr int V = M >= 6 ? 4 : 6;
    int n = 0;
    for (; n + V * LANES <= N; n += V * LANES) columns<V>(a, b + n, BK, c + n, CM, scale);
    for (; n + LANES <= N; n += LANES) columns<1>(a, b + n, BK, c + n, CM, scale);
    constexpr int REST = N % LANES;
    if constexpr (REST != 0) {  // the last columns, in a full vector of their own
      Room<(size_t)K * LANES> wide_room;
      Room<(size_t)M * LANES> out_room;
      real *wide = wide_room.at, *out = out_room.at;
      for (int k = 0; k < K; k++)
        for (int i = 0; i < LANES; i++) wide[k * LANES + i] = i < REST ? b[k * BK + n + i] : 0;
      for (int m = 0; m < M; m++)
        for (int i = 0; i < LANES; i++) out[m * LANES + i] = ONTO && i < REST ? c[m * CM + n + i] : 0;
      columns<1>(a, wide, LANES, out, LANES, scale);
      for (int m = 0; m < M; m++)
        for (int i = 0; i < REST; i++) c[m * CM + n + i] = out[m * LANES + i];
    }
  }

  // A in rows and B in columns: products of neighbours with neighbours.
  template <int R, int S>
  static inline void corner(const real* a, const real* b, real* c, real scale) {
    vector_t total[R][S];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int s = 0; s < S; s++) total[r][s] = vector_t{};
    constexpr int FULL = K / LANES * LANES;
    for (int k = 0; k < FULL; k += LANES) {
      vector_t left[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) left[r] = load(a + r * AM + k);
#pragma GCC unroll 8
      for (int s = 0; s < S; s++) {
        const vector_t right = load(b + s * BN + k);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) total[r][s] += left[r] * right;
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int s = 0; s < S; s++) {
        real all = sum<LANES>(total[r][s]);
        for (int k = FULL; k < K; k++) all += a[r * AM + k] * b[s * BN + k];
        real* to = c + r * CM + s;
        *to = ONTO ? *to + all * scale : all * scale;
      }
  }

  template <int S>
  static inline void beside(const real* a, const real* b, real* c, real scale) {
    constexpr int R = M < 5 ? M : 5;
    int m = 0;
    for (; m + R <= M; m += R)
      corner<R, S>(a + (ptrdiff_t)m * AM, b, c + (ptrdiff_t)m * CM, scale);
    if constexpr (M % R != 0)
      corner<M % R, S>(a + (ptrdiff_t)m * AM, b, c + (ptrdiff_t)m * CM, scale);
  }

  static inline void by_columns(const real* a, const real* b, real* c, real scale) {
    constexpr int S = REGISTERS / 6 < N ? REGISTERS / 6 : N;
    int n = 0;
    for (; n + S <= N; n += S) beside<S>(a, b + (ptrdiff_t)n * BN, c + n, scale);
    if constexpr (N % S != 0) beside<N % S>(a, b + (ptrdiff_t)n * BN, c + n, scale);
  }

  static NOT_INLINE void apply(const real* a, const real* b, real* c, real scale) {
    constexpr bool DOT = N == 1 && K > 1024 && AK == 1 && BK == 1;  // of whole models, say
    if constexpr ((BN == 1 || N == 1) && !DOT) {
      by_rows(a, b, c, scale);
    } else if constexpr (AK == 1 && BK == 1) {
      by_columns(a, b, c, scale);
    } else {  // neither: B is put into rows first
      real* rows = new real[(size_t)K * N];
      for (int k = 0; k < K; k++)
        for (int n = 0; n < N; n++) rows[(size_t)k * N + n] = b[(ptrdiff_t)k * BK + (ptrdiff_t)n * BN];
      Product<M, N, K, AM, AK, N, 1, CM, ONTO>::apply(a, rows, c, scale);
      delete[] rows;
    }
  }
};
