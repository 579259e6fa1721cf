"""The alerts as Prometheus sees them: `promtool` evaluates each one on a recorded scenario, and on healthy ones."""

import functools
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from pgleaderlock import LeaderElection
from pgleaderlock._election.metric_table import METRICS, unknown_names
from pgleaderlock.alerts import (
    Alert,
    Expected,
    default_alerts,
    duration,
    from_rule,
    merged,
    rules_yaml,
    translated,
)
from pgleaderlock.config import AlertRule
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.metrics import ElectionMetrics
from pgleaderlock.server.metrics import Metrics
from support.deps import debian_tool
from support.monitoring import queries
from support.program import command

FIRING = 'ALERTS{alertstate="firing"}'


def written(
    name: str = "no_scheduler_leader",
    condition: str = "sum(forge_leader_is_leader{role='scheduler'}) == 0",
    for_s: float = 30.0,
    severity: str = "critical",
    *,
    notify: tuple[str, ...] = ("pagerduty",),
    line: int = 3,
) -> AlertRule:
    """An `[[alerts]]` as a configuration hands it over."""
    return AlertRule(name, condition, for_s, severity, notify, line)


def promtool(*args: object) -> subprocess.CompletedProcess[str]:
    tool = debian_tool("promtool")
    return subprocess.run(
        [tool.path, *map(str, args)], env=tool.env, capture_output=True, text=True, timeout=60, check=False
    )


def checked(alerts: Sequence[Alert], folder: Path) -> str:
    """The rules, which promtool has accepted."""
    rules = rules_yaml(alerts)
    (folder / "rules.yml").write_text(rules)
    return verdict(rules)


