"""The specifications in `spec/`: TLC finds that they hold, catches what is broken, and explains what real elections do.

At full counts every broken rule is tried, and more histories are recorded.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.counts import count, proof_asked
from support.elections import fresh_database
from support.gate_trace import NAMES, ROLE, Recorder, Traced, plant_own_by_session

pytestmark = pytest.mark.long

SPEC = Path(__file__).parents[2] / "spec"
# Bounds against hanging, never a measure: of one run of TLC, and of all that a test asks for.
SECONDS_MAX = 300
ALL_S_MAX = 3000
SEEDS = range(count(1, 6))
FAULTS = count(8, 40)


def tlc(out: Path, *asked: str) -> tuple[bool, str]:
    """Whether everything was as `run.sh` expects, and what it says."""
    env = {**os.environ, "PYTHON": sys.executable, "OUT": str(out), "SECONDS_MAX": str(SECONDS_MAX)}
    command = ["sh", str(SPEC / "run.sh"), *asked]
    process = subprocess.Popen(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=ALL_S_MAX)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    assert process.returncode in (0, 1), f"TLC did not run: {said}"
    return process.returncode == 0, said


@pytest.mark.timeout(ALL_S_MAX)
def test_gate_and_fence_hold_in_every_reachable_state(tmp_path: Path) -> None:
    as_expected, said = tlc(tmp_path, "ci")
    assert as_expected, said
    assert said.count(" holds ") == 2


@pytest.mark.timeout(ALL_S_MAX)
def test_every_broken_rule_of_the_specifications_is_caught(tmp_path: Path) -> None:
    as_expected, said = tlc(tmp_path, "mutations", *([] if proof_asked() else ["own_by_session"]))
    assert as_expected, said
    assert " AtMostOne " in said


def test_a_machine_without_java_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA", str(tmp_path / "java"))
    with pytest.raises(AssertionError, match="There is no Java"):
        tlc(tmp_path, "ci")


def explained(out: Path, history: str) -> tuple[bool, str]:
    """Whether the specification allows this history; and what was said."""
    (file := out / "recorded.tla").write_text(history, encoding="utf-8")
    whole, said = tlc(out, "history", str(file))
    assert whole or " holds " in said, f"TLC came to no verdict: {said}\n{(out / 'history.out').read_text()}"
    return whole, f"{said}\n{file} is refused there"


@pytest.mark.timeout(ALL_S_MAX)
@pytest.mark.parametrize("seed", SEEDS)
async def test_what_real_elections_do_is_a_behaviour_of_the_specification(
    dsn: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch)
    with fresh_database(dsn, ledger=True) as own, contextlib.ExitStack() as nodes:
        traced = Traced(own, recorder, seed)
        for name in NAMES:
            nodes.enter_context(traced.node(name))
        await traced.storm(FAULTS)
        history = traced.history()
    assert len(recorder.epochs()) > FAULTS / 3, "hardly anybody was replaced: this shows nothing"
    whole, said = explained(tmp_path, history)
    assert whole, said


@contextlib.asynccontextmanager
async def a_lost_second_term(dsn: str, recorder: Recorder) -> AsyncIterator[Traced]:
    """Node a leads, hands over to b, and wins again on the same session; the answer is lost, and it wins once more."""
    awake = threading.Event()
    with fresh_database(dsn, ledger=True) as own, contextlib.ExitStack() as nodes:
        traced = Traced(own, recorder)
        a = nodes.enter_context(traced.node("a"))
        await traced.leads("a")
        nodes.enter_context(traced.node("b"))
        nodes.callback(awake.set)
        await traced.at("a", a.drain(ROLE))
        await traced.leads("b")
        recorder.lose("a", "bump")
        traced.block("b", awake.wait)
        await traced.end_session("b")
        await traced.at("a", a.resume(ROLE))
        await traced.leads("a")
        yield traced


@pytest.mark.timeout(ALL_S_MAX)
@pytest.mark.parametrize("by_session", [False, True], ids=["by epoch", "by session"])
async def test_a_node_that_knows_its_last_term_by_the_session_is_refused(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_session: bool
) -> None:
    """The control: with the rule that once was, TLC refuses the very history that it explains with the present one."""
    recorder = Recorder(monkeypatch)
    if by_session:
        plant_own_by_session(monkeypatch, recorder)
    async with a_lost_second_term(dsn, recorder) as traced:
        history = traced.history()
    assert recorder.lost == {"bump": 1}
    assert recorder.epochs()[:3] == [1, 2, 4]
    whole, said = explained(tmp_path, history)
    assert whole is not by_session, said
