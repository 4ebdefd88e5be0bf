"""Texts that show a model's activations before it is quantized, and what is measured of them."""
