"""Asked from afar, through SQL alone: durable, obeyed once, with an outcome; a notification only wakes."""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import psycopg
import pytest

from pgleaderlock import LeaderElection, LockState
from pgleaderlock._election.ledger import Beat, Ledger, Settled
from pgleaderlock._pg.lease import LeaseSession
from pgleaderlock._pg.session import DedicatedSession
from support.elections import (
    HASTY,
    PATIENT,
    STEADY,
    Story,
    admin,
    bounded,
    end_leader,
    end_session,
    holding,
    last_session,
    one,
    opens,
    somebody_acts,
    until,
)

pytestmark = pytest.mark.usefixtures("hold")

# A node that does not listen and looks seldom: whoever listens would win before it, if nobody held back.
LAST_BEAT = (
    "SELECT min(beat) AS beat FROM pgleaderlock.sessions s WHERE namespace = %s AND ended_at IS NULL"
    " AND (hold = 'lease' OR EXISTS (SELECT FROM pg_stat_get_activity(s.backend_pid)))"
)
SLOW = {**PATIENT, "acquire_delay_s": (0.4, 0.5), "listen_channel": None}


@pytest.fixture
def name() -> str:
    """Of everything in one test: its roles, its nodes, its namespace."""
    return f"asked-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def node(node_dsn: str, name: str) -> Callable[..., LeaderElection]:
    """Makes a node of the test's own namespace, in which nobody else's nodes are."""

    def make(node_id: str, roles: Any = None, **settings: Any) -> LeaderElection:
        options = {**PATIENT, **settings}
        return LeaderElection(node_dsn, roles or f"{name}-role", node_id=node_id, namespace=name, **options)

    return make


class Hand:
    """An operator's hand: what the command line sends, as a role with no more rights than a node."""

    def __init__(self, dsn: str, superuser: str, name: str) -> None:
        self._dsn, self._superuser, self._name = dsn, superuser, name

    def step_down(self, role: str, to: str | None = None) -> int | None:
        query = "SELECT pgleaderlock.request_step_down(%s, %s, %s, 'pgleaderlock') AS id"
        return self._id(one(self._dsn, query, role, self._name, to))

    def drain(self, node_id: str) -> int | None:
        return self._id(
            one(self._dsn, "SELECT pgleaderlock.request_drain(%s, %s, 'pgleaderlock') AS id", node_id, self._name)
        )

    def resume(self, node_id: str) -> int | None:
        return self._id(
            one(self._dsn, "SELECT pgleaderlock.request_resume(%s, %s, 'pgleaderlock') AS id", node_id, self._name)
        )

    def _id(self, row: dict[str, Any]) -> int | None:
        one(self._dsn, "SELECT pg_notify('pgleaderlock', 'requested')")  # behind the request, and never with it
        return None if row["id"] is None else int(row["id"])

    def outcome(self, request_id: int | None) -> tuple[str | None, str | None]:
        row = one(
            self._superuser, "SELECT outcome, detail FROM pgleaderlock.requests WHERE request_id = %s", request_id
        )
        return row["outcome"], row["detail"]

    async def settled(self, request_id: int | None) -> tuple[str | None, str | None]:
        await until(lambda: self.outcome(request_id)[0] is not None, "the outcome of the request")
        return self.outcome(request_id)

    def events(self) -> list[tuple[str, str | None, str | None]]:
        with admin(self._superuser) as conn:
            rows = conn.execute(
                "SELECT kind, role, node_id FROM pgleaderlock.events WHERE namespace = %s"
                " AND kind NOT LIKE 'session%%' ORDER BY event_id",
                (self._name,),
            ).fetchall()
        return [(row["kind"], row["role"], row["node_id"]) for row in rows]

    def session(self, node_id: str) -> dict[str, Any]:
        return one(
            self._superuser,
            "SELECT * FROM pgleaderlock.sessions WHERE namespace = %s AND node_id = %s AND ended_at IS NULL",
            self._name,
            node_id,
        )


@pytest.fixture
def hand(node_dsn: str, superuser: str, name: str) -> Hand:
    return Hand(node_dsn, superuser, name)


# --- To a certain node


