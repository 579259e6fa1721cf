"""Alerts for Prometheus: the default set, and `[[alerts]]` of a configuration, written as alerting rules.

This module sends nothing: Prometheus evaluates the rules, and Alertmanager notifies people. `notify` becomes labels by
which Alertmanager chooses the receiver: `pagerduty` is `notify_pagerduty="default"`, `slack:#ops` is
`notify_slack="#ops"`.

It must never write a rule on a metric that does not exist without a warning: such an alert could never fire.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from pgleaderlock._config.load import defaults, timing_of
from pgleaderlock._config.schema import ELECTION
from pgleaderlock._election.metric_table import (
    BUCKETS_S,
    MS_NAMES,
    PREFIX,
    metric_names,
    unknown_names,
    words_outside_strings,
)
from pgleaderlock.config import AlertRule
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.keys import DEFAULT_NAMESPACE

__all__ = ["Alert", "Expected", "default_alerts", "from_rule", "merged", "misread", "rules_yaml", "translated"]

FOREIGN_PREFIX = "forge_leader_"
GROUP = "pgleaderlock"
# How long an unnamed role is remembered after its last node has gone.
MEMORY_S = 3_600.0
# The page that says what to do. `--runbooks` gives another one.
RUNBOOKS = "docs/runbooks.md"
_INFO = f"{PREFIX}node_info"
# The labels of a role, of a node, and of one node's series for one role.
_ROLE = "job, namespace, role"
_NODE = "job, namespace, instance, node"
_SERIES = "job, instance, role"
_DEFAULT = timing_of(defaults(ELECTION))
_TOKEN = re.compile(
    r"""(?P<space>\s+|\#[^\n]*)|(?P<open>[({\[])|(?P<close>[)}\]])|(?P<sign>[=!]~|[=!<>]=|[-=<>+*/%^,@])"""
    r"""|(?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|`[^`]*`)|(?P<word>[\w:.]+)""",
    re.ASCII,
)
_CLOSES = {")": "(", "}": "{", "]": "["}
# The words and signs after which a condition must go on.
_BINARY = frozenset(
    (
        "==",
        "!=",
        "<=",
        ">=",
        "=~",
        "!~",
        "and",
        "or",
        "unless",
        "on",
        "ignoring",
        "by",
        "without",
        "offset",
        "bool",
        *"+-*/%^=<>,@",
    )
)
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
    """The receivers: the kind of each, and which one of that kind."""
    has_runbook: bool = True
    """Whether docs/runbooks.md has a section for the alert. Your own alerts have none there."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The normal values of this installation, from which the thresholds follow."""

    scrape_interval_s: float = 15.0
    heartbeat_interval_s: float = _DEFAULT.heartbeat_interval_s
    late_threshold_s: float = _DEFAULT.gate_s
    """G: how long a heartbeat keeps the gate open."""
    session_lease_s: float = _DEFAULT.lease_s
    """T: the longest that a successor waits for a leader that was lost."""
    failovers_max: int = 3
    failover_window_s: float = 900.0
    drain_s: float = 60.0
    roles: tuple[str, ...] = ()
    """Roles that must have a leader whether or not any node has ever been seen."""
    namespace: str = DEFAULT_NAMESPACE
    """The namespace of the named roles."""
    job: str | None = None
    """The job under which their nodes are scraped. None: any job."""

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
        _no_leader(usual),
        _two_leaders(usual),
        _frequent_failovers(usual),
        _late_heartbeat(usual),
        _no_session(usual),
        _stuck_drain(usual),
    )


def _no_leader(usual: Expected) -> Alert:
    # A failover takes T and ends with the next scrape; the last scrape before it may be one interval older.
    for_s = math.ceil(usual.session_lease_s + 2 * usual.scrape_interval_s) + 1
    nobody = f"max by ({_ROLE}) ({_named('gate_open')}) == 0"
    # When the last node has gone, its series end, too: take the roles of the last hour from past samples.
    all_gone = (
        f"(max by ({_ROLE}) (last_over_time({_INFO}[{duration(MEMORY_S)}])) * 0"
        f" unless on (job, namespace) count by (job, namespace) ({_INFO}))"
    )
    # Named roles are missed without a time limit. They are in the same rule because, with a job, they have the same
    # labels as the others, and two rules must not produce the same series.
    of_ours = {"job": usual.job, "namespace": usual.namespace}
    never = [f"absent({_INFO}{{{_matchers({**of_ours, 'role': role})}}})" for role in usual.roles]
    return Alert(
        "PgleaderlockNoLeader",
        " or ".join([f"({nobody})", all_gone, *never]),
        for_s,
        "critical",
        "Nobody leads {{ $labels.role }}",
        "No gate of this role has been open for longer than a failover takes: its work does not get done.",
    )


