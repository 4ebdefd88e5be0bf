"""Speculative decoding: guess several tokens ahead, check them all in one step, keep what is right."""
