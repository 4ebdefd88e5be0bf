"""The command line, benchmarks and evaluation."""
