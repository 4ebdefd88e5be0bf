"""The exceptions of pagelet: one tree, drawn here before any code raises one.

    PageletError
    ├── InputError            what a caller passed (also a ValueError)
    │   ├── PromptTooLongError
    │   └── CapacityError     a request or configuration that can never fit
    │       └── QueueFullError    one that would fit later
    ├── CheckpointError       a source model: damaged, incomplete, refused
    │   └── UnsupportedError  well-formed, but something pagelet does not know
    ├── UnfinishedError       an export that stopped on purpose; the same command goes on from there
    ├── BundleError           an exported bundle: damaged, foreign, too new
    ├── SessionError          a saved session: damaged, or not of this model and cache
    ├── BackendError          the engine underneath failed or is missing
    ├── EngineClosedError     a call on a closed engine
    └── CancelledError        the caller cancelled

Every message says what was found, what was expected, and what to do.
"""


class PageletError(Exception):
    """Base of every error that pagelet raises on purpose."""


class InputError(PageletError, ValueError):
    """An argument, option or request is not valid."""


class PromptTooLongError(InputError):
    """A prompt does not fit into the model's context."""


class CapacityError(InputError):
    """A request or configuration needs more memory than there can ever be."""


class QueueFullError(CapacityError):
    """As many requests wait as may wait; the same one may be taken later."""


class CheckpointError(PageletError):
    """A checkpoint is damaged, incomplete, or of a kind that is refused."""


class UnsupportedError(CheckpointError):
    """A checkpoint asks for something that the exporter does not know."""


class UnfinishedError(PageletError):
    """An export stopped before its end, and what it has done is kept for the next one to the same place."""


class BundleError(PageletError):
    """A bundle is damaged, incomplete, foreign, or newer than this version."""


class SessionError(PageletError):
    """A session file is damaged, newer than this version, or of another model or kind of cache."""


class BackendError(PageletError):
    """The engine underneath (ONNX Runtime, an op library) failed or is missing."""


class EngineClosedError(PageletError):
    """The engine was closed, or its loop ended."""


class CancelledError(PageletError):
    """The caller cancelled the operation."""
