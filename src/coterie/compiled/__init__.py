"""Optional: traces the vmap engine's calls once and replays them, as C++ or as CUDA graphs."""
