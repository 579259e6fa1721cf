"""The acting gate: decided by the clock at the moment it is asked, for one term, from any thread."""

import asyncio
import pickle
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from pgleaderlock import LeaderGate, LeaderToken, NotLeader
from pgleaderlock.gate import GAPS_MAX, Gap
from support.fakes import FakeClock, limit, until
from support.forked import in_child

ROLE = "scheduler"
FIRST = LeaderToken(ROLE, 7, "node-a")
SECOND = LeaderToken(ROLE, 8, "node-a")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def gate(clock: FakeClock) -> LeaderGate:
    return LeaderGate(ROLE, clock=clock)


def open_for(gate: LeaderGate, clock: FakeClock, seconds: float = 6.0, token: LeaderToken = FIRST) -> None:
    gate.open(token, clock.now(), clock.now() + seconds)


def reason(gate: LeaderGate) -> str:
    """Why the gate refuses; every way of asking must agree that it does."""
    assert not gate.is_leader
    with pytest.raises(NotLeader) as refused, gate.acting():
        pytest.fail("work began behind a gate that is shut")
    assert gate.in_flight == 0
    with pytest.raises(NotLeader) as again:
        gate.require_leader()
    with pytest.raises(NotLeader) as at_last:
        gate.ensure_epoch(FIRST.epoch)
    assert refused.value.reason == again.value.reason == at_last.value.reason
    assert again.value.role == ROLE
    return again.value.reason


# --- Why it is shut


def test_a_gate_that_was_never_opened_says_so(gate: LeaderGate) -> None:
    assert reason(gate) == "never_led"
    assert (gate.current_epoch, gate.holder_identity, gate.token) == (None, None, None)


def test_an_open_gate_hands_out_the_token_of_its_term(gate: LeaderGate, clock: FakeClock) -> None:
    open_for(gate, clock)
    assert gate.is_leader
    assert gate.require_leader() is FIRST
    assert (gate.current_epoch, gate.holder_identity) == (7, "node-a")
    gate.ensure_epoch(7)


def test_before_the_predecessors_deadline_the_reason_is_waiting(gate: LeaderGate, clock: FakeClock) -> None:
    gate.open(FIRST, clock.now() + 3.0, clock.now() + 6.0)
    assert reason(gate) == "waiting"
    assert gate.current_epoch == 7, "the term has begun, though it may not act yet"


def test_after_its_deadline_the_reason_is_a_late_heartbeat(gate: LeaderGate, clock: FakeClock) -> None:
    open_for(gate, clock, 6.0)
    clock.jump(6.0)
    assert reason(gate) == "late_heartbeat"


def test_a_wait_longer_than_the_last_heartbeat_lasts_is_never_open(gate: LeaderGate, clock: FakeClock) -> None:
    gate.open(FIRST, clock.now() + 7.0, clock.now() + 6.0)
    seen = []
    for _ in range(10):
        seen.append(reason(gate))
        clock.jump(1.0)
    assert seen == ["waiting"] * 6 + ["late_heartbeat"] * 4


@pytest.mark.parametrize("why", ["lost", "released"])
def test_after_the_term_the_reason_is_how_it_ended(gate: LeaderGate, clock: FakeClock, why: str) -> None:
    open_for(gate, clock)
    gate.close(why)
    assert reason(gate) == why
    assert (gate.current_epoch, gate.holder_identity, gate.token) == (None, None, None)


def test_a_drain_lets_nothing_new_in(gate: LeaderGate, clock: FakeClock) -> None:
    open_for(gate, clock)
    gate.drain()
    assert reason(gate) == "draining"
    assert gate.current_epoch == 7


def test_a_term_that_is_to_be_given_up_before_it_has_begun_lets_nothing_in(gate: LeaderGate, clock: FakeClock) -> None:
    gate.open(FIRST, clock.now(), clock.now() + 6.0, draining=True)
    assert reason(gate) == "draining"
    gate.open(SECOND, clock.now(), clock.now() + 6.0)
    assert gate.require_leader() is SECOND, "the next one is not"