@functools.cache
def verdict(rules: str) -> str:
    """What promtool says of these rules: the same each time, and most scenarios have the same."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rules.yml"
        file.write_text(rules)
        done = promtool("check", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# -- scenarios --------------------------------------------------------------------------------------------------------

Key = tuple[str, str] | tuple[str, str, str]

# Three nodes of one role, scraped every 15 s; a leads. In promtool's words: "0x3" is 0 and three more of it, "stale" is
# what a scrape that failed leaves behind.
HEALTHY: dict[Key, str] = {
    ("gate_open", "a"): "1x320",
    ("gate_open", "b"): "0x320",
    ("gate_open", "c"): "0x320",
    ("is_leader", "a"): "1x320",
    ("is_leader", "b"): "0x320",
    ("is_leader", "c"): "0x320",
    ("draining", "a"): "0x320",
    ("draining", "b"): "0x320",
    ("draining", "c"): "0x320",
    ("failovers_total", "a"): "0x320",
    ("failovers_total", "b"): "0x320",
    ("failovers_total", "c"): "0x320",
    # The oldest that a heartbeat gets while all is well, and ages in between.
    ("heartbeat_age_seconds", "a"): "0.4 3 1.9 " * 106,
    ("heartbeat_age_seconds", "b"): "2.9 0.1 1.5 " * 106,
    ("heartbeat_age_seconds", "c"): "0.8 2.2 3.01 " * 106,
    ("lost_total", "a", "lost"): "0x320",
    ("lost_total", "b", "lost"): "0x320",
    ("node_info", "a"): "1x320",
    ("node_info", "b"): "1x320",
    ("node_info", "c"): "1x320",
    ("state", "a", "follower"): "0x320",
    ("state", "b", "follower"): "1x320",
    ("state", "c", "follower"): "1x320",
}
GONE_AFTER_1_MIN: dict[Key, str] = {
    key: " ".join([*values.split()[:4], "stale"]) for key, values in HEALTHY.items() if "x" not in values
} | {key: f"{values[0]}x3 stale" for key, values in HEALTHY.items() if "x" in values}


def gone(*nodes: str) -> dict[Key, str]:
    """These nodes die after a minute."""
    return {key: values for key, values in GONE_AFTER_1_MIN.items() if key[1] in nodes}


ROLE = {"job": "app", "namespace": "shop", "role": "billing"}
NODE_A, NODE_B = ({"job": "app", "namespace": "shop", "instance": each, "node": f"node-{each}"} for each in ("a", "b"))
NO_LEADER = ("PgleaderlockNoLeader", {**ROLE, "severity": "critical"})
TWO_LEADERS = [
    ("PgleaderlockTwoLeaders", {**node, "role": "billing", "severity": "critical"}) for node in (NODE_A, NODE_B)
]
FAILOVERS = ("PgleaderlockFrequentFailovers", {**ROLE, "severity": "warning"})
FLAPPING = ("PgleaderlockFrequentFailovers", {**ROLE, "node": "node-a", "severity": "warning"})
LATE = ("PgleaderlockHeartbeatLate", {**NODE_A, "severity": "warning"})
NO_SESSION = ("PgleaderlockNoSession", {**NODE_B, "severity": "warning"})
STUCK = ("PgleaderlockDrainStuck", {**NODE_A, "role": "billing", "severity": "warning"})

NAMED = Expected(roles=("billing",), namespace="shop", job="app")
OTHER_JOB: dict[Key, str] = {("gate_open", "other/x"): "1x320", ("node_info", "other/x"): "1x320"}
OTHER_NAMESPACE: dict[Key, str] = {("gate_open", "x@forge"): "1x320", ("node_info", "x@forge"): "1x320"}

Fired = tuple[str, dict[str, str]]


@dataclass(frozen=True)
class Scenario:
    """What is recorded, where it differs from health, and which alerts fire when."""

    told: Mapping[Key, str]
    fires: Mapping[str, Sequence[Fired]]
    expected: Expected = field(default_factory=Expected)
    alone: bool = False
    """Nothing but what is told is recorded."""


SCENARIOS = {
    "all_is_well": Scenario({}, {"15s": [], "10m": [], "1h15m": []}),
    "an_ordinary_failover_rouses_nobody": Scenario(
        {**gone("a"), ("gate_open", "b"): "0x4 1x300", ("failovers_total", "b"): "0x4 1x300"},
        {f"{seconds}s": [] for seconds in range(15, 300, 15)},
    ),
    "nobody_takes_over": Scenario(gone("a"), {"1m30s": [], "2m": [NO_LEADER], "1h10m": [NO_LEADER]}),
    "a_leader_at_last": Scenario(
        {**gone("a"), ("gate_open", "b"): "0x20 1x280"}, {"4m": [NO_LEADER], "5m15s": [], "6m": []}
    ),
    "every_node_is_gone_for_an_hour": Scenario(
        gone("a", "b", "c"), {"1m30s": [], "2m": [NO_LEADER], "55m": [NO_LEADER], "1h3m": []}
    ),
    "a_named_role_is_missed_for_ever": Scenario(
        gone("a", "b", "c"), {"1m30s": [], "2m": [NO_LEADER], "55m": [NO_LEADER], "1h15m": [NO_LEADER]}, NAMED
    ),
    "a_named_role_is_missed_for_ever_also_when_another_job_leads_an_equal_name": Scenario(
        {**gone("a", "b", "c"), **OTHER_JOB}, {"2m": [NO_LEADER], "55m": [NO_LEADER], "1h15m": [NO_LEADER]}, NAMED
    ),
    "naming_a_role_does_not_switch_the_rule_off_for_another_job": Scenario(
        {**OTHER_JOB, ("gate_open", "other/x"): "0x320"},
        {"1m": [("PgleaderlockNoLeader", {**ROLE, "job": "other", "severity": "critical"})]},
        NAMED,
    ),
    "a_job_without_a_leader_is_missed_though_another_job_leads_an_equal_name": Scenario(
        {**gone("a"), **OTHER_JOB}, {"1m30s": [], "2m": [NO_LEADER]}, NAMED
    ),
    "two_namespaces_of_one_job_have_a_leader_each": Scenario(OTHER_NAMESPACE, {"5m": [], "1h": []}),
    "a_named_role_that_nobody_was_ever_seen_with": Scenario(
        {},
        {"30s": [], "1m": [("PgleaderlockNoLeader", {**ROLE, "role": "mail", "severity": "critical"})]},
        Expected(roles=("mail",), namespace="shop", job="app"),
    ),
    "without_a_job_a_named_role_is_missed_in_all_of_them": Scenario(
        {},
        {"30s": []} | {"1m": [("PgleaderlockNoLeader", {"namespace": "shop", "role": "mail", "severity": "critical"})]},
        Expected(roles=("mail",), namespace="shop"),
    ),
    "a_role_was_removed_on_purpose": Scenario(
        {key: values for key, values in gone("a", "b", "c").items() if key[0] != "heartbeat_age_seconds"}
        | {("gate_open", "a", "other"): "1x320", ("node_info", "a", "other"): "1x320"},
        {"2m": [], "30m": []},
    ),
    "two_lead": Scenario({("gate_open", "b"): "0x3 1x300"}, {"1m15s": [], "1m45s": TWO_LEADERS, "1h": TWO_LEADERS}),
    "a_handover_seen_from_two_scrapes": Scenario(
        {("gate_open", "a"): "1x8 0x300", ("gate_open", "b"): "0x7 1x300"},
        {f"{seconds}s": [] for seconds in range(90, 240, 15)},
    ),
    "five_failovers_in_ten_minutes": Scenario(
        {("failovers_total", "b"): "0x8 1x8 2x8 3x8 4x8 5x250"}, {"2m30s": [], "11m": [FAILOVERS], "40m": []}
    ),
    "one_node_loses_its_session_again_and_again_and_comes_back": Scenario(
        {("lost_total", "a", "lost"): "0x8 1x8 2x8 3x8 4x8 5x250"}, {"2m30s": [], "11m": [FLAPPING], "40m": []}
    ),
    "one_node_loses_it_again_and_again_and_others_take_over": Scenario(
        {
            ("lost_total", "a", "lost"): "0x8 1x8 2x8 3x8 4x8 5x250",
            ("failovers_total", "b"): "0x8 1x8 2x8 3x8 4x8 5x250",
        },
        {"11m": [FLAPPING], "40m": []},
    ),
    "two_nodes_lose_their_sessions_in_turn": Scenario(
        {("lost_total", "a", "lost"): "0x8 1x16 2x16 3x250", ("lost_total", "b", "lost"): "0x16 1x16 2x16 3x250"},
        {"2m30s": [], "13m": [FAILOVERS], "40m": []},
    ),
    "an_address_that_is_another_nodes_now_does_not_break_the_rule": Scenario(
        {
            ("failovers_total", "b"): "0x8 1x8 2x8 3x8 4x8 5x250",
            ("node_info", "b"): "1x8 stale",
            ("node_info", "b#2"): "_x9 1x300",
        },
        {"11m": [FAILOVERS]},
    ),
    "five_failovers_whose_winners_are_all_dead_but_one": Scenario(
        {**gone("a"), ("gate_open", "b"): "0x3 1x300", ("failovers_total", "a"): "0 1 2 3 stale"}
        | {("failovers_total", "b"): "0x4 1 2x300"},
        {"3m": [FAILOVERS]},
    ),
    "three_failovers_in_ten_minutes": Scenario(
        {("failovers_total", "b"): "1x8 2x8 3x8 4x290"}, {f"{minutes}m": [] for minutes in range(1, 30)}
    ),
    "three_failovers_in_an_hour": Scenario(
        {("failovers_total", "b"): "0x80 1x80 2x80 3x60"}, {f"{minutes}m": [] for minutes in range(5, 75, 5)}
    ),
    "heartbeats_are_late_again_and_again": Scenario(
        {("heartbeat_age_seconds", "a"): "0.4 3 1.9 5.2 " * 80}, {"1m30s": [], "3m": [LATE], "1h": [LATE]}
    ),
    "one_heartbeat_was_late": Scenario(
        {("heartbeat_age_seconds", "a"): "0.4 3 1.9 5.2 " + "0.4 3 1.9 " * 80},
        {f"{seconds}s": [] for seconds in range(15, 300, 15)},
    ),
    "a_node_has_no_session": Scenario(
        {("heartbeat_age_seconds", "b"): GONE_AFTER_1_MIN["heartbeat_age_seconds", "b"]},
        {"1m45s": [], "2m15s": [NO_SESSION], "1h": [NO_SESSION]},
    ),
    "a_node_is_switched_off": Scenario(
        {
            ("heartbeat_age_seconds", "b"): GONE_AFTER_1_MIN["heartbeat_age_seconds", "b"],
            ("state", "b", "follower"): "0x320",
        },
        {"2m15s": [], "1h": []},
    ),
    "a_drain_does_not_end": Scenario(
        {("is_leader", "a"): "1x3 0x300", ("draining", "a"): "0x3 1x300"}, {"1m30s": [], "2m15s": [STUCK]}
    ),
    "a_drain_takes_half_a_minute": Scenario(
        {
            ("is_leader", "a"): "1x3 0x300",
            ("draining", "a"): "0x3 1x2 0x300",
            ("gate_open", "a"): "1x3 0x300",
            ("gate_open", "b"): "0x5 1x300",
        },
        {f"{seconds}s": [] for seconds in range(15, 300, 15)},
    ),
}


def series_of(key: Key) -> str:
    """Of job app and namespace shop, unless the instance is written job/x, or x@namespace; x#2: another node at x."""
    name, where, *more = key
    job, _, where = where.rpartition("/")
    where, _, other = where.partition("#")
    instance, _, namespace = where.partition("@")
    labels = {"job": job or "app", "instance": where, "role": "billing"}
    if name in ("state", "lost_total"):
        labels["state" if name == "state" else "reason"] = more[0]
    elif more:
        labels["role"] = more[0]
    if name == "node_info":
        labels |= {"node": f"node-{instance}{other}", "namespace": namespace or "shop", "version": "1.0"}
    return f"pgleaderlock_{name}{{" + ",".join(f'{label}="{value}"' for label, value in labels.items()) + "}"


