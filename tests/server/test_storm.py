"""Lock servers are killed under load: the clients go on, and no invariant is broken.

`pgleaderlock load` is the judge: it checks every lease and every write, and exits with 1 when one was wrong.
"""

import contextlib
import json
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import StartServer
from support.counts import count
from support.lockserver import LockServerProcess, lock_server, postgres_url
from support.program import Program, running

pytestmark = pytest.mark.long

SEED = 5
# More than the run takes; it is ended when enough has happened.
DURATION = "3600s"


@contextlib.contextmanager
def _load(report: Path, servers: list[LockServerProcess], *options: str) -> Iterator[Program]:
    arguments = [part for server in servers for part in ("--server", server.url)]
    arguments += ["--duration", DURATION, "--json", str(report), "--seed", str(SEED), *options]
    with running("load", *arguments) as program:
        yield program


def _ended(program: Program, report: Path) -> dict[str, Any]:
    program.signal(signal.SIGINT)
    assert program.end() == 0, program.out + program.err
    found: dict[str, Any] = json.loads(report.read_text())
    assert found["violations"]["total"] == 0
    return found


def _seconds_of_work(program: Program) -> int:
    return program.out.count(" op/s")


@pytest.mark.timeout(300)
def test_clients_go_on_when_one_of_three_servers_on_one_database_is_killed(
    tmp_path: Path, throwaway_postgres: StartServer
) -> None:
    database = throwaway_postgres().dsn
    report = tmp_path / "report.json"
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(lock_server(tmp_path, store=postgres_url(database))) for _ in range(3)]
        options = ("--clients", "24", "--locks", "6", "--ttl", "1s", "--failrate", "0.05")
        with _load(report, servers, *options) as program:
            program.until(" op/s", "out", times=3)
            for victim in servers[: count(1, 2)]:
                victim.program.signal(signal.SIGKILL)
                program.until(" op/s", "out", times=_seconds_of_work(program) + count(4, 20))
            found = _ended(program, report)
    assert found["counts"]["acquired"] >= 50
    assert found["counts"]["crashed"] + found["counts"]["stalled"] > 0


@pytest.mark.timeout(900)
def test_a_server_that_is_killed_again_and_again_breaks_no_promise(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    report = tmp_path / "report.json"
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(lock_server(tmp_path))
        # Short leases, because a held lock counts for its whole time again after a restart.
        options = ("--clients", "16", "--locks", "8", "--ttl", "400ms", "--failrate", "0.05")
        with _load(report, [server], *options) as program:
            for _ in range(count(4, 100)):
                program.until(" op/s", "out", times=_seconds_of_work(program) + rng.choice((1, 1, 2)))
                server.program.signal(signal.SIGKILL)
                assert server.program.end() == -signal.SIGKILL  # whether a client feels it is a matter of the moment
                server = stack.enter_context(lock_server(tmp_path, port=server.port))
            program.until(" op/s", "out", times=_seconds_of_work(program) + 2)
            found = _ended(program, report)
    assert found["counts"]["acquired"] >= count(20, 1_000)
