"""What an export does for its target behind the quantizer: weights in its layout, its ops, its engine."""

from pagelet.exporter.targets.finish import finish
from pagelet.exporter.targets.lower import check_model, lower

__all__ = ["check_model", "finish", "lower"]
