"""The transition table against the specification: every expected row is written here by hand, none is derived."""

import asyncio
import copy
import itertools
import random
import runpy
from dataclasses import FrozenInstanceError, dataclass, field
from pathlib import Path

import pytest

from fakes import FakeClock
from pgleaderlock import FixedInterval, LockState
from pgleaderlock._callbacks import CallbackRegistry, Dispatcher
from pgleaderlock._driver import Driver
from pgleaderlock._fsm import TABLE, Action, IllegalTransition, Input, Rules, step
from pgleaderlock._logging import get_logger

STOPPED, FOLLOWER, ACQUIRING = LockState.STOPPED, LockState.FOLLOWER, LockState.ACQUIRING
LEADER, RECONNECTING, RELEASING = LockState.LEADER, LockState.RECONNECTING, LockState.RELEASING

OPEN, CLOSE, TRY, PROBE = Action.OPEN, Action.CLOSE, Action.TRY_LOCK, Action.PROBE
REACQUIRE, UNLOCK, RESET = Action.REACQUIRE, Action.UNLOCK, Action.RESET_RETRY
NOW, SOON, BACK_OFF = Action.ATTEMPT_NOW, Action.ATTEMPT_SOON, Action.BACK_OFF
BACK_OFF_JITTERED, GRACE = Action.BACK_OFF_JITTERED, Action.START_GRACE
LOG_LOSS, LOG_RECOVERED = Action.LOG_LOSS, Action.LOG_RECOVERED

ALL_RULES = [Rules(*values) for values in itertools.product((True, False), repeat=3)]


@dataclass(frozen=True)
class Expected:
    """One row of the specification: where it leads, whom it tells and what is done besides, each in order."""

    source: LockState
    input: str
    target: LockState
    emits: tuple[str, ...] = ()
    does: tuple[Action, ...] = ()
    when: dict[str, bool] = field(default_factory=dict, hash=False)

    @property
    def id(self) -> str:
        rules = "".join(f", {'' if value else 'no '}{name}" for name, value in self.when.items())
        return f"{self.source.name} x {self.input}{rules}"

    def all_rules(self) -> list[Rules]:
        return [rules for rules in ALL_RULES if all(getattr(rules, name) is value for name, value in self.when.items())]


YES, NO = {"auto_reacquire": True}, {"auto_reacquire": False}
GRACE_ON = {"grace": True}
GRACE_OFF, GRACE_OFF_NO = {"grace": False, **YES}, {"grace": False, **NO}
STOPPING = {"stopping": True}
STEPPED_DOWN, STEPPED_DOWN_NO = {"stopping": False, **YES}, {"stopping": False, **NO}

