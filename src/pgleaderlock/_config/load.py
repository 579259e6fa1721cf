"""Reads the file, the environment and the flags into values that record where they came from.

Reading goes on after a mistake, so that all of them are reported at once, each with its place. The relations between
settings are those of `timing`, reported with the names that the file uses. An unknown key must never be ignored.
"""

import difflib
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from pgleaderlock._config.durations import format_duration, parse_duration_s
from pgleaderlock._config.schema import (
    ALERT,
    DEFAULT_DELAYS_S,
    DELAYS,
    DURATION,
    ELECTION,
    INTEGER,
    ROLE,
    SECTIONS,
    SWITCH,
    Mistake,
    Setting,
)
from pgleaderlock._config.timing import (
    Misfit,
    Timing,
    Words,
    check_channel,
    checked_node_id,
    combination_misfits,
    gate_under_lease_s,
    idle_lock_timeout,
    role_misfits,
    timing_misfits,
)
from pgleaderlock._config.toml import Place, Problem, TomlFile
from pgleaderlock._pg.conninfo import check_dsn
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.keys import KeyPair, key_pair, key_pair_from_bigint

__all__ = [
    "AlertRule",
    "Contents",
    "Origin",
    "RoleSettings",
    "Value",
    "advice",
    "check",
    "defaults",
    "dsn_in_environment",
    "from_environment",
    "from_file",
    "from_flags",
    "from_variables",
    "role_of_environment",
    "role_pair",
    "timing_of",
]

