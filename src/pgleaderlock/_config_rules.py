"""What settings must be to each other, said in the words of the file: which line, and which number would do.

The election checks the same relations when it is made (`_election_settings`), by the names of its keywords; a test
holds the two together. Here each error names the place to correct.

Imports `_config_read`, `_config_file`, `_config_duration`, `_conninfo`, `_election_settings`, `keys`, `errors`. Pure.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pgleaderlock import _election_settings
from pgleaderlock._config_duration import format_duration, parse_duration_s
from pgleaderlock._config_file import Problem
from pgleaderlock._config_read import Origin, RoleSettings, Value
from pgleaderlock._conninfo import check_dsn
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.keys import KeyPair, key_pair, key_pair_from_bigint

__all__ = ["Thresholds", "check", "gate_under_lease_s", "role_pair", "statement_timeout_s", "thresholds"]


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The three durations that hang together: the interval, G and T."""

    interval_s: float
    gate_s: float
    lease_s: float


def thresholds(values: Mapping[str, Value]) -> Thresholds:
    """With what was not given worked out: G from T, or from the interval; T from G."""
    interval_s = values["refresh_interval"].value
    gate_s, lease_s = values["late_threshold"].value, values["lease_duration"].value
    if gate_s is None:
        gate_s = 2 * interval_s if lease_s is None else gate_under_lease_s(lease_s)
    if lease_s is None:
        lease_s = gate_s + max(1.0, gate_s / 10)
    return Thresholds(interval_s, gate_s, lease_s)


def gate_under_lease_s(lease_s: float) -> float:
    """G, where T alone was given."""
    return lease_s - max(1.0, lease_s / 10)


def statement_timeout_s(gate_s: float) -> float:
    """How long a statement of the session may take, as the election sets it."""
    return max(1.0, gate_s / 2)


def check(values: Mapping[str, Value], roles: Sequence[RoleSettings], broken: Collection[str]) -> Iterator[Problem]:
    """Everything that does not fit together, or cannot be used. `broken` were told already, and are defaults here."""
    yield from _names(values)
    if not {"refresh_interval", "late_threshold", "lease_duration"} & set(broken):
        yield from _heartbeats(values)
        yield from _delays(values)
    yield from _combinations(values, roles)
    yield from _roles(roles, values["namespace"].value)


def _names(values: Mapping[str, Value]) -> Iterator[Problem]:
    namespace = values["namespace"]
    try:
        key_pair("any", namespace.value)
    except ConfigurationError as error:
        yield namespace.origin.problem(str(error))
    for key, refuse in (
        ("node_id", _election_settings.checked_node_id),
        ("listen_channel", _election_settings.check_channel),
        ("dsn", check_dsn),
    ):
        value = values[key]
        if value.value in (None, False):
            continue
        try:
            refuse(value.value)
        except ConfigurationError as error:
            yield value.origin.problem(str(error))


# --- Durations


def _heartbeats(values: Mapping[str, Value]) -> Iterator[Problem]:
    interval, gate, lease = values["refresh_interval"], values["late_threshold"], values["lease_duration"]
    found = thresholds(values)
    least_s = found.interval_s * _election_settings.JITTER
    if gate.value is not None and lease.value is not None and lease.value <= gate.value:
        remedy = f"raise lease_duration to {format_duration(gate.value + max(1.0, gate.value / 10))}, or leave it out"
        yield lease.origin.problem(f"{_said(lease)} must be longer than {_said(gate, with_origin=True)}", remedy)
    if found.gate_s <= least_s:
        shorter = f"shorten refresh_interval to {_below(found.gate_s / _election_settings.JITTER)}"
        if gate.value is None and lease.value is not None:
            remedy = f"raise lease_duration to {_above(max(least_s + 1, least_s / 0.9))}"
            text = (
                f"{_said(lease)} keeps the gate open for {format_duration(max(0.0, found.gate_s))} (G) only, and "
                f"{_said(interval, with_origin=True)}, stretched by up to a fifth, is not shorter"
            )
            remedy += f", or {shorter}" if found.gate_s > 0.001 else ""
            yield lease.origin.problem(text, remedy)
        else:
            text = (
                f"{_said(gate)} must be longer than {_said(interval, with_origin=True)}, stretched by up to a "
                "fifth, or the gate shuts between two heartbeats"
            )
            higher_s = parse_duration_s(_above(least_s))
            remedy = f"raise late_threshold to {format_duration(higher_s)}"
            if lease.value is not None and lease.value <= higher_s:
                remedy += f" and lease_duration to {_above(higher_s + max(1.0, higher_s / 10))}"
            yield gate.origin.problem(text, f"{remedy}, or {shorter}")
    if found.lease_s > _election_settings.LEASE_S_MAX:
        text = f"a lease_duration of {format_duration(found.lease_s)} is too long"
        yield _place(lease, gate, interval).problem(text, f'give at most "{_election_settings.LEASE_S_MAX:.0f}s"')


