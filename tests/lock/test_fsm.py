"""The transition table against the rows of the specification in `support.lock_table`, and the page that shows it."""

import asyncio
import copy
import random
import runpy
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from pgleaderlock import FixedInterval, LockState
from pgleaderlock._base.logging import get_logger
from pgleaderlock._lock.callbacks import CallbackRegistry, Dispatcher
from pgleaderlock._lock.driver import Driver
from pgleaderlock._lock.fsm import TABLE, Action, IllegalTransition, Input, Rules, step
from support.fakes import FakeClock
from support.lock_table import (
    ACQUIRING,
    ALL_RULES,
    FOLLOWER,
    LEADER,
    RECONNECTING,
    RELEASING,
    ROWS,
    STOPPED,
    Expected,
)

# Every cell in which something may happen. All others are mistakes.
LEGAL = {
    STOPPED: {"Start", "StopRequested", "ReleaseRequested"},
    FOLLOWER: {"Start", "StopRequested", "ReleaseRequested", "AcquireAttempt", "DbError", "GaveUp"},
    ACQUIRING: {"Start", "StopRequested", "ReleaseRequested", "AcquireSucceeded", "AcquireFailed", "DbError"},
    LEADER: {"Start", "StopRequested", "ReleaseRequested", "HealthOk", "HealthFailed", "DbError"},
    RECONNECTING: {
        "Start",
        "StopRequested",
        "ReleaseRequested",
        "ReacquireSucceeded",
        "ReacquireFailed",
        "GraceExpired",
        "DbError",
        "GaveUp",
    },
    RELEASING: {"Start", "StopRequested", "ReleaseRequested", "ReleaseSucceeded", "ReleaseFailed", "DbError"},
}
ILLEGAL = [(state, input_) for state in LockState for input_ in Input if input_.value not in LEGAL[state]]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_the_table_does_what_the_specification_says(row: Expected) -> None:
    assert row.all_rules()
    for rules in row.all_rules():
        transition = step(row.source, Input(row.input), rules)
        emitted = tuple(action.value for action in transition.actions if action.value.startswith("on_"))
        done = tuple(action for action in transition.actions if not action.value.startswith("on_"))
        assert (transition.target, emitted, done) == (row.target, row.emits, row.does)


def test_the_rows_written_by_hand_cover_each_legal_cell_for_every_rule_exactly_once() -> None:
    by_hand = [(row.source, row.input, rules) for row in ROWS for rules in row.all_rules()]
    expected = [(state, input_, rules) for state, inputs in LEGAL.items() for input_ in inputs for rules in ALL_RULES]
    assert len(by_hand) == len(set(by_hand))
    assert set(by_hand) == set(expected)


@pytest.mark.parametrize(("state", "input_"), ILLEGAL, ids=lambda value: value.value)
def test_a_cell_that_is_not_in_the_specification_raises(state: LockState, input_: Input) -> None:
    for rules in ALL_RULES:
        with pytest.raises(IllegalTransition, match=f"{input_.value} cannot happen in {state.name}"):
            step(state, input_, rules)


def test_there_are_cells_of_both_kinds() -> None:
    assert len(ILLEGAL) == 6 * 15 - sum(map(len, LEGAL.values())) == 55


@pytest.mark.parametrize("rules", ALL_RULES, ids=str)
def test_no_two_rows_of_the_table_fit_one_cell(rules: Rules) -> None:
    fitting = [(row.source, row.input) for row in TABLE if row.fits(rules)]
    assert len(fitting) == len(set(fitting))


def test_a_step_is_pure() -> None:
    before = copy.deepcopy(TABLE)
    rules = Rules()
    first = step(LEADER, Input.HEALTH_FAILED, rules)
    assert step(LEADER, Input.HEALTH_FAILED, rules) == first
    assert before == TABLE
    assert rules == Rules(auto_reacquire=True, grace=False, stopping=False, standby_wait=False)


@pytest.mark.parametrize(
    "value", [TABLE[0], Rules(), step(STOPPED, Input.START, Rules())], ids=lambda v: type(v).__name__
)
def test_rows_rules_and_transitions_cannot_be_changed(value: object) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(value, next(iter(type(value).__dataclass_fields__)), None)  # type: ignore[attr-defined]


def test_every_way_into_stopped_ends_with_on_stopped_after_the_connection_was_closed() -> None:
    entries = [row for row in TABLE if row.target is STOPPED and row.source is not STOPPED]
    assert len(entries) >= 15
    for row in entries:
        assert row.actions[-2:] == (Action.CLOSE, Action.EMIT_STOPPED)
    assert not any(Action.EMIT_STOPPED in row.actions for row in TABLE if row not in entries)


# --- The driver is the table's only user: a refused input leaves it where it was


async def _driver(state: LockState, registry: CallbackRegistry) -> tuple[Driver, Dispatcher]:
    dispatcher = Dispatcher(registry, FakeClock(), get_logger("pgleaderlock"))
    dispatcher.start()
    driver = Driver(
        rules=Rules(),
        grace_s=None,
        strategy=FixedInterval(1),
        clock=FakeClock(),
        rng=random.Random(1),
        log=get_logger("pgleaderlock"),
        dispatcher=dispatcher,
        left_leader=lambda: None,
    )
    driver.state = state
    return driver, dispatcher


@pytest.mark.parametrize(("state", "input_"), ILLEGAL, ids=lambda value: value.value)
async def test_an_input_that_is_refused_changes_nothing_and_tells_nobody(state: LockState, input_: Input) -> None:
    registry = CallbackRegistry()
    heard: list[str] = []
    for event in CallbackRegistry.EVENTS:
        registry.add(event, lambda *_, event=event: heard.append(event))
    driver, dispatcher = await _driver(state, registry)
    change = driver.next_change()
    due_at = driver.due_at
    with pytest.raises(IllegalTransition):
        driver.feed(input_, RuntimeError("nothing to remember"))
    await dispatcher.drained()
    assert driver.state is state
    assert (driver.due_at, driver.last_error, driver.stopping) == (due_at, None, False)
    assert not change.done()
    assert heard == []
    change.cancel()
    await dispatcher.close()


async def test_the_state_has_changed_before_anybody_is_told() -> None:
    registry = CallbackRegistry()
    driver, dispatcher = await _driver(LEADER, registry)
    states: list[LockState] = []
    for event in ("on_state_change", "on_lost", "on_error"):
        registry.add(event, lambda *_: states.append(driver.state))
    driver.feed(Input.HEALTH_FAILED, RuntimeError("gone"))
    async with asyncio.timeout(5):
        await dispatcher.drained()
    assert states == [FOLLOWER, FOLLOWER, FOLLOWER]
    await dispatcher.close()


# --- The page that shows the table


ROOT = Path(__file__).resolve().parents[2]


def test_the_diagram_in_the_docs_is_drawn_from_the_table_of_today() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "state_diagram.py"))
    page = (ROOT / "docs" / "state-machine.md").read_text(encoding="utf-8")
    assert tool["drawn"](page) == page, "run tools/state_diagram.py"


def test_the_page_shows_every_row_and_every_change_of_state() -> None:
    page = (ROOT / "docs" / "state-machine.md").read_text(encoding="utf-8")
    for row in ROWS:
        shown = [line for line in page.splitlines() if line.startswith(f"| {row.source.name} | {row.input} |")]
        assert shown, row.id
        if row.target is not row.source:
            assert f"    {row.source.name} --> {row.target.name}: " in page
            assert any(f"| {row.target.name} |" in line for line in shown)
