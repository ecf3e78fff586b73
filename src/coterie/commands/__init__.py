"""The command line: what is typed, what is printed, and the benchmarks."""