async def test_the_named_node_leads_next_though_others_are_quicker(
    node: Callable[..., LeaderElection], hand: Hand, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is quick is woken by the release. One that tries by itself, too, may do so with a snapshot from before the
    reservation, and win."""
    monkeypatch.setattr("pgleaderlock._election.ledger.HOLD_S", 600.0)  # a busy machine may need longer than 2 s
    role = f"{name}-role"
    woken = {"acquire_delay_s": (60.0, 60.0)}
    async with node("gives") as gives, node("quick", **woken) as quick, node("named", **SLOW) as named:
        await bounded(quick.drain())
        await bounded(named.drain())
        await opens(gives, role)
        await quick.resume()
        await named.resume()
        await until(lambda: quick.leader(role) is not None and named.leader(role) is not None)
        await until(lambda: not hand.session("named")["draining"])
        asked = hand.step_down(role, "named")
        await opens(named, role)
        assert await hand.settled(asked) == ("done", "named leads it")
        assert quick.state(role) is LockState.FOLLOWER
        await until(lambda: gives.state(role) is LockState.FOLLOWER)  # it hears of its own release a moment later


@pytest.mark.parametrize("why", ["unknown", "no candidate", "drained", "gone"])
async def test_a_node_that_cannot_take_over_is_refused_and_nothing_is_given_up(
    node: Callable[..., LeaderElection], hand: Hand, name: str, why: str
) -> None:
    await refused_because(why, node, hand, name)


@pytest.mark.of_sessions
async def test_a_node_that_was_killed_is_refused_at_once_and_nothing_is_given_up(
    node: Callable[..., LeaderElection], hand: Hand, name: str
) -> None:
    await refused_because("killed", node, hand, name)


async def refused_because(why: str, node: Callable[..., LeaderElection], hand: Hand, name: str) -> None:
    role = f"{name}-role"
    async with node("leads") as leads:
        await opens(leads, role)
        named = node("named", candidate=why != "no candidate")
        await named.start()
        if why == "drained":
            await bounded(named.drain())
            await until(lambda: hand.session("named")["draining"])
        if why == "gone":
            await named.shutdown()
        if why == "killed":  # its record is as fresh as that of the living
            assert named._run.task is not None
            named._run.task.cancel()
            await until(lambda: named.state(role) is LockState.STOPPED)
        asked = hand.step_down(role, "nobody" if why == "unknown" else "named")
        outcome, detail = await hand.settled(asked)
        assert outcome == "refused"
        assert detail is not None
        assert "no live candidate" in detail
        assert leads.gate(role).is_leader
        assert leads.gate(role).current_epoch == 1
        await named.shutdown()


async def test_a_named_node_that_does_not_compete_keeps_the_role_free_for_a_moment_only(
    node: Callable[..., LeaderElection], hand: Hand, name: str, hold: str
) -> None:
    """It is alive and a candidate, but for another role: no table says that.

    Everybody's own next look is far away, unless it is a lease, which has nothing else to go by.
    """
    role, far = f"{name}-role", {"acquire_delay_s": (500.0, 550.0)}
    looks = far if hold == "session" else {"acquire_delay_s": (0.4, 0.5)}
    async with node("gives", **far) as gives, node("named", f"{name}-other"):
        await opens(gives, role)
        async with node("waits", **looks) as waits:
            await until(lambda: waits.leader(role) is not None)
            asked = hand.step_down(role, "named")
            await opens(waits, role)
            assert await hand.settled(asked) == ("done", "waits leads it, and not named")


async def test_a_role_that_was_left_to_somebody_in_the_future_is_nobodys(
    node: Callable[..., LeaderElection], superuser: str, name: str
) -> None:
    await left_to_somebody_in_the_future(node, superuser, name, balance=False)


@pytest.mark.of_sessions
async def test_a_role_that_was_left_to_somebody_in_the_future_is_nobodys_for_those_who_balance(
    node: Callable[..., LeaderElection], superuser: str, name: str
) -> None:
    await left_to_somebody_in_the_future(node, superuser, name, balance=True)


async def left_to_somebody_in_the_future(
    node: Callable[..., LeaderElection], superuser: str, name: str, *, balance: bool
) -> None:
    """The database's clock was set back: for an hour nobody would lead."""
    role = f"{name}-role"
    with admin(superuser) as conn:
        conn.execute(
            "INSERT INTO pgleaderlock.requests (kind, namespace, role, to_node_id, released_at)"
            " VALUES ('step_down', %s, %s, 'named', clock_timestamp() + interval '1 hour')",
            (name, role),
        )
    async with node("leads", balance=balance) as leads:
        await opens(leads, role)


@pytest.mark.parametrize("asked", ["step_down", "step_down to nobody", "resume"])
async def test_many_requests_at_once_are_settled_in_few_statements(
    node: Callable[..., LeaderElection],
    superuser: str,
    name: str,
    asked: str,
    *,
    hold: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A heartbeat waits behind each of them."""
    session, sends = (DedicatedSession, "_execute") if hold == "session" else (LeaseSession, "_once")
    real, settling = getattr(session, sends), list[str]()

    async def execute(self: object, statement: str, *args: Any) -> list[Any]:
        if "settle" in statement or "finish" in statement:
            settling.append(statement)
        answer: list[Any] = await real(self, statement, *args)
        return answer

    roles = [f"{name}-{number:02}" for number in range(40)]
    async with node("leads", roles) as leads:
        await until(lambda: all(leads.gate(role).is_leader for role in roles))
        monkeypatch.setattr(session, sends, execute)
        with admin(superuser) as conn:
            query = {
                "step_down": "SELECT pgleaderlock.request_step_down(role, %(n)s, NULL, 'pgleaderlock')",
                "step_down to nobody": "SELECT pgleaderlock.request_step_down(role, %(n)s, 'nobody', 'pgleaderlock')",
                "resume": "SELECT pgleaderlock.request_resume('leads', %(n)s, 'pgleaderlock')",
            }[asked]
            conn.execute(f"{query} FROM pgleaderlock.leaders WHERE namespace = %(n)s".encode(), {"n": name})
        settled = "SELECT count(outcome) AS n FROM pgleaderlock.requests WHERE namespace = %s"
        await until(lambda: one(superuser, settled, name)["n"] == 40)
        assert 1 <= len(settling) <= 4


async def test_a_role_that_nobody_leads_and_a_node_that_is_not_there_are_nothing_to_ask(hand: Hand, name: str) -> None:
    assert hand.step_down(f"{name}-role") is None
    assert hand.drain("nobody") is None
    assert hand.resume("nobody") is None
    assert hand.events() == []


async def test_what_was_asked_of_a_term_that_was_lost_is_not_asked_of_the_next(
    node: Callable[..., LeaderElection], node_dsn: str, hand: Hand, name: str
) -> None:
    role = f"{name}-role"
    async with node("leads") as leads:
        await opens(leads, role)
        with leads.gate(role).acting():
            asked = hand.step_down(role)
            await until(lambda: leads.draining(role))
            end_leader(node_dsn, role, name)
            assert await hand.settled(asked) == ("done", "leads leads it")
        await until(lambda: leads.gate(role).current_epoch == 2)
        assert leads._roster.roles[role].requests == []
        assert leads.state(role) is LockState.LEADER


async def test_a_step_down_is_obeyed_by_one_term_though_nobody_can_write_down_that_it_is_done(
    node: Callable[..., LeaderElection], superuser: str, hand: Hand, name: str
) -> None:
    """An operator holds the request: whoever leads next, in this session or another, was not asked."""
    role = f"{name}-role"
    async with node("one", **STEADY) as first, node("two", **STEADY) as second:
        leads = await somebody_acts([first, second], role)
        with admin(superuser) as operator:
            with leads.gate(role).acting():  # it is not done before the operator holds it
                asked = hand.step_down(role)
                operator.execute("BEGIN")
                operator.execute("SELECT FROM pgleaderlock.requests WHERE request_id = %s FOR UPDATE", (asked,))
            await until(lambda: 2 in [election.gate(role).current_epoch for election in (first, second)])
            beat = one(superuser, LAST_BEAT, name)["beat"]
            await until(lambda: one(superuser, LAST_BEAT, name)["beat"] > beat + 5)
            assert one(superuser, "SELECT epoch FROM pgleaderlock.leaders WHERE role = %s", role)["epoch"] == 2
            operator.execute("ROLLBACK")
        assert await hand.settled(asked) == ("done", "the term that was asked for has ended")


# --- Of a node


@pytest.mark.parametrize("threaded", [False, True])
async def test_a_node_that_is_asked_to_drain_gives_up_everything_and_stays_so_over_a_reconnect(
    node: Callable[..., LeaderElection], hand: Hand, superuser: str, name: str, threaded: bool
) -> None:
    roles = [f"{name}-{number}" for number in range(3)]
    drained = node("drained", roles, heartbeat_thread=threaded)
    async with drained:
        for role in roles:
            await opens(drained, role)
        async with node("other", roles) as other:
            await until(lambda: all(other.leader(role) for role in roles))
            asked = hand.drain("drained")
            for role in roles:
                await opens(other, role)
            assert await hand.settled(asked) == ("done", "clean")
            before = hand.session("drained")
            assert before["draining"]
            end_session(superuser, before["session_id"])
            await until(lambda: last_session(superuser, "drained", name) > before["session_id"])
            assert hand.session("drained")["draining"]
            assert [drained.drained(role) for role in roles] == [True] * 3
        resumed = hand.resume("drained")
        for role in roles:
            await opens(drained, role)
        assert (await hand.settled(resumed))[0] == "done"
        assert not hand.session("drained")["draining"]
        kinds = {kind for kind, _, _ in hand.events()}
        assert kinds == {
            "acquired",
            "released",
            "drain_requested",
            "drain_began",
            "drain_ended",
            "resume_requested",
        }
        asked = hand.drain("drained")
        assert (await hand.settled(asked))[0] == "done"
    async with drained:  # a process that was restarted begins anew
        for role in roles:
            await opens(drained, role)


async def test_a_drain_that_waits_for_work_is_open_until_the_work_ends(
    node: Callable[..., LeaderElection], hand: Hand, name: str
) -> None:
    role = f"{name}-role"
    async with node("busy", **STEADY) as busy:
        await opens(busy, role)
        with busy.gate(role).acting():
            asked = hand.drain("busy")
            await until(lambda: busy.draining(role))
            beat = hand.session("busy")["beat"]
            await until(lambda: hand.session("busy")["beat"] > beat + 2)
            assert hand.outcome(asked) == (None, None)
        assert await hand.settled(asked) == ("done", "clean")


async def test_the_later_of_two_opposite_requests_counts(
    node: Callable[..., LeaderElection], hand: Hand, name: str
) -> None:
    role = f"{name}-role"
    async with node("busy", **STEADY) as busy:
        await opens(busy, role)
        with busy.gate(role).acting():
            drain = hand.drain("busy")
            await until(lambda: busy.draining(role))
            resume = hand.resume("busy")
            assert (await hand.settled(resume))[0] == "done"
        assert (await hand.settled(drain))[0] == "refused"
        await opens(busy, role)


async def test_a_drain_that_the_application_resumes_before_its_end_is_refused(
    node: Callable[..., LeaderElection], hand: Hand, name: str
) -> None:
    role = f"{name}-role"
    async with node("busy", **STEADY) as busy:
        await opens(busy, role)
        with busy.gate(role).acting():
            asked = hand.drain("busy")
            await until(lambda: busy.draining(role))
            await busy.resume()
        assert await hand.settled(asked) == ("refused", "resumed before it had ended")
        await opens(busy, role)


async def test_a_drain_that_an_earlier_session_was_asked_for_is_obeyed_by_the_next_and_stays(
    node: Callable[..., LeaderElection], hand: Hand, superuser: str, name: str, hold: str
) -> None:
    """It had no chance to read it: it beats when it is told to. The new session's record does not say drained."""
    role = f"{name}-role"
    async with node("deaf", heartbeat_interval_s=400.0, listen_channel=None) as deaf:
        await opens(deaf, role)
        asked, before = hand.drain("deaf"), hand.session("deaf")
        engine = deaf._run.engine
        assert engine is not None
        end_session(superuser, before["session_id"])
        if hold == "lease":  # which learns of its end when it says something
            engine.wake("requested")
        await until(lambda: last_session(superuser, "deaf", name) > before["session_id"])

        def recorded() -> bool:
            engine.wake("requested")
            return bool(hand.session("deaf")["draining"])

        await until(recorded)
        assert (await hand.settled(asked))[0] == "done"
        assert deaf.drained(role)


async def test_what_a_process_was_asked_is_not_for_the_one_that_follows_it(
    node: Callable[..., LeaderElection], hand: Hand, name: str
) -> None:
    """The name is the same, as that of a pod is. It was killed before its drain had ended."""
    role = f"{name}-role"
    first, second = node("pod-0", **HASTY), node("pod-0", **HASTY)
    async with first:
        await opens(first, role)
        with first.gate(role).acting():
            asked = hand.drain("pod-0")
            await until(lambda: first.draining(role))
            assert first._run.task is not None
            first._run.task.cancel()
            await until(lambda: first.state(role) is LockState.STOPPED)
    async with second:
        await opens(second, role)
        beat = one(hand._superuser, LAST_BEAT, name)["beat"]
        await until(lambda: one(hand._superuser, LAST_BEAT, name)["beat"] > beat + 2)
        assert not second.drained(role)
        assert hand.outcome(asked) == (None, None)


async def test_a_node_of_several_sessions_is_drained_when_the_last_of_them_is(
    node: Callable[..., LeaderElection], hand: Hand, superuser: str, name: str
) -> None:
    """Two programs of one host have one name, unless somebody names them."""
    async with node("host", f"{name}-a", **STEADY) as idle, node("host", f"{name}-b", **STEADY) as busy:
        await opens(idle, f"{name}-a")
        await opens(busy, f"{name}-b")
        with busy.gate(f"{name}-b").acting():
            asked = hand.drain("host")
            await until(lambda: idle.gate(f"{name}-a").token is None and busy.draining(f"{name}-b"))
            beat = one(superuser, LAST_BEAT, name)["beat"]
            await until(lambda: one(superuser, LAST_BEAT, name)["beat"] > beat + 3)
            assert hand.outcome(asked) == (None, None)
        assert await hand.settled(asked) == ("done", "clean")


async def test_what_the_application_resumes_is_not_drained_again_by_a_request_that_is_still_open(
    node: Callable[..., LeaderElection],
    hand: Hand,
    name: str,
    ledger_kind: type[Ledger],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The drain of another session of this node goes on; this one's has ended, and it has said so in vain."""
    real, said = ledger_kind.settle_requests, asyncio.Event()

    async def settle_requests(self: Ledger, settled: Sequence[Settled]) -> None:
        await real(self, settled)
        if settled:
            said.set()

    monkeypatch.setattr(ledger_kind, "settle_requests", settle_requests)
    async with node("host", f"{name}-a", **STEADY) as idle, node("host", f"{name}-b", **STEADY) as busy:
        await opens(idle, f"{name}-a")
        await opens(busy, f"{name}-b")
        with busy.gate(f"{name}-b").acting():
            asked = hand.drain("host")
            await bounded(said.wait())
            await idle.resume()
            await opens(idle, f"{name}-a")
            answers = "SELECT answers FROM pgleaderlock.requests WHERE request_id = %s"
            await until(lambda: "refused" in one(hand._superuser, answers, asked)["answers"].values())
            assert idle.gate(f"{name}-a").current_epoch == 2
            assert hand.outcome(asked) == (None, None)
        assert (await hand.settled(asked))[0] == "refused"


async def test_an_answer_that_was_on_its_way_does_not_undo_what_the_application_has_decided(
    node: Callable[..., LeaderElection],
    node_dsn: str,
    hand: Hand,
    name: str,
    *,
    ledger_kind: type[Ledger],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A heartbeat's answer says that the node is not drained; it left the server before the drain was asked for."""
    role = f"{name}-role"
    real, on_its_way, go_on = ledger_kind.beat, asyncio.Event(), asyncio.Event()

    async def beat(self: Ledger, *args: Any) -> Beat:
        answer = await real(self, *args)
        on_its_way.set()
        await go_on.wait()
        return answer

    async with node("decides", **STEADY) as election:
        await opens(election, role)
        monkeypatch.setattr(ledger_kind, "beat", beat)
        await bounded(on_its_way.wait())
        draining = asyncio.ensure_future(election.drain())
        await until(lambda: election.drained(role))
        go_on.set()
        assert await bounded(draining)
        await until(lambda: hand.session("decides")["draining"])
        assert election.drained(role)
        assert holding(node_dsn, role, name) == 0
        assert [event[0] for event in hand.events()].count("acquired") == 1, "it was won again in between"
        await election.resume()
        await opens(election, role)
        await until(lambda: not hand.session("decides")["draining"])


# --- When


@pytest.mark.of_sessions
async def test_each_request_wakes_its_node_at_once(node: Callable[..., LeaderElection], hand: Hand, name: str) -> None:
    """Its next heartbeat is minutes away."""
    role = f"{name}-role"
    election = node("sleeps", heartbeat_interval_s=400.0)
    story = Story(election)
    async with election:
        await opens(election, role)
        hand.drain("sleeps")
        await story.heard("on_released", role)
        hand.resume("sleeps")
        await opens(election, role)
        hand.step_down(role)
        await story.heard("on_released", role, times=2)


async def test_a_request_that_wakes_nobody_is_obeyed_at_the_next_heartbeat(
    node: Callable[..., LeaderElection], node_dsn: str, name: str
) -> None:
    """The function sends no notification: what decides must not depend on the queue of hints."""
    role = f"{name}-role"
    election = node("leads", **STEADY)
    story = Story(election)
    async with election:
        await opens(election, role)
        one(node_dsn, "SELECT pgleaderlock.request_step_down(%s, %s, NULL, 'pgleaderlock')", role, name)
        await story.heard("on_released", role)


async def test_what_the_application_has_drained_by_name_is_not_resumed_by_an_operator(
    node: Callable[..., LeaderElection], hand: Hand, name: str
) -> None:
    roles = [f"{name}-kept", f"{name}-other"]
    async with node("host", roles, **STEADY) as election:
        await opens(election, roles[0])
        await opens(election, roles[1])
        await bounded(election.drain(roles[0]))
        assert (await hand.settled(hand.drain("host")))[0] == "done"
        assert [election.drained(role) for role in roles] == [True, True]
        assert (await hand.settled(hand.resume("host")))[0] == "done"
        await opens(election, roles[1])
        assert [election.drained(role) for role in roles] == [True, False]
        await election.resume(roles[0])
        await opens(election, roles[0])


async def test_what_an_operator_drains_while_the_application_resumes_everything_is_resumed(
    node: Callable[..., LeaderElection], hand: Hand, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is read on the engine's thread after the application has called, and before the engine hears it."""
    role = f"{name}-role"
    async with node("node", heartbeat_thread=True) as election:
        await opens(election, role)
        to_engine = election._run.on_engine

        async def late(work: Callable[[Any], Any]) -> Any:
            hand.drain("node")
            await until(lambda: election.drained(role))
            return await to_engine(work)

        monkeypatch.setattr(election._run, "on_engine", late)
        await bounded(election.resume())
        await until(lambda: not election.drained(role))
        await opens(election, role)


async def test_of_a_drained_node_one_role_can_be_resumed_and_the_others_stay(
    node: Callable[..., LeaderElection], name: str
) -> None:
    roles = [f"{name}-back", f"{name}-other"]
    async with node("host", roles, **STEADY) as election:
        await opens(election, roles[0])
        await bounded(election.drain())
        await election.resume(roles[0])
        await opens(election, roles[0])
        assert [election.drained(role) for role in roles] == [False, True]


async def test_a_request_in_a_transaction_that_stays_open_costs_no_heartbeat(
    node: Callable[..., LeaderElection], superuser: str, name: str
) -> None:
    """Neither an operator's request nor an epoch advanced by hand may hold a row that a heartbeat needs."""
    roles = [f"{name}-a", f"{name}-b"]
    async with node("leads", roles, **STEADY) as election:
        for role in roles:
            await opens(election, role)
        with admin(superuser) as conn:
            conn.execute("BEGIN")
            conn.execute("SELECT pgleaderlock.request_drain('leads', %s, 'c')", (name,))
            conn.execute("SELECT pgleaderlock.request_resume('leads', %s, 'c')", (name,))
            conn.execute("SELECT pgleaderlock.request_step_down(%s, %s, NULL, 'c')", (roles[0], name))
            conn.execute("SELECT pgleaderlock.advance_epoch(%s, %s, 'c')", (roles[0], name))
            beat = one(superuser, LAST_BEAT, name)["beat"]
            await until(lambda: one(superuser, LAST_BEAT, name)["beat"] > beat + 15)
            assert [election.gate(role).current_epoch for role in roles] == [1, 1]
            await bounded(election.step_down(roles[0]))  # its row is held: not clean, and no reason to lose the other
            assert election.gate(roles[1]).is_leader
            conn.execute("ROLLBACK")
        assert election.gate(roles[1]).current_epoch == 1


async def test_a_request_that_is_five_minutes_old_is_expired_and_not_obeyed(
    node: Callable[..., LeaderElection], hand: Hand, superuser: str, name: str
) -> None:
    role = f"{name}-role"
    async with node("leads", **STEADY) as leads:
        await opens(leads, role)
        with admin(superuser) as conn:
            old = [
                conn.execute(
                    "INSERT INTO pgleaderlock.requests (kind, namespace, role, node_id, at)"
                    " VALUES (%s, %s, %s, %s, clock_timestamp() - interval '5 minutes 1 second') RETURNING request_id",
                    (kind, name, *(whom)),
                ).fetchone()
                for kind, whom in (("step_down", (role, None)), ("drain", (None, "leads")))
            ]
        for row in old:
            assert row is not None
            assert (await hand.settled(row["request_id"]))[0] == "expired"
        assert leads.gate(role).current_epoch == 1
        assert leads.gate(role).is_leader


async def test_the_story_of_a_handover_is_in_the_events(
    node: Callable[..., LeaderElection], hand: Hand, name: str
) -> None:
    role = f"{name}-role"
    async with node("a") as a:
        await opens(a, role)
        async with node("b") as b:
            await until(lambda: b.leader(role) is not None)
            hand.step_down(role, "b")
            await opens(b, role)
            told = hand.events()
    assert told == [
        ("acquired", role, "a"),
        ("step_down_requested", role, None),
        ("released", role, "a"),
        ("acquired", role, "b"),
    ]


async def test_a_plain_role_settles_only_what_is_asked_of_its_own_session(
    node: Callable[..., LeaderElection], node_dsn: str, hand: Hand, name: str
) -> None:
    role = f"{name}-role"
    async with node("leads") as leads:
        await opens(leads, role)
        with leads.gate(role).acting():
            asked = hand.drain("leads")
            await until(lambda: leads.draining(role) and hand.session("leads")["draining"])
            theirs = hand.session("leads")["session_id"]
            with psycopg.connect(node_dsn, autocommit=True) as conn:
                conn.execute("SELECT pgleaderlock.settle_request(%s, %s, 'done', NULL)", (theirs, asked))
                conn.execute("SELECT pgleaderlock.note_drain(%s, 'drain_began', ARRAY['x'], ARRAY['y'])", (theirs,))
                conn.execute("SELECT pgleaderlock.reserve(%s, ARRAY[%s])", (theirs, asked))
                conn.execute("SELECT pgleaderlock.describe_session(%s, false, true)", (theirs,))
                with pytest.raises(psycopg.errors.Error) as refused:
                    conn.execute("SELECT pgleaderlock.tick(%s, '{}', NULL)", (theirs,))
                assert refused.value.sqlstate == "PGL03"
            assert hand.outcome(asked) == (None, None)
            assert ("drain_began", "x", "leads") not in hand.events()
            assert {key: hand.session("leads")[key] for key in ("draining", "balance")} == {
                "draining": True,
                "balance": False,
            }
            assert holding(node_dsn, role, name) == 1
        await hand.settled(asked)
