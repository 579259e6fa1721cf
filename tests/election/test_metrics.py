"""The metrics of real elections, as a scraper reads them."""

import asyncio
import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from pgleaderlock import LeaderElection, NotLeader, key_pair
from pgleaderlock._base.version import VERSION
from pgleaderlock._election.metric_table import METRICS
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.gate import _EXPLAINED
from pgleaderlock.metrics import GATE_REASONS, ElectionMetrics
from pgleaderlock.server.metrics import Metrics
from support.deps import debian_tool
from support.elections import PATIENT, STEADY, ledger_dsns, until
from support.server_side import terminate

WAIT_S = 20.0
PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
STANDINGS = ("acting", "waiting", "draining", "vetoed", "late", "work_failed", "follows")
STATES = ("stopped", "follower", "acquiring", "leader", "reconnecting", "releasing")


@pytest.fixture
def ledger(dsn: str) -> dict[str, str]:
    return ledger_dsns(dsn)


class Measured:
    """An election, its metrics in a registry, and the numbers that a scrape finds there."""

    def __init__(self, election: LeaderElection, registry: CollectorRegistry | None = None) -> None:
        self.election = election
        self.metrics = ElectionMetrics(election, registry or CollectorRegistry())

    def scrape(self) -> dict[tuple[str, ...], float]:
        """By name without the prefix, then the values of the labels in the order of their names."""
        found: dict[tuple[str, ...], float] = {}
        for family in text_string_to_metric_families(self.metrics.exposition().decode()):
            for sample in family.samples:
                labels = tuple(value for _, value in sorted(sample.labels.items()))
                key = (sample.name.removeprefix("pgleaderlock_"), *labels)
                assert key not in found, f"{key} is there twice"
                found[key] = sample.value
        return found

    def value(self, *key: str) -> float:
        return self.scrape()[key]

    def __call__(self, *key: str) -> float:
        return self.scrape().get(key, -1.0)


def make(ledger: dict[str, str], roles: str | list[str], node: str, **options: Any) -> LeaderElection:
    return LeaderElection(ledger["plain"], roles, node_id=node, **{**PATIENT, **options})


@contextlib.contextmanager
def refused() -> Iterator[None]:
    with pytest.raises(NotLeader):
        yield


# -- what there is ----------------------------------------------------------------------------------------------------


def test_every_metric_is_there_from_the_start_at_zero() -> None:
    measured = Measured(LeaderElection("", ["mail", "billing"], standalone=True))
    zero = {
        *((name, role) for role in ("mail", "billing") for name in ("is_leader", "gate_open", "epoch", "draining")),
        *(("candidate", role) for role in ("mail", "billing")),
        *((name, role) for role in ("mail", "billing") for name in ("tenure_seconds", "elections_total")),
        *((name, role) for role in ("mail", "billing") for name in ("failovers_total", "acquired_total")),
        *((name, role) for role in ("mail", "billing") for name in ("work_failed", "work_failures_total")),
        *(
            ("lost_total", reason, role)
            for role in ("mail", "billing")
            for reason in ("released", "lost", "superseded")
        ),
        *(
            ("acquire_attempts_total", result, role)
            for role in ("mail", "billing")
            for result in ("won", "held", "busy", "error")
        ),
        *(("gate_blocked_total", reason, role) for role in ("mail", "billing") for reason in GATE_REASONS),
        *(("state", role, state) for role in ("mail", "billing") for state in STATES if state != "stopped"),
        *(("role_state", role, name) for role in ("mail", "billing") for name in STANDINGS if name != "follows"),
        *(
            (f"{name}_seconds_{part}", role)
            for role in ("mail", "billing")
            for part in ("sum", "count")
            for name in ("acquire_latency", "failover")
        ),
        ("heartbeat_update_seconds_sum",),
        ("heartbeat_update_seconds_count",),
    }
    found = measured.scrape()
    plain = {key: value for key, value in found.items() if not key[0].endswith("_bucket")}
    assert {key for key, value in plain.items() if value == 0} == zero
    assert {key: value for key, value in plain.items() if value != 0} == {
        ("state", "mail", "stopped"): 1,
        ("state", "billing", "stopped"): 1,
        ("role_state", "mail", "follows"): 1,
        ("role_state", "billing", "follows"): 1,
        ("node_info", "session", "pgleaderlock", measured.election.node_id, "mail", VERSION): 1,
        ("node_info", "session", "pgleaderlock", measured.election.node_id, "billing", VERSION): 1,
    }
    assert ("acquire_latency_seconds_bucket", "+Inf", "mail") in found
    assert ("heartbeat_update_seconds_bucket", "+Inf") in found


