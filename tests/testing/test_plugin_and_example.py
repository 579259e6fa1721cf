"""The pytest plugin and its example, in a pytest of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.program import PATIENCE_S

PROJECT = Path(__file__).parents[2]
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "pytest_pgleaderlock", "-p", "no:cacheprovider", "-c", "none.ini"]

USES = """
import asyncio


def test_fakes(fake_election, fake_lock, sync_fake_lock):
    async def main():
        async with fake_election(["a", "b"], heartbeat_interval_s=1) as election, fake_lock("c") as lock:
            await election.win("a")
            await lock.win()
            assert election.gate("a").is_leader and not election.gate("b").is_leader and lock.is_leader

    asyncio.run(main())
    with sync_fake_lock("c") as lock:
        lock.win()
        assert lock.is_leader


def test_real(leader_election):
    async def main():
        async with leader_election("r") as one, leader_election("r") as two:
            assert await one.gate("r").wait_open(30)
            assert one.node_id != two.node_id
            assert not two.gate("r").is_leader

    asyncio.run(main())


def test_other(leader_election, pgleaderlock_postgres, sync_leader_election):
    async def main():
        async with leader_election("r") as one:
            assert await one.gate("r").wait_open(30)
            assert one.gate("r").current_epoch == 1  # of a namespace of its own

    asyncio.run(main())
    sync_leader_election("left running").start()
"""


def _pytest(*args: str, cwd: Path) -> str:
    ran = subprocess.run([*PYTEST, *args], cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S * 3, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "none.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    return tmp_path


def test_each_fixture_gives_what_it_says(folder: Path) -> None:
    (folder / "test_uses.py").write_text(USES)
    assert "3 passed" in _pytest("test_uses.py", cwd=folder)


def test_the_example_passes_as_it_is_shown(folder: Path) -> None:
    example = (PROJECT / "examples" / "test_with_fakes.py").read_text()
    shown = (PROJECT / "docs" / "testing.md").read_text()
    assert example.split("# -- shown in docs/testing.md\n")[1].split("\n\n# -- until here")[0] in shown
    (folder / "test_with_fakes.py").write_text(example)
    assert "3 passed" in _pytest("test_with_fakes.py", cwd=folder)


def test_the_plugin_imports_nothing_of_the_package_before_a_fixture_is_used() -> None:
    look = (
        "import sys, pytest_pgleaderlock; print([name for name in sys.modules if name in ('pgleaderlock', 'psycopg')])"
    )
    ran = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert ran.stdout.strip() == "[]"
