"""From logits to a token: parameters, penalties, filters, and noise that depends on nothing beside it."""

from pagelet.runtime.sampling.params import SamplingParams
from pagelet.runtime.sampling.sampler import SampledToken, Sampler
from pagelet.runtime.sampling.state import SamplerState

__all__ = ["SampledToken", "Sampler", "SamplerState", "SamplingParams"]
