"""The examples of the web frameworks, with the real servers: one worker leads, and another one after it was killed or
has ended.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from pgleaderlock.embedded import EmbeddedPostgres
from support.fencing import Leader, ledger_database
from support.program import PATIENCE_S, Program, environment

EXAMPLES = Path(__file__).parents[2] / "examples"
SITE = EXAMPLES / "django_site"
# The environment of an election whose T a test can wait for.
QUICK = {"HEARTBEAT_INTERVAL_MS": "200", "HEARTBEAT_LATE_THRESHOLD_MS": "2000", "HEARTBEAT_S": "0.4"}
LISTENING = re.compile(r"http://127\.0\.0\.1:(\d+)")
WORKERS = 4

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def ledger(postgres: EmbeddedPostgres, nothing_left: None) -> Iterator[str]:
    with ledger_database(postgres.dsn) as own:
        yield own


def uvicorn(file: str, workers: int = WORKERS) -> list[str]:
    app = f"{Path(file).stem}:app"
    return [sys.executable, "-m", "uvicorn", app, "--host", "127.0.0.1", "--port", "0", "--workers", str(workers)]


def gunicorn(file: str, *options: str) -> list[str]:
    bind = ["--config", "gunicorn_conf.py", "--bind", "127.0.0.1:0"]
    return [sys.executable, "-m", "gunicorn", *bind, *options, f"{Path(file).stem}:app"]


@contextlib.contextmanager
def serving(argv: Sequence[str], dsn: str, folder: Path = EXAMPLES, **more: str) -> Iterator[Program]:
    """A server and its workers, in a process group of their own; what is left of it at the end is killed."""
    database = {f"DB_{name.upper()}": str(value) for name, value in conninfo_to_dict(dsn).items()}
    env = environment(
        {"PG_DSN": dsn, **QUICK, **database, "DB_NAME": database["DB_DBNAME"], "PYTHONUNBUFFERED": "1", **more}
    )
    process = subprocess.Popen(
        argv,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield Program(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(PATIENCE_S)
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def leading(program: Program, epoch: int) -> int:
    """Wait until the work of this epoch has begun; gives the process in which it runs."""
    program.until(f"leading: epoch {epoch}, process ", "out")
    program.until("\n", "out", times=program.out[: program.out.index(f"epoch {epoch},")].count("\n") + 1)
    (found,) = re.findall(rf"leading: epoch {epoch}, process (\d+)", program.out)
    return int(found)


def ended(dsn: str) -> list[tuple[int, str]]:
    """Epoch and reason of the terms that are over."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        return [
            (row[0], row[1])
            for row in conn.execute(
                "SELECT epoch, reason FROM pgleaderlock.terms WHERE ended_at IS NOT NULL ORDER BY 1"
            )
        ]


def until_candidates(dsn: str, wanted: int) -> None:
    """Until so many processes compete. Nothing announces it: looked for, within bounds."""
    look = "SELECT count(*), pg_sleep(0.05) FROM pgleaderlock.sessions WHERE ended_at IS NULL"
    found = 0
    with psycopg.connect(dsn, autocommit=True) as conn:
        for _ in range(int(PATIENCE_S * 20)):
            ((found, _slept),) = conn.execute(look.encode()).fetchall()
            if found == wanted:
                return
    pytest.fail(f"{found} compete, not {wanted}")


def asked(program: Program, path: str, stream: str = "err", method: str = "GET") -> tuple[int, dict[str, object]]:
    program.until("http://127.0.0.1:", stream)
    port = LISTENING.findall(program.err if stream == "err" else program.out)[0]
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, json.loads(answer.read())
    except HTTPError as refused:
        with refused:
            body = refused.read()
            return refused.code, json.loads(body) if body.startswith(b"{") else {}


def fetched(port: int, path: str) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE_S) as answer:
            return str(answer.read(), "utf-8")
    except HTTPError as refused:
        with refused:
            return str(refused.read(), "utf-8")


