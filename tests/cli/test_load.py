"""`pgleaderlock load`: it measures, it checks, and it finds what it is made to find."""

import contextlib
import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgleaderlock.cli.load.engine import GuardedResource, Latencies, Violations
from pgleaderlock.cli.output import EXIT_NO, EXIT_OK, EXIT_USAGE
from pgleaderlock.client import LockInfo
from pgleaderlock.client._lease import BaseLease, LeaseState
from pgleaderlock.client._wire import Granted
from support.lockserver import LockServerProcess, lock_server
from support.program import PATIENCE_S, command, environment, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LockServerProcess]:
    with lock_server(tmp_path_factory.mktemp("locks")) as started:
        yield started


# -- what must never be seen is seen ----------------------------------------------------------------------------------


class StillClock:
    def __init__(self) -> None:
        self.at = 1000.0

    def now(self) -> float:
        return self.at

    async def sleep(self, delay_s: float) -> None:
        raise NotImplementedError


class World:
    """A resource, and leases for it that a test makes as it likes."""

    def __init__(self) -> None:
        self.clock = StillClock()
        self.violations = Violations()
        self.resource = GuardedResource("job", self.violations)

    def lease(self, token: int, ttl_s: float = 10.0) -> BaseLease:
        return BaseLease(
            Granted("job", f"owner-{token}", f"L{token}", token, 0, False), ttl_s, self.clock.at, self.clock
        )

    def broken(self) -> dict[str, int]:
        return dict(self.violations.counts)


@pytest.fixture
def world() -> World:
    return World()


def seen(token: int, *, held: bool = True) -> LockInfo:
    return LockInfo("job", held, "x" if held else None, None, token, None, 1)


def test_a_sound_history_breaks_nothing(world: World) -> None:
    first = world.lease(1)
    world.resource.granted(first)
    assert world.resource.write(1)
    first._end(LeaseState.RELEASED)
    second = world.lease(2)
    world.resource.granted(second)
    assert world.resource.write(2)
    assert not world.resource.write(1), "the stale writer was let in"
    world.resource.stale_released(second, seen(2))
    world.clock.at += 11.0  # expired by its own deadline
    world.resource.granted(world.lease(3))
    assert world.broken() == {}


def test_two_leases_that_are_valid_at_the_same_time_are_caught(world: World) -> None:
    world.resource.granted(world.lease(1))
    world.resource.granted(world.lease(2))
    assert world.broken() == {"overlap": 1}


def test_a_stale_lease_that_was_renewed_beside_a_valid_one_is_caught(world: World) -> None:
    world.resource.granted(world.lease(2))
    world.resource.revived(world.lease(1))
    assert world.broken() == {"overlap": 1}


@pytest.mark.parametrize("token", [1, 2])
def test_a_token_that_does_not_rise_is_caught(world: World, token: int) -> None:
    first = world.lease(2)
    world.resource.granted(first)
    first._end(LeaseState.RELEASED)
    world.resource.granted(world.lease(token))
    assert world.broken() == {"token": 1}


def test_a_stale_write_that_is_accepted_is_caught(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GuardedResource, "_accepts", lambda self, token: True)  # the fence is taken out
    assert world.resource.write(2)
    assert world.resource.write(1)
    assert world.broken() == {"write": 1}


@pytest.mark.parametrize("found", [seen(2, held=False), seen(3)], ids=["freed", "given to another"])
def test_a_stale_release_that_frees_a_later_lease_is_caught(world: World, found: LockInfo) -> None:
    holder = world.lease(2)
    world.resource.granted(holder)
    world.resource.stale_released(holder, found)
    assert world.broken() == {"clobber": 1}


def test_who_let_go_by_himself_was_not_clobbered(world: World) -> None:
    holder = world.lease(2)
    world.resource.granted(holder)
    holder._end(LeaseState.RELEASED)
    world.resource.stale_released(holder, seen(2, held=False))
    assert world.broken() == {}


@given(st.lists(st.floats(1e-6, 100.0), min_size=1, max_size=200), st.sampled_from([0.5, 0.95, 0.99]))
@settings(deadline=None)
def test_a_percentile_is_right_to_two_hundredths(durations: list[float], share: float) -> None:
    latencies = Latencies()
    for duration in durations:
        latencies.add(duration)
    exact = sorted(durations)[math.ceil(len(durations) * share) - 1]
    assert exact * 0.999 <= latencies.percentile_s(share) <= exact * 1.0205
    assert latencies.max_s == max(durations)


# -- the command ------------------------------------------------------------------------------------------------------

# One grant in ten is a lie: a lease that nobody has granted, with a token of the past.
LYING = """
import itertools
from pgleaderlock.client import AsyncLease, AsyncLockClient
from pgleaderlock.client._wire import Granted
honest, number = AsyncLockClient.acquire, itertools.count(1)
async def acquire(self, lock_name, ttl_s=30.0, *, wait_s=0.0):
    if next(number) % 10 == 0:
        clock = self._core.clock
        return AsyncLease(Granted(lock_name, self.owner_id, "forged", 1, 0, False), ttl_s, clock.now(), clock)
    return await honest(self, lock_name, ttl_s, wait_s=wait_s)
AsyncLockClient.acquire = acquire
"""


