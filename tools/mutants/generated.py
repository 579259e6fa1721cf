"""The targets of the generators, the tests that must notice a defect in each, and the changes that are no defects.

A target is one function, and names the tests that must notice: the quick ones first. Of the functions in the ledger's
migrations only the last definition counts. `equivalent.toml` explains, by name, each mutant that no test can notice. A
name says file, function, kind of change, and the text before and after, so that it
stays the same while that text does, wherever it moves.
"""

import hashlib
import itertools
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tools.mutants import _python, _sql
from tools.mutants.model import Mutant, Site, Splice, Tests

__all__ = ["PACKAGE", "generated", "reasons"]

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "pgleaderlock"
MIGRATIONS = "_pg/sql/migrations"
NAME_LENGTH = 80

RULE: Tests = ("tests/election/test_role_rule.py",)
GATE: Tests = (
    "tests/election/test_gate.py",
    # It takes half a minute, for a promise that no change of one line breaks.
    "--deselect=tests/election/test_gate.py::test_threads_that_ask_while_it_opens_and_shuts_never_see_half_of_a_term",
)
FSM: Tests = ("tests/lock/test_fsm.py",)
SESSIONS: Tests = ("tests/election/test_ledger_functions.py",)
TERMS: Tests = (
    "tests/election/test_ledger_functions.py::test_a_session_that_is_anothers_or_over_is_refused",
    "tests/election/test_ledger_terms.py",
)
ENGINE: Tests = ("tests/election/test_engine.py",)
SESSION: Tests = ("tests/pg/test_session.py",)
STATEMENT: Tests = (
    "tests/pg/test_statements.py",
    "tests/pg/test_lease.py::test_a_slice_that_ends_as_it_is_granted_is_a_grant",
    "tests/pg/test_explain.py::test_a_standby_is_refused_by_the_statement_itself",
    "tests/election/test_eviction.py::test_a_restored_copy_beside_its_original_ends_nobody",
)
FENCE: Tests = (
    "tests/election/test_ledger_terms.py::test_an_epoch_that_is_current_for_another_role_or_in_another_namespace_is_stale_here",
    "tests/election/test_ledger_terms.py::test_the_strict_half_of_the_fence_holds_a_bump_back_by_itself",
    "tests/election/test_ledger_terms.py::test_who_won_an_epoch_is_read_of_that_very_term",
    "tests/election/test_fence.py",
    "tests/election/test_fence_table.py",
)
FENCED: Tests = ("tests/election/test_fence_rules.py",)


def _tests(file: str, *names: str) -> Tests:
    """Those tests of a file that are about one function: all tests would take a minute per mutant."""
    return tuple(f"{file}::test_{name}" for name in names)


LEASES = "tests/election/test_ledger_leases.py"
LEASE_SETTINGS = _tests(
    LEASES,
    "a_message_above_read_committed_is_refused_and_changes_nothing",
    "what_a_message_depends_on_is_set_until_its_commit_and_no_longer",
)
LEASE_OPEN = _tests(
    LEASES,
    "a_lease_is_recorded_once_however_often_its_message_comes",
    "the_lease_that_a_process_has_lost_ends_with_the_opening_of_the_next_one",
    "no_other_lease_ends_with_an_opening",
    "the_first_lease_of_a_history_notes_when_that_began",
    "a_message_above_read_committed_is_refused_and_changes_nothing",
)
LEASE_MESSAGE = _tests(
    LEASES,
    "a_message_begins_with_a_beat_of_its_own_row_and_ends_without_a_backend",
    "the_end_of_a_message_is_told_with_the_key_of_that_very_lease",
    "a_message_that_was_overtaken_changes_nothing",
    "a_message_is_carried_out_once_and_only_for_a_lease_that_holds",
    "a_message_above_read_committed_is_refused_and_changes_nothing",
)
LEASE_END = _tests(
    LEASES,
    "a_silent_lease_is_ended_at_the_beat_that_was_seen_and_nobody_else_is",
    "a_lease_may_end_another_and_the_eviction_leaves_its_trace",
    "a_lease_that_is_not_silent_or_not_ours_to_end_stays",
    "a_lease_whose_row_somebody_holds_is_not_silent_and_nobody_waits_for_it",
    "who_is_not_recorded_for_its_backend_ends_no_lease",
)
LEASE_LOCK = _tests(
    LEASES,
    "a_lease_has_the_locks_of_what_it_takes_exclusively_until_the_commit",
    "a_role_with_another_key_takes_the_recorded_lock_as_well",
    "what_somebody_else_has_locked_is_not_locked_and_not_waited_for",
    "only_a_lease_that_is_recorded_for_this_backend_gets_locks",
)
LEASE_STATEMENT: Tests = ("tests/pg/test_lease_statements.py",)
LEASE_RULES: Tests = ("tests/election/test_lease_rules.py",)
LEASE_SESSION: Tests = ("tests/pg/test_lease_session.py",)
LEASE_CONNECTION: Tests = (
    *LEASE_SESSION,
    "tests/election/test_fork.py::test_a_child_has_no_copy_of_the_socket_through_which_its_parent_leads",
)
LEASED_ROLES: Tests = ("tests/election/test_leased_roles.py",)
GATES: Tests = ("tests/election/test_ledger_gates.py",)
SLOTS: Tests = ("tests/election/test_ledger_slots.py",)
TICKS = _tests("tests/election/test_once.py", "ticks_follow_the_local_day")

