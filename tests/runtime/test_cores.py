"""How many cores there are for us, and that engines of one process take turns on them."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from exporting import uncertified

from pagelet.exporter import export
from pagelet.runtime import Engine, EngineConfig, SamplingParams
from pagelet.runtime.cores import CORES, Cores, physical_cores

# Eight logical processors, two on each core.
SIBLINGS = {
    f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": f"{i % 4},{i % 4 + 4}" for i in range(8)
}
V2 = {"proc/self/cgroup": "0::/app/job\n"}
V1 = {"proc/self/cgroup": "3:memory:/app\n2:cpuacct,cpu:/app\n"}
PERIOD = {"sys/fs/cgroup/cpu/app/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("files", "usable", "cores"),
    [
        ({}, range(6), 6),  # nothing is known of cores
        (SIBLINGS, range(8), 4),
        (SIBLINGS, (1, 5), 1),
        (SIBLINGS, (0, 1, 5, 6), 3),
        ({**SIBLINGS, **V2, "sys/fs/cgroup/app/job/cpu.max": "max 100000\n"}, range(8), 4),
        ({**SIBLINGS, **V2, "sys/fs/cgroup/app/job/cpu.max": "250000 100000\n"}, range(8), 2),
        ({**SIBLINGS, **V2, "sys/fs/cgroup/app/cpu.max": "300000 100000\n"}, range(8), 3),  # a parent's
        ({**SIBLINGS, **V2, "sys/fs/cgroup/cpu.max": "50000 100000\n"}, range(8), 1),  # seen from a container
        ({**SIBLINGS, **V2, "sys/fs/cgroup/app/job/cpu.max": "garbage"}, range(8), 4),
        ({**SIBLINGS, **V1, **PERIOD, "sys/fs/cgroup/cpu/app/cpu.cfs_quota_us": "200000\n"}, range(8), 2),
        ({**SIBLINGS, **V1, **PERIOD, "sys/fs/cgroup/cpu/app/cpu.cfs_quota_us": "-1\n"}, range(8), 4),
    ],
)
def test_physical_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], usable: Any, cores: int
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(usable), raising=False)
    assert physical_cores(tmp_path) == cores


def test_never_more_threads_than_cores_and_everyone_gets_a_turn() -> None:
    cores, held, most = Cores(4), 0, 0
    lock = threading.Lock()

    def work(seed: int) -> None:
        nonlocal held, most
        chooser = random.Random(seed)
        for _ in range(200):
            taken = cores.acquire(chooser.randint(1, 9))
            with lock:
                held += taken
                most = max(most, held)
            with lock:
                held -= taken
            cores.release(taken)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
        assert not worker.is_alive()
    assert 1 <= most <= 4
    assert cores.acquire(9) == 4  # all of them are free again


def test_who_waits_longest_is_served_first() -> None:
    cores, order = Cores(2), []
    taken = cores.acquire(1)

    def work(wanted: int) -> None:
        mine = cores.acquire(wanted)
        order.append(wanted)
        cores.release(mine)

    workers = [threading.Thread(target=work, args=(wanted,)) for wanted in (2, 1)]
    for number, worker in enumerate(workers):
        worker.start()
        while worker.is_alive() and len(cores._waiting) <= number:
            time.sleep(0.001)  # the second one could have the free core, and must not pass
    cores.release(taken)
    for worker in workers:
        worker.join()
    assert order == [2, 1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
def test_a_fork_has_all_cores() -> None:
    code = (
        "import os; from pagelet.runtime.cores import CORES; CORES.acquire(10**6); child = os.fork()\n"
        "if not child: CORES.acquire(1); os._exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "7\n"


def test_engines_of_one_process_take_turns(make_llama: Callable[..., Path], tmp_path: Path) -> None:
    export(make_llama(), tmp_path / "bundle", uncertified())
    config, params = (
        EngineConfig(kv_memory="4MiB", threads=CORES._count),
        SamplingParams(max_tokens=40, ignore_eos=True),
    )
    inside, most, steps = 0, 0, 0

    def counted(run: Callable[[object], None]) -> Callable[[object], None]:
        def wrapper(binding: object) -> None:
            nonlocal inside, most, steps
            inside, steps = inside + 1, steps + 1
            most = max(most, inside)
            run(binding)
            inside -= 1

        return wrapper

    with Engine.open(tmp_path / "bundle", config) as one, Engine.open(tmp_path / "bundle", config) as other:
        for engine in (one, other):
            session: Any = engine._loop.backend._session  # type: ignore[attr-defined]
            session.run_with_iobinding = counted(session.run_with_iobinding)
        requests = [engine.submit([5, 6, 7], params) for engine in (one, other, one, other)]
        first, *others = [request.result().token_ids for request in requests]
    assert all(tokens == first for tokens in others)
    assert most == 1
    assert steps >= 80


def test_who_is_interrupted_while_waiting_leaves_nothing_behind() -> None:
    if not hasattr(signal, "setitimer"):
        pytest.skip("needs timers that interrupt")
    cores = Cores(2)
    taken = cores.acquire(1)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            cores.acquire(2)
    finally:
        signal.signal(signal.SIGALRM, before)
    cores.release(taken)
    assert cores.acquire(2) == 2  # would wait for ever behind the one who left