def test_a_drain_ends_with_its_term(gate: LeaderGate, clock: FakeClock) -> None:
    open_for(gate, clock)
    gate.drain()
    gate.close("released")
    assert reason(gate) == "released"
    open_for(gate, clock, token=SECOND)
    assert gate.require_leader() is SECOND


def test_a_gate_that_is_switched_off_never_opens(gate: LeaderGate, clock: FakeClock) -> None:
    gate.switch_off()
    assert reason(gate) == "disabled"
    open_for(gate, clock)
    gate.renew(clock.now() + 100)
    assert reason(gate) == "disabled"


def test_another_epoch_than_the_open_one_is_refused_as_changed(gate: LeaderGate, clock: FakeClock) -> None:
    open_for(gate, clock, token=SECOND)
    for wrong in (7, 9, -8):
        with pytest.raises(NotLeader) as refused:
            gate.ensure_epoch(wrong)
        assert refused.value.reason == "epoch_changed"
        assert str(wrong) in str(refused.value)


def test_a_refusal_survives_pickling(gate: LeaderGate) -> None:
    with pytest.raises(NotLeader) as refused:
        gate.require_leader()
    copy = pickle.loads(pickle.dumps(refused.value))
    assert (copy.role, copy.reason, str(copy)) == (ROLE, "never_led", str(refused.value))


# --- The clock decides, and nothing else


def test_it_opens_and_shuts_by_the_clock_alone(gate: LeaderGate, clock: FakeClock) -> None:
    """No event loop runs here, nobody tells the gate anything: as in the first instruction after a long pause."""
    opens_at, deadline = clock.now() + 2.0, clock.now() + 6.0
    gate.open(FIRST, opens_at, deadline)
    answers = []
    while clock.now() <= deadline + 1.0:
        answers.append((clock.now(), gate.is_leader))
        clock.jump(0.25)
    assert answers == [(at, opens_at <= at < deadline) for at, _ in answers]
    assert {answer for _, answer in answers} == {True, False}


def test_it_opens_again_in_the_same_term_when_heartbeats_resume(gate: LeaderGate, clock: FakeClock) -> None:
    open_for(gate, clock, 6.0)
    clock.jump(9.0)
    assert reason(gate) == "late_heartbeat"
    gate.renew(clock.now() + 6.0)
    assert gate.require_leader() is FIRST


def test_a_renewal_does_not_shorten_the_wait_for_the_predecessor(gate: LeaderGate, clock: FakeClock) -> None:
    gate.open(FIRST, clock.now() + 10.0, clock.now() + 6.0)
    clock.jump(5.0)
    gate.renew(clock.now() + 6.0)
    assert reason(gate) == "waiting"
    clock.jump(5.0)
    assert gate.is_leader


@pytest.mark.parametrize(
    ("opens_in_s", "renewed_after_s", "lapses"),
    [
        pytest.param(0.0, 5.9, 0, id="in time"),
        pytest.param(0.0, 6.0, 1, id="in the moment in which it shuts"),
        pytest.param(0.0, 7.0, 1, id="later"),
        pytest.param(6.0, 7.0, 0, id="it had not been open"),
    ],
)
def test_a_gate_that_has_shut_by_itself_before_its_renewal_has_lapsed(
    gate: LeaderGate, clock: FakeClock, opens_in_s: float, renewed_after_s: float, lapses: int
) -> None:
    gate.open(FIRST, clock.now() + opens_in_s, clock.now() + 6.0)
    clock.jump(renewed_after_s)
    gate.renew(clock.now() + 6.0)
    assert gate.lapses == lapses


def test_a_late_renewal_does_not_move_the_deadline_back(gate: LeaderGate, clock: FakeClock) -> None:
    open_for(gate, clock, 6.0)
    gate.renew(clock.now() + 2.0)
    clock.jump(5.0)
    assert gate.is_leader


