"""How much memory this process holds, in bytes."""

import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_rss() -> int:
    """Largest resident size so far; 0 where the system does not say."""
    if _STATUS.exists():  # getrusage would count the parent's memory before exec
        return _status("VmHWM")
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def anonymous_rss() -> int:
    """Resident bytes that no file backs (heap, stacks): what grows when something leaks. Linux only."""
    return _status("RssAnon")


def _status(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0