def test_each_metric_is_one_family_of_the_kind_and_with_the_words_of_the_table() -> None:
    text = Measured(LeaderElection("", ["a", "b"], standalone=True)).metrics.exposition().decode()
    for metric in METRICS:
        assert text.count(f"# TYPE {metric.name} {metric.kind}\n") == 1
        assert text.count(f"# HELP {metric.name} {metric.help}\n") == 1
    assert text.count("# TYPE pgleaderlock_") == len(METRICS)


def linted(text: bytes) -> "subprocess.CompletedProcess[bytes]":
    tool = debian_tool("promtool")
    return subprocess.run(
        [tool.path, "check", "metrics"], env=tool.env, input=text, capture_output=True, timeout=60, check=False
    )


async def test_promtool_finds_nothing_to_improve(ledger: dict[str, str]) -> None:
    measured = Measured(make(ledger, "linted", "linted-1"))
    async with measured.election:
        await until(lambda: measured("heartbeat_age_seconds", "linted") >= 0)
        text = measured.metrics.exposition()
    done = await asyncio.to_thread(linted, text)
    assert (done.returncode, done.stderr) == (0, b"")


def test_promtool_finds_nothing_to_improve_in_the_lock_server() -> None:
    done = linted(Metrics().exposition())
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_node_its_namespace_and_version_are_told() -> None:
    election = LeaderElection("", "told", node_id="node-7", namespace="shop", standalone=True)
    assert Measured(election).value("node_info", "session", "shop", "node-7", "told", VERSION) == 1


def test_the_reasons_are_those_of_the_gate() -> None:
    assert set(GATE_REASONS) == {*_EXPLAINED, "epoch_changed"}


