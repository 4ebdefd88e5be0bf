"""The processor's cores: how many this process may use, and whose step runs on them now."""

import os
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path


def physical_cores(root: Path = Path("/")) -> int:
    """Physical cores that this process may run on; logical ones where the system does not tell.

    That is within its affinity, and within the time that its control group may take (`cpu.max` in version 2,
    `cpu.cfs_quota_us` in version 1), rounded down: threads beyond it would wait in the middle of a step.
    """
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    topology = root / "sys/devices/system/cpu"
    try:
        cores = len({(topology / f"cpu{cpu}/topology/thread_siblings_list").read_text() for cpu in usable})
    except OSError:
        cores = len(usable)
    return max(1, min([cores, *map(int, _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Cores' worth of time that each control group around this process may take."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        group = mount / path.lstrip("/")
        # A container may see the host's path, of which nothing exists here but the top.
        for folder in (group, *group.parents):
            if folder.is_relative_to(mount) and (quota := _quota(folder)):
                yield quota


def _quota(folder: Path) -> float | None:
    """Of one control group; None: no limit."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return max(float(quota), 0.0) / float(period)  # -1 is version 1's word for no limit
    except (OSError, ValueError):  # "max"
        return None


class Cores:
    """Shares the cores between the engines of this process: first come, first served, a step at a time.

    A step's threads spin while they wait for each other, so two engines with more threads than cores would
    take turns in the worst way, within every op.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.reset()

    def reset(self) -> None:
        """All cores are free and nobody waits; so it is in a fork, which has none of the other threads."""
        self._free = self._count
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, threading.Lock]] = deque()

    def acquire(self, threads: int) -> int:
        """Wait until `threads` cores are free, or all of them where that is less; how many were taken."""
        wanted = min(threads, self._count)
        with self._lock:
            if not self._waiting and wanted <= self._free:
                self._free -= wanted
                return wanted
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append((wanted, turn))
        try:
            turn.acquire()
        except BaseException:  # Ctrl-C, in a main thread
            self._give_up(wanted, turn)
            raise
        return wanted

    def _give_up(self, wanted: int, turn: threading.Lock) -> None:
        with self._lock:
            granted = (wanted, turn) not in self._waiting
            if not granted:
                self._waiting.remove((wanted, turn))
        self.release(wanted if granted else 0)  # who waited behind may fit now

    def release(self, taken: int) -> None:
        with self._lock:
            self._free += taken
            while self._waiting and self._waiting[0][0] <= self._free:
                wanted, turn = self._waiting.popleft()
                self._free -= wanted
                turn.release()


CORES = Cores(physical_cores())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=CORES.reset)
