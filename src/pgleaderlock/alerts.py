"""Alerts for Prometheus: the default set, and `[[alerts]]` of a configuration, written as alerting rules.

Nothing here sends anything: Prometheus decides, Alertmanager tells people. `notify` becomes labels by which
Alertmanager chooses: `pagerduty` is `notify_pagerduty="default"`, `slack:#ops` is `notify_slack="#ops"`.

Imports `_metric_table`, `config`, `errors` and the standard library. It must never write a rule whose condition names
a metric that does not exist without saying so: such an alert would be silent for ever.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from pgleaderlock._metric_table import PREFIX, metric_names, unknown_names, words_outside_strings
from pgleaderlock.config import AlertRule
from pgleaderlock.errors import ConfigurationError

__all__ = ["Alert", "Expected", "default_alerts", "from_rule", "merged", "rules_yaml", "translated"]

FOREIGN_PREFIX = "forge_leader_"
GROUP = "pgleaderlock"
# How long a role is remembered after the last node that knew it has gone, unless it is named.
MEMORY_S = 3_600.0
_CHANNEL = re.compile(r"([a-z][a-z0-9_]*)(?::(.+))?")


@dataclass(frozen=True, slots=True)
class Alert:
    """One alerting rule."""

    name: str
    condition: str
    for_s: float
    severity: str
    summary: str
    description: str
    notify: dict[str, str] = field(default_factory=dict)
    """Where to: the kind of receiver, and which one of that kind."""
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Expected:
    """What is normal here. The thresholds follow from it."""

    scrape_interval_s: float = 15.0
    heartbeat_interval_s: float = 3.0
    late_threshold_s: float = 6.0
    """G: so long a heartbeat keeps the gate open."""
    session_lease_s: float = 7.0
    """T: so long a successor waits for a leader that was lost."""
    failovers_max: int = 3
    failover_window_s: float = 900.0
    drain_s: float = 60.0
    roles: tuple[str, ...] = ()
    """Roles that must have a leader whether or not any node has ever been seen."""

    def __post_init__(self) -> None:
        for name in ("scrape_interval_s", "heartbeat_interval_s", "failover_window_s", "drain_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigurationError(f"{name} must be longer than zero")
        if self.failovers_max < 1:
            raise ConfigurationError("failovers_max must be at least 1: every death of a leader is one failover")


def default_alerts(expected: Expected | None = None) -> tuple[Alert, ...]:
    """No leader, two leaders, frequent failovers, a late heartbeat, no session, a stuck drain."""
    usual = expected or Expected()
    return (
        *_no_leader(usual),
        _two_leaders(usual),
        _frequent_failovers(usual),
        _late_heartbeat(usual),
        _no_session(usual),
        _stuck_drain(usual),
    )


def _no_leader(usual: Expected) -> Iterator[Alert]:
    # A failover is over after T and the next scrape, and what the scrape before has shown is one interval older still.
    for_s = math.ceil(usual.session_lease_s + 2 * usual.scrape_interval_s) + 1
    text = "No gate of this role has been open for longer than a failover takes: its work does not get done."
    known = f"{{role!~{_quoted(_any_of(usual.roles))}}}" if usual.roles else ""
    nobody = f"max by (job, role) ({PREFIX}gate_open{known}) == 0"
    # When the last node has gone, so have its series: who has led until an hour ago is known from the past.
    all_gone = (
        f"(max by (job, role) (last_over_time({PREFIX}gate_open{known}[{duration(MEMORY_S)}])) * 0"
        f" unless on (job) count by (job) ({PREFIX}gate_open))"
    )
    yield Alert(
        "PgleaderlockNoLeader",
        f"({nobody}) or {all_gone}",
        for_s,
        "critical",
        "Nobody leads {{ $labels.role }}",
        text,
    )
    for role in usual.roles:
        yield Alert(
            "PgleaderlockNoLeader",
            f"absent({PREFIX}gate_open{{role={_quoted(role)}}} == 1)",
            for_s,
            "critical",
            f"Nobody leads {_literal(role)}",
            text,
            labels={"role": _literal(role)},
        )


def _two_leaders(usual: Expected) -> Alert:
    return Alert(
        "PgleaderlockTwoLeaders",
        f"sum by (job, role) ({PREFIX}gate_open) > 1",
        # Nodes are scraped one after the other: for one interval a handover looks like two leaders.
        2 * usual.scrape_interval_s,
        "critical",
        "{{ $value }} nodes act for {{ $labels.role }}",
        "More than one gate of this role is open. One database cannot do that: look for a second primary, a second "
        "database, or two applications under one job.",
    )


def _frequent_failovers(usual: Expected) -> Alert:
    window = duration(usual.failover_window_s)
    return Alert(
        "PgleaderlockFrequentFailovers",
        # Half a one more: increase() guesses what happened before and after the samples that it has.
        f"sum by (job, role) (increase({PREFIX}failovers_total[{window}])) > {usual.failovers_max + 0.5}",
        0.0,
        "warning",
        "{{ $labels.role }} changes hands too often",
        f"More than {usual.failovers_max} leaders of this role were lost within {window}: they crash, are killed, or "
        "cannot keep their session.",
    )


def _late_heartbeat(usual: Expected) -> Alert:
    window_s = 4 * usual.scrape_interval_s
    # Healthy ages end at the interval, and at G the gate shuts: half way between them is late, and still in time.
    limit_ms = (usual.heartbeat_interval_s + usual.late_threshold_s) / 2 * 1_000
    return Alert(
        "PgleaderlockHeartbeatLate",
        f"max by (job, instance) (max_over_time({PREFIX}heartbeat_age_ms[{duration(window_s)}])) > {limit_ms:g}",
        # Longer than the window: one that was late by itself rouses nobody.
        window_s + 2 * usual.scrape_interval_s,
        "warning",
        "Heartbeats of {{ $labels.instance }} are late",
        f"The database acknowledges heartbeats late, again and again. At {usual.late_threshold_s:g} s the gate shuts: "
        "look at the database's load, the network, and the node's own CPU.",
    )


def _no_session(usual: Expected) -> Alert:
    return Alert(
        "PgleaderlockNoSession",
        f'count by (job, instance) ({PREFIX}state{{state="follower"}} == 1)'
        f" unless count by (job, instance) ({PREFIX}heartbeat_age_ms)",
        4 * usual.scrape_interval_s,
        "warning",
        "{{ $labels.instance }} has no session with the database",
        "This node runs, and can neither lead nor take over: it does not reach the database, or is refused. Its log "
        "says why.",
    )


def _stuck_drain(usual: Expected) -> Alert:
    return Alert(
        "PgleaderlockDrainStuck",
        f"max by (job, instance, role) ({PREFIX}draining) == 1",
        usual.drain_s,
        "warning",
        "{{ $labels.instance }} cannot give {{ $labels.role }} up",
        "Work in flight does not end, so that the lock is not released and nobody else can lead. A drain with a "
        "timeout would end it.",
    )


# -- [[alerts]] -------------------------------------------------------------------------------------------------------


def translated(condition: str) -> tuple[str, list[str]]:
    """The condition in our names, and what there is to say about it."""
    notes: list[str] = []
    parts, at = [], 0
    for word in words_outside_strings(condition):
        if word[2].startswith(FOREIGN_PREFIX):
            ours = PREFIX + word[2].removeprefix(FOREIGN_PREFIX)
            notes.append(f"{word[2]} is written as {ours}")
            parts += [condition[at : word.start(2)], ours]
            at = word.end(2)
    found = "".join([*parts, condition[at:]])
    known = ", ".join(sorted(name.removeprefix(PREFIX) for name in metric_names()))
    notes += [
        f"{name} is no metric of ours, so this alert can never fire: after {PREFIX} comes one of {known}"
        for name in unknown_names(found)
    ]
    return found, list(dict.fromkeys(notes))


def from_rule(rule: AlertRule) -> tuple[Alert, list[str]]:
    """The alert of one `[[alerts]]`, and what there is to say about it."""
    condition, notes = translated(rule.condition)
    alert = Alert(
        rule.name,
        condition,
        rule.for_s,
        rule.severity,
        _literal(rule.name.replace("_", " ")),
        _literal(f"The condition holds: {condition}"),
        notify=_receivers(rule),
    )
    return alert, [f"{_where(rule)}: {note}" for note in notes]


def merged(defaults: Iterable[Alert], own: Iterable[Alert]) -> tuple[Alert, ...]:
    """The defaults, then one's own; one of the same name takes the place of the default."""
    own = tuple(own)
    taken = {alert.name for alert in own}
    return (*(alert for alert in defaults if alert.name not in taken), *own)


