"""Options of an export for tests that are about something else than its certificate."""

from functools import partial

from pagelet.exporter import ExportOptions

# The models are random: in four bits they are further from their originals than any limit allows.
uncertified = partial(ExportOptions, certificate_seconds=None)