PYTHON: dict[str, dict[Tests, tuple[str, ...]]] = {
    "_election/role.py": {
        RULE: (
            "opens_at",
            "Role.saw",
            "Role.drained",
            "Role.wanted",
            "Role.unchanged_s",
            "Role.drain",
            "Role.resume",
            "Role.node_resumed",
            "_is_next",
        ),
        ENGINE: ("Role.won", "Role.told_settled", "Role.releasing", "Role.released", "Role.lost"),
    },
    "gate.py": {
        GATE: tuple(
            f"LeaderGate.{name}"
            for name in (
                "is_leader",
                "require_leader",
                "ensure_epoch",
                "acting",
                "enable",
                "open",
                "renew",
                "close",
                "drain",
                "shut_in_child",
                "_hold_shut",
                "_publish",
                "_wake",
                "_next_opening",
                "_refusal",
            )
        )
    },
    "_lock/fsm.py": {FSM: ("Row.fits", "step")},
    "_election/winning.py": {
        ENGINE: ("Winning.wanted", "Winning.try_locks", "Winning.begin_terms", "Winning._bump", "Winning._begin_term")
    },
    "_election/engine.py": {ENGINE: ("Engine._beat", "Engine._reconcile", "Engine._lose", "Engine._lose_role")},
    "_election/releasing.py": {ENGINE: ("Releases._begin", "Releases.finish", "Releases.lost")},
    "_election/ledger.py": {
        SESSION: ("Ledger.beat", "Ledger.bump", "Ledger.end_terms", "Ledger.unlock", "Ledger.hint", "Ledger._write")
    },
    "_election/lease.py": {
        LEASE_RULES: tuple(
            f"LeaseLedger.{name}"
            for name in (
                "__init__",
                "open",
                "beat",
                "try_and_look",
                "_listen",
                "_seems_free",
                "_is_silent",
                "bump",
                "end_terms",
                "unlock",
                "evict",
            )
        )
    },
    "_pg/lease.py": {
        LEASE_SESSION: (
            *(
                f"LeaseSession.{name}"
                for name in ("rows", "_once", "_message", "_remember_warning", "_failed", "_abandon")
            ),
            "_execute",
        ),
        LEASE_CONNECTION: ("LeaseSession._connected",),
    },
    "fence.py": {
        FENCED: (
            "Block.enter",
            "Block.leave",
            "fenced_async",
            "fenced_sync",
            "_PsycopgBlock.tries",
            "_PsycopgBlock.send",
            "_PsycopgBlock.check",
            "still_fenced",
            "raced",
        )
    },
    "_pg/session.py": {
        SESSION: (
            "DedicatedSession.take",
            "DedicatedSession.wait",
            "DedicatedSession.verify",
            "DedicatedSession._rows",
            "DedicatedSession._is_answer",
            "DedicatedSession._abandon",
            "DedicatedSession.close",
            "DedicatedSession._watch",
            "DedicatedSession._readable",
            "DedicatedSession._timeouts_ms",
        )
    },
}
FUNCTIONS: dict[Tests, tuple[str, ...]] = {
    SESSIONS: (
        "open_session",
        "heartbeat",
        "tick",
        "note_eviction",
        "is_there",
        "is_live",
        "is_live_candidate",
        "request_targets",
        "request_step_down",
        "request_of_node",
        "reserve",
        "settle_request",
        "lock_wake",
    ),
    TERMS: ("bump_unleased", "longest_wait_s", "end_term", "advance_epoch", "next_number"),
    FENCE: ("fence", "fence_strictly", "check_fence"),
    LEASE_SETTINGS: ("lease_settings",),
    LEASE_OPEN: ("lease_open",),
    LEASE_MESSAGE: ("lease_begin", "lease_done"),
    LEASE_END: ("end_silent_leases",),
    LEASE_LOCK: ("lease_lock",),
    LEASED_ROLES: ("bump",),
    GATES: ("report_gates",),
    SLOTS: ("claim_slot", "finish_slot"),
    TICKS: ("tick_of",),
}
STATEMENTS: dict[str, dict[Tests, tuple[str, ...]]] = {
    "_pg/sql/ledger.sql": {
        STATEMENT: (
            "ledger_open",
            "ledger_prepare_heartbeat",
            "ledger_try_and_look",
            "ledger_unlock",
            "ledger_hint",
            "ledger_owned",
            "ledger_evict",
            "ledger_settle_requests",
        )
    },
    "_pg/sql/lock.sql": {STATEMENT: ("take", "wait_for_lock")},
    "_pg/sql/lease.sql": {LEASE_STATEMENT: ("lease_look", "lease_ended")},
}


