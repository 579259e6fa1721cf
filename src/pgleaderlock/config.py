"""Settings as people write them: a file, the environment and flags become one checked `Config`.

    config = Config.load()                      # ./pgleaderlock.toml, or $PGLEADERLOCK_CONFIG
    LeaderElection.from_config(config)

A flag overrides the environment, the environment overrides the file, and the file overrides the default; each value
records its origin. All mistakes are reported at once, each with its line and its remedy, before anything is opened.

It must never show a password.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgleaderlock._config.durations import format_duration, parse_duration_s, positive_s
from pgleaderlock._config.load import (
    DEFAULT,
    AlertRule,
    Contents,
    Origin,
    RoleSettings,
    Value,
    advice,
    check,
    defaults,
    from_file,
    from_flags,
    from_variables,
    role_of_environment,
    role_pair,
    timing_of,
)
from pgleaderlock._config.schema import ELECTION, ROLE, SWITCH, Setting, json_schema
from pgleaderlock._config.timing import gate_under_lease_s
from pgleaderlock._config.toml import ConfigFileError, FileUnreadable, Problem, TomlFile, read_toml
from pgleaderlock._pg.conninfo import Dsn, resolve, whole_ms
from pgleaderlock.keys import bigint_from_key_pair, key_pair

__all__ = [
    "FILE_NAME",
    "AlertRule",
    "Config",
    "ConfigFileError",
    "FileUnreadable",
    "Origin",
    "Problem",
    "RoleSettings",
    "Setting",
    "Value",
    "find_file",
    "format_duration",
    "json_schema",
    "parse_duration_s",
    "positive_s",
]

FILE_NAME = "pgleaderlock.toml"
FILE_VARIABLE = "PGLEADERLOCK_CONFIG"


@dataclass(frozen=True, slots=True, repr=False)
class Config:
    """Every setting with its origin. The constructors check them, so every instance is valid."""

    path: Path | None
    """The file that was read; None if there was none."""
    values: Mapping[str, Value]
    """The values by their keys in `[cluster.leader_election]`."""
    role_settings: tuple[RoleSettings, ...]
    alerts: tuple[AlertRule, ...]
    warnings: tuple[Problem, ...]
    _startup_options: str = ""
    _switched_off: tuple[RoleSettings, ...] = ()

    @classmethod
    def load(
        cls,
        path: str | Path | None = None,
        environ: Mapping[str, str] | None = None,
        flags: Mapping[str, object] | None = None,
        roles: Sequence[str] | None = None,
    ) -> "Config":
        """Read the file at `path` (or the one that `find_file` finds), the environment and `flags`.

        `flags` has the keys of `[cluster.leader_election]`; durations in it may be numbers of seconds, and None means
        not given. `roles` are the roles that take part, instead of all enabled roles of the file; they have the keys
        that the file gives them. Raises `ConfigFileError`, a `ConfigurationError`, with every mistake that was found.
        """
        env = os.environ if environ is None else environ
        found_at = find_file(path, env)
        file = None if found_at is None else read_toml(found_at)
        contents = Contents() if file is None else from_file(file)
        by_variable, key = from_variables(env)
        by_flag = from_flags(flags or {})
        problems = [*by_flag.problems, *by_variable.problems, *contents.problems]
        values = defaults(ELECTION) | contents.election | by_variable.election | by_flag.election
        sections = contents.roles if roles is None else _named(roles, contents.roles, problems)
        keyed = _keyed(sections, key, problems).values()
        taking_part = tuple(role for role in keyed if role.enabled.value)
        problems += check(values, taking_part, by_flag.broken | by_variable.broken | contents.broken)
        if problems:
            # The problems of the file in the order of its lines.
            raise ConfigFileError(sorted(problems, key=lambda problem: problem.line or 0))
        names = {role.name for role in taking_part}
        switched_off = tuple(role for role in contents.roles.values() if role.name not in names)
        return cls(
            path=found_at,
            values=_completed(values),
            role_settings=taking_part,
            alerts=tuple(contents.alerts),
            warnings=(*_readable_password(values["dsn"], file), *advice(values)),
            _startup_options=env.get("PGOPTIONS", ""),
            _switched_off=switched_off,
        )

    def __getitem__(self, key: str) -> Any:
        """The value of a setting of `[cluster.leader_election]`; None if it has none."""
        return self.values[key].value

    def __repr__(self) -> str:
        return f"<Config from {self.path or 'environment and defaults'}: {len(self.role_settings)} roles>"

    @property
    def dsn(self) -> str:
        """The connection string, including `lock_timeout`. Empty if libpq's own variables say where to connect."""
        return self._with_lock_timeout(self["dsn"] or "")

    @property
    def roles(self) -> tuple[str, ...] | dict[str, int]:
        """The roles for `LeaderElection`: names, or names with 64-bit keys if any role has an explicit key."""
        return self._keyed_in(self["namespace"], [role.name for role in self.role_settings])

    def election_options(self) -> dict[str, Any]:
        """The other keywords of `LeaderElection`: values that were given or derived, without the defaults."""
        return {
            # TOML has no null: in a setting that is not a switch, false stands for None.
            value.setting.option: None if value.value is False and value.setting.kind is not SWITCH else value.value
            for value in self.values.values()
            if value.setting.option not in ("", "dsn") and value.origin != DEFAULT
        }

    def arguments(self, **options: Any) -> dict[str, Any]:
        """Every argument of `LeaderElection`, including `dsn` and `roles`. Keywords given here override the file.

        Derived values follow from the overriding ones: keys from the namespace, G from T. A role that is given by its
        name alone has the key that the file gives it, because with another key it would not exclude the other nodes.
        """
        found: dict[str, Any] = {"dsn": self.dsn, "roles": [role.name for role in self.role_settings]}
        found |= self.election_options() | options
        if "dsn" in options:
            found["dsn"] = self._reached(options["dsn"])
        if not isinstance(found["roles"], Mapping):
            names = [found["roles"]] if isinstance(found["roles"], str) else list(found["roles"])
            found["roles"] = self._keyed_in(found.get("namespace", self["namespace"]), names)
        lease_s = options.get("session_lease_s")
        if lease_s is not None and "late_threshold_s" not in options and not self.values["late_threshold"].is_given:
            found["late_threshold_s"] = gate_under_lease_s(positive_s("session_lease_s", lease_s))
        return found

    # --- Inside

    def _reached(self, dsn: Dsn) -> Dsn:
        """The same database, with `lock_timeout`."""
        if isinstance(dsn, str):
            return self._with_lock_timeout(dsn)
        if self["lock_timeout"] is None:
            return dsn

        async def asked_for() -> str:
            return self._with_lock_timeout(await resolve(dsn))

        return asked_for

    def _with_lock_timeout(self, dsn: str) -> str:
        if (timeout_s := self["lock_timeout"]) is None:
            return dsn
        # The options of the DSN, or else PGOPTIONS, come later in the text, and so override ours.
        theirs = conninfo_to_dict(dsn).get("options") or self._startup_options
        options = f"-c lock_timeout={whole_ms(timeout_s)} {theirs}".strip()
        return make_conninfo(dsn, options=options)

    def _keyed_in(self, namespace: str, names: Sequence[str]) -> tuple[str, ...] | dict[str, int]:
        """These roles, with their keys if any of them has an explicit key."""
        own = {role.name: role for role in (*self.role_settings, *self._switched_off) if role.key.value is not None}
        if len(set(names)) < len(names) or not own.keys() & set(names):
            return tuple(names)  # no role has a key, or one is named twice, which the election refuses
        pairs = {name: role_pair(own[name], namespace) if name in own else key_pair(name, namespace) for name in names}
        return {name: bigint_from_key_pair(pair) for name, pair in pairs.items()}


