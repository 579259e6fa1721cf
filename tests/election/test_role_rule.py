"""When may a successor act? The rule of the gate, case by case, by hand.

`first_seen` is the clock after the reply that first showed the predecessor's last (session, beat); `wait_t` comes from
the role's row. All moments are on the successor's own clock.
"""

import ast
import random
from dataclasses import replace
from pathlib import Path

import pytest
from tools.mutants._python import parsed

from pgleaderlock import FixedInterval, LeaderGate, _election, election
from pgleaderlock._base.logging import get_logger
from pgleaderlock._election.ledger import Bump, Look
from pgleaderlock._election.role import Role, Sight, opens_at
from pgleaderlock._lock.driver import Driver
from pgleaderlock._lock.fsm import Rules
from pgleaderlock._lock.work import Works
from support.fakes import FakeClock

HERE = (7_000_000_000, 1)
ELSEWHERE = (7_000_000_000, 2)
ME, OTHER = "11111111-1111-1111-1111-111111111111", "22222222-2222-2222-2222-222222222222"

LOST = Bump(
    role="r",
    outcome="won",
    epoch=8,
    history=HERE,
    prev_session_id=40,
    prev_beat=17,
    prev_wait_t=7.0,
    prev_clean=False,
    prev_instance=OTHER,
)
"""Another process led, in session 40 up to its beat 17, and did not release."""


class Silent:
    def emit(self, event: str, *args: object) -> None:
        """Nobody listens here."""


@pytest.fixture
def role() -> Role:
    driver = Driver(
        rules=Rules(),
        grace_s=None,
        strategy=FixedInterval(1.0),
        clock=FakeClock(),
        rng=random.Random(1),
        log=get_logger("pgleaderlock"),
        dispatcher=Silent(),
        left_leader=lambda: None,
    )
    return Role("r", (1, 2), driver, LeaderGate("r", clock=FakeClock()), Works())


def when(role: Role, bump: Bump, won_at: float = 100.0) -> float:
    return opens_at(role, bump, won_at, own_instance=ME)


def look(session_id: int | None = 40, beat: int | None = 17) -> Look:
    return Look(
        role="r",
        granted=False,
        epoch=7,
        session_id=session_id,
        beat=beat,
        ended=session_id is None,
        holder_identity=None,
        node_id=None,
        lease_s=7.0,
        backend_pid=1,
        backend_start="1",
    )


# --- At once


def test_after_a_clean_release_it_opens_at_once(role: Role) -> None:
    role.sight = Sight(40, 17, 99.0, HERE)
    assert when(role, replace(LOST, prev_clean=True)) == 100.0


def test_a_role_that_nobody_has_led_opens_at_once(role: Role) -> None:
    """The ledger's row of a new role is clean, and has no session."""
    fresh = replace(LOST, epoch=1, prev_session_id=None, prev_beat=None, prev_wait_t=0.0, prev_clean=True)
    assert when(role, replace(fresh, prev_instance=None)) == 100.0


# --- After the predecessor


def test_one_who_has_never_looked_waits_from_the_win(role: Role) -> None:
    assert when(role, LOST) == 107.0


def test_one_who_saw_the_last_beat_waits_from_when_it_first_saw_it(role: Role) -> None:
    role.sight = Sight(40, 17, 98.0, HERE)
    assert when(role, LOST) == 105.0


def test_one_who_saw_it_long_ago_opens_at_once_and_never_in_the_past(role: Role) -> None:
    role.sight = Sight(40, 17, 20.0, HERE)
    assert when(role, LOST) == 100.0


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param(Sight(40, 16, 20.0, HERE), id="an older beat"),
        pytest.param(Sight(40, 18, 20.0, HERE), id="another beat"),
        pytest.param(Sight(39, 17, 20.0, HERE), id="another session"),
        pytest.param(Sight(40, 17, 20.0, ELSEWHERE), id="another timeline"),
        pytest.param(Sight(40, 17, 20.0, (7_000_000_001, 1)), id="another system"),
    ],
)
def test_a_look_at_anything_else_counts_for_nothing(role: Role, seen: Sight) -> None:
    role.sight = seen
    assert when(role, LOST) == 107.0


def test_a_wait_that_the_predecessor_had_inherited_is_waited_for_in_full(role: Role) -> None:
    """Its own T was 7; it had not waited out one with a T of 30."""
    role.sight = Sight(40, 17, 98.0, HERE)
    assert when(role, replace(LOST, prev_wait_t=30.0)) == 128.0


def test_a_predecessor_of_which_no_wait_is_known_is_not_waited_for(role: Role) -> None:
    assert when(role, replace(LOST, prev_wait_t=None)) == 100.0


def test_after_an_epoch_was_advanced_by_hand_the_wait_is_counted_from_the_win(role: Role) -> None:
    """The operator's hand leaves no session in the row, so no look can be one at the predecessor."""
    role.sight = Sight(40, 17, 20.0, HERE)
    advanced = replace(LOST, prev_session_id=None, prev_beat=None, prev_instance=None)
    assert when(role, advanced) == 107.0


# --- After itself


