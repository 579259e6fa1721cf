"""`LeaderElection.lead` when the work ends badly: who hears of it, who leads afterwards, and when it runs again."""

import asyncio
import contextlib
import json
import logging
import random
import re
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pgleaderlock import (
    ConfigurationError,
    ElectionObserver,
    LeaderElection,
    LeaderToken,
    LockState,
    NotLeader,
)
from pgleaderlock.errors import StaleEpoch
from pgleaderlock.metrics import ElectionMetrics
from pgleaderlock.probes import ProbeServer
from support.counts import count
from support.elections import (
    HASTY,
    PATIENT,
    STEADY,
    Story,
    admin,
    beat_turns,
    bounded,
    end_leader,
    holding,
    ledger_dsns,
    opens,
    until,
)
from support.fakes import FakeClock, captured_log

pytestmark = pytest.mark.usefixtures("hold")


@pytest.fixture
def ledger(dsn: str) -> str:
    return ledger_dsns(dsn)["superuser"]


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    with captured_log() as found:
        yield found


@pytest.fixture(name="election", params=["server", "standalone"])
async def _election(request: pytest.FixtureRequest, ledger: str, role: str) -> AsyncIterator[LeaderElection]:
    """One that runs: with a ledger, or alone."""
    async with LeaderElection(ledger, role, standalone=request.param == "standalone", **PATIENT) as election:
        yield election


def failures(records: list[logging.LogRecord]) -> list[dict[str, Any]]:
    return [vars(record) for record in records if vars(record).get("event") == "work_failed"]


class Flaky:
    """A work that fails in its first runs, and then goes on until it is cancelled."""

    def __init__(self, fails: int, error: BaseException | None = None) -> None:
        self.fails = fails
        self.error = error or ZeroDivisionError("bad work")
        self.epochs: list[int] = []
        self.running = asyncio.Event()

    async def __call__(self, token: LeaderToken) -> None:
        self.epochs.append(token.epoch)
        if len(self.epochs) <= self.fails:
            raise self.error
        self.running.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.running.clear()


class Beats(ElectionObserver):
    """Lets an election take turns: for claims that something does NOT happen in them."""

    def __init__(self, election: LeaderElection) -> None:
        self._news = asyncio.Event()
        election.observe(self)

    def beaten(self, took_s: float) -> None:
        self._news.set()

    async def more(self, times: int = 5) -> None:
        for _ in range(times):
            self._news.clear()
            await bounded(self._news.wait())


async def ended(task: "asyncio.Future[Any]") -> None:
    task.cancel()
    await asyncio.wait([task])


# --- What it raises


async def test_after_the_work_has_raised_the_node_does_not_compete_until_lead_is_entered_again(
    ledger: str, role: str
) -> None:
    work = Flaky(fails=1)
    async with LeaderElection(ledger, role, **PATIENT) as election:
        with pytest.raises(ZeroDivisionError):
            await bounded(election.lead(role, work))
        await Beats(election).more()
        assert election.state(role) is LockState.FOLLOWER
        assert holding(ledger, role) == 0
        leading = asyncio.ensure_future(election.lead(role, work))
        await bounded(work.running.wait())
        assert work.epochs == [1, 2]
        await ended(leading)


async def test_a_node_whose_work_has_raised_leaves_the_role_to_the_next_one_for_good(ledger: str, role: str) -> None:
    one, two = (LeaderElection(ledger, role, node_id=name, **PATIENT) for name in ("one", "two"))
    async with one, two:
        await until(lambda: one.gate(role).is_leader or two.gate(role).is_leader)
        broken, sound = (one, two) if one.gate(role).is_leader else (two, one)
        with pytest.raises(ZeroDivisionError):
            await bounded(broken.lead(role, Flaky(fails=1)))
        await opens(sound, role)
        end_leader(ledger, role)
        await until(lambda: sound.gate(role).current_epoch == 3)
        assert broken.gate(role).current_epoch is None


