"""The example of the lock server's client does what it says, run as a process against a real server."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pgleaderlock.client import LockClient
from support.lockserver import LockServerProcess, lock_server
from support.program import PATIENCE_S, Program, environment, started

EXAMPLE = Path(__file__).parents[2] / "examples" / "lock_server_job.py"
DONE, SERVER, NOT_WON, LOST = 0, 2, 75, 76


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LockServerProcess]:
    with lock_server(tmp_path) as running:
        yield running


def example(url: str, folder: Path) -> contextlib.AbstractContextManager[Program]:
    return started([sys.executable, str(EXAMPLE)], {"PGLEADERLOCK_SERVER": url, "REPORTS": str(folder)})


def test_the_job_is_done_and_the_lock_is_free_again(server: LockServerProcess, tmp_path: Path) -> None:
    with example(server.url, tmp_path) as program:
        assert program.end() == DONE, program.err
    assert (tmp_path / "report").read_text().startswith("step 3")
    assert (tmp_path / "token").read_text() == "1"
    with LockClient(server.url) as client:
        assert not client.get("job-lock").held


def test_who_comes_second_is_told_who_is_at_it(server: LockServerProcess, tmp_path: Path) -> None:
    with LockClient(server.url, owner_id="the-first") as client:
        client.acquire("job-lock", 60.0)
        with example(server.url, tmp_path) as program:
            assert program.end() == NOT_WON, program.err
    assert "the-first" in program.out
    assert not (tmp_path / "report").exists()


def test_a_stale_token_is_refused_downstream(server: LockServerProcess, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("1000")
    with example(server.url, tmp_path) as program:
        assert program.end() == 1
    assert "token 1 is stale: 1000 was here" in program.err
    assert not (tmp_path / "report").exists()


def test_a_lease_that_is_broken_ends_the_job(tmp_path: Path) -> None:
    with lock_server(tmp_path, tokens=True) as server:
        code = (
            EXAMPLE.read_text().replace(".split())", f".split(), token={server.token!r})").replace("0.1)  #", "60)  #")
        )
        slow = tmp_path / "slow.py"
        slow.write_text(code)
        env = {"PGLEADERLOCK_SERVER": server.url, "REPORTS": str(tmp_path)}
        process = subprocess.Popen([sys.executable, slow], env=environment(env), stdout=subprocess.PIPE, text=True)
        with LockClient(server.url, token=server.admin_token) as admin, process:
            while not admin.get("job-lock").held:
                assert process.poll() is None
            admin.break_lock("job-lock")
            out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == LOST, out
    assert "lost:" in out


def test_no_server_is_said_in_a_sentence(tmp_path: Path) -> None:
    with example("http://127.0.0.1:1", tmp_path) as program:
        assert program.end() == SERVER
    assert "no lock server has answered" in program.out
