"""How much memory this process holds, in bytes."""

import sys
from pathlib import Path


def peak_rss() -> int:
    """Largest resident size so far; 0 where the system does not say."""
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def anonymous_rss() -> int:
    """Resident bytes that no file backs (heap, stacks): what grows when something leaks. Linux only."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0
