"""The command line: its arguments, its output, and the benchmarks."""
