// Vectors as wide as the machine's registers, which may begin anywhere.
#pragma once

typedef REAL real;

#if defined(__AVX512F__)
enum { BYTES = 64, REGISTERS = 24 };  // registers for sums; the others hold what is added
#elif defined(__AVX__)
enum { BYTES = 32, REGISTERS = 12 };
#else
enum { BYTES = 16, REGISTERS = 24 };
#endif
enum { LANES = BYTES / sizeof(real) };

typedef real vector_t __attribute__((vector_size(BYTES), aligned(sizeof(real)), may_alias));

static inline vector_t load(const real* from) { return *(const vector_t*)from; }
static inline void store(real* to, vector_t value) { *(vector_t*)to = value; }

static inline real sum(vector_t value) {
  real total = 0;
  for (int lane = 0; lane < LANES; lane++) total += value[lane];
  return total;
}
