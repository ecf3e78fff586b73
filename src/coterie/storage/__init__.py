"""Crash-safe files: atomic writes, locks, the cache, and arrays in safetensors and npz files."""