ELECTION_PLACE = ("cluster", "leader_election")
ROLE_KEY = next(setting for setting in ROLE if setting.key == "key")


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from; as text: `pgleaderlock.toml line 12`, `environment PG_DSN`, `flag --dsn`, `default`."""

    kind: Literal["flag", "environment", "file", "default"]
    text: str
    line: int | None = None

    def __str__(self) -> str:
        return self.text

    def problem(self, text: str, remedy: str = "") -> Problem:
        return Problem(self.text, text, remedy, self.line)


DEFAULT = Origin("default", "default")


@dataclass(frozen=True, slots=True)
class Value:
    """The value of a setting, and its origin."""

    setting: Setting
    value: Any = field(repr=False)  # it may be a DSN
    origin: Origin = DEFAULT

    @property
    def is_given(self) -> bool:
        return self.origin.kind != "default"

    @property
    def shown(self) -> str:
        return self.setting.shown(self.value)


def defaults(settings: Iterable[Setting]) -> dict[str, Value]:
    return {setting.key: Value(setting, setting.default) for setting in settings}


@dataclass(frozen=True, slots=True)
class RoleSettings:
    """A section `[roles.NAME]`."""

    name: str
    origin: Origin
    key: Value
    enabled: Value


@dataclass(frozen=True, slots=True)
class AlertRule:
    """A section `[[alerts]]`."""

    name: str
    condition: str
    for_s: float
    severity: str
    notify: tuple[str, ...]
    line: int | None = None


@dataclass(slots=True)
class Contents:
    """The settings of one source, and the problems found in it."""

    election: dict[str, Value] = field(default_factory=dict)
    roles: dict[str, RoleSettings] = field(default_factory=dict)
    alerts: list[AlertRule] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    """The settings that could not be read: their relations to others are not checked."""

    def read(self, into: dict[str, Value], setting: Setting, origin: Origin, read: Callable[[], Any]) -> None:
        """Note the value that `read` returns, unless it is None, or what is wrong with it."""
        try:
            value = read()
        except (ConfigurationError, Mistake) as error:
            self.problems.append(origin.problem(str(error), getattr(error, "remedy", "")))
            self.broken.add(setting.key)
            return
        if value is not None:
            into[setting.key] = Value(setting, value, origin)


# --- The file


def from_file(file: TomlFile) -> Contents:
    found = Contents()
    for key, value in file.document.items():
        if key not in SECTIONS:
            found.problems.append(file.problem((key,), *_unknown_section(key, value)))
    cluster = _section(file, ("cluster",), found)
    for key in cluster:
        if key != "leader_election":
            remedy = "write [cluster.leader_election]"
            if any(key == setting.key for setting in ELECTION):
                remedy = f"move {key} to [cluster.leader_election]"
            found.problems.append(file.problem(("cluster", key), f"unknown setting {key!r} in [cluster]", remedy))
    found.election = _values(file, ELECTION_PLACE, _section(file, ELECTION_PLACE, found), ELECTION, found)
    for name in _section(file, ("roles",), found):
        values = _values(file, ("roles", name), _section(file, ("roles", name), found), ROLE, found)
        found.roles[name] = RoleSettings(name, _origin(file, ("roles", name)), **defaults(ROLE) | values)
    found.alerts = list(_alerts(file, found))
    return found


def _unknown_section(key: str, value: object) -> tuple[str, str]:
    text = f"unknown {'setting' if not isinstance(value, dict | list) else 'section'} {key!r}"
    if key == "leader_election" or any(key == setting.key for setting in ELECTION):
        return text, "write it in [cluster.leader_election]"
    if key == "server":
        return text, "the lock server has a file of its own: pgleaderlock serve --config FILE"
    if near := difflib.get_close_matches(key, SECTIONS, n=1):
        return text, f"did you mean {'[[alerts]]' if near[0] == 'alerts' else near[0]}?"
    return text, "known are [cluster.leader_election], [roles.NAME] and [[alerts]]"


def _section(file: TomlFile, place: tuple[str, ...], found: Contents) -> dict[str, Any]:
    """The section at that place; empty if there is none, or if the value there is not a section."""
    value = file.document
    for depth, key in enumerate(place, 1):
        value = value.get(key, {})
        if not isinstance(value, dict):
            place = place[:depth]
            name = ".".join(place)
            shape = f"[{name}.NAME]" if place == ("roles",) else f"[{name}]"
            problem = file.problem(place, f"{name} is a section, and no value", f"write {shape} in a line of its own")
            if problem not in found.problems:  # report it once, and not for each place below it
                found.problems.append(problem)
            return {}
    return value


def _values(
    file: TomlFile, place: Place, section: Mapping[str, Any], settings: tuple[Setting, ...], found: Contents
) -> dict[str, Value]:
    known = {setting.key: setting for setting in settings}
    values: dict[str, Value] = {}
    for key, given in section.items():
        where = (*place, key)
        if key not in known:
            found.problems.append(file.problem(where, *_unknown(key, settings)))
            continue
        found.read(values, known[key], _origin(file, where), partial(known[key].kind.read, key, given))
    return values


def _unknown(key: str, settings: tuple[Setting, ...]) -> tuple[str, str]:
    text = f"unknown setting {key!r}"
    for setting in settings:
        if key in setting.other_names or key.lower() == setting.key:
            return text, f"it is {setting.key} here"
    if settings is ROLE and any(key == setting.key for setting in ELECTION):
        return text, f"{key} is the same for all roles of a node: move it to [cluster.leader_election]"
    names = {name: setting.key for setting in settings for name in (setting.key, *setting.other_names)}
    if near := difflib.get_close_matches(key.lower(), names, n=1):
        return text, f"did you mean {names[near[0]]}?"
    return text, f"known are {', '.join(setting.key for setting in settings)}"


def _alerts(file: TomlFile, found: Contents) -> Iterator[AlertRule]:
    sections = file.document.get("alerts", [])
    if not isinstance(sections, list) or not all(isinstance(section, dict) for section in sections):
        found.problems.append(file.problem(("alerts",), "alerts is a list of sections", "write [[alerts]]"))
        return
    first: dict[str, int] = {}
    for index, section in enumerate(sections):
        place: Place = ("alerts", index)
        values = _values(file, place, section, ALERT, found)
        for key in (setting.key for setting in ALERT if setting.required and setting.key not in section):
            found.problems.append(file.problem(place, f"this alert has no {key}", f'add {key} = "…" to it'))
        read = {key: value.value for key, value in (defaults(ALERT) | values).items()}
        name, line = read["name"], file.line(place)
        if name in first:
            text = f"an alert named {name!r} is already in line {first[name]}"
            found.problems.append(file.problem((*place, "name"), text, "give each a name of its own"))
        if name is not None:
            first.setdefault(name, line)
            if read["condition"] is not None:
                yield AlertRule(name, read["condition"], read["for"], read["severity"], read["notify"], line)


def _origin(file: TomlFile, place: Place) -> Origin:
    return Origin("file", file.where(place), file.line(place))


# --- The environment


def from_variables(environ: Mapping[str, str]) -> tuple[Contents, Value | None]:
    """The election's values, and the key of its one role if there is one."""
    found, of_role = Contents(), dict[str, Value]()
    for setting in (*ELECTION, ROLE_KEY):
        given = _given(setting, environ)
        origin = Origin("environment", "environment " + ", ".join(given))
        if setting is ROLE_KEY:
            found.read(of_role, setting, origin, partial(_role_key, given))
        else:
            found.read(found.election, setting, origin, partial(_of_variables, setting, given))
    return found, of_role.get(ROLE_KEY.key)