def generated() -> list[Mutant]:
    """All of them, in the order of the tables above."""
    seen: Counter[str] = Counter()
    mutants = []
    for file, label, function, site, tests in itertools.chain(_of_python(), _of_functions(), _of_statements()):
        old = (PACKAGE / file).read_text()[site.start : site.end]
        name = f"{label}:{function}:{site.operator}:{_short(old)}"
        if site.new and site.new not in ("pass", "NULL"):
            name += f" -> {_short(site.new)}"
        seen[name] += 1
        if seen[name] > 1:
            name += f" #{seen[name]}"
        mutants.append(Mutant(name, (Splice(file, site),), tests))
    return mutants


def reasons() -> dict[str, str]:
    """The explained mutants, by name, each with the reason why no test can notice it."""
    table = tomllib.loads(Path(__file__).with_name("equivalent.toml").read_text())
    return {name: entry["reason"] for entry in table["equivalent"] for name in entry["mutants"]}


def _short(text: str) -> str:
    """The text on one line; of a long text the beginning, and a digest of the rest."""
    line = " ".join(text.split())
    if len(line) <= NAME_LENGTH:
        return line
    return f"{line[:NAME_LENGTH]}… ({hashlib.sha256(line.encode()).hexdigest()[:6]})"


Found = tuple[str, str, str, Site, Tests]


def _of_python() -> Iterator[Found]:
    for file, targets in PYTHON.items():
        source = (PACKAGE / file).read_text()
        for tests, functions in targets.items():
            for function in functions:
                for site in _python.sites(source, function):
                    yield file, file, function, site, tests


def _of_functions() -> Iterator[Found]:
    for tests, functions in FUNCTIONS.items():
        for function in functions:
            path, start, end = _sql.latest_definition(PACKAGE / MIGRATIONS, function)
            for site in _sql.function_sites(path.read_text(), start, end):
                yield str(path.relative_to(PACKAGE)), MIGRATIONS, function, site, tests


def _of_statements() -> Iterator[Found]:
    for file, targets in STATEMENTS.items():
        source = (PACKAGE / file).read_text()
        for tests, names in targets.items():
            for name in names:
                for site in _sql.statement_sites(source, name):
                    yield file, file, name, site, tests
