"""The examples of job frameworks, with the real frameworks in processes of their own: one leads, others succeed it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from pgleaderlock import key_pair, sync
from support.deps import debian_tool
from support.program import PATIENCE_S, Program, environment
from support.server_side import holders

PROJECT = Path(__file__).parents[2]
EXAMPLES = PROJECT / "examples"
POLL_S = 0.05

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    tool = debian_tool("redis-server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("redis")
    command = [str(tool.path), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
    with subprocess.Popen(command, env=tool.env, stdout=subprocess.DEVNULL) as process:
        try:
            _until_listening(port)
            yield f"redis://127.0.0.1:{port}"
        finally:
            process.terminate()


def _until_listening(port: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            assert time.monotonic() < deadline, "redis does not listen"
            time.sleep(POLL_S)
        else:
            return


@contextlib.contextmanager
def program(argv: list[str], **env: str) -> Iterator[Program]:
    """A process and its children, in a group of their own; what is left of it at the end is killed."""
    process = subprocess.Popen(
        [sys.executable, *argv],
        cwd=EXAMPLES,
        env=environment({"PYTHONUNBUFFERED": "1", **env}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield Program(process)
    finally:
        kill(process.pid)
        process.wait(PATIENCE_S)
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def until_candidates(dsn: str, name: str, wanted: int) -> None:
    """Until so many processes have a session for this lock. Nothing announces it: looked for, within bounds."""
    query = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE %s"
    deadline = time.monotonic() + PATIENCE_S
    with psycopg.connect(dsn, autocommit=True) as conn:
        while (found := conn.execute(query, (f"pgleaderlock%{name}%",)).fetchone()) != (wanted,):
            assert time.monotonic() < deadline, f"{found} compete, not {wanted}"
            time.sleep(POLL_S)


def said(process: Program, stream: str) -> str:
    """Everything that it has said until now."""
    while process._read(0.0):
        pass
    text: str = getattr(process, stream)
    return text


def takes_over(dsn: str, name: str, does: str, stream: str, argv: list[list[str]], **env: str) -> None:
    """Of three, the first works; the second after it was killed; the third after the second was asked to end."""

    def works(process: Program) -> None:
        """From now on: a second time, since the first may have been in flight."""
        process.until(does, stream, times=said(process, stream).count(does) + 2)

    with contextlib.ExitStack() as stack:
        first = stack.enter_context(program(argv[0], **env))
        works(first)
        second = stack.enter_context(program(argv[1], **env))
        until_candidates(dsn, name, 2)
        if name != "periodic":  # Dramatiq's messages are for any worker, whoever sends them
            works(first)
            assert does not in said(second, stream)
        assert len(holders(dsn, key_pair(name))) == 1
        kill(first.process.pid)
        works(second)
        third = stack.enter_context(program(argv[2], **env))
        until_candidates(dsn, name, 2)
        second.signal(signal.SIGTERM)
        second.end()
        works(third)
        assert len(holders(dsn, key_pair(name))) == 1
        third.signal(signal.SIGTERM)
        third.end()
    assert holders(dsn, key_pair(name)) == []


@pytest.mark.parametrize("file", ["celery_app.py", "apscheduler_app.py", "dramatiq_app.py"])
def test_the_docs_show_the_example(file: str) -> None:
    text = (EXAMPLES / file).read_text()
    shown = text.split("# -- shown in docs/jobs.md\n")[1].split("\n\n# -- until here")[0].rstrip("\n")
    assert shown in (PROJECT / "docs" / "jobs.md").read_text()


def celery(*args: str) -> list[str]:
    return ["-m", "celery", "-A", "celery_app", *args, "--loglevel", "info"]


@pytest.mark.long
def test_one_celery_beat_of_many_sends(dsn: str, redis_url: str, tmp_path: Path) -> None:
    beats = [celery("beat", "--pidfile=", "--schedule", str(tmp_path / str(number))) for number in range(3)]
    takes_over(
        dsn, "celery-beat/billing", "Sending due task", "err", beats, PG_DSN=dsn, CELERY_BROKER_URL=f"{redis_url}/0"
    )


@pytest.mark.long
def test_a_celery_task_is_skipped_while_another_run_lasts(dsn: str, redis_url: str, tmp_path: Path) -> None:
    env = {"PG_DSN": dsn, "CELERY_BROKER_URL": f"{redis_url}/1"}
    beat = celery("beat", "--pidfile=", "--schedule", str(tmp_path / "beat"))
    worker = celery("worker", "--pool", "prefork", "--concurrency", "2", "--without-gossip", "--without-mingle")
    other_run = sync.acquire_leadership(dsn, "send-invoices")
    with program(beat, **env), program(worker, **env) as working:
        with other_run:
            working.until("run_skipped", times=2)
            assert "invoices sent" not in working.err
        working.until("invoices sent")


@pytest.mark.long
def test_one_apscheduler_of_many_runs_the_jobs(dsn: str) -> None:
    takes_over(dsn, "jobs", "polled by", "out", [["apscheduler_app.py"]] * 3, PG_DSN=dsn)


@pytest.mark.long
def test_one_dramatiq_worker_of_many_sends(dsn: str, redis_url: str) -> None:
    argv = ["-m", "dramatiq", "dramatiq_app", "--processes", "1", "--threads", "1"]
    takes_over(dsn, "periodic", "polled", "err", [argv] * 3, PG_DSN=dsn, REDIS_URL=f"{redis_url}/2")