def _two_leaders(usual: Expected) -> Alert:
    gates = _named("gate_open")
    return Alert(
        "PgleaderlockTwoLeaders",
        # One alert for each of the nodes that act.
        f"({gates} == 1) * on ({_ROLE}) group_left () (sum by ({_ROLE}) ({gates}) > 1)",
        # Nodes are scraped one after the other: for one interval a handover looks like two leaders.
        2 * usual.scrape_interval_s,
        "critical",
        "{{ $value }} nodes act for {{ $labels.role }}, {{ $labels.node }} is one of them",
        "More than one gate of this role is open. One database cannot do that: look for a second primary, a second "
        "database, or two applications under one job.",
    )


def _frequent_failovers(usual: Expected) -> Alert:
    window = duration(usual.failover_window_s)
    # Include nodes that have died since; one series for each, because an address may have had several nodes meanwhile.
    names = f"topk by ({_SERIES}) (1, last_over_time({_INFO}[{window}]))"

    def too_many(series: str, labels: str = _ROLE) -> str:
        found = f"increase({PREFIX}{series}[{window}]) * on ({_SERIES}) group_left (node, namespace) {names}"
        # Half of one more: increase() extrapolates beyond the samples that it has.
        return f"(sum by ({labels}) ({found}) > {usual.failovers_max + 0.5})"

    lost = 'lost_total{reason="lost"}'
    by_one_node, by_several = too_many(lost, f"{_ROLE}, node"), too_many(lost)
    return Alert(
        "PgleaderlockFrequentFailovers",
        # A node that wins its own lost role again is not a failover, but has lost a term. Losses and failovers are not
        # added, because many losses are failovers as well. The alert names the node if it alone has lost too many.
        f" or on ({_ROLE}) ".join([by_one_node, too_many("failovers_total"), by_several]),
        0.0,
        "warning",
        "{{ $labels.role }} changes hands too often{{ with $labels.node }}: {{ . }} loses it{{ end }}",
        f"More than {usual.failovers_max} leaders of this role were lost within {window}: they crash, are killed, or "
        "cannot keep their session.",
    )


def _late_heartbeat(usual: Expected) -> Alert:
    window_s = 4 * usual.scrape_interval_s
    # The normal age is at most the interval, and at G the gate shuts: alert half way between the two.
    limit_s = (usual.heartbeat_interval_s + usual.late_threshold_s) / 2
    oldest = f"max_over_time({PREFIX}heartbeat_age_seconds[{duration(window_s)}])"
    return Alert(
        "PgleaderlockHeartbeatLate",
        f"max by ({_NODE}) ({_joined(oldest)}) > {limit_s:g}",
        # Longer than the window: a single late heartbeat is no alert.
        window_s + 2 * usual.scrape_interval_s,
        "warning",
        "Heartbeats of {{ $labels.node }} are late",
        f"The database acknowledges heartbeats late, again and again. At {usual.late_threshold_s:g} s the gate shuts: "
        "look at the database's load, the network, and the node's own CPU.",
    )


def _no_session(usual: Expected) -> Alert:
    competes = f'({PREFIX}state{{state="follower"}} == 1)'
    return Alert(
        "PgleaderlockNoSession",
        f"count by ({_NODE}) ({_joined(competes)}) unless count by ({_NODE}) ({_named('heartbeat_age_seconds')})",
        4 * usual.scrape_interval_s,
        "warning",
        "{{ $labels.node }} has no session with the database",
        "This node runs, and can neither lead nor take over any of its {{ $value }} roles: it does not reach the "
        "database, or is refused. Its log says why.",
    )


def _stuck_drain(usual: Expected) -> Alert:
    return Alert(
        "PgleaderlockDrainStuck",
        f"max by (role, {_NODE}) ({_named('draining')}) == 1",
        usual.drain_s,
        "warning",
        "{{ $labels.node }} cannot give {{ $labels.role }} up",
        "Work in flight does not end, so that the lock is not released and nobody else can lead. `pgleaderlock drain "
        "--work-timeout 30s {{ $labels.node }}` would end it.",
    )


def _named(metric: str) -> str:
    return _joined(PREFIX + metric)


def _joined(series: str) -> str:
    """The series with the labels for node and namespace added. Each role has one series per instance."""
    return f"{series} * on ({_SERIES}) group_left (node, namespace) {_INFO}"


# --- The sections [[alerts]] of a configuration


def misread(condition: str) -> str | None:
    """Why Prometheus would refuse a condition, as far as its characters show; None if nothing is wrong.

    This is not a parser: only `promtool check rules` checks functions, types and the order of words.
    """
    open_: list[str] = []
    last = ""
    at = 0
    while at < len(condition):
        found = _TOKEN.match(condition, at)
        if found is None:
            char = condition[at]
            return f"the quote {char} is not closed" if char in "\"'`" else f"{char!r} means nothing in PromQL"
        at, kind, text = found.end(), found.lastgroup, found[0]
        if kind == "space":
            continue
        if kind == "open":
            open_.append(text)
        elif kind == "close" and (not open_ or _CLOSES[text] != open_.pop()):
            return f"{text} closes nothing"
        elif text == "=" and (not open_ or open_[-1] != "{"):
            return "= compares labels only: values are compared by =="
        last = text
    if open_:
        return f"{open_[-1]} is not closed"
    if not last:
        return "it is empty"
    return f"something is missing after {last}" if last in _BINARY else None


