"""The checks of `pagelet.tools.gpu_check`: what is run on a GPU, and what it is compared with."""
