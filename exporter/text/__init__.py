"""Building the bundle's tokenizer files and text settings from a checkpoint."""

from pagelet.exporter.text.write import write_text_files

__all__ = ["write_text_files"]
