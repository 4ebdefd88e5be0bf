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


def rss() -> int:
    """Resident bytes at this moment, of files and otherwise. Linux only."""
    return _status("VmRSS")


def mapped(name: str) -> dict[str, int]:
    """Bytes of this process's mappings of a file, by the end of its path. Linux only.

    "rss": resident, once for each mapping; "pss": the same, each page divided by how many map it;
    "anonymous_pages": copied since, by a write.
    """
    fields = {"Rss": "rss", "Pss": "pss", "Anonymous": "anonymous_pages"}
    total = dict.fromkeys(fields.values(), 0)
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, _, value = line.partition(":")
        if key in fields and inside:
            total[fields[key]] += int(value.split()[0]) * 1024
        elif "-" in line.split()[0]:  # a mapping's first line: addresses, …, path
            inside = line.endswith(name)
    return total


def _status(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0