@pytest.mark.parametrize("ended", ["never", "closed"])
def test_a_renewal_does_not_revive_what_is_over(gate: LeaderGate, clock: FakeClock, ended: str) -> None:
    if ended == "closed":
        open_for(gate, clock)
        gate.close("lost")
    gate.renew(clock.now() + 100.0)
    assert reason(gate) == ("lost" if ended == "closed" else "never_led")
    assert gate.deadline < clock.now()


# --- The veto


def test_disable_is_a_veto_and_enable_lifts_it(gate: LeaderGate, clock: FakeClock) -> None:
    open_for(gate, clock)
    gate.disable()
    assert reason(gate) == "vetoed"
    assert gate.current_epoch == 7, "a veto does not end the term"
    gate.enable(FIRST)
    assert gate.is_leader


def test_a_veto_outlasts_renewals_and_terms(gate: LeaderGate, clock: FakeClock) -> None:
    open_for(gate, clock)
    gate.disable()
    gate.renew(clock.now() + 60.0)
    assert reason(gate) == "vetoed"
    gate.close("lost")
    open_for(gate, clock, token=SECOND)
    assert reason(gate) == "vetoed"
    gate.enable(SECOND)
    assert gate.require_leader() is SECOND


def test_enable_with_the_token_of_another_term_lifts_nothing(gate: LeaderGate, clock: FakeClock) -> None:
    open_for(gate, clock, token=SECOND)
    gate.disable()
    with pytest.raises(NotLeader) as refused:
        gate.enable(FIRST)
    assert refused.value.reason == "epoch_changed"
    assert reason(gate) == "vetoed"


def _late(gate: LeaderGate, clock: FakeClock) -> None:
    open_for(gate, clock, 1.0)
    clock.jump(1.0)


def _waiting(gate: LeaderGate, clock: FakeClock) -> None:
    gate.open(FIRST, clock.now() + 5.0, clock.now() + 6.0)


def _draining(gate: LeaderGate, clock: FakeClock) -> None:
    open_for(gate, clock)
    gate.drain()


def _switched_off(gate: LeaderGate, clock: FakeClock) -> None:
    gate.switch_off()
    open_for(gate, clock)


@pytest.mark.parametrize(
    ("shut", "why"),
    [(_late, "late_heartbeat"), (_waiting, "waiting"), (_draining, "draining"), (_switched_off, "disabled")],
)
def test_enable_only_lifts_and_never_opens_what_is_shut_for_another_reason(
    gate: LeaderGate, clock: FakeClock, shut: Callable[[LeaderGate, FakeClock], None], why: str
) -> None:
    shut(gate, clock)
    gate.disable()
    gate.enable(FIRST)
    assert reason(gate) == why


def test_enable_takes_the_token_of_this_role_only(gate: LeaderGate, clock: FakeClock) -> None:
    open_for(gate, clock)
    gate.disable()
    with pytest.raises(NotLeader):
        gate.enable(LeaderToken("another role", FIRST.epoch, "somebody"))
    assert not gate.is_leader


def test_enable_without_a_term_is_refused(gate: LeaderGate) -> None:
    with pytest.raises(NotLeader):
        gate.enable(FIRST)
    assert reason(gate) == "never_led"


# --- What it remembers of its term


def test_it_remembers_since_when_and_until_when_its_term_could_act(gate: LeaderGate, clock: FakeClock) -> None:
    began = clock.now()
    gate.open(FIRST, began + 3.0, began + 6.0)
    assert gate.record() == (None, None, ())
    clock.jump(4.0)  # nobody asked at the moment itself
    assert gate.record() == (began + 3.0, None, ())
    clock.jump(4.0)
    assert gate.record() == (began + 3.0, began + 6.0, ())