def find_file(path: str | Path | None = None, environ: Mapping[str, str] | None = None) -> Path | None:
    """The file to read: `path`, or `$PGLEADERLOCK_CONFIG`, or `pgleaderlock.toml` in this folder if it exists."""
    env = os.environ if environ is None else environ
    if path is not None:
        return Path(path)
    if named := env.get(FILE_VARIABLE):
        return Path(named)
    here = Path(FILE_NAME)
    return here if os.path.lexists(here) else None


def _named(names: Sequence[str], known: Mapping[str, RoleSettings], problems: list[Problem]) -> dict[str, RoleSettings]:
    """The named roles, with the keys that the file gives them. They take part even if the file disables them."""
    named: dict[str, RoleSettings] = {}
    for name in names:
        origin = Origin("flag", f"role {name!r}")
        if name in named:
            problems.append(origin.problem("it is named twice", "name each role once"))
        named[name] = RoleSettings(name, origin, **defaults(ROLE))
        if name in known:
            named[name] = replace(named[name], key=known[name].key)
    return named


def _keyed(roles: dict[str, RoleSettings], key: Value | None, problems: list[Problem]) -> dict[str, RoleSettings]:
    """The roles, with the key that the environment gives to the only one."""
    if key is None:
        return roles
    if len(roles) > 1:
        text = f"the key is one role's, and there are {len(roles)} roles"
        problems.append(key.origin.problem(text, "unset it, and write key = … into [roles.NAME]"))
        return roles
    if not roles:
        name = role_of_environment(key.value)  # the same name as in `LeaderElection.from_env`
        roles = {name: RoleSettings(name, key.origin, **defaults(ROLE))}
    return {name: replace(role, key=key) for name, role in roles.items()}


def _completed(values: Mapping[str, Value]) -> dict[str, Value]:
    """The values with G and T derived from each other or from the interval."""
    timing, gate, lease = timing_of(values), values["late_threshold"], values["lease_duration"]
    completed = dict(values)
    if gate.value is None:
        # With the interval alone, the election would derive the same values.
        origin = DEFAULT if lease.value is None else Origin("default", "follows from lease_duration")
        completed["late_threshold"] = replace(gate, value=timing.gate_s, origin=origin)
    if lease.value is None:
        completed["lease_duration"] = replace(lease, value=timing.lease_s)
    return completed


def _readable_password(dsn: Value, file: TomlFile | None) -> Iterator[Problem]:
    if file is not None and file.world_readable and dsn.origin.kind == "file" and _has_password(dsn.value):
        remedy = f"chmod 640 {file.path}, or take the password out: PGPASSWORD, a password file"
        yield dsn.origin.problem("everybody on this machine can read the password in this file", remedy)


def _has_password(dsn: str) -> bool:
    try:
        return bool(conninfo_to_dict(dsn).get("password"))
    except psycopg.Error:
        return False
