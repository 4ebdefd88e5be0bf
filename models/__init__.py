"""What a model *is*: its spec, the data rows of its architecture, the bundle manifest, the errors.

Imports nothing else of pagelet; the exporter writes what is described here and the runtime reads it.
"""
