"""What runs a step: one module per engine underneath, each imported only when it is opened."""

from pagelet.runtime.backends.base import Backend, StepBatch

__all__ = ["Backend", "StepBatch"]
