"""Files that survive a kill: atomic writes, locks, the cache, arrays in safetensors and npz."""
