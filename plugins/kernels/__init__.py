"""Paged attention in Triton for NVIDIA GPUs: what is compiled, and how one step is launched.

`variant` and `launch_plan` are plain Python, so that a runtime without Triton can launch compiled kernels.
"""
