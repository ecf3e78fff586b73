// Vectors as wide as the machine's registers, which may begin anywhere.
#pragma once
#include <cstddef>
#include <cstring>

typedef REAL real;

#define NOT_INLINE __attribute__((noinline))  // compiled once, however often it is called

#if defined(__AVX512F__)
enum { BYTES = 64, REGISTERS = 24 };  // registers for sums; the others hold what is added
#elif defined(__AVX__)
enum { BYTES = 32, REGISTERS = 12 };
#else
enum { BYTES = 16, REGISTERS = 24 };
#endif
enum { LANES = BYTES / sizeof(real) };

template <int N>
struct Lanes {
  typedef real type __attribute__((vector_size(N * sizeof(real)), aligned(sizeof(real)), may_alias));
};
typedef Lanes<LANES>::type vector_t;

static inline vector_t load(const real* from) { return *(const vector_t*)from; }
static inline void store(real* to, vector_t value) { *(vector_t*)to = value; }

// The sum of all lanes: halves are added to halves.
template <int N>
static inline real sum(typename Lanes<N>::type value) {
  if constexpr (N == 2) {
    return value[0] + value[1];
  } else {
    typename Lanes<N / 2>::type half;
#pragma GCC unroll 8
    for (int lane = 0; lane < N / 2; lane++) half[lane] = value[lane] + value[lane + N / 2];
    return sum<N / 2>(half);
  }
}

// The sum of n neighbours.
static inline real sum(const real* from, ptrdiff_t n) {
  vector_t total[4] = {};
  ptrdiff_t i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES)
    for (int v = 0; v < 4; v++) total[v] += load(from + i + v * LANES);
  real rest = sum<LANES>((total[0] + total[1]) + (total[2] + total[3]));
  for (; i < n; i++) rest += from[i];
  return rest;
}
