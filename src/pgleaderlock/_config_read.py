"""From what was written to values that know where they came from: the file, the environment, the flags.

Imports the `_config_*` modules below it, `_election_settings`, `errors` and the standard library. Every mistake is
noted and reading goes on: whoever corrects a file wants to see all of them at once. A key that is not known must never
be taken for a remark.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pgleaderlock import _election_settings
from pgleaderlock._config_duration import parse_duration_s
from pgleaderlock._config_file import Place, Problem, TomlFile
from pgleaderlock._config_kinds import DELAYS, DURATION, DURATION_OR_NEVER, DURATION_OR_ZERO, Mistake
from pgleaderlock._config_schema import ALERT, ELECTION, ROLE, SECTIONS, Setting
from pgleaderlock.errors import ConfigurationError

__all__ = ["AlertRule", "Contents", "Origin", "RoleSettings", "Value", "from_file", "from_flags", "from_variables"]

ELECTION_PLACE = ("cluster", "leader_election")


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
    """What a setting is, and why."""

    setting: Setting
    value: Any = field(repr=False)  # it may be a DSN
    origin: Origin = DEFAULT

    @property
    def is_given(self) -> bool:
        return self.origin.kind != "default"

    @property
    def shown(self) -> str:
        return self.setting.shown(self.value)


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
    """What one source says, and what is wrong with it."""

    election: dict[str, Value] = field(default_factory=dict)
    roles: dict[str, RoleSettings] = field(default_factory=dict)
    alerts: list[AlertRule] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    """The election's settings that are wrong, whose relations to others say nothing."""


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
        origin = _origin(file, ("roles", name))
        defaults = {setting.key: Value(setting, setting.default) for setting in ROLE}
        found.roles[name] = RoleSettings(name, origin, **{**defaults, **values})
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
    """The section at that place; empty if there is none, or something else."""
    value = file.document
    for depth, key in enumerate(place, 1):
        value = value.get(key, {})
        if not isinstance(value, dict):
            place = place[:depth]
            name = ".".join(place)
            shape = f"[{name}.NAME]" if place == ("roles",) else f"[{name}]"
            problem = file.problem(place, f"{name} is a section, and no value", f"write {shape} in a line of its own")
            if problem not in found.problems:  # each place below it comes by here
                found.problems.append(problem)
            return {}
    return value


def _values(
    file: TomlFile, place: Place, section: Mapping[str, Any], settings: tuple[Setting, ...], found: Contents
) -> dict[str, Value]:
    known = {setting.key: setting for setting in settings}
    values = {}
    for key, given in section.items():
        where = (*place, key)
        if key not in known:
            found.problems.append(file.problem(where, *_unknown(key, settings)))
            continue
        try:
            values[key] = Value(known[key], known[key].kind.read(key, given), _origin(file, where))
        except Mistake as mistake:
            found.problems.append(file.problem(where, mistake.text, mistake.remedy))
            if settings is ELECTION:
                found.broken.add(key)
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
        missing = [setting.key for setting in ALERT if setting.required and setting.key not in section]
        for key in missing:
            found.problems.append(file.problem(place, f"this alert has no {key}", f'add {key} = "…" to it'))
        read: dict[str, Any] = {setting.key: setting.default for setting in ALERT}
        read |= {key: value.value for key, value in values.items()}
        line = file.line(place)
        if (name := read["name"]) is not None:
            if name in first:
                text = f"an alert named {name!r} is already in line {first[name]}"
                found.problems.append(file.problem((*place, "name"), text, "give each a name of its own"))
            first.setdefault(name, line)
        if read["name"] is not None and read["condition"] is not None:
            yield AlertRule(read["name"], read["condition"], read["for"], read["severity"], read["notify"], line)


def _origin(file: TomlFile, place: Place) -> Origin:
    return Origin("file", file.where(place), file.line(place))


# --- The environment


def from_variables(environ: Mapping[str, str]) -> tuple[Contents, Value | None]:
    """The election's values, and the key of its one role if there is one."""
    found = Contents()
    for setting in ELECTION:
        names = [name for name in setting.variables if name in environ]
        if setting.key == "dsn":
            # An election's own variable first. An empty one is none, as it is for the other commands.
            names = [name for name in names if environ[name].strip()][:1]
        if not names:
            continue
        origin = Origin("environment", "environment " + ", ".join(names))
        try:
            value = _of_variables(setting, {name: environ[name] for name in names})
        except ConfigurationError as error:
            found.problems.append(origin.problem(str(error)))
            found.broken.add(setting.key)
            continue
        if value is not None:
            found.election[setting.key] = Value(setting, value, origin)
    return found, _role_key(environ, found)


def _of_variables(setting: Setting, environ: Mapping[str, str]) -> object:
    if setting.key == "dsn":
        return next(iter(environ.values())).strip()
    return _election_settings.from_environment(environ).get(setting.option)


def _role_key(environ: Mapping[str, str], found: Contents) -> Value | None:
    setting = next(setting for setting in ROLE if setting.variables)
    (variable,) = setting.variables
    if not environ.get(variable):
        return None
    origin = Origin("environment", f"environment {variable}")
    try:
        number = _election_settings.from_environment({variable: environ[variable]})["lock_key"]
        return Value(setting, setting.kind.read(variable, number), origin)
    except ConfigurationError as error:
        found.problems.append(origin.problem(str(error)))
    except Mistake as mistake:
        found.problems.append(origin.problem(mistake.text, mistake.remedy))
    return None


# --- Flags


def from_flags(flags: Mapping[str, object]) -> Contents:
    """What a program was told directly, by the keys of the file; None is not given. Seconds may be numbers."""
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
        try:
            found.election[key] = Value(setting, _flag_value(setting, given), origin)
        except (ConfigurationError, Mistake) as error:
            found.problems.append(origin.problem(str(error), getattr(error, "remedy", "")))
            found.broken.add(key)
    return found


def _flag_value(setting: Setting, given: Any) -> Any:
    is_duration = any(setting.kind is kind for kind in (DURATION, DURATION_OR_NEVER, DURATION_OR_ZERO, DELAYS))
    if is_duration and isinstance(given, int | float) and not isinstance(given, bool):
        return setting.kind.read(setting.key, f"{parse_duration_s(given):f}s")
    if setting.kind is DELAYS and isinstance(given, tuple):
        return setting.kind.read(setting.key, [f"{parse_duration_s(delay_s):f}s" for delay_s in given])
    return setting.kind.read(setting.key, given)