def test_a_heartbeat_that_was_late_leaves_a_gap(gate: LeaderGate, clock: FakeClock) -> None:
    began = clock.now()
    open_for(gate, clock, 6.0)
    clock.jump(8.0)
    assert not gate.untold
    gate.renew(clock.now() + 6.0)
    gap = Gap(began + 6.0, began + 8.0, "late_heartbeat")
    assert gate.record() == (began, None, (gap,))
    assert gate.untold
    gate.told([gap])
    assert gate.record() == (began, None, ())
    assert not gate.untold


def test_a_veto_leaves_a_gap_when_it_is_lifted(gate: LeaderGate, clock: FakeClock) -> None:
    began = clock.now()
    open_for(gate, clock, 60.0)
    clock.jump(1.0)
    gate.disable()
    clock.jump(2.0)
    assert gate.record() == (began, began + 1.0, ())
    gate.enable(FIRST)
    assert gate.record() == (began, None, (Gap(began + 1.0, began + 3.0, "vetoed"),))


def test_a_veto_that_took_no_time_or_came_before_the_gate_was_open_leaves_none(
    gate: LeaderGate, clock: FakeClock
) -> None:
    began = clock.now()
    gate.disable()
    gate.open(FIRST, began + 1.0, began + 60.0)
    clock.jump(2.0)
    assert gate.record() == (None, None, ()), "it was vetoed"
    gate.enable(FIRST)
    assert gate.record() == (began + 2.0, None, ())
    clock.jump(1.0)
    gate.disable()
    gate.enable(FIRST)
    assert gate.record() == (began + 2.0, None, ())


@pytest.mark.parametrize("late_s", [0.0, 1.0])
def test_a_veto_that_is_lifted_when_the_heartbeat_is_late_opens_nothing(
    gate: LeaderGate, clock: FakeClock, late_s: float
) -> None:
    gate.disable()
    open_for(gate, clock, 6.0)
    clock.jump(6.0 + late_s)
    gate.enable(FIRST)
    clock.jump(1.0)
    assert gate.record() == (None, None, ())
    gate.renew(clock.now() + 6.0)
    assert gate.record() == (clock.now(), None, ())


@pytest.mark.parametrize("late_s", [0.0, 1.0])
def test_a_veto_that_is_lifted_when_the_heartbeat_is_late_is_one_gap_with_what_follows(
    gate: LeaderGate, clock: FakeClock, late_s: float
) -> None:
    began = clock.now()
    open_for(gate, clock, 6.0)
    clock.jump(3.0)
    gate.disable()
    clock.jump(3.0 + late_s)
    gate.enable(FIRST)
    assert gate.record() == (began, began + 3.0, ())
    clock.jump(1.0)
    gate.renew(clock.now() + 6.0)
    assert gate.record() == (began, None, (Gap(began + 3.0, clock.now(), "late_heartbeat"),))


def test_each_term_is_remembered_for_itself(gate: LeaderGate, clock: FakeClock) -> None:
    open_for(gate, clock, 6.0)
    clock.jump(8.0)
    gate.renew(clock.now() + 6.0)
    clock.jump(1.0)
    began = clock.now()
    gate.open(SECOND, began + 1.0, began + 6.0)
    assert gate.record() == (None, None, ())
    clock.jump(1.0)
    assert gate.record() == (began + 1.0, None, ())


def test_of_very_many_gaps_it_remembers_the_last(gate: LeaderGate, clock: FakeClock) -> None:
    open_for(gate, clock, 1.0)
    for _ in range(GAPS_MAX + 3):
        clock.jump(2.0)
        gate.renew(clock.now() + 1.0)
    gaps = gate.record().gaps
    assert len(gaps) == GAPS_MAX
    assert gaps[-1] == Gap(clock.now() - 1.0, clock.now(), "late_heartbeat")


# --- Work in flight