@pytest.mark.parametrize("name", SCENARIOS)
def test_of_the_default_alerts_exactly_those_fire_that_should(name: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    checked(default_alerts(scenario.expected), tmp_path)
    recorded = {**HEALTHY, **scenario.told}
    test = {
        "rule_files": [str(tmp_path / "rules.yml")],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": [{"series": series_of(key), "values": values} for key, values in recorded.items()],
                "promql_expr_test": [
                    {"expr": FIRING, "eval_time": when, "exp_samples": [sample_of(*alert) for alert in alerts]}
                    for when, alerts in scenario.fires.items()
                ],
            }
        ],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
    done = promtool("test", "rules", tmp_path / "test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("told", "count"), [({}, 0), (gone("a"), 1), (gone("a", "b", "c"), 1)])
def test_the_dashboard_counts_roles_without_a_leader_also_when_every_node_is_gone(
    told: dict[Key, str], count: int, tmp_path: Path
) -> None:
    query = next(query for query in queries() if query.startswith("count((max by"))
    filled = query.replace('"$job"', '".+"').replace('"$role"', '".+"')
    series = [{"series": series_of(key), "values": values} for key, values in {**HEALTHY, **told}.items()]
    asked = {"expr": filled, "eval_time": "5m", "exp_samples": [{"labels": "{}", "value": count}]}
    test = {"tests": [{"interval": "15s", "input_series": series, "promql_expr_test": [asked]}]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
    done = promtool("test", "rules", tmp_path / "test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def sample_of(name: str, labels: dict[str, str]) -> dict[str, Any]:
    pairs = {"alertname": name, "alertstate": "firing", **labels}
    return {"labels": "ALERTS{" + ",".join(f'{key}="{value}"' for key, value in pairs.items()) + "}", "value": 1}


def test_every_default_alert_fires_in_some_scenario() -> None:
    fired = {name for scenario in SCENARIOS.values() for alerts in scenario.fires.values() for name, _ in alerts}
    assert fired == {alert.name for alert in default_alerts()}


def test_the_default_alerts_name_only_metrics_that_exist() -> None:
    for alert in default_alerts(Expected(roles=("billing",))):
        assert unknown_names(alert.condition) == []
        assert "pgleaderlock_" in alert.condition


def test_the_thresholds_follow_from_what_is_normal_here() -> None:
    slow = Expected(scrape_interval_s=60, heartbeat_interval_s=30, late_threshold_s=54, session_lease_s=60)
    alerts = {alert.name: alert for alert in default_alerts(slow)}
    assert alerts["PgleaderlockNoLeader"].for_s == 181  # T, two scrapes, one second
    assert alerts["PgleaderlockTwoLeaders"].for_s == 120  # two scrapes
    assert "> 42" in alerts["PgleaderlockHeartbeatLate"].condition  # half way from 30 s to 54 s
    for wrong in ({"scrape_interval_s": 0}, {"failovers_max": 0}, {"drain_s": -1}, {"failover_window_s": float("inf")}):
        with pytest.raises(ConfigurationError):
            Expected(**wrong)


# -- [[alerts]] -------------------------------------------------------------------------------------------------------


def test_the_alerts_of_the_seed_become_rules_with_a_word_about_their_names(tmp_path: Path) -> None:
    failovers = written(
        "frequent_failovers",
        "rate(forge_leader_failovers_total[5m]) > 5",
        0.0,
        "warning",
        notify=("slack:#ops",),
        line=10,
    )
    (one, first), (two, second) = from_rule(written()), from_rule(failovers)
    assert "2 rules found" in checked([one, two], tmp_path)
    assert first == [
        "alert 'no_scheduler_leader' in line 3: forge_leader_is_leader is written as pgleaderlock_is_leader"
    ]
    assert [note.split(": ")[1] for note in second] == [
        "forge_leader_failovers_total is written as pgleaderlock_failovers_total"
    ]
    assert yaml.safe_load(rules_yaml([one, two])) == {
        "groups": [
            {
                "name": "pgleaderlock",
                "rules": [
                    {
                        "alert": "no_scheduler_leader",
                        "expr": "sum(pgleaderlock_is_leader{role='scheduler'}) == 0",
                        "for": "30s",
                        "labels": {"severity": "critical", "notify_pagerduty": "default"},
                        "annotations": {
                            "summary": "no scheduler leader",
                            "description": "The condition holds: sum(pgleaderlock_is_leader{role='scheduler'}) == 0",
                        },
                    },
                    {
                        "alert": "frequent_failovers",
                        "expr": "rate(pgleaderlock_failovers_total[5m]) > 5",
                        "labels": {"severity": "warning", "notify_slack": "#ops"},
                        "annotations": {
                            "summary": "frequent failovers",
                            "description": "The condition holds: rate(pgleaderlock_failovers_total[5m]) > 5",
                        },
                    },
                ],
            }
        ]
    }


@pytest.mark.parametrize(
    ("condition", "ours"),
    [
        ("forge_leader_tenure_seconds > 1", "pgleaderlock_tenure_seconds > 1"),
        ('x{of="forge_leader_is_leader"} > 0', 'x{of="forge_leader_is_leader"} > 0'),
        ("x{of='it\\'s forge_leader_is_leader'}", "x{of='it\\'s forge_leader_is_leader'}"),
        ("my_forge_leader_is_leader == 0", "my_forge_leader_is_leader == 0"),
        ("forge_leader_is_leader + forge_leader_is_leader", "pgleaderlock_is_leader + pgleaderlock_is_leader"),
    ],
)
def test_names_are_translated_and_what_is_in_quotes_is_left_alone(condition: str, ours: str) -> None:
    assert translated(condition)[0] == ours


def test_a_name_that_does_not_exist_is_said_to_be_silent_for_ever() -> None:
    _, notes = translated("forge_leader_coffee > 1 and pgleaderlock_acquire_latency_seconds_count > 1")
    assert len(notes) == 2
    assert notes[1].startswith("pgleaderlock_coffee is no metric of ours, so this alert can never fire")


@pytest.mark.parametrize(
    ("notify", "labels"),
    [
        ((), {}),
        (("pagerduty",), {"pagerduty": "default"}),
        (("pagerduty", "slack:#ops"), {"pagerduty": "default", "slack": "#ops"}),
        (("slack:#ops", "slack:#ops"), {"slack": "#ops"}),
    ],
)
def test_receivers_become_labels(notify: tuple[str, ...], labels: dict[str, str]) -> None:
    assert from_rule(written(notify=notify))[0].notify == labels


@pytest.mark.parametrize("notify", [("Pager Duty",), (":#ops",), ("",), ("slack:#ops", "slack:#dev"), ("slack:",)])
def test_receivers_that_cannot_be_labels_are_refused_with_their_line(notify: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match="line 3"):
        from_rule(written(notify=notify))


def test_an_alert_of_ones_own_takes_the_place_of_the_default() -> None:
    own, _ = from_rule(written("PgleaderlockNoLeader", "vector(0) > 1"))
    found = merged(default_alerts(), [own])
    assert [alert.condition for alert in found if alert.name == "PgleaderlockNoLeader"] == ["vector(0) > 1"]
    assert len(found) == len(default_alerts())


def test_any_text_survives_the_way_through_yaml(tmp_path: Path) -> None:
    odd = 'a: "b" \\ {{ nothing }} # \x7f \u2028 \U0001f600\n- x\t'
    alert, _ = from_rule(written(name=odd, condition="vector(1) > 0\n  and on () vector(2)"))
    checked([alert], tmp_path)
    (rule,) = yaml.safe_load(rules_yaml([alert]))["groups"][0]["rules"]
    assert rule["alert"] == odd
    assert rule["expr"] == "vector(1) > 0\n  and on () vector(2)"


def test_a_role_of_any_name_can_be_named(tmp_path: Path) -> None:
    checked(default_alerts(Expected(roles=('a"b\\', "c.d|e", "{{ f }}", "g\nh"))), tmp_path)


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0.25, "250ms"),
        (1, "1s"),
        (1.5, "1500ms"),
        (60, "1m"),
        (90, "90s"),
        (3600, "1h"),
        (5400, "90m"),
        (0.0001, "1ms"),
    ],
)
def test_durations_as_prometheus_writes_them(seconds: float, written: str) -> None:
    assert duration(seconds) == written


