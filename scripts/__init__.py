"""The command line, the demo and the benchmarks; no library code."""