def test_acting_gives_the_token_and_counts(gate: LeaderGate, clock: FakeClock) -> None:
    open_for(gate, clock)
    with gate.acting() as token, gate.acting():
        assert token is FIRST
        assert gate.in_flight == 2
    assert gate.in_flight == 0
    with pytest.raises(ZeroDivisionError), gate.acting():
        raise ZeroDivisionError
    assert gate.in_flight == 0


async def test_what_acts_is_cancelled_when_the_time_of_a_drain_is_over_and_what_has_acted_is_not(
    gate: LeaderGate, clock: FakeClock
) -> None:
    open_for(gate, clock)
    inside, outside = asyncio.Event(), asyncio.Event()

    async def act(*, ends: bool) -> None:
        with gate.acting():
            inside.set()
            if not ends:
                await asyncio.get_running_loop().create_future()
        await outside.wait()

    acting, has_acted, drainer = (asyncio.ensure_future(act(ends=ends)) for ends in (False, True, False))
    async with limit():
        await until(lambda: gate.in_flight == 2)
        gate.cancel_acting(but=drainer)
        await asyncio.wait([acting])
        assert acting.cancelled()
        outside.set()
        await has_acted
    assert not drainer.done()
    gate.cancel_acting()
    await asyncio.wait([drainer])


async def test_a_drain_waits_for_the_work_in_flight_and_for_nothing_else(gate: LeaderGate, clock: FakeClock) -> None:
    open_for(gate, clock)
    async with limit():
        await gate.wait_idle()
        with gate.acting():
            with gate.acting():
                gate.drain()
                idle = asyncio.ensure_future(gate.wait_idle())
                assert reason_while_acting(gate) == "draining"
            await turns()
            assert not idle.done(), "one of two is still at work"
        await idle


def reason_while_acting(gate: LeaderGate) -> str:
    with pytest.raises(NotLeader) as refused:
        gate.require_leader()
    return refused.value.reason


async def turns(number: int = 10) -> None:
    """Give whoever is ready to run the chance to: for claims that something does NOT happen."""
    for _ in range(number):
        await asyncio.sleep(0)


# --- Waking up


async def test_wait_open_returns_at_once_when_it_is(gate: LeaderGate, clock: FakeClock) -> None:
    open_for(gate, clock)
    async with limit():
        assert await gate.wait_open() is True


async def test_wait_open_wakes_when_the_gate_is_opened(gate: LeaderGate, clock: FakeClock) -> None:
    waits = [asyncio.ensure_future(gate.wait_open()) for _ in range(3)]
    await turns()
    assert not any(wait.done() for wait in waits)
    open_for(gate, clock)
    async with limit():
        assert await asyncio.gather(*waits) == [True, True, True]


async def test_wait_open_wakes_when_the_wait_for_the_predecessor_is_over(gate: LeaderGate, clock: FakeClock) -> None:
    gate.open(FIRST, clock.now() + 3.0, clock.now() + 6.0)
    wait = asyncio.ensure_future(gate.wait_open())
    async with limit():
        assert await clock.somebody_sleeps() == pytest.approx(3.0)
        clock.advance(3.0)
        assert await wait is True


async def test_wait_open_wakes_when_a_veto_is_lifted_and_when_heartbeats_resume(
    gate: LeaderGate, clock: FakeClock
) -> None:
    open_for(gate, clock, 6.0)
    gate.disable()
    lifted = asyncio.ensure_future(gate.wait_open())
    await turns()
    gate.enable(FIRST)
    async with limit():
        assert await lifted is True
        clock.jump(6.0)
        resumed = asyncio.ensure_future(gate.wait_open())
        await turns()
        assert not resumed.done()
        gate.renew(clock.now() + 6.0)
        assert await resumed is True


