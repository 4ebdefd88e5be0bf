"""Measuring pagelet beside other engines: `python -m pagelet.tools.bench_peers`."""