async def test_a_role_that_is_won_in_the_moment_of_the_failure_is_given_back(ledger: str, role: str) -> None:
    """The lock was granted before the node knew that its work is broken: no term begins, or the term ends at once."""
    began = asyncio.Event()

    async def work(token: LeaderToken) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await until(lambda: election.state(role) is LockState.LEADER and election.gate(role).current_epoch == 2)
            raise ZeroDivisionError("in the next term already")

    async with LeaderElection(ledger, role, **STEADY) as election:
        leading = asyncio.ensure_future(election.lead(role, work))
        await bounded(began.wait())
        end_leader(ledger, role)
        with pytest.raises(ZeroDivisionError):
            await bounded(leading)
        await until(lambda: holding(ledger, role) == 0)
        await Beats(election).more()
        assert election.state(role) is LockState.FOLLOWER


async def test_standalone_what_the_work_raises_leaves_nothing_led_until_lead_is_entered_again(role: str) -> None:
    work = Flaky(fails=1)
    async with LeaderElection("", role, standalone=True) as election:
        with pytest.raises(ZeroDivisionError):
            await bounded(election.lead(role, work))
        assert not election.gate(role).is_leader
        leading = asyncio.ensure_future(election.lead(role, work))
        await bounded(work.running.wait())
        await ended(leading)


async def test_a_failed_work_is_logged_as_an_error_at_once_with_role_and_epoch(
    ledger: str, role: str, records: list[logging.LogRecord]
) -> None:
    """Before anybody has looked at the task of `lead`."""
    async with LeaderElection(ledger, role, **PATIENT) as election:
        leading = asyncio.ensure_future(election.lead(role, Flaky(fails=1)))
        await until(lambda: failures(records))
        (line,) = failures(records)
        assert (line["levelname"], line["role"], line["epoch"]) == ("ERROR", role, 1)
        assert "bad work" in str(line["error"])
        assert line["exc_info"] is not None
        await asyncio.wait([leading])
        assert isinstance(leading.exception(), ZeroDivisionError)


async def test_gate_term_and_failed_work_of_an_election_in_a_program_are_logged_at_info_or_above(
    records: list[logging.LogRecord], election: LeaderElection, role: str
) -> None:
    with pytest.raises(ZeroDivisionError):
        await bounded(election.lead(role, Flaky(fails=1)))
    await until(lambda: "gate_closed" in [vars(record).get("event") for record in records])
    told = {vars(record)["event"]: vars(record) for record in records if "epoch" in vars(record)}
    assert {"gate_opened", "work_failed", "gate_closed", "leadership_released"} <= set(told)
    assert {line["role"] for line in told.values()} == {role}
    assert all(line["levelno"] >= logging.INFO for line in told.values())


# --- What else it may do


async def test_a_failed_work_is_restarted_in_the_same_term(election: LeaderElection, role: str) -> None:
    work = Flaky(fails=2)
    leading = asyncio.ensure_future(election.lead(role, work, on_failure="restart"))
    await bounded(work.running.wait())
    assert len(set(work.epochs)) == 1
    assert election.work_error(role) is None
    await ended(leading)


async def test_a_work_that_fails_again_and_again_gives_the_role_up_while_it_waits(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    monkeypatch.setattr(LeaderElection, "_clock", clock)
    work = Flaky(fails=100)
    async with LeaderElection("", role, standalone=True) as election:
        leading = asyncio.ensure_future(election.lead(role, work, on_failure="restart"))
        waits = []
        for runs in range(1, 11):
            await until(lambda runs=runs: len(work.epochs) == runs)  # type: ignore[misc]
            waits.append(await clock.somebody_sleeps())
            assert election.work_error(role) is work.error
            if waits[-1] > 1.0:
                await until(lambda: not election.gate(role).is_leader)
            else:
                assert election.gate(role).is_leader
            clock.advance(waits[-1])
        assert waits == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30, 30])
        await ended(leading)