def until_one_leads(ports: Sequence[int]) -> None:
    """Nothing announces that a gate has opened: looked for, within bounds."""
    deadline = time.monotonic() + PATIENCE_S
    while not any(fetched(port, "/leader").startswith("leader") for port in ports):
        assert time.monotonic() < deadline, "no gate has opened"
        time.sleep(0.05)


def stops(program: Program) -> None:
    """With 0, or by the signal itself, which uvicorn raises again when it has done everything else."""
    program.signal(signal.SIGTERM)
    assert program.end() in {0, -signal.SIGTERM}, program.out + program.err


def succession(program: Program, dsn: str, others: int) -> None:
    """One of the workers leads; another one after it was killed; another one after it was ended; none at the end."""
    first = leading(program, 1)
    until_candidates(dsn, others + 1)
    os.kill(first, signal.SIGKILL)
    second = leading(program, 2)
    assert second != first
    os.kill(second, signal.SIGTERM)
    third = leading(program, 3)
    assert third not in {first, second}
    assert ended(dsn)[1] == (2, "released")
    stops(program)
    assert re.findall(r"leading: epoch (\d)", program.out)[:3] == ["1", "2", "3"]
    assert "Traceback" not in program.err
    assert ended(dsn)[-1][1] == "released"


@pytest.mark.long
def test_of_uvicorns_workers_one_leads_and_another_one_after_it(ledger: str) -> None:
    with serving(uvicorn("fastapi_app.py"), ledger) as program:
        succession(program, ledger, WORKERS - 1)


@pytest.mark.long
def test_of_gunicorns_asgi_workers_one_leads_after_a_fork_and_another_one_after_it(ledger: str) -> None:
    argv = [sys.executable, "-m", "gunicorn", "--worker-class", "asgi", "--preload", "--bind", "127.0.0.1:0"]
    with serving([*argv, "--workers", str(WORKERS), "fastapi_app:app"], ledger) as program:
        succession(program, ledger, WORKERS - 1)


@pytest.mark.long
@pytest.mark.parametrize("preload", [["--preload"], []], ids=["preload", "plain"])
def test_of_gunicorns_workers_one_leads_and_another_one_after_it(ledger: str, preload: list[str]) -> None:
    with serving(gunicorn("flask_app.py", "--workers", str(WORKERS), *preload), ledger) as program:
        succession(program, ledger, WORKERS - 1)


@pytest.mark.parametrize(
    "argv", [uvicorn("fastapi_app.py", 1), gunicorn("flask_app.py", "--workers", "1")], ids=["fastapi", "flask"]
)
def test_the_leader_serves_what_only_it_may_and_the_others_answer_503(ledger: str, argv: list[str]) -> None:
    with serving(argv, ledger) as first:
        leading(first, 1)
        with serving(argv, ledger) as second:
            until_candidates(ledger, 2)
            status, body = asked(first, "/leader")
            assert (status, body["is_leader"], body["epoch"], body["reason"]) == (200, True, 1, None)
            assert asked(first, "/books/close", method="POST") == (200, {"epoch": 1})
            status, refused = asked(second, "/leader")
            assert (status, refused["is_leader"], refused["epoch"]) == (503, False, None)
            assert refused["leader"] == body["node"] == body["leader"]
            assert asked(second, "/books/close", method="POST")[0] == 503
            assert asked(first, "/leader?role=mail")[0] == 404
            stops(first)
            leading(second, 2)
            assert asked(second, "/leader?role=billing")[0] == 200
            stops(second)