def test_its_own_settled_term_is_not_waited_for(role: Role) -> None:
    role.settled_at, role.heard_epoch = 60.0, 7
    assert when(role, replace(LOST, prev_instance=ME)) == 100.0


def test_after_its_own_unsettled_term_it_waits_for_what_that_one_was_waiting_for(role: Role) -> None:
    role.settled_at, role.heard_epoch = 112.0, 7
    assert when(role, replace(LOST, prev_instance=ME)) == 112.0


def test_its_own_term_of_which_it_never_heard_is_waited_for_like_any_other(role: Role) -> None:
    """On whichever session it was: epoch 7 came between the one that it heard of and the new one."""
    role.settled_at, role.heard_epoch = 60.0, 6
    assert when(role, replace(LOST, prev_instance=ME)) == 107.0


def test_its_own_term_is_waited_for_by_a_process_that_has_heard_of_none(role: Role) -> None:
    role.settled_at = 60.0
    assert when(role, replace(LOST, prev_instance=ME)) == 107.0


def test_the_same_node_name_in_another_process_is_somebody_else(role: Role) -> None:
    role.settled_at, role.heard_epoch = 60.0, 7
    assert when(role, replace(LOST, prev_instance=OTHER)) == 107.0


# --- What counts as a look


def test_the_first_sight_of_a_beat_stays_its_first(role: Role) -> None:
    role.saw(look(), 50.0, HERE)
    role.saw(look(), 60.0, HERE)
    assert role.sight == Sight(40, 17, 50.0, HERE)
    assert role.unchanged_s(65.0) == 15.0


@pytest.mark.parametrize(
    ("later", "history"),
    [(look(beat=18), HERE), (look(session_id=41), HERE), (look(), ELSEWHERE)],
    ids=["another beat", "another session", "another history"],
)
def test_a_new_beat_session_or_history_is_seen_anew(role: Role, later: Look, history: tuple[int, int]) -> None:
    role.saw(look(), 50.0, HERE)
    role.saw(later, 60.0, history)
    assert role.sight is not None
    assert role.sight.first_seen == 60.0


def test_a_look_at_nobody_does_not_forget_the_last_beat_of_somebody(role: Role) -> None:
    role.saw(look(), 50.0, HERE)
    role.saw(look(session_id=None, beat=None), 60.0, HERE)
    assert role.sight == Sight(40, 17, 50.0, HERE)


@pytest.mark.parametrize("seen", [look(session_id=40, beat=None), look(session_id=None, beat=17)], ids=str)
def test_half_a_look_at_somebody_is_no_sight_of_a_beat(role: Role, seen: Look) -> None:
    """A record that is not there any more ended long ago, and was cleaned up."""
    role.saw(seen, 50.0, HERE)
    assert (role.look, role.sight, role.unchanged_s(65.0)) == (seen, None, 0.0)


@pytest.mark.parametrize("seen", [look(), look(session_id=None, beat=None)], ids=["of somebody", "of nobody"])
def test_a_look_that_grants_the_lock_makes_this_node_hold_it(role: Role, seen: Look) -> None:
    role.saw(seen._replace(granted=True), 50.0, HERE)
    assert role.holds_lock
    role.saw(seen, 60.0, HERE)
    assert not role.holds_lock


# --- Whether it is competed for


@pytest.mark.parametrize(
    ("drained_here", "node_drained", "not_before", "wanted"),
    [
        (False, False, 0.0, True),
        (False, False, 100.0, True),
        (False, False, 100.1, False),
        (True, False, 0.0, False),
        (False, True, 0.0, False),
    ],
)
def test_a_role_is_wanted_unless_it_is_drained_or_rests(
    role: Role, drained_here: bool, node_drained: bool, not_before: float, wanted: bool
) -> None:
    role.drained_here, role.node_drained, role.not_before = drained_here, node_drained, not_before
    assert role.wanted(100.0) is wanted


def test_one_role_of_a_drained_node_is_resumed_and_the_others_stay_drained_by_name(role: Role) -> None:
    role.drain(with_node=True)
    role.node_resumed(stays=True)
    assert (role.drained_here, role.node_drained, role.release_asked) == (True, False, True)
    role.resume()
    assert not role.drained


def test_a_role_that_was_drained_with_its_node_is_resumed_with_it(role: Role) -> None:
    role.drain(with_node=True)
    assert (role.drained_here, role.node_drained) == (False, True)
    role.node_resumed(stays=False)
    assert not role.drained


def test_a_role_that_was_drained_by_name_stays_drained_when_its_node_is_resumed(role: Role) -> None:
    role.drain(with_node=False)
    role.drain(with_node=True)
    role.node_resumed(stays=False)
    assert role.drained
    role.resume()
    role.node_resumed(stays=True)
    assert not role.drained


# --- Who writes it


def test_the_fields_of_roles_and_board_are_written_by_their_own_methods_only() -> None:
    """In the package of the election nothing assigns to a field of anything but `self`."""
    files = [*Path(_election.__file__).parent.glob("*.py"), Path(election.__file__)]
    foreign = [
        f"{file.name}:{node.lineno}: {ast.unparse(node)}"
        for file in files
        for node in ast.walk(parsed(file.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    ]
    assert foreign == []
