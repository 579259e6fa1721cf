"""Known defects, each with a test that fails. Not collected: run `pytest tests/_election_api_bugs.py`."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fakes import FakeClock
from pgleaderlock import LeaderGate, LeaderToken

TOKEN = LeaderToken("scheduler", 7, "node-a")


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


async def test_work_that_ends_while_a_drain_begins_to_wait_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    gate = LeaderGate("scheduler", clock=clock)
    gate.open(TOKEN, clock.now(), clock.now() + 6)
    acting = gate.acting()
    acting.__enter__()
    just_before_it_waits(monkeypatch, lambda: acting.__exit__(None, None, None))
    async with asyncio.timeout(5):
        await gate.wait_idle()


async def test_a_gate_that_opens_while_somebody_begins_to_wait_for_it_is_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock()
    gate = LeaderGate("scheduler", clock=clock)
    async with asyncio.timeout(5):
        just_before_it_waits(monkeypatch, lambda: gate.open(TOKEN, clock.now(), clock.now() + 6))
        assert await gate.wait_open()


async def test_a_gate_that_shuts_while_somebody_begins_to_wait_for_it_is_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock()
    gate = LeaderGate("scheduler", clock=clock)
    gate.open(TOKEN, clock.now(), clock.now() + 6)
    async with asyncio.timeout(5):
        just_before_it_waits(monkeypatch, lambda: gate.close("lost"))
        await gate.wait_closed(TOKEN)