def _role_key(environ: Mapping[str, str]) -> int | None:
    number = _of_variables(ROLE_KEY, environ)
    return None if number is None else ROLE_KEY.kind.read(ROLE_KEY.variables[0], number)


def from_environment(environ: Mapping[str, str] | None = None) -> dict[str, object]:
    """Keyword arguments of `LeaderElection` from the environment, for the variables that are set; and `lock_key`."""
    env = os.environ if environ is None else environ
    found = {setting.option: _of_variables(setting, env) for setting in ELECTION if setting.variables}
    found["lock_key"] = _of_variables(ROLE_KEY, env)
    return {keyword: value for keyword, value in found.items() if value is not None}


def dsn_in_environment() -> str | None:
    """The DSN alone; other variables are not read and cannot fail."""
    (dsn,) = (setting for setting in ELECTION if setting.key == "dsn")
    found = _of_variables(dsn, os.environ)
    return None if found is None else str(found)


def role_of_environment(key: int | None) -> str:
    """The name of a role that was given by its key only. The ledger identifies roles by name: two keys, two names."""
    return "leader" if key is None else f"leader-{key}"


def _given(setting: Setting, environ: Mapping[str, str]) -> dict[str, str]:
    """The setting's variables that are set."""
    given = {name: environ[name] for name in setting.variables if name in environ}
    if setting.key == "dsn":
        # The first variable that is set counts. An empty one counts as not set, as in the other commands.
        given = dict([(name, text.strip()) for name, text in given.items() if text.strip()][:1])
    return given


def _of_variables(setting: Setting, environ: Mapping[str, str]) -> Any:
    """What the setting's variables say; None where none is set."""
    given = _given(setting, environ)
    if not given:
        return None
    if setting.kind is DELAYS:
        return _delays(setting.variables, given)
    name, text = next(iter(given.items()))
    if setting.kind is DURATION:
        return _milliseconds(name, text)
    if setting.kind is SWITCH:
        return _truth(name, text)
    if setting.kind is INTEGER and text:
        if not re.fullmatch(r"-?\d+", text.strip()):
            raise ConfigurationError(f"{name}={text!r} is no number: give a 64-bit integer, or unset it")
        return int(text)
    return text or None


def _delays(variables: tuple[str, ...], given: Mapping[str, str]) -> tuple[float, float]:
    """A missing delay keeps its default, but a default longest delay is at least the shortest one."""
    shortest, longest = variables
    low_s, high_s = DEFAULT_DELAYS_S
    if shortest in given:
        low_s = _milliseconds(shortest, given[shortest])
    return low_s, _milliseconds(longest, given[longest]) if longest in given else max(high_s, low_s)


