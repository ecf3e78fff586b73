cd .gpu-dbg
for o in "-O3" "-O2" "-O3 -fno-strict-aliasing" "-O3 -fno-tree-slp-vectorize" "-O3 -fno-tree-loop-vectorize" "-O3 -fno-tree-loop-distribute-patterns" "-O3 -fno-tree-loop-distribution" "-O3 -fno-split-paths" "-O3 -fno-unswitch-loops" "-O3 -fno-tree-loop-im" "-O3 -fno-peel-loops" "-O3 -mprefer-vector-width=256" "-O3 -fsanitize=address,undefined" "-O3 -fno-tree-vrp" "-O3 -fno-ivopts" "-O3 -fno-tree-pre" "-O3 -fno-version-loops-for-strides" "-O3 -fvect-cost-model=very-cheap" "-O3 -march=skylake-avx512"; do
 m="-march=native"; case "$o" in *march*) m="";; esac
 g++ $o $m -std=c++17 -DREAL=double -I../src/coterie/kernels/cpp m.cpp -o m 2>&1 | head -3; echo "$o: $(./m)"; done
