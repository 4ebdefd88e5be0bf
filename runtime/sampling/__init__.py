"""From logits to a token: parameters, penalties, filters, and noise that depends on nothing beside it."""

from pagelet.runtime.sampling.params import SamplingParams
from pagelet.runtime.sampling.sampler import Mask, SampledToken, Sampler
from pagelet.runtime.sampling.state import SamplerState

__all__ = ["Mask", "SampledToken", "Sampler", "SamplerState", "SamplingParams"]
