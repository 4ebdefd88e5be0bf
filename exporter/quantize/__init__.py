"""Weights to few bits: the rules, and what they need to know of a model's activations."""