@pytest.mark.long
def test_a_run_with_clients_that_fail_on_purpose_finds_nothing_broken(
    server: LockServerProcess, tmp_path: Path
) -> None:
    file = tmp_path / "report.json"
    args = ["--clients", "20", "--duration", "4s", "--ttl", "400ms", "--failrate", "0.3", "--locks", "3"]
    done = command("load", "--server", server.url, *args, "--wait", "300ms", "--json", str(file))
    assert done.code == EXIT_OK, done.out + done.err
    assert "every invariant held" in done.out
    report = json.loads(file.read_text())
    counts = report["counts"]
    assert report["violations"] == {"total": 0}
    assert report["settings"]["seed"] is not None, "a run can be repeated"
    # Each kind of failure must have happened, or the run has shown nothing.
    for kind in ("acquired", "released", "crashed", "stalled", "stale_writes_refused", "stale_renewals_refused"):
        assert counts[kind] > 0, kind
    assert counts["writes"] > counts["acquired"]
    assert report["latency"]["acquire"]["p99_ms"] >= report["latency"]["acquire"]["p50_ms"] > 0


def test_the_names_of_its_locks_need_no_escape_in_a_path(server: LockServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    args = ["--clients", "2", "--duration", "300ms", "--locks", "2", "--failrate", "0", "--json", str(file)]
    assert command("load", "--server", server.url, *args).code == EXIT_OK
    names = json.loads(file.read_text())["settings"]["names"]
    assert [name for name in names if not re.fullmatch(r"[A-Za-z0-9._~-]+", name)] == []


def test_a_broken_invariant_is_exit_code_1_and_is_named(server: LockServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    args = ["load", "--server", server.url, "--clients", "10", "--duration", "2s", "--json", str(file)]
    with running(*args, code=LYING) as program:
        assert program.end() == EXIT_NO
    assert "AN INVARIANT WAS BROKEN" in program.out
    assert "VIOLATION token" in program.out
    report = json.loads(file.read_text())
    assert report["violations"]["total"] > 0
    assert report["first_violations"][0]["rule"] in {"token", "overlap"}


def test_a_run_that_was_granted_nothing_shows_nothing_and_says_so(server: LockServerProcess) -> None:
    done = command("load", "--server", "http://127.0.0.1:1", "--clients", "2", "--duration", "1s")
    assert done.code == EXIT_USAGE
    assert "nothing was shown" in done.err
    assert "every invariant held" not in done.out
    done = command("load", "--server", server.url, "--lock", "a", "--locks", "2")
    assert done.code == EXIT_USAGE
    assert "exclude each other" in done.err


def test_a_run_that_is_not_allowed_ends_at_once(tmp_path: Path) -> None:
    with lock_server(tmp_path, tokens=True) as server:
        file = tmp_path / "report.json"
        done = command("load", "--server", server.url, "--duration", "10m", "--json", str(file))
        assert done.code == EXIT_USAGE
        assert "a bearer token is needed" in done.err
        assert json.loads(file.read_text())["counts"]["acquired"] == 0


def test_a_report_that_cannot_be_written_is_told_before_the_run(server: LockServerProcess) -> None:
    done = command("load", "--server", server.url, "--duration", "10m", "--json", "/no/such/folder/report.json")
    assert done.code == EXIT_USAGE
    assert "--json /no/such/folder/report.json cannot be written: No such file or directory" in done.err


def test_ctrl_c_ends_the_run_early_and_its_figures_are_shown(server: LockServerProcess) -> None:
    with running("load", "--server", server.url, "--clients", "3", "--duration", "10m") as program:
        program.until("op/s", "out")
        program.signal(signal.SIGINT)
        assert program.end() == EXIT_OK
    assert "every invariant held" in program.out


def test_without_a_terminal_every_line_is_plain_and_short(server: LockServerProcess) -> None:
    done = command("load", "--server", server.url, "--clients", "2", "--duration", "2s", env={"COLUMNS": "60"})
    assert done.code == EXIT_OK
    assert "\x1b" not in done.out
    assert max(map(len, done.out.splitlines())) <= 80
    table = done.out[done.out.index("after ") :]
    assert max(map(len, table.splitlines())) <= 60


def test_in_a_terminal_of_sixty_columns_the_figures_are_live_and_nothing_is_cut_off(server: LockServerProcess) -> None:
    master, slave = pty.openpty()
    env = environment({"TERM": "xterm", "COLUMNS": "60", "LINES": "40"})
    argv = [sys.executable, "-m", "pgleaderlock", "load", "--server", server.url, "--clients", "2", "--duration", "2s"]
    process = subprocess.Popen(argv, env=env, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    said = b""
    until = time.monotonic() + PATIENCE_S
    try:
        with contextlib.suppress(OSError):  # the terminal's end, when the process has ended
            while time.monotonic() < until:
                if select.select([master], [], [], 1.0)[0]:
                    said += os.read(master, 65536)
        assert process.wait(PATIENCE_S) == EXIT_OK
    finally:
        process.kill()
        process.wait()
        os.close(master)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode())
    assert text.count("violations") > 2, "it was drawn once only"
    assert "…" not in text
    assert max(len(line.rstrip()) for line in re.split(r"[\r\n]+", text)) <= 60