# The table of the specification, section 3.3, with its three footnotes as rows of their own.
SPECIFIED = [
    Expected(STOPPED, "Start", FOLLOWER, (), (RESET, OPEN, NOW)),
    Expected(FOLLOWER, "AcquireAttempt", ACQUIRING, (), (TRY,)),
    Expected(FOLLOWER, "StopRequested", STOPPED, ("on_stopped",), (CLOSE,)),
    Expected(ACQUIRING, "AcquireSucceeded", LEADER, ("on_acquired",), (RESET, PROBE)),
    Expected(ACQUIRING, "AcquireFailed", FOLLOWER, ("on_acquire_failed",), (BACK_OFF,)),
    Expected(ACQUIRING, "DbError", FOLLOWER, ("on_lost", "on_error"), (CLOSE, BACK_OFF_JITTERED), YES),
    Expected(ACQUIRING, "DbError", STOPPED, ("on_lost", "on_error", "on_stopped"), (CLOSE,), NO),
    Expected(ACQUIRING, "StopRequested", STOPPED, ("on_stopped",), (CLOSE,)),
    Expected(LEADER, "HealthOk", LEADER),
    Expected(LEADER, "HealthFailed", RECONNECTING, (), (LOG_LOSS, CLOSE, GRACE, REACQUIRE), GRACE_ON),
    Expected(LEADER, "HealthFailed", FOLLOWER, ("on_lost", "on_error"), (LOG_LOSS, CLOSE, SOON), GRACE_OFF),
    Expected(LEADER, "HealthFailed", STOPPED, ("on_lost", "on_error", "on_stopped"), (LOG_LOSS, CLOSE), GRACE_OFF_NO),
    Expected(LEADER, "DbError", RECONNECTING, (), (LOG_LOSS, CLOSE, GRACE, REACQUIRE), GRACE_ON),
    Expected(LEADER, "DbError", FOLLOWER, ("on_lost", "on_error"), (LOG_LOSS, CLOSE, SOON), GRACE_OFF),
    Expected(LEADER, "DbError", STOPPED, ("on_lost", "on_error", "on_stopped"), (LOG_LOSS, CLOSE), GRACE_OFF_NO),
    Expected(LEADER, "StopRequested", RELEASING, (), (UNLOCK,)),
    Expected(LEADER, "ReleaseRequested", RELEASING, (), (UNLOCK,)),
    Expected(RECONNECTING, "ReacquireSucceeded", LEADER, (), (LOG_RECOVERED, RESET, PROBE)),
    Expected(RECONNECTING, "ReacquireFailed", FOLLOWER, ("on_lost",), (SOON,), YES),
    Expected(RECONNECTING, "ReacquireFailed", STOPPED, ("on_lost", "on_stopped"), (CLOSE,), NO),
    Expected(RECONNECTING, "GraceExpired", FOLLOWER, ("on_lost",), (SOON,), YES),
    Expected(RECONNECTING, "GraceExpired", STOPPED, ("on_lost", "on_stopped"), (CLOSE,), NO),
    Expected(RECONNECTING, "StopRequested", STOPPED, ("on_stopped",), (CLOSE,)),
    Expected(RELEASING, "ReleaseSucceeded", STOPPED, ("on_released", "on_stopped"), (CLOSE,), STOPPING),
    Expected(RELEASING, "ReleaseSucceeded", STOPPED, ("on_released", "on_stopped"), (CLOSE,), STEPPED_DOWN_NO),
    Expected(RELEASING, "ReleaseSucceeded", FOLLOWER, ("on_released",), (CLOSE, BACK_OFF), STEPPED_DOWN),
    Expected(RELEASING, "ReleaseFailed", STOPPED, ("on_error", "on_stopped"), (CLOSE,), STOPPING),
    Expected(RELEASING, "ReleaseFailed", STOPPED, ("on_error", "on_stopped"), (CLOSE,), STEPPED_DOWN_NO),
    Expected(RELEASING, "DbError", STOPPED, ("on_error", "on_stopped"), (CLOSE,), STOPPING),
    Expected(RELEASING, "DbError", STOPPED, ("on_error", "on_stopped"), (CLOSE,), STEPPED_DOWN_NO),
]

# What the design adds so that the table closes, and the two places where it departs from the specification.
ADDED = [
    Expected(FOLLOWER, "DbError", FOLLOWER, ("on_error",), (CLOSE, BACK_OFF_JITTERED)),
    Expected(FOLLOWER, "GaveUp", STOPPED, ("on_stopped",), (CLOSE,)),
    Expected(RECONNECTING, "GaveUp", STOPPED, ("on_lost", "on_stopped"), (CLOSE,)),
    Expected(RELEASING, "StopRequested", RELEASING),
    Expected(STOPPED, "StopRequested", STOPPED),
    Expected(FOLLOWER, "Start", FOLLOWER),
    Expected(ACQUIRING, "Start", ACQUIRING),
    Expected(LEADER, "Start", LEADER),
    Expected(RECONNECTING, "Start", RECONNECTING),
    Expected(RELEASING, "Start", RELEASING),
    Expected(STOPPED, "ReleaseRequested", STOPPED),
    Expected(FOLLOWER, "ReleaseRequested", FOLLOWER),
    Expected(ACQUIRING, "ReleaseRequested", ACQUIRING),
    Expected(RECONNECTING, "ReleaseRequested", RECONNECTING),
    Expected(RELEASING, "ReleaseRequested", RELEASING),
    Expected(RECONNECTING, "DbError", RECONNECTING, (), (CLOSE, BACK_OFF_JITTERED, REACQUIRE)),
    Expected(RELEASING, "ReleaseFailed", FOLLOWER, ("on_error",), (CLOSE, BACK_OFF), STEPPED_DOWN),
    Expected(RELEASING, "DbError", FOLLOWER, ("on_error",), (CLOSE, BACK_OFF), STEPPED_DOWN),
]

ROWS = SPECIFIED + ADDED

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
    assert rules == Rules(auto_reacquire=True, grace=False, stopping=False)


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


ROOT = Path(__file__).resolve().parent.parent


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
