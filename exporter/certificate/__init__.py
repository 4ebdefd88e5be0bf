"""The certificate: a bundle beside its original in full precision, on text that it was not made with."""

from pagelet.exporter.certificate.certify import certify

__all__ = ["certify"]
