"""What an election tells whoever measures it: the hooks in order, and what can be read at any time from any thread."""

import asyncio
import threading
import uuid
from dataclasses import replace
from typing import Any

import pytest

from pgleaderlock import (
    ConfigurationError,
    ElectionObserver,
    LeaderElection,
    LeaderToken,
    LockState,
    NotLeader,
)
from pgleaderlock._election.ledger import Bump, Look
from pgleaderlock._election.role import is_failover
from support.elections import (
    HASTY,
    PATIENT,
    STEADY,
    WAIT_S,
    Story,
    admin,
    bounded,
    end_leader,
    one,
    opens,
    until,
)

pytestmark = pytest.mark.usefixtures("hold")

POLITE = {"acquire_delay_s": (4.0, 5.0)}


class Journal(ElectionObserver):
    """Every call, without the figures that no test can know, and on which thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.threads: set[int] = set()

    def _note(self, *call: Any) -> None:
        self.calls.append(call)
        self.threads.add(threading.get_ident())

    def role_added(self, role: str) -> None:
        self._note("role_added", role)

    def role_removed(self, role: str) -> None:
        self._note("role_removed", role)

    def attempted(self, role: str, result: str) -> None:
        self._note("attempted", role, result)

    def acquired(self, role: str, epoch: int, latency_s: float, from_other: bool) -> None:
        assert 0 < latency_s < WAIT_S
        self._note("acquired", role, epoch, from_other)

    def lost(self, role: str, epoch: int, reason: str) -> None:
        self._note("lost", role, epoch, reason)

    def work_began(self, role: str, epoch: int) -> None:
        self._note("work_began", role, epoch)

    def work_ended(self, role: str, epoch: int, error: BaseException | None) -> None:
        self._note("work_ended", role, epoch, error and type(error).__name__)

    def work_failed(self, role: str, epoch: int, error: BaseException) -> None:
        self._note("work_failed", role, epoch, type(error).__name__)

    def state_changed(self, role: str, old: LockState, new: LockState) -> None:
        self._note("state_changed", role, old.value, new.value)

    def beaten(self, took_s: float) -> None:
        assert 0 < took_s < WAIT_S
        self._note("beaten")

    def session_lost(self, error: Exception) -> None:
        self._note("session_lost", type(error).__name__)

    def drain_began(self, role: str) -> None:
        self._note("drain_began", role)

    def drain_ended(self, role: str, clean: bool) -> None:
        self._note("drain_ended", role, clean)

    def said(self, *hooks: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] in hooks]

    def without(self, *hooks: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] not in hooks]


@pytest.mark.parametrize("threaded", [False, True])
async def test_a_term_is_told_from_its_first_try_to_its_end(node_dsn: str, role: str, threaded: bool) -> None:
    election = LeaderElection(node_dsn, role, heartbeat_thread=threaded, **STEADY)
    journal = Journal()
    election.observe(journal)
    async with election:
        await opens(election, role)
        await until(lambda: journal.said("beaten"))
    assert journal.without("beaten") == [
        ("role_added", role),
        ("state_changed", role, "stopped", "follower"),
        ("attempted", role, "won"),
        ("state_changed", role, "follower", "acquiring"),
        ("state_changed", role, "acquiring", "leader"),
        ("acquired", role, 1, False),
        ("drain_began", role),
        ("state_changed", role, "leader", "releasing"),
        ("state_changed", role, "releasing", "stopped"),
        ("lost", role, 1, "released"),
        ("drain_ended", role, True),
    ]
    assert len(journal.threads) == (2 if threaded else 1), "registered at home, and told on the engine's loop"


@pytest.mark.parametrize("threaded", [False, True])
async def test_each_work_is_told_from_its_beginning_to_its_end(node_dsn: str, role: str, threaded: bool) -> None:
    election = LeaderElection(node_dsn, role, heartbeat_thread=threaded, **STEADY)
    journal = Journal()
    election.observe(journal)

    async def work(token: LeaderToken) -> str:
        if token.epoch == 1:
            await asyncio.Event().wait()
        return "done"

    async with election:
        await opens(election, role)
        leading = asyncio.ensure_future(election.lead(role, work))
        await until(lambda: journal.said("work_began"))
        end_leader(node_dsn, role)
        assert await bounded(leading) == "done"
        await until(lambda: journal.said("work_ended")[1:])
    assert journal.said("work_began", "work_ended", "work_failed") == [
        ("work_began", role, 1),
        ("work_ended", role, 1, None),
        ("work_began", role, 2),
        ("work_ended", role, 2, None),
    ]


async def test_a_work_that_fails_is_told_as_ended_and_as_failed(node_dsn: str, role: str) -> None:
    election = LeaderElection(node_dsn, role, **STEADY)
    journal = Journal()
    election.observe(journal)

    async def work(_: LeaderToken) -> None:
        raise KeyError("why")

    async with election:
        with pytest.raises(KeyError):
            await bounded(election.lead(role, work))
    assert journal.said("work_began", "work_ended", "work_failed") == [
        ("work_began", role, 1),
        ("work_ended", role, 1, "KeyError"),
        ("work_failed", role, 1, "KeyError"),
    ]


async def test_a_lost_session_is_told_once_and_each_of_its_terms(node_dsn: str, role: str) -> None:
    roles = [f"{role}-{number}" for number in range(2)]
    election = LeaderElection(node_dsn, roles, **STEADY)
    async with election:
        for name in roles:
            await opens(election, name)
        journal = Journal()
        election.observe(journal)
        end_leader(node_dsn, roles[0])
        await until(lambda: len(journal.said("acquired")) == 2)
    assert journal.said("role_added") == [("role_added", name) for name in roles]
    assert journal.said("session_lost") == [("session_lost", "ConnectionError")]
    assert journal.said("lost")[:2] == [("lost", name, 1, "lost") for name in roles]
    assert sorted(journal.said("acquired")) == [("acquired", name, 2, False) for name in roles], "its own, no failover"


async def test_an_attempt_is_held_while_another_leads_and_a_failover_is_told_from_a_handover(
    node_dsn: str, role: str
) -> None:
    journal = Journal()
    first = LeaderElection(node_dsn, role, node_id="first", **{**PATIENT, "acquire_delay_s": (0.3, 0.4)})
    second = LeaderElection(node_dsn, role, node_id="second", **PATIENT)
    second.observe(journal)
    async with first:
        await opens(first, role)
        async with second:
            await until(lambda: ("attempted", role, "held") in journal.calls)
            await bounded(first.step_down(role))
            await until(lambda: journal.said("acquired") == [("acquired", role, 2, False)])
            assert await bounded(second.drain(role))
            await opens(first, role)
            journal.calls.clear()
            await second.resume(role)
            await until(lambda: ("attempted", role, "held") in journal.calls)
            first._roster.roles[role].not_before = float("inf")
            end_leader(node_dsn, role)
            await until(lambda: journal.said("acquired") == [("acquired", role, 4, True)])


@pytest.mark.parametrize("how", ["session", "task", "epochs"])
async def test_every_gate_is_shut_before_anybody_is_told_of_one(
    node_dsn: str, superuser: str, role: str, how: str
) -> None:
    """An observer may be slow, and must not keep the other gates open."""
    roles = [f"{role}-{number}" for number in range(3)]
    told: list[tuple[str, bool]] = []

    class Looks(ElectionObserver):
        def lost(self, role: str, epoch: int, reason: str) -> None:
            told.append((f"{epoch} {reason}", any(election.gate(name).is_leader for name in roles)))

        def state_changed(self, role: str, old: LockState, new: LockState) -> None:
            if old is LockState.LEADER:
                told.append((new.value, any(election.gate(name).is_leader for name in roles)))

    async with LeaderElection(node_dsn, roles, **STEADY) as election:
        for name in roles:
            await opens(election, name)
        election.observe(Looks())
        if how == "session":
            end_leader(node_dsn, roles[0])
        elif how == "task":
            assert election._run.task is not None
            election._run.task.cancel()
        else:
            query = "SELECT count(pgleaderlock.advance_epoch(role, namespace, 'c')) FROM pgleaderlock.leaders"
            one(superuser, f"{query} WHERE role = ANY (%s)", roles)
        await until(lambda: len(told) >= 6)
        assert {was_open for _, was_open in told[:6]} == {False}
        reason = "superseded" if how == "epochs" else "lost"
        assert [what for what, _ in told[:6]].count(f"1 {reason}") == 3


BUMP = Bump(
    role="r",
    outcome="won",
    epoch=2,
    history=(1, 1),
    prev_session_id=40,
    prev_beat=7,
    prev_wait_t=1.0,
    prev_clean=False,
    prev_instance="theirs",
)
LOOK = Look(
    role="r",
    granted=True,
    epoch=1,
    session_id=40,
    beat=7,
    ended=False,
    holder_identity="x",
    node_id="other",
    lease_s=1.0,
    backend_pid=1,
    backend_start="1",
)


@pytest.mark.parametrize(
    ("bump", "look", "failover"),
    [
        (BUMP, LOOK, True),
        (BUMP, None, True),
        (BUMP, LOOK._replace(session_id=39, ended=True), True),
        (replace(BUMP, prev_clean=True), LOOK, False),
        (replace(BUMP, prev_instance=None), LOOK, False),
        (replace(BUMP, prev_instance="ours"), LOOK, False),
        (BUMP, LOOK._replace(ended=True), False),
        (BUMP, LOOK._replace(node_id="here"), False),
    ],
    ids=["lost", "never looked", "looked earlier", "released", "never led", "ourselves", "not clean", "restarted"],
)
def test_a_failover_is_a_term_of_another_node_that_was_not_given_up(
    bump: Bump, look: Look | None, failover: bool
) -> None:
    role = LeaderElection("", "r", standalone=True)._run._make_role("r")
    role.look = look
    assert is_failover(role, bump, own_instance="ours", own_node_id="here") is failover


async def test_a_superseded_term_says_so(node_dsn: str, superuser: str, role: str) -> None:
    journal = Journal()
    election = LeaderElection(node_dsn, role, **HASTY)
    election.observe(journal)
    async with election:
        await opens(election, role)
        one(superuser, "SELECT pgleaderlock.advance_epoch(%s, 'pgleaderlock', 'pgleaderlock')", role)
        await until(lambda: journal.said("lost") == [("lost", role, 1, "superseded")])


async def test_a_database_that_is_away_is_an_error_of_each_attempt() -> None:
    journal = Journal()
    election = LeaderElection("postgresql://nobody@127.0.0.1:1/none?connect_timeout=2", ["a", "b"], **STEADY)
    election.observe(journal)
    async with election:
        await until(lambda: ("attempted", "b", "error") in journal.calls)
        assert election.heartbeat_age_s() is None
    assert journal.said("session_lost") == []


@pytest.mark.parametrize("error", [ZeroDivisionError, asyncio.CancelledError])
async def test_an_observer_that_fails_disturbs_nobody(node_dsn: str, role: str, error: type[BaseException]) -> None:
    """The second is what a cancelled future raises when it is asked for its result."""

    class Bad(ElectionObserver):
        def beaten(self, took_s: float) -> None:
            raise error("an observer's own")

    election = LeaderElection(node_dsn, role, **STEADY)
    journal, story = Journal(), Story(election)
    election.observe(Bad())
    election.observe(journal)
    async with election:
        await opens(election, role)
        await until(lambda: len(journal.said("beaten")) >= 2)
    assert story.errors == []


def test_only_an_observer_can_observe(node_dsn: str) -> None:
    with pytest.raises(ConfigurationError, match="ElectionObserver"):
        LeaderElection(node_dsn, "r").observe(print)  # type: ignore[arg-type]


async def test_tenure_and_heartbeat_are_read_from_any_thread(node_dsn: str, role: str) -> None:
    election = LeaderElection(node_dsn, role, heartbeat_thread=True, **STEADY)
    assert (election.tenure_s(role), election.heartbeat_age_s(), election.draining(role)) == (None, None, False)
    async with election:
        await opens(election, role)
        tenure_s = election.tenure_s(role)
        assert tenure_s is not None
        seen = await asyncio.to_thread(lambda: (election.tenure_s(role), election.heartbeat_age_s()))
        assert seen[0] is not None
        assert seen[1] is not None
        assert tenure_s <= seen[0] < WAIT_S
        assert 0 <= seen[1] < 5.0, "the last beat keeps the gate open"
        with election.gate(role).acting():
            stepping = asyncio.ensure_future(election.step_down(role))
            await until(lambda: election.draining(role))
        await bounded(stepping)
        assert not election.draining(role)
    assert (election.tenure_s(role), election.heartbeat_age_s()) == (None, None)


async def test_a_gate_counts_its_refusals_by_reason_and_nothing_else(node_dsn: str, role: str) -> None:
    election = LeaderElection(node_dsn, role, **{**STEADY, **POLITE})
    gate = election.gate(role)
    assert gate.blocked == {}
    with pytest.raises(NotLeader):
        gate.require_leader()
    async with election:
        await opens(election, role)
        token = gate.require_leader()
        gate.ensure_epoch(token.epoch)
        with gate.acting():
            pass
        with pytest.raises(NotLeader):
            gate.ensure_epoch(token.epoch + 1)
        await bounded(election.step_down(role))

        def ask() -> None:
            for _ in range(200):
                with pytest.raises(NotLeader), gate.acting():
                    pytest.fail("let in")

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        await until(lambda: not any(thread.is_alive() for thread in threads))
        assert gate.blocked == {"never_led": 1, "epoch_changed": 1, "released": 800}


async def test_events_of_the_ledger_tell_the_same_story(node_dsn: str, superuser: str, role: str, hold: str) -> None:
    node = f"told-{uuid.uuid4().hex[:6]}"
    async with LeaderElection(node_dsn, role, node_id=node, **STEADY) as election:
        await opens(election, role)
        end_leader(node_dsn, role)
        await until(lambda: election.gate(role).current_epoch == 2)
        await bounded(election.drain(role))
    with admin(superuser) as conn:
        rows = conn.execute(
            "SELECT kind, epoch, detail FROM pgleaderlock.events WHERE role = %s OR node_id = %s ORDER BY event_id",
            (role, node),
        ).fetchall()
    assert [(row["kind"], row["epoch"]) for row in rows] == [
        ("session_opened", None),
        ("acquired", 1),
        *([("session_ended", None)] if hold == "session" else []),  # that of a lease is noted by who ends it
        ("session_opened", None),
        ("lost", 1),
        ("acquired", 2),
        ("drain_began", None),
        ("released", 2),
        ("drain_ended", None),
        ("session_ended", None),
    ]
    assert [row["detail"] for row in rows[-4:-1]] == [None, "clean", "clean"]