def _milliseconds(variable: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (value > 0 and math.isfinite(value)):
        raise ConfigurationError(f"{variable}={text!r} is not usable: give a number of milliseconds above 0")
    return value / 1000


def _truth(variable: str, text: str) -> bool:
    if text.strip().lower() in ("true", "1", "yes", "on"):
        return True
    if text.strip().lower() in ("false", "0", "no", "off"):
        return False
    raise ConfigurationError(f"{variable}={text!r} is neither true nor false")


# --- Flags


def from_flags(flags: Mapping[str, object]) -> Contents:
    """Settings that a program was given as flags, by the keys of the file; None means not given. Durations may be
    numbers of seconds."""
    known = {setting.key: setting for setting in ELECTION}
    found = Contents()
    for key, given in flags.items():
        if given is None:
            continue
        if key not in known:
            found.problems.append(Problem(f"flag {key}", *_unknown(key, ELECTION)))
            continue
        setting = known[key]
        origin = Origin("flag", f"flag {setting.flag or key}")
        found.read(found.election, setting, origin, partial(_flag_value, setting, given))
    return found


def _flag_value(setting: Setting, given: Any) -> Any:
    if setting.kind.is_duration and isinstance(given, int | float) and not isinstance(given, bool):
        given = f"{parse_duration_s(given):f}s"
    elif setting.kind is DELAYS and isinstance(given, tuple):
        given = [f"{parse_duration_s(delay_s):f}s" for delay_s in given]
    return setting.kind.read(setting.key, given)


# --- Relations, reported with the names that the file uses


class FileWords(Words):
    """`lease_duration = 7s`, with the place where it was given."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        super().__init__(key for key, value in values.items() if value.value is not None)
        self._values = values

    def name(self, key: str) -> str:
        return key

    def said(self, key: str, value: object) -> str:
        return f"{key} = {self._values[key].setting.shown(value)}"

    def told(self, key: str, value: object) -> str:
        return f"{self.said(key, value)} ({self._values[key].origin})"

    def duration(self, duration_s: float) -> str:
        return format_duration(duration_s)

    def literal(self, duration_s: float | None) -> str:
        return "false" if duration_s is None else f'"{format_duration(duration_s)}"'

    def problem(self, misfit: Misfit) -> Problem:
        """The problem, placed at the first of its settings that was given."""
        values = [self._values[key] for key in misfit.at]
        at = next((value for value in values if value.is_given), values[0])
        return at.origin.problem(misfit.text, misfit.remedy)


def timing_of(values: Mapping[str, Value]) -> Timing:
    """The timing, with missing values derived: G from T, or from the interval; T from G."""
    gate_s, lease_s = values["late_threshold"].value, values["lease_duration"].value
    if gate_s is None and lease_s is not None:
        gate_s = gate_under_lease_s(lease_s)
    interval_s, delays_s = values["refresh_interval"].value, values["check_interval"].value
    return Timing.derived(interval_s, gate_s, lease_s, delays_s, values["standby_wait"].value)


def check(values: Mapping[str, Value], roles: Sequence[RoleSettings], broken: Collection[str]) -> Iterator[Problem]:
    """Settings that contradict each other or cannot be used. The `broken` ones are reported already: here they have
    their defaults."""
    words = FileWords(values)
    yield from _names(values)
    misfits: list[Misfit] = []
    if not {"refresh_interval", "late_threshold", "lease_duration"} & set(broken):
        misfits += timing_misfits(timing_of(values), words)
    misfits += combination_misfits(
        words,
        roles=len(roles),
        standby_wait_s=values["standby_wait"].value,
        allow_pooler=values["allow_pooler"].value,
        lock_timeout_s=values["lock_timeout"].value,
        balance=values["balance"].value,
        retention_s=values["retention"].value or None,
        hold=values["hold"].value,
    )
    yield from map(words.problem, misfits)
    yield from _roles(roles, values["namespace"].value)


def advice(values: Mapping[str, Value]) -> Iterable[Problem]:
    """Warnings: settings that are valid, but probably not what was meant."""
    words = FileWords(values)
    return map(words.problem, idle_lock_timeout(values["lock_timeout"].value, timing_of(values), words))


def _names(values: Mapping[str, Value]) -> Iterator[Problem]:
    for key, refuse in (
        ("namespace", lambda namespace: key_pair("any", namespace)),
        ("node_id", checked_node_id),
        ("listen_channel", check_channel),
        ("dsn", check_dsn),
    ):
        value = values[key]
        if value.value in (None, False):
            continue
        try:
            refuse(value.value)
        except ConfigurationError as error:
            yield value.origin.problem(str(error))


def _roles(roles: Sequence[RoleSettings], namespace: str) -> Iterator[Problem]:
    pairs: dict[str, KeyPair] = {}
    for role in roles:
        try:
            key_pair(role.name)
        except ConfigurationError as error:
            yield role.origin.problem(f"the role's {error}", "give it another name")
            continue
        try:
            pairs[role.name] = role_pair(role, namespace)
        except ConfigurationError:
            return  # it is the namespace that is wrong, which is reported already
    by_name = {role.name: role for role in roles}
    for misfit in role_misfits(pairs):
        role = by_name[misfit.at[0]]
        origin = role.key.origin if role.key.is_given else role.origin
        yield origin.problem(misfit.text, misfit.remedy)


def role_pair(role: RoleSettings, namespace: str) -> KeyPair:
    """The role's advisory-lock keys; its name must be fit for the ledger in any case."""
    derived = key_pair(role.name, namespace)
    return derived if role.key.value is None else key_pair_from_bigint(role.key.value)
