"""What each way to store weights costs: `python -m pagelet.tools.quality_bench`."""