async def test_for_a_gate_that_shuts_as_it_opens_nobody_looks_at_the_clock(gate: LeaderGate, clock: FakeClock) -> None:
    """It never opens: whoever waits for that moment would wait for it again and again."""
    gate.open(FIRST, clock.now() + 1.0, clock.now() + 1.0)
    waiting = asyncio.ensure_future(gate.wait_open())
    await until(lambda: bool(gate._waiting))
    await asyncio.sleep(0)
    assert clock.waits_s() == []
    waiting.cancel()
    await asyncio.wait([waiting])


async def test_wait_open_gives_up_when_its_time_is_over(gate: LeaderGate) -> None:
    async with limit():
        assert await gate.wait_open(timeout_s=0.01) is False


async def test_wait_closed_wakes_at_the_deadline_and_not_before(gate: LeaderGate, clock: FakeClock) -> None:
    open_for(gate, clock, 6.0)
    closed = asyncio.ensure_future(gate.wait_closed(FIRST))
    async with limit():
        await clock.somebody_sleeps()
        gate.renew(clock.now() + 9.0)
        await until(lambda: 9.0 in clock.waits_s())
        clock.advance(6.0)
        await turns()
        assert not closed.done(), "the deadline had been moved"
        clock.advance(3.0)
        await closed


@pytest.mark.parametrize("end", ["close", "drain", "disable", "switch_off"])
async def test_wait_closed_wakes_whatever_shuts_the_gate(gate: LeaderGate, clock: FakeClock, end: str) -> None:
    open_for(gate, clock)
    closed = asyncio.ensure_future(gate.wait_closed(FIRST))
    await turns()
    assert not closed.done()
    getattr(gate, end)()
    async with limit():
        await closed


async def test_wait_closed_is_about_one_term_and_not_about_the_next(gate: LeaderGate, clock: FakeClock) -> None:
    open_for(gate, clock)
    closed = asyncio.ensure_future(gate.wait_closed(FIRST))
    await turns()
    gate.open(SECOND, clock.now(), clock.now() + 6.0)
    async with limit():
        await closed