def _delays(values: Mapping[str, Value]) -> Iterator[Problem]:
    found, delays = thresholds(values), values["check_interval"]
    if delays.value[1] >= found.lease_s:
        text = (
            f"{_said(delays)} must be shorter than lease_duration ({format_duration(found.lease_s)}), or the "
            "server drops a standby that waits"
        )
        others = (values[key] for key in ("lease_duration", "late_threshold", "refresh_interval"))
        yield _place(delays, *others).problem(text, "shorten check_interval, or raise lease_duration")


def _said(value: Value, *, with_origin: bool = False) -> str:
    text = f"{value.setting.key} = {value.shown}"
    return f"{text} ({value.origin})" if with_origin else text


def _place(*values: Value) -> Origin:
    """Where to correct it: the first of them that was given at all."""
    return next((value.origin for value in values if value.is_given), values[0].origin)


def _above(bound_s: float) -> str:
    """A round duration above the bound."""
    step_s = 1.0 if bound_s >= 1 else 0.001
    return format_duration((math.floor(bound_s / step_s + 1e-9) + 1) * step_s)


def _below(bound_s: float) -> str:
    """A round duration below the bound."""
    step_s = 1.0 if bound_s > 1 else 0.001
    return format_duration(max(0.001, (math.ceil(bound_s / step_s - 1e-9) - 1) * step_s))


# --- Combinations


def _combinations(values: Mapping[str, Value], roles: Sequence[RoleSettings]) -> Iterator[Problem]:
    wait, pooler, timeout = values["standby_wait"], values["allow_pooler"], values["lock_timeout"]
    if wait.value and len(roles) > 1:
        text = f"{_said(wait)} waits at the server for one role only, and there are {len(roles)}"
        yield wait.origin.problem(text, "remove it, or give each role a process of its own")
    if wait.value and values["balance"].value:
        text = f"{_said(wait)} leaves a role to nobody, and {_said(values['balance'], with_origin=True)} does to others"
        yield wait.origin.problem(text, "remove one of the two")
    for value in (wait, timeout):
        if value.value and pooler.value:
            text = f"{value.setting.key} cannot be used behind a pooler, and allow_pooler is true ({pooler.origin})"
            yield value.origin.problem(text, "remove one of the two")
    retention, least_s = values["retention"], _election_settings.RETENTION_S_MIN
    if retention.value is not False and retention.value < least_s:
        remedy = f'give at least "{format_duration(least_s)}", or false to keep everything'
        yield retention.origin.problem(f"{_said(retention)} is too short to be of any use", remedy)


def _roles(roles: Sequence[RoleSettings], namespace: str) -> Iterator[Problem]:
    if len(roles) > _election_settings.ROLES_MAX:
        text = f"{len(roles)} roles are too many for one process"
        remedy = f"{_election_settings.ROLES_MAX} at most: spread them over several databases"
        yield roles[_election_settings.ROLES_MAX].origin.problem(text, remedy)
    seen: dict[KeyPair, str] = {}
    for role in roles:
        try:
            key_pair(role.name)
        except ConfigurationError as error:
            yield role.origin.problem(f"the role's {error}", "give it another name")
            continue
        try:
            pair = role_pair(role, namespace)
        except ConfigurationError:
            return  # the namespace, which was told already
        if pair in seen:
            origin = role.key.origin if role.key.is_given else role.origin
            yield origin.problem(f"roles {seen[pair]!r} and {role.name!r} have the same key", "change one of them")
        seen.setdefault(pair, role.name)


def role_pair(role: RoleSettings, namespace: str) -> KeyPair:
    """The role's advisory-lock keys; its name must be fit for the ledger in any case."""
    derived = key_pair(role.name, namespace)
    return derived if role.key.value is None else key_pair_from_bigint(role.key.value)
