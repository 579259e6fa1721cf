"""Runs the tests of mutants against copies of the source, and returns a verdict for each.

The work tree is never changed: a copy comes before the installed package on the path. Imports the standard library.
"""

import contextlib
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.mutants.model import Change, Mutant, Tests

__all__ = ["Verdict", "baseline_s", "judge"]

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "pgleaderlock"
# A mutant may make a test hang. That counts as caught, but must not take the suite's limit of two minutes.
TEST_TIMEOUT_S = 60
# How much longer than on the sound source the tests of a mutant may take. Generous: a busy machine must not count as a
# test that failed, and a test that hangs ends by its own limit.
RUN_TIMES_MAX = 10
RUN_MIN_S = 300.0
PYTEST_FAILED = 1
# Only the plugins that the tests need: some take longer to import than these tests to run.
PLUGINS = ("pytest_asyncio.plugin", "pytest_timeout", "mutant_guard", "no:cacheprovider")

# Importing pytest and the driver takes longer than most of these tests, so each run is forked from a process that has
# imported them. Each run imports the package itself.
_CHILDREN = multiprocessing.get_context("forkserver")
_CHILDREN.set_forkserver_preload(["pytest", "psycopg", "asyncio", "unittest.mock"])
OUTPUT = "output.txt"

# Runs inside pytest. It checks that the tests import the mutant, because they would prove nothing otherwise. It also
# shortens the tests' waits, because a mutant may prevent what they wait for.
GUARD = """
import os
from pathlib import Path

import pgleaderlock

def pytest_configure(config):
    copy = Path(os.environ["MUTANTS_COPY"])
    if copy not in Path(pgleaderlock.__file__).resolve().parents:
        raise RuntimeError(f"the tests would import {pgleaderlock.__file__}, which is not below {copy}")

def pytest_collection_finish(session):
    from support import elections, fencing
    elections.WAIT_S = fencing.WAIT_S = 8.0
"""


@dataclass(frozen=True)
class Verdict:
    """The result for a mutant: `caught`, with the name of the test, `survived`, or `broken`."""

    kind: str
    detail: str
    took_s: float


@contextlib.contextmanager
def _copy_of_the_source(changes: Sequence[Change]) -> Iterator[Path]:
    """A folder to put on the path: the package with these changes, and the guard."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder).resolve()
        copy.chmod(0o755)  # the embedded server may run its helper as another user
        shutil.copytree(ROOT / "src" / PACKAGE, copy / PACKAGE)  # with its bytecode: a changed file is newer than it
        (copy / "mutant_guard.py").write_text(GUARD)
        for change in changes:
            change.plant(copy / PACKAGE)
        yield copy


def _run_tests(copy: Path, tests: Tests, timeout_s: float | None = None) -> tuple[int, str]:
    """Pytest's exit code and output for these tests on this copy."""
    child = _CHILDREN.Process(target=_in_child, args=(copy, tests))
    child.start()
    child.join(timeout_s)
    if child.exitcode is None:
        child.kill()
        child.join()
        return PYTEST_FAILED, f"FAILED nothing came back within {timeout_s:.0f} s"
    return child.exitcode, (copy / OUTPUT).read_text()


def _in_child(copy: Path, tests: Tests) -> None:
    import pytest  # noqa: PLC0415  # in the children only

    with (copy / OUTPUT).open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(copy))
    os.environ |= {
        # For the processes that the tests start.
        "PYTHONPATH": os.pathsep.join([str(copy), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "MUTANTS_COPY": str(copy),
    }
    os.chdir(ROOT)
    options = ["-q", "-x", "-rfE", "--tb=short", f"--timeout={TEST_TIMEOUT_S}"]
    options += [word for plugin in PLUGINS for word in ("-p", plugin)]
    sys.exit(int(pytest.main([*options, *tests])))


def _failures(output: str) -> list[str]:
    return re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)


def baseline_s(tests: Tests) -> float:
    """How long these tests take on the sound source; raises `RuntimeError` if one of them fails there."""
    began = time.monotonic()
    with _copy_of_the_source(()) as copy:
        code, output = _run_tests(copy, tests)
    if code:
        raise RuntimeError(f"pytest ends with {code}: {', '.join(_failures(output)) or output[-2000:]}")
    return time.monotonic() - began


def judge(mutant: Mutant, sound_s: float) -> Verdict:
    """Run the mutant's tests on a copy with its defect. `sound_s` is how long they take on the sound source."""
    began = time.monotonic()
    try:
        with _copy_of_the_source(mutant.changes) as copy:
            code, output = _run_tests(copy, mutant.tests, max(RUN_MIN_S, RUN_TIMES_MAX * sound_s))
    except LookupError as error:
        return Verdict("broken", f"does not apply: {error}", 0.0)
    took_s = time.monotonic() - began
    if code == 0:
        return Verdict("survived", " ".join(mutant.tests), took_s)
    failed = _failures(output)
    if not failed:  # not even in the collection, which a mutant may break
        return Verdict("broken", f"the tests could not run (pytest's exit code {code}):\n{output[-2000:]}", took_s)
    if "psycopg.errors.SyntaxError" in output:
        return Verdict("broken", f"is no SQL:\n{output[-2000:]}", took_s)
    return Verdict("caught", failed[0], took_s)
