"""Checkpoint in, bundle out: read, quantize, build the graph, write."""

from pagelet.exporter.export import export
from pagelet.exporter.options import ExportOptions

__all__ = ["ExportOptions", "export"]