def test_no_alert_at_all_is_a_file_too(tmp_path: Path) -> None:
    checked([], tmp_path)


def test_the_table_of_metrics_has_each_name_once_with_its_unit_last() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert re.fullmatch(r"pgleaderlock_[a-z_]+", metric.name)


# -- the command ------------------------------------------------------------------------------------------------------

SEED = """
[cluster.leader_election]
check_interval = "5s"
lease_duration = "60s"
refresh_interval = "30s"
lock_timeout = "10s"

[roles.scheduler]

[[alerts]]
name = "no_scheduler_leader"
condition = "sum(forge_leader_is_leader{role='scheduler'}) == 0"
for = "30s"
severity = "critical"
notify = ["pagerduty"]

[[alerts]]
name = "frequent_failovers"
condition = "rate(forge_leader_failovers_total[5m]) > 5"
severity = "warning"
notify = ["slack:#ops"]
"""


def test_export_writes_the_rules_of_a_configuration_and_warns_on_standard_error(tmp_path: Path) -> None:
    (tmp_path / "pgleaderlock.toml").write_text(SEED)
    done = command("alerts", "export", "--config", str(tmp_path / "pgleaderlock.toml"), "--role", "mail")
    assert done.code == 0, done.err
    rules = yaml.safe_load(done.out)["groups"][0]["rules"]
    assert [(rule["alert"], rule.get("for")) for rule in rules] == [
        ("PgleaderlockNoLeader", "91s"),  # T = 60 s, two scrapes, one second
        ("PgleaderlockTwoLeaders", "30s"),
        ("PgleaderlockFrequentFailovers", None),
        ("PgleaderlockHeartbeatLate", "90s"),
        ("PgleaderlockNoSession", "1m"),
        ("PgleaderlockDrainStuck", "1m"),
        ("no_scheduler_leader", "30s"),
        ("frequent_failovers", None),
    ]
    assert re.findall('role="(.*?)"', rules[0]["expr"]) == ["scheduler", "mail"]
    assert done.err.count("warning:") == 2
    assert "forge_leader_is_leader is written as pgleaderlock_is_leader" in done.err
    (tmp_path / "rules.yml").write_text(done.out)
    assert promtool("check", "rules", tmp_path / "rules.yml").returncode == 0