def just_before_it_waits(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Something happens in another thread between a wait's look at the gate and its registration."""
    loop = asyncio.get_running_loop()
    create_future = loop.create_future
    pending = [happens]

    def create() -> "asyncio.Future[Any]":
        if pending:
            pending.pop()()
        return create_future()

    monkeypatch.setattr(loop, "create_future", create)


async def test_work_that_ends_while_a_drain_begins_to_wait_is_not_missed(
    gate: LeaderGate, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.open(FIRST, clock.now(), clock.now() + 6)
    acting = gate.acting()
    acting.__enter__()
    just_before_it_waits(monkeypatch, lambda: acting.__exit__(None, None, None))
    async with limit():
        await gate.wait_idle()


async def test_a_gate_that_opens_while_somebody_begins_to_wait_for_it_is_not_missed(
    gate: LeaderGate,
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with limit():
        just_before_it_waits(monkeypatch, lambda: gate.open(FIRST, clock.now(), clock.now() + 6))
        assert await gate.wait_open()


async def test_a_gate_that_shuts_while_somebody_begins_to_wait_for_it_is_not_missed(
    gate: LeaderGate,
    clock: FakeClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate.open(FIRST, clock.now(), clock.now() + 6)
    async with limit():
        just_before_it_waits(monkeypatch, lambda: gate.close("lost"))
        await gate.wait_closed(FIRST)


async def test_a_wait_that_is_cancelled_leaves_nothing_behind(gate: LeaderGate, clock: FakeClock) -> None:
    gate.open(FIRST, clock.now() + 3.0, clock.now() + 6.0)
    waits = [asyncio.ensure_future(wait) for wait in (gate.wait_open(), gate.wait_over(FIRST))]
    await turns()
    for wait in waits:
        wait.cancel()
    await asyncio.wait(waits)
    await turns()
    assert gate._waiting == []
    assert asyncio.all_tasks() == {asyncio.current_task()}


def in_thread(target: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def test_waits_on_the_loops_of_several_threads_are_woken_from_another(gate: LeaderGate, clock: FakeClock) -> None:
    waiting, opened, idle, closed = (threading.Barrier(5, timeout=20) for _ in range(4))
    answers: list[bool] = []

    async def wait() -> None:
        asyncio.get_running_loop().call_later(0, waiting.wait)
        answers.append(await gate.wait_open())
        await asyncio.to_thread(opened.wait)
        over = asyncio.ensure_future(gate.wait_closed(FIRST))
        await turns()
        await asyncio.to_thread(closed.wait)
        await over
        await gate.wait_idle()
        await asyncio.to_thread(idle.wait)

    threads = [in_thread(lambda: asyncio.run(wait())) for _ in range(4)]
    waiting.wait()
    open_for(gate, clock)
    opened.wait()
    acting = gate.acting()
    acting.__enter__()
    closed.wait()
    gate.close("lost")
    acting.__exit__(None, None, None)
    idle.wait()
    for thread in threads:
        thread.join(20)
    assert answers == [True] * 4
    assert gate._waiting == []


def test_a_waiter_whose_loop_is_gone_does_not_hold_the_others_up(gate: LeaderGate, clock: FakeClock) -> None:
    loop = asyncio.new_event_loop()
    gate._waiting.append((loop, loop.create_future()))
    loop.close()
    open_for(gate, clock)
    assert gate.is_leader


# --- Threads and processes


def test_threads_that_ask_while_it_opens_and_shuts_never_see_half_of_a_term(gate: LeaderGate, clock: FakeClock) -> None:
    """Each term says in its token when it may act: whoever is let in holds a token for a moment of that very term."""
    done = threading.Event()
    wrong: list[str] = []
    let_in = [0] * 4
    epochs = 400

    def ask(number: int) -> None:
        while not done.is_set():
            before = clock.now()
            try:
                token = gate.require_leader() if number % 2 else _acted(gate)
            except NotLeader:
                continue
            after = clock.now()
            let_in[number] += 1
            # Term n acts from 1000 + 10 n to 1000 + 10 n + 5.
            begins = 1_000.0 + 10 * token.epoch
            if before >= begins + 5 or after < begins:
                wrong.append(f"epoch {token.epoch} between {before} and {after}")

    threads = [in_thread(partial(ask, number)) for number in range(4)]
    for epoch in range(1, epochs):
        begins = 1_000.0 + 10 * epoch
        gate.open(LeaderToken(ROLE, epoch, "x"), begins, begins + 4)
        for step in range(8):
            clock.jump(begins + step - clock.now())
            gate.renew(begins + 5)
            while epoch == 1 and step == 0 and not all(let_in):  # everybody has begun
                threading.Event().wait(0.001)
        if epoch % 3 == 0:
            gate.disable()
            gate.enable(LeaderToken(ROLE, epoch, "x"))
        if epoch % 2:
            gate.close("lost")
    done.set()
    for thread in threads:
        thread.join(20)
    assert wrong == []
    assert all(let_in), "nobody was ever let in"
    assert gate.in_flight == 0


def _acted(gate: LeaderGate) -> LeaderToken:
    with gate.acting() as token:
        return token


def test_no_work_begins_after_a_drain_whatever_the_threads_do(gate: LeaderGate, clock: FakeClock) -> None:
    """Once drained and idle, a release may follow: nobody may slip in between the question and the count."""
    open_for(gate, clock, 1e9)
    drained = threading.Event()
    late: list[int] = []
    began = threading.Barrier(5, timeout=20)

    def work() -> None:
        began.wait()
        try:
            while True:
                with gate.acting():
                    if drained.is_set():
                        late.append(1)
        except NotLeader:
            return

    for _ in range(20):
        gate.open(FIRST, clock.now(), 1e9)
        drained.clear()
        threads = [in_thread(work) for _ in range(4)]
        began.wait()
        gate.drain()
        asyncio.run(gate.wait_idle())
        drained.set()
        for thread in threads:
            thread.join(20)
        gate.close("released")
    assert late == []
    assert gate.in_flight == 0


def test_a_drain_that_begins_while_somebody_is_let_in_sees_that_one(clock: FakeClock) -> None:
    """Between the question and the count no drain may begin: it would find nobody at work, and release."""
    gate = LeaderGate(ROLE, clock=clock)
    seen: list[int] = []

    def drain() -> None:
        gate.drain()
        seen.append(gate.in_flight)

    drains = threading.Thread(target=drain, daemon=True)

    def now() -> float:
        if not drains.ident:
            drains.start()
            drains.join(0.2)  # it is given the time to get in between, if it can
        return clock.now()

    open_for(gate, clock)
    gate._now = now
    with gate.acting():
        drains.join(20)
        assert seen == [1]


@pytest.fixture
def held_lock(gate: LeaderGate) -> Iterator[None]:
    """Another thread is inside the gate at the moment of the fork."""
    gate._lock.acquire()
    yield
    gate._lock.release()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
async def test_a_forked_child_wakes_nobody_of_its_parent(gate: LeaderGate, clock: FakeClock) -> None:
    """The futures that wait are the parent's, and so is the loop that would be woken."""
    waiting = asyncio.ensure_future(gate.wait_open())
    await until(lambda: bool(gate._waiting))
    gate.shut_in_child()
    assert gate._waiting == []
    waiting.cancel()
    await asyncio.wait([waiting])


def test_a_forked_childs_gate_is_shut_whatever_the_parent_does(
    gate: LeaderGate, clock: FakeClock, held_lock: None
) -> None:
    gate._lock.release()
    open_for(gate, clock)
    gate._lock.acquire()

    def ask() -> str:
        before = reason_in_child(gate)
        gate.renew(clock.now() + 100.0)
        gate.enable(FIRST)
        after = reason_in_child(gate)
        open_for(gate, clock, token=SECOND)
        return f"{before} {after} {reason_in_child(gate)}"

    assert in_child(ask) == "forked forked forked"
    assert gate.is_leader


def reason_in_child(gate: LeaderGate) -> str:
    if gate.is_leader:
        return "open"
    try:
        gate.require_leader()
    except NotLeader as refused:
        return refused.reason
    return "open"


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize(
    ("shut", "why"), [(LeaderGate.disable, "vetoed"), (LeaderGate.switch_off, "disabled"), (LeaderGate.drain, "open")]
)
def test_after_a_fork_a_gate_that_begins_anew_keeps_what_its_node_had_decided(
    gate: LeaderGate, clock: FakeClock, shut: Callable[[LeaderGate], None], why: str
) -> None:
    open_for(gate, clock)
    shut(gate)

    def ask() -> str:
        before = reason_in_child(gate)
        gate.begin_anew()
        epoch = gate.current_epoch
        open_for(gate, clock, token=SECOND)
        return f"{before} {epoch} {reason_in_child(gate)}"

    assert in_child(ask) == f"forked None {why}"


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_work_in_flight_at_a_fork_is_the_parents_alone(gate: LeaderGate, clock: FakeClock) -> None:
    open_for(gate, clock)
    acting = gate.acting()
    acting.__enter__()

    def ask() -> str:
        inside = gate.in_flight
        acting.__exit__(None, None, None)
        return f"{inside} {gate.in_flight}"

    assert in_child(ask) == "0 0"
    assert gate.in_flight == 1
    acting.__exit__(None, None, None)
    assert gate.in_flight == 0


def test_beginning_anew_without_a_fork_changes_nothing(gate: LeaderGate, clock: FakeClock) -> None:
    open_for(gate, clock)
    gate.begin_anew()
    assert gate.require_leader() == FIRST
    gate.close("lost")
    gate.begin_anew()
    assert reason_in_child(gate) == "lost"