def test_each_worker_has_metrics_of_its_own_and_one_gate_is_open(ledger: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:  # the range begins with a port that is not free
        first = taken.getsockname()[1]
        with serving(uvicorn("fastapi_metrics.py", 2), ledger, PROBES_PORT=str(first)) as program:
            program.until("metrics on port ", "out", times=2)
            program.until("\n", "out", times=2)
            ports = [int(port) for port in re.findall(r"metrics on port (\d+)", program.out)]
            assert len({first, *ports}) == 3
            for port in ports:
                assert 'pgleaderlock_gate_open{role="billing"}' in fetched(port, "/metrics")
            until_one_leads(ports)
            assert sorted(fetched(port, "/leader") for port in ports) == ["leader\n", "not the leader\n"]
            stops(program)


# --- Django


def manage(*args: str) -> list[str]:
    return [sys.executable, "manage.py", *args]


@pytest.fixture
def site(ledger: str) -> str:
    """The database of the example, with its tables."""
    with serving(manage("migrate", "--run-syncdb", "--verbosity", "0"), ledger, SITE) as program:
        assert program.end() == 0, program.err
    return ledger


def invoices(dsn: str) -> list[tuple[int, int]]:
    """Epoch and process of what was written, in that order."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        return [
            (row[0], row[1])
            for row in conn.execute("SELECT epoch, process FROM invoices_invoice ORDER BY id").fetchall()
        ]


@pytest.mark.long
def test_of_several_run_leader_one_works_and_another_one_after_it(site: str) -> None:
    with serving(manage("run_leader"), site, SITE) as first:
        leading(first, 1)
        with serving(manage("run_leader", "billing"), site, SITE) as second:
            until_candidates(site, 2)
            first.signal(signal.SIGKILL)
            leading(second, 2)
            with serving(manage("run_leader"), site, SITE) as third:
                stops(second)
                leading(third, 3)
                third.signal(signal.SIGINT)
                assert third.end() == 0, third.err
    assert ended(site)[1:] == [(2, "released"), (3, "released")]
    epochs = [epoch for epoch, _ in invoices(site)]
    assert epochs == sorted(epochs)
    assert set(epochs) <= {1, 2, 3}


def test_a_work_that_raises_is_started_again_or_ends_the_command_as_it_was_told(site: str) -> None:
    with psycopg.connect(site, autocommit=True) as conn:
        conn.execute("ALTER TABLE invoices_invoice RENAME TO elsewhere")
    with serving(manage("run_leader", "--on-failure", "raise"), site, SITE) as program:
        assert program.end() == 1
        assert "CommandError: a work has failed: ProgrammingError(" in program.err
    with serving(manage("run_leader"), site, SITE) as program:
        leading(program, 2)
        program.until("leading: ", "out", times=2)
        stops(program)


@pytest.mark.long
def test_a_command_from_cron_runs_one_at_a_time_and_the_other_ends_with_75(site: str) -> None:
    with serving(manage("close_books"), site, SITE) as program:
        assert program.end() == 0, program.err
        assert program.out == "closed: epoch 1\n"
    assert [epoch for epoch, _ in invoices(site)] == [1]
    with serving(manage("run_leader"), site, SITE) as elsewhere:
        leading(elsewhere, 1)  # another role does not matter
        with Leader(site, "close_books", node="the-other-one") as other:
            other.win()
            with serving(manage("close_books"), site, SITE) as program:
                assert program.end() == 75, program.out + program.err
                assert "'close_books' is led by the-other-one" in program.err
        stops(elsewhere)


def test_the_view_of_a_web_process_tells_who_leads(site: str) -> None:
    web = [sys.executable, "-m", "gunicorn", "--bind", "127.0.0.1:0", "--env", "DJANGO_SETTINGS_MODULE=settings"]
    with serving([*web, "django.core.wsgi:get_wsgi_application()"], site, SITE) as program:
        assert asked(program, "/leader")[0] == 404
        with serving(manage("run_leader"), site, SITE) as worker:
            leading(worker, 1)
            body = _told(program, 200)  # the ledger hears of an open gate a moment after the work does
            assert (body["role"], body["state"], body["epoch"]) == ("billing", "acting", 1)
            stops(worker)
        assert _told(program, 503)["state"] == "nobody"
        stops(program)


def _told(program: Program, status: int) -> Any:
    """What the view answers once it has this status."""
    deadline = time.monotonic() + PATIENCE_S
    while (answer := asked(program, "/leader"))[0] != status:
        assert time.monotonic() < deadline, answer
        time.sleep(0.05)
    return answer[1]