def _receivers(rule: AlertRule) -> dict[str, str]:
    receivers: dict[str, str] = {}
    for text in rule.notify:
        found = _CHANNEL.fullmatch(text)
        if found is None:
            raise ConfigurationError(
                f"{_where(rule)}: notify = {text!r} is no receiver: write a kind such as pagerduty, or a kind and "
                "which one, such as slack:#ops"
            )
        kind, which = found[1], found[2] or "default"
        if receivers.setdefault(kind, which) != which:
            raise ConfigurationError(
                f"{_where(rule)} names two receivers of the kind {kind}, and an alert has one of a kind: let "
                "Alertmanager send to both, or write the alert twice under two names"
            )
    return receivers


def _where(rule: AlertRule) -> str:
    return f"alert {rule.name!r}" + (f" in line {rule.line}" if rule.line is not None else "")


# -- written for Prometheus -------------------------------------------------------------------------------------------


def rules_yaml(alerts: Iterable[Alert]) -> str:
    """A file for `rule_files:` of prometheus.yml."""
    lines = ["groups:", f"  - name: {_scalar(GROUP)}", "    rules:"]
    count = 0
    for alert in alerts:
        count += 1
        labels = {**alert.labels, "severity": alert.severity}
        labels |= {f"notify_{kind}": which for kind, which in alert.notify.items()}
        lines += [
            f"      - alert: {_scalar(alert.name)}",
            f"        expr: {_scalar(alert.condition)}",
            *([f"        for: {_scalar(duration(alert.for_s))}"] if alert.for_s else []),
            "        labels:",
            *(f"          {name}: {_scalar(value)}" for name, value in labels.items()),
            "        annotations:",
            f"          summary: {_scalar(alert.summary)}",
            f"          description: {_scalar(alert.description)}",
        ]
    if not count:
        lines[-1] += " []"
    return "\n".join([*lines, ""])


def duration(seconds: float) -> str:
    """As Prometheus writes it: whole numbers with a unit, the largest that fits."""
    ms = math.ceil(round(seconds * 1_000, 6))
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1_000)):
        if ms and ms % size == 0:
            return f"{ms // size}{unit}"
    return f"{ms}ms"


def _scalar(text: str) -> str:
    """A string in YAML. JSON's quotes are YAML's; what YAML does not allow unwritten is written as an escape."""
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in quoted)


def _quoted(text: str) -> str:
    """A string in PromQL."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _any_of(names: Sequence[str]) -> str:
    """A regular expression (RE2) for these names."""
    return "|".join(re.sub(r"([\\.+*?()|\[\]{}^$])", r"\\\1", name) for name in names)


def _literal(text: str) -> str:
    """Text for a label or an annotation, which Prometheus reads as a template."""
    return re.sub(r"\{\{", '{{ "{{" }}', text)