def test_every_metric_is_on_the_page_with_its_kind_and_labels() -> None:
    rows = {
        found[1]: [cell.strip() for cell in found[2].split("|")]
        for found in re.finditer(r"^\| `(pgleaderlock_\w+)` \|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    }
    assert rows.keys() == {metric.name for metric in METRICS}
    for metric in METRICS:
        kind, labels, unit, meaning = rows[metric.name][:4]
        assert kind == metric.kind
        assert re.findall(r"`(\w+)`", labels) == list(metric.labels)
        assert unit
        assert meaning
    page = PAGE.read_text()
    for word in (*GATE_REASONS, *STATES, "won", "held", "busy", "error", "released", "lost", "superseded"):
        assert f"`{word}`" in page, word


# -- what it counts ---------------------------------------------------------------------------------------------------


async def test_one_leads_the_other_stands_by_and_a_handover_is_no_failover(ledger: dict[str, str]) -> None:
    one, two = (Measured(make(ledger, "measured", node)) for node in ("measured-1", "measured-2"))
    async with one.election:
        assert await one.election.gate("measured").wait_open(WAIT_S)
        async with two.election:
            await until(lambda: two("acquire_attempts_total", "held", "measured") >= 2)
            await until(lambda: two("epoch", "measured") == 1)
            await until(lambda: one("heartbeat_update_seconds_count") >= 1)
            first, second = one.scrape(), two.scrape()
            names = ("is_leader", "gate_open", "epoch", "acquired_total", "failovers_total")
            assert [first[name, "measured"] for name in names] == [1, 1, 1, 1, 0]
            assert [second[name, "measured"] for name in names] == [0, 0, 1, 0, 0]
            assert {state: first["state", "measured", state] for state in STATES} == {
                **dict.fromkeys(STATES, 0),
                "leader": 1,
            }
            assert sum(second["state", "measured", state] for state in STATES) == 1
            assert first["tenure_seconds", "measured"] > 0
            assert second["tenure_seconds", "measured"] == 0
            assert first["acquire_attempts_total", "won", "measured"] == 1
            assert first["elections_total", "measured"] == 1
            assert second["elections_total", "measured"] == second["acquire_attempts_total", "held", "measured"]
            assert first["acquire_latency_seconds_count", "measured"] == 1
            assert first["acquire_latency_seconds_sum", "measured"] > 0
            await one.election.drain()
            await until(lambda: two("gate_open", "measured") == 1)
            first, second = one.scrape(), two.scrape()
            after = ("is_leader", "gate_open", "acquired_total", "failovers_total")
            assert [first[name, "measured"] for name in after] == [0, 0, 1, 0]
            assert [second[name, "measured"] for name in after] == [1, 1, 1, 0]
            assert second["epoch", "measured"] == 2
            assert first["lost_total", "released", "measured"] == 1
            assert first["lost_total", "lost", "measured"] == 0


async def test_a_leader_that_is_lost_counts_as_a_failover_where_the_next_term_begins(ledger: dict[str, str]) -> None:
    one = Measured(make(ledger, "failing", "failing-1", takeover="instant"))
    two = Measured(make(ledger, "failing", "failing-2", takeover="instant"))
    async with one.election:
        await until(lambda: one("is_leader", "failing") == 1)
        async with two.election:
            await until(lambda: two("acquire_attempts_total", "held", "failing") >= 1)
            # The one that was cut may win again by itself, with a new session: then it is cut again.
            for _ in range(50):
                terminate(ledger["superuser"], key_pair("failing"))
                await until(lambda: one("acquired_total", "failing") + two("acquired_total", "failing") >= 2)
                if two("acquired_total", "failing"):
                    break
            await until(lambda: two("is_leader", "failing") == 1)
            assert two("failovers_total", "failing") == 1
            assert one("lost_total", "lost", "failing") >= 1
            assert one("failovers_total", "failing") == 0, "one's own predecessor is no other node"


async def test_the_age_of_the_heartbeat_is_true_when_it_is_asked_for(ledger: dict[str, str]) -> None:
    rare = {"heartbeat_interval_s": 300.0, "late_threshold_s": 600.0, "session_lease_s": 700.0}
    measured = Measured(make(ledger, "ageing", "ageing-1", **rare))
    assert measured("heartbeat_age_seconds", "ageing") == -1.0, "no session, no age"
    async with measured.election:
        await until(lambda: measured("is_leader", "ageing") == 1)
        ages = [measured.value("heartbeat_age_seconds", "ageing") for _ in range(3)]
        assert 0 < ages[0] < ages[1] < ages[2]
    assert measured("heartbeat_age_seconds", "ageing") == -1.0


async def test_what_the_gate_refuses_is_counted_by_reason(ledger: dict[str, str]) -> None:
    measured = Measured(make(ledger, "refusing", "refusing-1"))
    gate = measured.election.gate("refusing")
    with refused():
        gate.require_leader()
    async with measured.election:
        assert await gate.wait_open(WAIT_S)
        gate.disable()
        for _ in range(2):
            with refused():
                gate.require_leader()
        found = measured.scrape()
        assert found["gate_blocked_total", "never_led", "refusing"] == 1
        assert found["gate_blocked_total", "vetoed", "refusing"] == 2
        assert found["gate_open", "refusing"] == 0
        assert found["is_leader", "refusing"] == 1, "it follows the lock"


async def test_a_database_that_is_away_is_no_election() -> None:
    measured = Measured(LeaderElection("postgresql://127.0.0.1:1/nobody", "away", **STEADY))
    async with measured.election:
        await until(lambda: measured("acquire_attempts_total", "error", "away") >= 1)
        assert measured("elections_total", "away") == 0


async def test_a_drain_that_waits_for_work_shows(ledger: dict[str, str]) -> None:
    measured = Measured(make(ledger, "measured_drain", "measured-drain-1"))
    async with measured.election:
        assert await measured.election.gate("measured_drain").wait_open(WAIT_S)
        assert measured("candidate", "measured_drain") == 1
        with measured.election.gate("measured_drain").acting():
            draining = asyncio.ensure_future(measured.election.drain())
            await until(lambda: measured("draining", "measured_drain") == 1)
            assert measured("candidate", "measured_drain") == 0
        await draining
        assert measured("draining", "measured_drain") == 0


# -- whose it is ------------------------------------------------------------------------------------------------------


async def test_roles_come_and_go() -> None:
    async with LeaderElection("", "first", standalone=True) as election:
        measured = Measured(election)
        await election.add_role("second")
        assert measured("failovers_total", "second") == 0
        measured.metrics.attempted("first", "won")
        await election.remove_role("first")
        assert not [key for key in measured.scrape() if "first" in key]
        await election.add_role("first")
        assert measured("acquire_attempts_total", "won", "first") == 0, "it begins anew"


def test_elections_share_a_registry_and_each_family_is_there_once() -> None:
    registry = CollectorRegistry()
    one = Measured(LeaderElection("", "a", standalone=True), registry)
    Measured(LeaderElection("", ["b", "c"], standalone=True), registry)
    assert {key[1] for key in one.scrape() if key[0] == "is_leader"} == {"a", "b", "c"}
    assert one.metrics.exposition().count(b"# TYPE pgleaderlock_is_leader ") == 1


async def test_a_role_is_measured_once_in_a_registry() -> None:
    registry = CollectorRegistry()
    taken = ElectionMetrics(LeaderElection("", ["a", "b"], standalone=True), registry)
    async with LeaderElection("", ["b"], namespace="other", standalone=True) as election:
        with pytest.raises(ConfigurationError, match="role 'b' is measured in this registry already"):
            ElectionMetrics(election, registry)
        other = ElectionMetrics(LeaderElection("", "c", standalone=True), registry)
        with pytest.raises(ConfigurationError, match="role 'a'"):
            other.role_added("a")
        assert other.measured() == {"c"}
        taken.close()
        again = Measured(election, registry)
        assert await election.gate("b").wait_open(WAIT_S)
        assert again("is_leader", "b") == 1
        assert again("is_leader", "a") == -1.0


def test_the_last_one_leaves_the_registry_as_it_was() -> None:
    registry = CollectorRegistry()
    for _ in range(2):
        metrics = ElectionMetrics(LeaderElection("", "a", standalone=True), registry)
        metrics.close()
        metrics.close()
        metrics.role_added("late")
        assert metrics.exposition() == b""


# Names from the designs that this library follows.
NAMES_OF_OTHER_DESIGNS = {
    "leader_acquired_total",
    "leadership_lost_total",
    "acquire_attempts_total",
    "extrinsic_blocked_not_leader_total",
    "is_leader",
    "leader_epoch",
    "heartbeat_age_ms",
    "acquire_latency_ms",
    "heartbeat_update_ms",
    "forge_leader_is_leader",
    "forge_leader_elections_total",
    "forge_leader_tenure_seconds",
    "forge_leader_failovers_total",
}
NAMES_OF_THE_LOCK_SERVER = {
    "lock_acquire_total",
    "lock_renew_total",
    "lock_release_total",
    "lock_op_latency_seconds",  # in milliseconds there, and in the rules of `--ms-names`
    "lock_db_busy_total",
    "locks_held",
    "lock_expired_total",
    "lock_store_unclean",
    "lock_store_damaged",
}


def test_the_page_says_for_each_name_of_another_design_which_of_our_metrics_answers() -> None:
    section = PAGE.read_text(encoding="utf-8").split("### Names of other designs\n")[1].split("\n#")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", section, re.MULTILINE))
    assert rows.keys() == NAMES_OF_OTHER_DESIGNS
    ours = {metric.name for metric in METRICS}
    for name, answer in rows.items():
        named = set(re.findall(r"`(\w+)`", answer))
        assert named, name
        assert named <= ours, name


def test_the_lock_servers_metrics_have_the_names_of_its_design() -> None:
    families = text_string_to_metric_families(Metrics().exposition().decode())
    shown = {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
    assert shown == NAMES_OF_THE_LOCK_SERVER
