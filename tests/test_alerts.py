"""The alerts as Prometheus sees them: `promtool` evaluates each one on a recorded scenario, and on healthy ones."""

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from pgleaderlock._metric_table import METRICS, unknown_names
from pgleaderlock.alerts import Alert, Expected, default_alerts, duration, from_rule, merged, rules_yaml, translated
from pgleaderlock.config import AlertRule
from pgleaderlock.errors import ConfigurationError
from support.deps import debian_tool
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
    file = folder / "rules.yml"
    file.write_text(rules_yaml(alerts))
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
    ("heartbeat_age_ms", "a"): "400 3000 1900 " * 106,
    ("heartbeat_age_ms", "b"): "2900 100 1500 " * 106,
    ("heartbeat_age_ms", "c"): "800 2200 3010 " * 106,
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


ROLE = {"job": "app", "role": "billing"}
NODE_A, NODE_B = {"job": "app", "instance": "a"}, {"job": "app", "instance": "b"}
NO_LEADER = ("PgleaderlockNoLeader", {**ROLE, "severity": "critical"})
TWO_LEADERS = ("PgleaderlockTwoLeaders", {**ROLE, "severity": "critical"})
FAILOVERS = ("PgleaderlockFrequentFailovers", {**ROLE, "severity": "warning"})
LATE = ("PgleaderlockHeartbeatLate", {**NODE_A, "severity": "warning"})
NO_SESSION = ("PgleaderlockNoSession", {**NODE_B, "severity": "warning"})
STUCK = ("PgleaderlockDrainStuck", {**NODE_A, "role": "billing", "severity": "warning"})

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
        gone("a", "b", "c"),
        {"1m30s": [], "2m": [("PgleaderlockNoLeader", {"role": "billing", "severity": "critical"})]}
        | {"1h15m": [("PgleaderlockNoLeader", {"role": "billing", "severity": "critical"})]},
        Expected(roles=("billing",)),
    ),
    "a_named_role_that_nobody_was_ever_seen_with": Scenario(
        {},
        {"30s": [], "1m": [("PgleaderlockNoLeader", {"role": "mail", "severity": "critical"})]},
        Expected(roles=("mail",)),
    ),
    "a_role_was_removed_on_purpose": Scenario(
        {key: values for key, values in gone("a", "b", "c").items() if key[0] != "heartbeat_age_ms"}
        | {("gate_open", "a", "other"): "1x320"},
        {"2m": [], "30m": []},
    ),
    "two_lead": Scenario({("gate_open", "b"): "0x3 1x300"}, {"1m15s": [], "1m45s": [TWO_LEADERS], "1h": [TWO_LEADERS]}),
    "a_handover_seen_from_two_scrapes": Scenario(
        {("gate_open", "a"): "1x8 0x300", ("gate_open", "b"): "0x7 1x300"},
        {f"{seconds}s": [] for seconds in range(90, 240, 15)},
    ),
    "five_failovers_in_ten_minutes": Scenario(
        {("failovers_total", "b"): "0x8 1x8 2x8 3x8 4x8 5x250"}, {"2m30s": [], "11m": [FAILOVERS], "40m": []}
    ),
    "three_failovers_in_ten_minutes": Scenario(
        {("failovers_total", "b"): "1x8 2x8 3x8 4x290"}, {f"{minutes}m": [] for minutes in range(1, 30)}
    ),
    "three_failovers_in_an_hour": Scenario(
        {("failovers_total", "b"): "0x80 1x80 2x80 3x60"}, {f"{minutes}m": [] for minutes in range(5, 75, 5)}
    ),
    "heartbeats_are_late_again_and_again": Scenario(
        {("heartbeat_age_ms", "a"): "400 3000 1900 5200 " * 80}, {"1m30s": [], "3m": [LATE], "1h": [LATE]}
    ),
    "one_heartbeat_was_late": Scenario(
        {("heartbeat_age_ms", "a"): "400 3000 1900 5200 " + "400 3000 1900 " * 80},
        {f"{seconds}s": [] for seconds in range(15, 300, 15)},
    ),
    "a_node_has_no_session": Scenario(
        {("heartbeat_age_ms", "b"): GONE_AFTER_1_MIN["heartbeat_age_ms", "b"]},
        {"1m45s": [], "2m15s": [NO_SESSION], "1h": [NO_SESSION]},
    ),
    "a_node_is_switched_off": Scenario(
        {("heartbeat_age_ms", "b"): GONE_AFTER_1_MIN["heartbeat_age_ms", "b"], ("state", "b", "follower"): "0x320"},
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
    name, instance, *more = key
    extra = f',state="{more[0]}"' if name == "state" else ""
    role = more[0] if more and name != "state" else "billing"
    return f'pgleaderlock_{name}{{job="app",instance="{instance}",role="{role}"{extra}}}'


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
    assert "> 42000" in alerts["PgleaderlockHeartbeatLate"].condition  # half way from 30 s to 54 s
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
    _, notes = translated("forge_leader_coffee > 1 and pgleaderlock_acquire_latency_ms_count > 1")
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
        ("PgleaderlockNoLeader", "91s"),
        ("PgleaderlockNoLeader", "91s"),
        ("PgleaderlockTwoLeaders", "30s"),
        ("PgleaderlockFrequentFailovers", None),
        ("PgleaderlockHeartbeatLate", "90s"),
        ("PgleaderlockNoSession", "1m"),
        ("PgleaderlockDrainStuck", "1m"),
        ("no_scheduler_leader", "30s"),
        ("frequent_failovers", None),
    ]
    assert [rule["labels"]["role"] for rule in rules if "role" in rule["labels"]] == ["scheduler", "mail"]
    assert done.err.count("warning:") == 2
    assert "forge_leader_is_leader is written as pgleaderlock_is_leader" in done.err
    (tmp_path / "rules.yml").write_text(done.out)
    assert promtool("check", "rules", tmp_path / "rules.yml").returncode == 0


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
    page = (Path(__file__).parents[1] / "docs" / "alerts.md").read_text()
    rows = re.findall(r"^\| `(Pgleaderlock\w+)` \| (\w+) \|", page, re.MULTILINE)
    assert rows == [(alert.name, alert.severity) for alert in default_alerts()]
