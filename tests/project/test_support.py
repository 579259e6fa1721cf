"""What the other tests stand on: counts, skips, programs, the pooler, and the look for leftovers."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import conftest
from conftest import StartPooler
from support.counts import count
from support.election_storm import Lag
from support.pgbouncer import PoolMode
from support.preloaded import Parent
from support.program import PATIENCE_S, attended, environment
from support.servers import left_behind, wait_until_nothing_left


def test_the_count_is_full_only_when_proof_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PGLEADERLOCK_PROOF", raising=False)
    assert count(3, 1000) == 3
    monkeypatch.setenv("PGLEADERLOCK_PROOF", "1")
    assert count(3, 1000) == 1000


SKIPS = """
import pytest

@pytest.mark.parametrize("number", [1, 2])
def test_it(number):
    pytest.skip("needs pgbouncer: run `make test-deps`")
"""


def run_skips(folder: Path, ci: str) -> tuple[int, str]:
    """Runs two tests that skip themselves, under the hooks of conftest.py; the exit code and what was said."""
    (folder / "test_skips.py").write_text(SKIPS)
    tests = Path(conftest.__file__).parent
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "test_skips.py"],
        env={**os.environ, "CI": ci, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": f"{tests}:{tests.parent}"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout


def test_skips_are_counted_at_the_end_with_what_it_takes_to_run_them(tmp_path: Path) -> None:
    code, said = run_skips(tmp_path, ci="")
    assert code == 0
    assert "2 skipped: needs pgbouncer: run `make test-deps`\n" in said


def test_in_ci_a_skip_is_a_failure(tmp_path: Path) -> None:
    code, said = run_skips(tmp_path, ci="true")
    assert code == 1
    assert "2 failed" in said


HEARD = "import signal\nprint('out', end='')\nsignal.pause()"


@pytest.fixture(scope="module")
def preloaded() -> Iterator[Parent]:
    """A process that forks, whose own output is buffered."""
    with pytest.MonkeyPatch.context() as environ:
        environ.delenv("PYTHONUNBUFFERED", raising=False)
        parent = Parent()
    yield parent
    parent.end()


def test_a_preloaded_program_without_a_buffer_is_heard_before_it_ends(preloaded: Parent) -> None:
    with attended(preloaded.start(["-c", HEARD], environment({"PYTHONUNBUFFERED": "1"}))) as program:
        program.until("out", "out")


ENDS = {
    "by itself": "print('said')",
    "with a code": "import sys; sys.exit(7)",
    "with a negative code": "import sys; sys.exit(-1)",
    "with a message": "import sys; sys.exit('not so')",
    "by an error": "raise SystemError",
    "by a signal to itself": "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
    "with words at the end": "import atexit, sys; atexit.register(print, 'last'); sys.exit(3)",
    "with a thread": "import threading as t; t.Thread(target=lambda: print(t.main_thread().join())).start()",
    "with garbage that speaks": (
        "class Loud:\n def __init__(self): self.me = self\n def __del__(self): print('gone', flush=True)\nLoud()"
    ),
    "with a global that speaks": "class Loud:\n def __del__(self): print('gone', flush=True)\nkept = Loud()",
    "with an output that is closed": "import os; print('lost'); os.close(1)",
}


@pytest.mark.parametrize("code", ENDS.values(), ids=list(ENDS))
def test_a_preloaded_program_ends_as_any_other(preloaded: Parent, code: str) -> None:
    ordinary = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    with attended(preloaded.start(["-c", code], environment({}))) as program:
        assert (program.end(), program.out) == (ordinary.returncode, ordinary.stdout)
    assert program.err.splitlines()[-1:] == ordinary.stderr.splitlines()[-1:]


@pytest.mark.parametrize(
    ("code", "how"),
    [("import sys; sys.exit(7)", "it ended with 7"), ("import os; os.kill(os.getpid(), 9)", "it was ended by 9")],
)
def test_a_program_that_says_nothing_is_reported_with_how_it_ended(preloaded: Parent, code: str, how: str) -> None:
    with attended(preloaded.start(["-c", code], environment({}))) as program:
        program.process.wait(PATIENCE_S)
        with pytest.raises(AssertionError, match=f"'word' was not said: {how}; output '', errors:"):
            program.until("word")


@pytest.mark.parametrize("pool_mode", ["session", "transaction", "statement"])
def test_the_pooler_leads_to_the_server_in_each_mode(pgbouncer: StartPooler, dsn: str, pool_mode: PoolMode) -> None:
    with psycopg.connect(pgbouncer(dsn, pool_mode), autocommit=True) as connection:
        row = connection.execute("SELECT pg_backend_pid()").fetchone()
        assert row is not None
        assert row[0] != connection.info.backend_pid


def test_a_session_and_its_lock_left_behind_are_found(dsn: str) -> None:
    with psycopg.connect(dsn, autocommit=True, application_name="forgotten") as connection:
        connection.execute("SELECT pg_advisory_lock(1, 2)")
        left = "\n".join(left_behind(dsn))
        assert "forgotten" in left
        assert "advisory lock 1/2" in left
        assert wait_until_nothing_left(dsn, timeout_s=0.05)


def test_of_a_late_wake_only_what_lies_within_the_time_that_is_asked_for_is_lag() -> None:
    lag = Lag()
    for due_s, woke_s in ((1, 1), (2, 5), (6, 7), (8, 20)):
        lag.slept(due_s * 10**9, woke_s * 10**9)
    assert lag.between_s(0, 30 * 10**9) == 16
    assert lag.between_s(3 * 10**9, 10 * 10**9) == 2 + 1 + 2
    assert lag.between_s(5 * 10**9, 6 * 10**9) == 0