def test_the_job_and_the_place_of_the_runbooks_can_be_told() -> None:
    done = command("alerts", "export", "--role", "mail", "--job", "app", "--runbooks", "https://wiki.example/pgl")
    assert done.code == 0, done.err
    rules = yaml.safe_load(done.out)["groups"][0]["rules"]
    assert 'absent(pgleaderlock_node_info{job="app",namespace="pgleaderlock",role="mail"})' in rules[0]["expr"]
    assert rules[0]["annotations"]["runbook_url"] == "https://wiki.example/pgl#pgleaderlocknoleader"


def test_durations_in_milliseconds_are_recorded_on_request(tmp_path: Path) -> None:
    recorded = rules_yaml([], ms_names=True)
    (tmp_path / "rules.yml").write_text(recorded)
    bounds = ("0.0005", "3.0", "+Inf")
    series = {f'pgleaderlock_heartbeat_update_seconds_bucket{{le="{bound}"}}': "7x4" for bound in bounds}
    series |= {"pgleaderlock_heartbeat_update_seconds_sum": "1.5x4", "pgleaderlock_heartbeat_age_seconds": "0.25x4"}
    expected = {f'pgleaderlock_heartbeat_update_ms_bucket{{le="{bound}"}}': 7 for bound in ("0.5", "3000.0", "+Inf")}
    expected |= {"pgleaderlock_heartbeat_update_ms_sum": 1500, "pgleaderlock_heartbeat_age_ms": 250}
    test = {
        "rule_files": [str(tmp_path / "rules.yml")],
        "tests": [
            {
                "interval": "15s",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "promql_expr_test": [
                    {"expr": '{__name__=~"pgleaderlock.*_ms.*"}', "eval_time": "1m", "exp_samples": samples}
                    for samples in [[{"labels": name, "value": value} for name, value in expected.items()]]
                ],
            }
        ],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test))
    done = promtool("test", "rules", tmp_path / "test.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    names = {re.sub("(_ms)_.*", r"\1", rule["record"]) for rule in yaml.safe_load(recorded)["groups"][1]["rules"]}
    ours = {f"pgleaderlock_{name}" for name in ("heartbeat_age_ms", "acquire_latency_ms", "heartbeat_update_ms")}
    assert names == ours | {"lock_op_latency_ms"}


def test_every_bucket_is_recorded_in_milliseconds() -> None:
    election = ElectionMetrics(LeaderElection("", "a", standalone=True), CollectorRegistry()).exposition().decode()
    lock_server = Metrics().exposition().decode()
    for metric, text, labels in (
        ("pgleaderlock_acquire_latency", election, ""),
        ("pgleaderlock_heartbeat_update", election, ""),
        ("lock_op_latency", lock_server, ',op="renew"'),
    ):
        shown = re.findall(rf'{metric}_seconds_bucket{{le="([^"]*)"{labels}', text)
        recorded = re.findall(rf"{metric}_seconds_bucket{{le=\\\"(.*?)\\\"}}", rules_yaml([], ms_names=True))
        assert recorded == shown


def test_a_name_in_milliseconds_says_where_it_comes_from() -> None:
    _, (note,) = translated("pgleaderlock_heartbeat_age_ms > 5000")
    assert note.endswith("record it: nodes export pgleaderlock_heartbeat_age_seconds")


MISREAD = {
    "sum(pgleaderlock_is_leader == 0": "( is not closed",
    "sum pgleaderlock_is_leader) == 0": ") closes nothing",
    "sum(x{role='a'] ) == 0": "] closes nothing",
    "x{role='a} == 0": "the quote ' is not closed",
    "x = 0": "= compares labels only",
    "x == 0 && y == 0": "'&' means nothing",
    "x == 0;": "';' means nothing",
    "x == ": "something is missing after ==",
    "x > 1 and": "something is missing after and",
    "# nothing": "it is empty",
}
READ = (
    "sum by (job) (rate(x{a=~'b|c', d!=\"e\"}[5m] offset 1h)) > 1e3 and on () vector(1) # why",
    '-x ^ 2 % 3 >= bool 0x1F or absent(up{job=`a"b`} @ end())',
    "max_over_time(x[1h:30s]) != Inf",
)


@pytest.mark.parametrize("condition", MISREAD)
def test_what_prometheus_would_refuse_is_refused_here_with_its_line(condition: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="line 3.*" + re.escape(MISREAD[condition])):
        from_rule(written(condition=condition))
    (tmp_path / "rules.yml").write_text(rules_yaml([replace(default_alerts()[0], condition=condition)]))
    assert promtool("check", "rules", tmp_path / "rules.yml").returncode != 0, "we refuse nothing that promtool takes"


@pytest.mark.parametrize("condition", READ)
def test_what_prometheus_takes_is_not_refused_here(condition: str, tmp_path: Path) -> None:
    checked([from_rule(written(condition=condition))[0]], tmp_path)


def test_every_default_alert_has_a_runbook() -> None:
    page = (Path(__file__).parents[2] / "docs" / "runbooks.md").read_text()
    names = [alert.name for alert in default_alerts()]
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == names
    for rule in yaml.safe_load(rules_yaml(default_alerts()))["groups"][0]["rules"]:
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks.md#{rule['alert'].lower()}"


def test_list_shows_the_same_for_people(tmp_path: Path) -> None:
    (tmp_path / "pgleaderlock.toml").write_text(SEED)
    done = command("alerts", "list", "--config", str(tmp_path / "pgleaderlock.toml"), "--no-defaults")
    assert (done.code, done.out) == (
        0,
        (
            "no_scheduler_leader: critical, after 30s, to pagerduty\n"
            "    sum(pgleaderlock_is_leader{role='scheduler'}) == 0\n"
            "frequent_failovers: warning, to slack:#ops\n"
            "    rate(pgleaderlock_failovers_total[5m]) > 5\n"
        ),
    )


def test_every_default_alert_is_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "alerts.md").read_text()
    rows = re.findall(r"^\| `(Pgleaderlock\w+)` \| (\w+) \|", page, re.MULTILINE)
    assert rows == [(alert.name, alert.severity) for alert in default_alerts()]
