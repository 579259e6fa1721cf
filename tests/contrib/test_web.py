"""What the web frameworks' doors share, and the lifespan of FastAPI, on elections that need no database."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from pgleaderlock import LeaderElection, LeaderToken, sync
from pgleaderlock.contrib._web import Works, leader_answer
from pgleaderlock.contrib.fastapi import leader_lifespan
from pgleaderlock.embedded import EmbeddedPostgres
from pgleaderlock.errors import ConfigurationError, SchemaError
from support.fencing import database

WAIT_S = 30.0


def alone(*roles: str) -> sync.LeaderElection:
    """Leads every role, without a database."""
    return sync.LeaderElection("", roles, standalone=True)


# --- Works


def until_stopped(begun: threading.Event) -> Callable[[LeaderToken, threading.Event], None]:
    def work(_token: LeaderToken, stop: threading.Event) -> None:
        begun.set()
        assert stop.wait(WAIT_S)

    return work


def failing(_token: LeaderToken, _stop: threading.Event) -> None:
    raise ZeroDivisionError


def test_one_work_that_has_raised_for_good_ends_the_wait_for_all() -> None:
    begun = threading.Event()
    works = Works(alone("mail", "fails"), {"mail": until_stopped(begun), "fails": failing}, on_failure="raise")
    works.start()
    works.wait()
    assert isinstance(works.error, ZeroDivisionError)
    assert begun.wait(WAIT_S)
    works.shutdown()


def test_the_wait_ends_when_every_work_has_returned() -> None:
    works = Works(alone("a", "b"), {"a": lambda *_: None, "b": lambda *_: None})
    with works:
        works.wait()
    assert works.error is None


def test_works_that_were_shut_down_can_be_started_again() -> None:
    begun = threading.Event()
    works = Works(alone("mail"), {"mail": until_stopped(begun)})
    for _ in range(3):
        begun.clear()
        with works:
            works.start()  # a second start changes nothing
            assert begun.wait(WAIT_S)
        works.wait()


def test_a_work_may_ask_for_the_end() -> None:
    def work(_token: LeaderToken, stop: threading.Event) -> None:
        works.shutdown()
        assert stop.wait(WAIT_S)

    works = Works(alone("mail"), {"mail": work})
    works.start()
    works.wait()


def test_a_work_for_a_role_that_the_election_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no role 'bills': it has billing, mail"):
        Works(alone("billing", "mail"), {"bills": failing})


# --- The answer


def test_the_answer_names_the_role_or_asks_for_it() -> None:
    election = alone("billing", "mail")
    assert leader_answer(election, None)[0] == 400
    assert leader_answer(election, "other")[0] == 404
    status, body = leader_answer(election, "billing")
    assert (status, body["is_leader"], body["reason"], body["epoch"]) == (503, False, "never_led", None)
    with election:
        assert election.gate("billing").wait_open(WAIT_S)
        status, body = leader_answer(election, "billing")
        assert (status, body["is_leader"], body["reason"]) == (200, True, None)
    assert leader_answer(alone("billing"), None)[0] == 503


# --- The lifespan


async def test_the_lifespan_leads_while_it_lasts_and_fits_into_another_one() -> None:
    election = LeaderElection("", "billing", standalone=True)
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work(_token: LeaderToken) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    @contextlib.asynccontextmanager
    async def lifespan(app: object) -> AsyncIterator[None]:
        async with leader_lifespan(election, {"billing": work})(app):
            yield

    async with lifespan(object()):
        await asyncio.wait_for(begun.wait(), WAIT_S)
        assert not ended.is_set()
    assert ended.is_set()
    assert not election.gate("billing").is_leader


async def test_a_work_that_raises_is_started_again() -> None:
    turns: list[int] = []
    again = asyncio.Event()

    async def work(token: LeaderToken) -> None:
        turns.append(token.epoch)
        if len(turns) == 1:
            raise ZeroDivisionError
        again.set()
        await asyncio.Event().wait()

    async with leader_lifespan(LeaderElection("", "billing", standalone=True), {"billing": work})(None):
        await asyncio.wait_for(again.wait(), WAIT_S)


async def test_a_work_that_does_not_end_does_not_hold_up_the_end_of_the_application() -> None:
    let_go, begun = asyncio.Event(), asyncio.Event()

    async def work(_token: LeaderToken) -> None:
        begun.set()
        while not let_go.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await let_go.wait()

    election = LeaderElection("", "billing", standalone=True)
    async with leader_lifespan(election, {"billing": work}, shutdown_timeout_s=0.05)(None):
        await asyncio.wait_for(begun.wait(), WAIT_S)
    assert not let_go.is_set()
    let_go.set()


async def test_an_application_without_a_ledger_does_not_start(postgres: EmbeddedPostgres, nothing_left: None) -> None:
    with database(postgres.dsn) as empty, pytest.raises(SchemaError, match="pgleaderlock migrate"):
        async with leader_lifespan(LeaderElection(empty, "billing"))(None):
            pytest.fail("it has started")
