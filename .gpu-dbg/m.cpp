#include "conv.h"
#include <cstdio>
#include <cmath>
#include <cstdlib>
#ifndef CFG
#define CFG 1, 2, 5, 5, 3, 3, 0, 0
#endif
typedef Layer<CFG> The;
template <int CI, int CO, int H, int W, int KY, int KX, int PY, int PX>
void naive(int n, const real* d, const real* w, real* out) {
  const int OH=H+2*PY-KY+1, OW=W+2*PX-KX+1;
  for (int i=0;i<n*CI*H*W;i++) out[i]=0;
  for (int m=0;m<n;m++) for (int o=0;o<CO;o++) for (int y=0;y<OH;y++) for (int x=0;x<OW;x++) for (int c=0;c<CI;c++) for (int a=0;a<KY;a++) for (int b=0;b<KX;b++) {
    int r=y+a-PY, s=x+b-PX; if (r<0||s<0||r>=H||s>=W) continue;
    out[((m*CI+c)*H+r)*W+s] += d[((m*CO+o)*OH+y)*OW+x]*w[((o*CI+c)*KY+a)*KX+b]; }
}
int main() {
  const int n=2; std::vector<real> d(n*The::OUT), w(The::FILTERS), a(n*The::IN), b(n*The::IN);
  for (auto& v : d) v = rand()%1000/500.-1; for (auto& v : w) v = rand()%1000/500.-1;
  The::to_images(n, d.data(), w.data(), a.data()); naive<CFG>(n, d.data(), w.data(), b.data());
  int bad=0; for (size_t i=0;i<a.size();i++) if (std::fabs(a[i]-b[i])>1e-4) { if (!bad) printf("[%zu: %g %g] ",i,(double)a[i],(double)b[i]); bad++; }
  printf("bad %d of %zu\n", bad, a.size());
}