async def test_a_work_that_ran_for_long_begins_its_delays_anew(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(LeaderElection, "_clock", clock)
    fail = asyncio.Queue[None]()
    began = asyncio.Queue[None]()

    async def work(token: LeaderToken) -> None:
        began.put_nowait(None)
        await fail.get()
        raise ZeroDivisionError

    async with LeaderElection("", role, standalone=True) as election:
        leading = asyncio.ensure_future(election.lead(role, work, on_failure="restart"))
        waits = []
        for ran_s in (0, 29, 30, 0):
            await bounded(began.get())
            clock.advance(ran_s)
            fail.put_nowait(None)
            waits.append(await clock.somebody_sleeps())
            clock.advance(waits[-1])
        assert waits == pytest.approx([0.2, 0.4, 0.2, 0.4])
        await ended(leading)


async def test_with_step_down_a_failed_work_runs_again_in_a_new_term(ledger: str, role: str) -> None:
    work = Flaky(fails=2)
    election = LeaderElection(ledger, role, **PATIENT)
    story = Story(election)
    async with election:
        leading = asyncio.ensure_future(election.lead(role, work, on_failure="step_down"))
        await bounded(work.running.wait())
        assert work.epochs == [1, 2, 3]
        assert story.events.count(("on_released", role)) == 2
        await ended(leading)


@pytest.mark.parametrize("on_failure", ["restart", "step_down"])
async def test_lead_ends_at_once_when_the_election_stops_while_a_failed_work_waits(
    election: LeaderElection, role: str, on_failure: Any
) -> None:
    work = Flaky(fails=100)
    leading = asyncio.ensure_future(election.lead(role, work, on_failure=on_failure))
    await until(lambda: len(work.epochs) == 5)  # now it waits for seconds
    async with asyncio.timeout(30):
        await election.shutdown()
        await leading
    assert leading.result() is None


async def test_lead_refuses_what_it_cannot_do_about_a_failure(election: LeaderElection, role: str) -> None:
    with pytest.raises(ConfigurationError, match='"raise", "restart" or "step_down"'):
        await election.lead(role, Flaky(fails=0), on_failure="ignore")  # type: ignore[arg-type]


# --- A caller that is cancelled


@pytest.mark.parametrize("where", ["in the work", "before a restart", "before a late restart"])
async def test_when_the_caller_is_cancelled_the_node_does_not_compete_until_lead_is_entered_again(
    election: LeaderElection, role: str, where: str, records: list[logging.LogRecord]
) -> None:
    work = Flaky(fails={"before a restart": 1, "before a late restart": 4}.get(where, 0))
    leading = asyncio.ensure_future(election.lead(role, work, on_failure="restart"))
    await until(lambda: len(work.epochs) == max(1, work.fails) and (not work.fails or election.work_error(role)))
    await ended(leading)
    work.running.clear()
    await until(lambda: election.state(role) is LockState.FOLLOWER)
    assert (election.gate(role).is_leader, election.work_error(role)) == (False, None)
    assert [vars(record)["role"] for record in records if vars(record).get("event") == "lead_cancelled"] == [role]
    leading = asyncio.ensure_future(election.lead(role, work))
    await bounded(work.running.wait())
    await ended(leading)


async def test_a_follower_whose_caller_was_cancelled_leaves_the_role_to_the_others(ledger: str, role: str) -> None:
    one, two, three = (LeaderElection(ledger, role, node_id=name, **PATIENT) for name in ("one", "two", "three"))
    async with one:
        await opens(one, role)
        async with two:
            waiting = asyncio.ensure_future(two.lead(role, Flaky(fails=0)))
            await Beats(two).more(1)
            await ended(waiting)
            await one.drain(role)
            await Beats(two).more()
            assert holding(ledger, role) == 0
            async with three:
                await opens(three, role)


async def test_the_ledger_records_that_the_role_was_given_up_because_its_lead_was_cancelled(
    ledger: str, role: str
) -> None:
    work = Flaky(fails=0)
    async with LeaderElection(ledger, role, **PATIENT) as election:
        leading = asyncio.ensure_future(election.lead(role, work))
        await bounded(work.running.wait())
        await ended(leading)
        await until(lambda: election.state(role) is LockState.FOLLOWER)
        with admin(ledger) as conn:
            query = b"SELECT detail FROM pgleaderlock.events WHERE role = %s AND kind = 'drain_began'"
            assert conn.execute(query, (role,)).fetchall() == [{"detail": "its lead was cancelled"}]


async def test_while_another_caller_leads_a_cancelled_one_leaves_the_role_as_it_is(
    election: LeaderElection, role: str
) -> None:
    one, two = Flaky(fails=0), Flaky(fails=0)
    tasks = [asyncio.ensure_future(election.lead(role, work)) for work in (one, two)]
    await bounded(one.running.wait())
    await bounded(two.running.wait())
    await ended(tasks[0])
    for _ in range(20):
        await asyncio.sleep(0)
    if election.heartbeat_age_s() is not None:
        await beat_turns(election, role)
    assert election.gate(role).is_leader
    assert len(two.epochs) == 1
    await ended(tasks[1])


@pytest.mark.parametrize("asked", ["step_down", "drain"])
async def test_standalone_what_is_given_up_is_so_though_the_caller_was_cancelled(role: str, asked: str) -> None:
    """As with a server: neither stuck in mid-release, nor led by nobody after a step-down or a `resume`."""
    async with LeaderElection("", role, standalone=True) as election:
        await opens(election, role)
        with election.gate(role).acting():
            asking = asyncio.ensure_future(getattr(election, asked)(role))
            await until(lambda: election.draining(role))
            await ended(asking)
            if asked == "drain":
                await election.resume(role)
        await opens(election, role)


# --- Asking one's own gate


def _shut_by_its_deadline(election: LeaderElection, role: str) -> None:
    """As a process sees it in its first instruction after a pause: time has passed, and no task has run yet."""
    gate = election.gate(role)
    with gate._lock:
        gate._term = gate._term._replace(deadline=gate._now())
        gate._visible = gate._term


@pytest.mark.parametrize("in_group", [False, True])
async def test_a_work_that_is_refused_by_its_own_gate_is_started_again(ledger: str, role: str, in_group: bool) -> None:
    began: list[int] = []

    async def ask(token: LeaderToken) -> None:
        _shut_by_its_deadline(election, role)
        election.gate(role).ensure_epoch(token.epoch)

    async def work(token: LeaderToken) -> str:
        began.append(token.epoch)
        if len(began) > 1:
            return "done"
        if in_group:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(ask(token))
        await ask(token)
        return "not refused"

    async with LeaderElection(ledger, role, **PATIENT) as election:
        assert await bounded(election.lead(role, work)) == "done"
        assert began == [1, 1]


async def test_a_work_that_asks_for_its_epoch_after_the_next_term_began_is_started_again(
    ledger: str, role: str, records: list[logging.LogRecord]
) -> None:
    began: list[int] = []

    async def work(token: LeaderToken) -> str:
        began.append(token.epoch)
        if len(began) > 1:
            return "done"
        try:
            await asyncio.Event().wait()
        finally:
            await until(lambda: election.gate(role).is_leader and election.gate(role).current_epoch == 2)
            election.gate(role).ensure_epoch(token.epoch)
        return "not refused"

    async with LeaderElection(ledger, role, **PATIENT) as election:
        leading = asyncio.ensure_future(election.lead(role, work))
        await until(lambda: began)
        end_leader(ledger, role)
        assert await bounded(leading) == "done"
        assert began == [1, 2]
    assert failures(records) == []


@pytest.mark.parametrize("what", ["another role", "another epoch", "another database"])
async def test_a_refusal_that_is_not_of_its_own_term_is_a_failure(
    election: LeaderElection, role: str, what: str
) -> None:
    async def work(token: LeaderToken) -> None:
        match what:
            case "another role":
                raise NotLeader("somebody else's", "lost", "it was lost")
            case "another epoch":
                election.gate(role).ensure_epoch(token.epoch + 7)
            case _:
                raise NotLeader(role, "never_led", "is this the database that elected the leader?")

    with pytest.raises(NotLeader):
        await bounded(election.lead(role, work))


async def test_a_fenced_write_that_came_too_late_counts_as_the_loss(ledger: str, role: str) -> None:
    began: list[int] = []

    async def work(token: LeaderToken) -> str:
        began.append(token.epoch)
        if len(began) > 1:
            return "done"
        try:
            await asyncio.Event().wait()
        finally:
            raise StaleEpoch("epoch 1 is over")

    async with LeaderElection(ledger, role, **PATIENT) as election:
        leading = asyncio.ensure_future(election.lead(role, work))
        await until(lambda: began)
        end_leader(ledger, role)
        assert await bounded(leading) == "done"


# --- Who says so


async def _answer(server: ProbeServer, path: str) -> tuple[int, str]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    async with asyncio.timeout(30):
        head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    return int(head.split(" ")[1]), body.strip()


async def test_probes_and_metrics_tell_a_leader_whose_work_has_failed_from_one_that_works(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()  # the delay before the restart does not pass
    monkeypatch.setattr(LeaderElection, "_clock", clock)
    election = LeaderElection("", role, standalone=True)
    metrics = ElectionMetrics(election, CollectorRegistry())
    work = Flaky(fails=1)

    def shown(name: str) -> str:
        lines = metrics.exposition().decode().splitlines()
        return next(line for line in lines if line.startswith(f'{name}{{role="{role}"}}')).rpartition(" ")[2]

    async with election, ProbeServer(election) as server:
        leading = asyncio.ensure_future(election.lead(role, work, on_failure="restart"))
        await until(lambda: election.work_error(role))
        assert election.state(role) is LockState.LEADER
        assert await _answer(server, "/readyz") == (503, f"the work of {role!r} has failed")
        assert await _answer(server, "/leader") == (200, "leader, idle: its work has failed")
        assert (shown("pgleaderlock_is_leader"), shown("pgleaderlock_work_failed")) == ("1.0", "1.0")
        clock.advance(1)
        await bounded(work.running.wait())
        assert await _answer(server, "/readyz") == (200, "ready")
        assert await _answer(server, "/leader") == (200, "leader")
        assert (shown("pgleaderlock_is_leader"), shown("pgleaderlock_work_failed")) == ("1.0", "0.0")
        assert shown("pgleaderlock_work_failures_total") == "1.0"
        await ended(leading)


async def test_a_node_that_does_not_compete_because_its_work_has_failed_is_not_ready(ledger: str, role: str) -> None:
    async with LeaderElection(ledger, role, **PATIENT) as election, ProbeServer(election) as server:
        with pytest.raises(ZeroDivisionError):
            await bounded(election.lead(role, Flaky(fails=1)))
        assert await _answer(server, "/readyz") == (503, f"the work of {role!r} has failed")
        assert isinstance(election.work_error(role), ZeroDivisionError)
        await election.shutdown()
        await election.start()
        await opens(election, role)
        assert election.work_error(role) is None
        assert await _answer(server, "/readyz") == (200, "ready")


@pytest.mark.parametrize("heartbeat_thread", [False, True])
async def test_observers_hear_of_a_failed_work(ledger: str, role: str, heartbeat_thread: bool) -> None:
    heard: list[tuple[str, int, str]] = []

    class Notebook(ElectionObserver):
        def work_failed(self, role: str, epoch: int, error: BaseException) -> None:
            heard.append((role, epoch, str(error)))

    async with LeaderElection(ledger, role, heartbeat_thread=heartbeat_thread, **PATIENT) as election:
        election.observe(Notebook())
        with pytest.raises(ZeroDivisionError):
            await bounded(election.lead(role, Flaky(fails=1)))
        await until(lambda: heard)
    assert heard == [(role, 1, "bad work")]


async def test_the_ledger_records_that_the_role_was_given_up_because_its_work_has_failed(
    ledger: str, role: str
) -> None:
    async with LeaderElection(ledger, role, **PATIENT) as election:
        with pytest.raises(ZeroDivisionError):
            await bounded(election.lead(role, Flaky(fails=1)))
        with admin(ledger) as conn:
            query = b"SELECT detail FROM pgleaderlock.events WHERE role = %s AND kind = 'drain_began'"
            assert conn.execute(query, (role,)).fetchall() == [{"detail": "its work has failed"}]


async def test_status_says_that_the_work_has_failed_until_the_next_term_begins(ledger: str, role: str) -> None:
    async def status(*options: str) -> str:
        words = ["-m", "pgleaderlock", "status", "--dsn", ledger, "--name", role, *options]
        asked = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
        out: bytes = (await bounded(asked.communicate()))[0]
        return out.decode()

    work = Flaky(fails=1)
    async with LeaderElection(ledger, role, node_id="node-7", **PATIENT) as election:
        await opens(election, role)
        assert "failed on" not in await status()
        with pytest.raises(ZeroDivisionError):
            await bounded(election.lead(role, work))
        assert re.search(r"^work +failed on node-7, \d+ s ago", await status(), re.MULTILINE)
        assert json.loads(await status("--json"))["ledger"]["work_failed_on"] == "node-7"
        leading = asyncio.ensure_future(election.lead(role, work))
        await bounded(work.running.wait())
        assert "failed on" not in await status()
        await ended(leading)


# --- Stepping down


async def test_standalone_a_step_down_is_followed_by_a_new_term(role: str) -> None:
    work = Flaky(fails=0)
    async with LeaderElection("", role, standalone=True) as election:
        leading = asyncio.ensure_future(election.lead(role, work))
        for runs in (1, 2, 3):
            await bounded(work.running.wait())
            assert len(work.epochs) == runs
            await bounded(election.step_down(role))
        await bounded(work.running.wait())
        await ended(leading)


async def test_standalone_a_step_down_that_the_work_itself_asks_for_is_followed_by_a_new_run(role: str) -> None:
    runs: list[int] = []

    async def work(token: LeaderToken) -> str:
        runs.append(token.epoch)
        if len(runs) == 2:
            return "done"
        await election.step_down(role)
        await asyncio.Event().wait()
        return "never"

    async with LeaderElection("", role, standalone=True) as election:
        assert await bounded(election.lead(role, work)) == "done"


async def test_standalone_what_was_drained_is_not_led_again_by_a_step_down(role: str) -> None:
    async with LeaderElection("", role, standalone=True) as election:
        await election.drain(role)
        await election.step_down(role)
        assert not election.gate(role).is_leader


@pytest.mark.parametrize("force", [False, True])
async def test_a_request_to_give_up_a_term_that_is_over_does_not_end_the_next_one(
    ledger: str, role: str, force: bool
) -> None:
    """As when the time of a `step_down` runs out in the moment in which the session is lost and won again."""
    async with LeaderElection(ledger, role, **PATIENT) as election:
        await opens(election, role)
        end_leader(ledger, role)
        await until(lambda: election.gate(role).is_leader and election.gate(role).current_epoch == 2)
        assert election._run.engine is not None
        election._run.engine.ask_release(role, 1, force=force)
        await beat_turns(election, role)
        assert election.gate(role).current_epoch == 2
        election._run.engine.ask_release(role, 2, force=force)
        await until(lambda: election.gate(role).current_epoch == 3)


# --- All of it at once


class Trial:
    """One node whose work fails, asks its gate, is paused and is stepped down at random; and who watches it.

    It is idle while its gate is open, no work runs, and it does not say that its work has failed. The watcher counts
    turns of the loop as well as time: what has not happened after so many turns does not wait for a busy machine.
    """

    TURNS_MAX = 50
    IDLE_S_MAX = 1.0
    STEPS = 40

    def __init__(self, dsn: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.ends_alone = seed % 2 == 0
        self.role = f"trial-{seed}-{uuid.uuid4().hex[:8]}"
        self.dsn = dsn
        options = {**STEADY, "heartbeat_thread": seed % 4 == 0}
        self.election = LeaderElection(dsn, self.role, **options)
        self.gate = self.election.gate(self.role)
        self.story: list[str] = []
        self.running = 0
        self.calm = False

    async def run(self) -> None:
        async with asyncio.timeout(100), self.election:
            watching = asyncio.ensure_future(self._watch())
            supervising = asyncio.ensure_future(self._supervise())
            try:
                for _ in range(self.STEPS):
                    await self._disturb()
                    await asyncio.sleep(self.rng.uniform(0, 0.1))
                if supervising.done():
                    supervising.result()
                if self.ends_alone:
                    await ended(supervising)
                self.calm = True
                await asyncio.wait([watching])
                watching.result()
                if supervising.done() and not supervising.cancelled():
                    supervising.result()
            finally:
                watching.cancel()
                await ended(supervising)

    async def _supervise(self) -> None:
        """As a program does: enters `lead` again after what its work has raised, or never. Nothing else is raised."""
        while True:
            on_failure = self.rng.choice(["raise", "raise", "restart", "step_down"])
            try:
                await self.election.lead(self.role, self._work, on_failure=on_failure)  # type: ignore[arg-type]
            except ZeroDivisionError:
                self.story.append(f"raised with {on_failure}")
            if self.rng.random() < 0.3:
                return
            await asyncio.sleep(self.rng.uniform(0, 0.1))

    async def _work(self, token: LeaderToken) -> None:
        self.running += 1
        try:
            while True:
                await asyncio.sleep(self.rng.uniform(0, 0.02))
                match self.rng.choice(["ask", "ask in a group", "pause", "raise", "work", "work"]):
                    case "ask":
                        self.gate.ensure_epoch(token.epoch)
                    case "ask in a group":
                        async with asyncio.TaskGroup() as tasks:
                            tasks.create_task(self._ask(token))
                    case "pause" if not self.calm:
                        self.story.append("paused")
                        _shut_by_its_deadline(self.election, self.role)
                        self.gate.ensure_epoch(token.epoch)
                    case "raise" if not self.calm:
                        self.story.append("raises")
                        raise ZeroDivisionError
        finally:
            self.running -= 1

    async def _ask(self, token: LeaderToken) -> None:
        self.gate.require_leader()
        self.gate.ensure_epoch(token.epoch)

    async def _disturb(self) -> None:
        match self.rng.choice(["step down", "hasty step down", "lose", "veto", *["nothing"] * 10]):
            case "step down":
                self.story.append("stepped down")
                await self.election.step_down(self.role)
            case "hasty step down":
                self.story.append("stepped down by force")
                await self.election.step_down(self.role, timeout_s=self.rng.uniform(0, 0.01))
            case "lose":
                self.story.append("lost")
                with contextlib.suppress(ValueError):  # nobody holds it just now
                    await asyncio.to_thread(end_leader, self.dsn, self.role)
            case "veto":
                self.story.append("vetoed")
                self.gate.disable()
                await asyncio.sleep(self.rng.uniform(0, 0.01))
                self.gate._hold_shut("vetoed", shut=False)

    async def _watch(self) -> None:
        """Ends some time after the disturbances have ended; raises if the node was idle for too long."""
        loop = asyncio.get_running_loop()
        idle_since, turns, calm_turns = loop.time(), 0, 0
        while calm_turns < 2 * self.TURNS_MAX:
            await asyncio.sleep(0.02)
            calm_turns += self.calm
            if not self.gate.is_leader or self.running or self.election.work_error(self.role) is not None:
                idle_since, turns = loop.time(), 0
            turns += 1
            idle_s = loop.time() - idle_since
            assert turns < self.TURNS_MAX or idle_s < self.IDLE_S_MAX, f"led without work for {idle_s:.1f} s"


@pytest.mark.parametrize("batch", range(count(1, 20)))
async def test_no_node_leads_without_a_running_work_unless_it_says_so(ledger: str, batch: int) -> None:
    """Ten runs at a time; each is repeated by its seed."""
    trials = [Trial(ledger, seed) for seed in range(10 * batch, 10 * batch + 10)]
    outcomes = await asyncio.gather(*(trial.run() for trial in trials), return_exceptions=True)
    failed = [
        f"{trial.role}: {outcome!r} {trial.story}" for trial, outcome in zip(trials, outcomes, strict=True) if outcome
    ]
    assert failed == []


PAUSED = """
import asyncio, json, sys, time
from pgleaderlock import LeaderElection

async def main(dsn, role, options):
    election = LeaderElection(dsn, role, **options)

    async def work(token):
        print("began", flush=True)
        while True:
            election.gate(role).ensure_epoch(token.epoch)
            time.sleep(0.005)
            await asyncio.sleep(0)

    async with election:
        await election.lead(role, work)

asyncio.run(main(*json.loads(sys.argv[1])))
"""


async def test_a_process_that_was_stopped_and_continued_works_again(ledger: str, role: str) -> None:
    """Longer than G and T: its work asks the gate before the loop has noticed anything."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PAUSED, json.dumps([ledger, role, HASTY]), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        for _ in range(3):
            assert await bounded(process.stdout.readline()) == b"began\n"
            process.send_signal(signal.SIGSTOP)
            await until(lambda: holding(ledger, role) == 0)
            process.send_signal(signal.SIGCONT)
        assert await bounded(process.stdout.readline()) == b"began\n"
    finally:
        process.kill()
        await process.wait()
