"""README's first snippet, as two processes from the built wheel: how long until the successor's work runs.

Twenty pairs for each signal stand by at the same time, so that one wait of three minutes serves all rounds. Then the
benchmark ends one leader after the other, by each signal in turn. `PGLEADERLOCK_BENCH_STANDBY_S` sets how long the
pairs stand by, and `PGLEADERLOCK_BENCH_PAIRS` how many pairs there are for each signal.
"""

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.harness import Figure, median, percentile
from bench.lock import kill_round, process
from pgleaderlock.embedded import EmbeddedPostgres

__all__ = ["readme"]

PAIRS = int(os.environ.get("PGLEADERLOCK_BENCH_PAIRS", "20"))
STANDBY_S = float(os.environ.get("PGLEADERLOCK_BENCH_STANDBY_S", "180"))
RAW_KEYS = (2, 3)
SIGNALS = {
    signal.SIGKILL: "SIGKILL",
    signal.SIGTERM: "SIGTERM",
    signal.SIGINT: "SIGINT (a clean release)",
}
PROJECT = Path(__file__).resolve().parents[1]
BUILD = "import hatchling.build, sys; hatchling.build.build_wheel(sys.argv[1])"
# The parts of the snippet that its reader has to fill in: the work, the database and the name.
BLANKS = (
    ("import asyncio\n", "import asyncio, time\n"),
    ("...  ", "print(time.monotonic(), flush=True)  "),
    ('"postgresql://app@db/app", "billing"', "*sys.argv[1:]"),
    ("asyncio.run(main())", "import sys\nasyncio.run(main())"),
)


async def readme(_dsn: str) -> list[Figure]:
    """From a signal to the leader until the successor's work runs, against a raw parked waiter."""
    return await asyncio.to_thread(_measure)


def _measure() -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="pgl-bench-", dir="/tmp") as folder:
        Path(folder).chmod(0o711)  # the server's account needs access to what is inside
        settings = {"max_connections": str(2 * len(SIGNALS) * PAIRS + 20)}
        with EmbeddedPostgres(Path(folder) / "pg", port=0, settings=settings) as server, _snippet() as start:
            return _rounds(server.dsn, start)


def _rounds(dsn: str, start: "_Start") -> list[Figure]:
    rng = random.Random(2)
    raw_waiter = process("bench.raw_waiter", dsn, *RAW_KEYS)
    rounds = [(signum, f"bench-readme-{number}-{signum}") for number in range(PAIRS) for signum in SIGNALS]
    running: list[subprocess.Popen[str]] = [raw_waiter]
    ours: dict[int, list[float]] = {signum: [] for signum in SIGNALS}
    raw: dict[int, list[float]] = {signum: [] for signum in SIGNALS}
    try:
        leaders = [start(dsn, name) for _, name in rounds]
        running += leaders
        for leader in leaders:
            _works_at(leader)
        standbys = [start(dsn, name) for _, name in rounds]
        running += standbys
        time.sleep(STANDBY_S)
        for (signum, _), leader, standby in zip(rounds, leaders, standbys, strict=True):
            time.sleep(rng.uniform(0, 0.6))  # the end falls anywhere within a slice, or between two of them
            ended_at = time.monotonic()
            os.kill(leader.pid, signum)
            ours[signum].append(_works_at(standby) - ended_at)
            raw[signum].append(kill_round(dsn, raw_waiter, RAW_KEYS, rng))
    finally:
        for each in running:
            each.kill()
        for each in running:
            each.wait()
    return [figure for signum, said in SIGNALS.items() for figure in _figures(said, ours[signum], raw[signum])]


@contextmanager
def _snippet() -> "Iterator[_Start]":
    """README's first snippet with its blanks filled in, run with the contents of the built wheel."""
    (code,) = re.findall(r"```python\n(.*?)```", (PROJECT / "README.md").read_text(), re.DOTALL)[:1]
    for blank, filled in BLANKS:
        assert code.count(blank) == 1, f"README's first snippet has changed: {blank!r}"
        code = code.replace(blank, filled)
    with tempfile.TemporaryDirectory(prefix="pgl-readme-") as folder:
        subprocess.run([sys.executable, "-c", BUILD, folder], cwd=PROJECT, check=True, stdout=subprocess.DEVNULL)
        (wheel,) = Path(folder).glob("*.whl")
        zipfile.ZipFile(wheel).extractall(folder)
        yield _Start(code, folder)


class _Start:
    """Starts the program: `start(dsn, name)`."""

    def __init__(self, code: str, folder: str) -> None:
        self._command = [sys.executable, "-c", code]
        self._folder = folder

    def __call__(self, dsn: str, name: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*self._command, dsn, name],
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": self._folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # an interrupted program shows its traceback
            text=True,
        )


def _works_at(program: "subprocess.Popen[str]") -> float:
    """When the program's work first ran, on the machine's monotonic clock."""
    assert program.stdout is not None
    return float(program.stdout.readline())


def _figures(said: str, ours: list[float], raw: list[float]) -> Iterator[Figure]:
    took = f"p50 {median(ours) * 1e3:.1f} ms, p99 {percentile(ours, 99) * 1e3:.1f} ms"
    beside = (
        f"raw parked waiter p50 {median(raw) * 1e3:.1f} ms, p99 {percentile(raw, 99) * 1e3:.1f} ms"
        f" ({len(ours)} rounds after {STANDBY_S:g} s of standing by)"
    )
    yield Figure(f"README's snippet, {said} → work, p50", took, beside, median(ours) * 1e3, 50.0, "ms")
    yield Figure(f"README's snippet, {said} → work, p99", took, beside, percentile(ours, 99) * 1e3, 1200.0, "ms")