def translated(condition: str) -> tuple[str, list[str]]:
    """The condition with our metrics' names, and notes about what was changed or is unknown."""
    notes: list[str] = []
    parts, at = [], 0
    for word in words_outside_strings(condition):
        if word[2].startswith(FOREIGN_PREFIX):
            name = PREFIX + word[2].removeprefix(FOREIGN_PREFIX)
            notes.append(f"{word[2]} is written as {name}")
            parts += [condition[at : word.start(2)], name]
            at = word.end(2)
    found = "".join([*parts, condition[at:]])
    known = ", ".join(sorted(name.removeprefix(PREFIX) for name in metric_names()))
    for name in unknown_names(found):
        ours = MS_NAMES.get(re.sub("(_ms)_(?:bucket|sum|count)$", r"\1", name))
        notes.append(
            f"{name} is no metric of ours, so this alert can never fire: after {PREFIX} comes one of {known}"
            if ours is None
            else f"{name} exists only where rules of `alerts export --ms-names` record it: nodes export {ours}"
        )
    return found, list(dict.fromkeys(notes))


def from_rule(rule: AlertRule) -> tuple[Alert, list[str]]:
    """The alert of one `[[alerts]]`, and notes about its condition."""
    if mistake := misread(rule.condition):
        raise ConfigurationError(f"{_where(rule)}: Prometheus would refuse the condition: {mistake}")
    condition, notes = translated(rule.condition)
    alert = Alert(
        rule.name,
        condition,
        rule.for_s,
        rule.severity,
        _literal(rule.name.replace("_", " ")),
        _literal(f"The condition holds: {condition}"),
        notify=_receivers(rule),
        has_runbook=False,
    )
    return alert, [f"{_where(rule)}: {note}" for note in notes]


def merged(defaults: Iterable[Alert], own: Iterable[Alert]) -> tuple[Alert, ...]:
    """The defaults, then the user's own alerts; one with the name of a default replaces it."""
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


# --- Written for Prometheus


def rules_yaml(alerts: Iterable[Alert], *, runbooks: str = RUNBOOKS, ms_names: bool = False) -> str:
    """A file for `rule_files:` of prometheus.yml.

    runbooks: the page with a section for each default alert, to which their annotation `runbook_url` points.
    ms_names: record the durations in milliseconds, too, under the names that end in `_ms`.
    """
    lines = ["groups:", f"  - name: {_scalar(GROUP)}", "    rules:"]
    count = 0
    for alert in alerts:
        count += 1
        labels = {"severity": alert.severity}
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
            *([f"          runbook_url: {_scalar(f'{runbooks}#{alert.name.lower()}')}"] if alert.has_runbook else []),
        ]
    if not count:
        lines[-1] += " []"
    if ms_names:
        lines += [f"  - name: {_scalar(f'{GROUP}-ms')}", "    rules:"]
        for name, condition in _ms_rules():
            lines += [f"      - record: {name}", f"        expr: {_scalar(condition)}"]
    return "\n".join([*lines, ""])


def _ms_rules() -> Iterator[tuple[str, str]]:
    """The durations of the table in milliseconds: the name, and the expression for it."""
    for name, ours in MS_NAMES.items():
        bounds_s = BUCKETS_S.get(ours)
        if bounds_s is None:
            yield name, f"{ours} * 1000"
            continue
        yield f"{name}_sum", f"{ours}_sum * 1000"
        yield f"{name}_count", f"{ours}_count"
        # A bucket's bound is a label: text, which only a rule for each of them can change.
        for bound_s in (*bounds_s, math.inf):
            old, new = ("+Inf" if bound == math.inf else str(bound) for bound in (bound_s, bound_s * 1_000))
            yield f"{name}_bucket", f'label_replace({ours}_bucket{{le="{old}"}}, "le", "{new}", "", "")'


def duration(seconds: float) -> str:
    """A duration in Prometheus's format: a whole number with the largest unit that fits."""
    ms = math.ceil(round(seconds * 1_000, 6))
    for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1_000)):
        if ms and ms % size == 0:
            return f"{ms // size}{unit}"
    return f"{ms}ms"


def _scalar(text: str) -> str:
    """A YAML string: quoted as in JSON, with escapes for characters that YAML does not allow."""
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in quoted)


def _quoted(text: str) -> str:
    """A string in PromQL."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _matchers(labels: Mapping[str, str | None]) -> str:
    return ",".join(f"{name}={_quoted(value)}" for name, value in labels.items() if value is not None)


def _literal(text: str) -> str:
    """Text for a label or an annotation, which Prometheus reads as a template."""
    return re.sub(r"\{\{", '{{ "{{" }}', text)
