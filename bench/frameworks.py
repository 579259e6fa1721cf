"""The examples of the frameworks: how long after SIGTERM to the leader another process leads.

Each example runs as two processes of the real framework, started as its users start it. The time includes everything
that the framework does after the signal: its own shutdown, the end of the work, the release of the lock.
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict

from bench.harness import Figure, median
from bench.peers import redis
from pgleaderlock import key_pair
from pgleaderlock.migrate import migrate

__all__ = ["stops"]

ROUNDS = 5
WAIT_S = 60.0
POLL_S = 0.002
STANDBY_S = 1.0  # how long the standby stands by before the leader ends
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

_HOLDER = (
    "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND classid::bigint = %s AND objid::bigint = %s"
    " AND objsubid = 2"
)
# Sessions with a running backend: the ledger keeps the sessions of killed processes for a while.
_IN_LEDGER = (
    "SELECT count(*) FROM pgleaderlock.sessions s JOIN pg_stat_activity a ON a.pid = s.backend_pid"
    " AND a.backend_start = s.backend_start WHERE s.ended_at IS NULL AND s.beat > 0"
)
_LOCK_SESSIONS = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE %s"


@dataclass(frozen=True)
class Example:
    what: str
    argv: tuple[str, ...]
    name: str
    """The name of the role or the lock."""
    elects: bool = True
    """Whether it uses an election, which is in the ledger; otherwise it uses a lock."""
    folder: Path = EXAMPLES


FRAMEWORKS = (
    Example("FastAPI in uvicorn", ("-m", "uvicorn", "fastapi_app:app", "--port", "0"), "billing"),
    Example(
        "Flask in gunicorn",
        ("-m", "gunicorn", "--config", "gunicorn_conf.py", "--bind", "127.0.0.1:0", "flask_app:app"),
        "billing",
    ),
    Example("Django's run_leader", ("manage.py", "run_leader"), "billing", folder=EXAMPLES / "django_site"),
    Example(
        "Celery's beat",
        ("-m", "celery", "-A", "celery_app", "beat", "--pidfile=", "--schedule", "{folder}/{number}"),
        "celery-beat/billing",
        elects=False,
    ),
    Example("APScheduler", ("apscheduler_app.py",), "jobs", elects=False),
    Example(
        "Dramatiq",
        ("-m", "dramatiq", "dramatiq_app", "--processes", "1", "--threads", "1"),
        "periodic",
        elects=False,
    ),
)


async def stops(dsn: str) -> list[Figure]:
    """From SIGTERM to the leader until another process holds its lock, for each framework's example."""
    await migrate(dsn)
    database = {f"DB_{name.upper()}": str(value) for name, value in conninfo_to_dict(dsn).items()}
    async with redis() as (port, _):
        broker = f"redis://127.0.0.1:{port}"
        env = {
            **os.environ,
            **database,
            "DB_NAME": database["DB_DBNAME"],
            "PG_DSN": dsn,
            "CELERY_BROKER_URL": f"{broker}/0",
            "REDIS_URL": f"{broker}/1",
        }
        migrated = [sys.executable, "manage.py", "migrate", "--run-syncdb", "--verbosity", "0"]
        await asyncio.to_thread(subprocess.run, migrated, cwd=EXAMPLES / "django_site", env=env, check=True)
        return [await asyncio.to_thread(_measure, example, dsn, env) for example in FRAMEWORKS]


def _measure(example: Example, dsn: str, env: Mapping[str, str]) -> Figure:
    took = []
    with (
        ExitStack() as running,
        psycopg.connect(dsn, autocommit=True) as look,
        tempfile.TemporaryDirectory(prefix="pgl-frameworks-") as folder,
    ):
        leader = _start(example, env, folder, 0, running)
        holder = _until_led(look, example)
        for number in range(1, ROUNDS + 1):
            standby = _start(example, env, folder, number, running)
            _until_two(look, example)
            time.sleep(STANDBY_S)
            asked_at = time.monotonic()
            leader.send_signal(signal.SIGTERM)
            holder = _until_led(look, example, holder)
            took.append(time.monotonic() - asked_at)
            leader.wait(WAIT_S)
            leader = standby
    return Figure(
        f"{example.what}: SIGTERM → successor leads, the slowest",
        f"p50 {median(took) * 1e3:.0f} ms, slowest {max(took) * 1e3:.0f} ms",
        f"{ROUNDS} rounds",
        max(took) * 1e3,
        1000.0,
        "ms",
    )


def _start(
    example: Example, env: Mapping[str, str], folder: str, number: int, running: ExitStack
) -> "subprocess.Popen[bytes]":
    """Start the process in a new process group, which is killed at the end."""
    argv = [word.format(folder=folder, number=number) for word in example.argv]
    process = subprocess.Popen(
        [sys.executable, *argv],
        cwd=example.folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    running.callback(_end, process)
    return process


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(WAIT_S)


def _until_led(look: "psycopg.Connection[tuple[int]]", example: Example, but: int | None = None) -> int:
    """Poll until another backend than `but` holds the lock; returns its pid."""
    keys = [key & 0xFFFFFFFF for key in key_pair(example.name)]
    deadline = time.monotonic() + WAIT_S
    while True:
        row = look.execute(_HOLDER, keys).fetchone()
        if row is not None and row[0] != but:
            return row[0]
        if time.monotonic() > deadline:
            raise TimeoutError(f"{example.what}: nobody leads")
        time.sleep(POLL_S)


def _until_two(look: "psycopg.Connection[tuple[int]]", example: Example) -> None:
    query, params = (_IN_LEDGER, ()) if example.elects else (_LOCK_SESSIONS, (f"pgleaderlock%{example.name}%",))
    deadline = time.monotonic() + WAIT_S
    while (found := look.execute(query.encode(), params).fetchone()) is None or found[0] < 2:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{example.what}: nobody stands by")
        time.sleep(POLL_S)
