"""Settings as people write them: a file, the environment and flags become one checked whole.

    config = Config.load()                      # ./pgleaderlock.toml, or $PGLEADERLOCK_CONFIG
    LeaderElection(config.dsn, config.roles, **config.election_options())

A flag wins over the environment, that over the file, that over the default; each value knows where it came from. All
mistakes are reported at once, each with its line and its remedy, before anything is opened.

Imports the `_config_*` modules, `_election_settings`, `errors`, psycopg's parser and the standard library. It knows
nothing of the election that is made of it, and must never show a password.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgleaderlock._config_duration import format_duration, parse_duration_s, positive_s
from pgleaderlock._config_file import ConfigFileError, FileUnreadable, Problem, TomlFile, read_toml
from pgleaderlock._config_read import (
    DEFAULT,
    AlertRule,
    Contents,
    Origin,
    RoleSettings,
    Value,
    from_file,
    from_flags,
    from_variables,
)
from pgleaderlock._config_rules import check, role_pair, statement_timeout_s, thresholds
from pgleaderlock._config_schema import ELECTION, ROLE, Setting, json_schema

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
ROLE_OF_THE_ENVIRONMENT = "leader"
"""What LEADER_LOCK_KEY names where no role is configured, as in `LeaderElection.from_env`."""


@dataclass(frozen=True, slots=True, repr=False)
class Config:
    """Every setting with its origin. One that exists is sound."""

    path: Path | None
    """The file that was read; None if there was none."""
    values: Mapping[str, Value]
    """By the keys of `[cluster.leader_election]`."""
    role_settings: tuple[RoleSettings, ...]
    alerts: tuple[AlertRule, ...]
    warnings: tuple[Problem, ...]
    _startup_options: str = ""

    @classmethod
    def load(
        cls,
        path: str | Path | None = None,
        environ: Mapping[str, str] | None = None,
        flags: Mapping[str, object] | None = None,
    ) -> "Config":
        """From the file at `path` (or where `find_file` finds one), the environment and `flags`.

        `flags` has the keys of `[cluster.leader_election]`; durations in it may be numbers of seconds, and None means
        not given. Raises `ConfigFileError`, a `ConfigurationError`, with every mistake that was found.
        """
        env = os.environ if environ is None else environ
        found_at = find_file(path, env)
        file = None if found_at is None else read_toml(found_at)
        contents = Contents() if file is None else from_file(file)
        by_variable, key = from_variables(env)
        by_flag = from_flags(flags or {})
        problems = [*by_flag.problems, *by_variable.problems, *contents.problems]
        values = {setting.key: Value(setting, setting.default) for setting in ELECTION}
        values |= contents.election | by_variable.election | by_flag.election
        roles = tuple(role for role in _keyed(contents.roles, key, problems).values() if role.enabled.value)
        problems += check(values, roles, by_flag.broken | by_variable.broken | contents.broken)
        if problems:
            # Those of one source in the order of its lines, as whoever corrects them goes through it.
            raise ConfigFileError(sorted(problems, key=lambda problem: problem.line or 0))
        config = cls(found_at, values, roles, tuple(contents.alerts), (), env.get("PGOPTIONS", ""))
        return replace(config, warnings=tuple(_warnings(config, file)), values=_completed(values))

    def __getitem__(self, key: str) -> Any:
        """The value of a setting of `[cluster.leader_election]`; None where there is none."""
        return self.values[key].value

    def __repr__(self) -> str:
        return f"<Config from {self.path or 'environment and defaults'}: {len(self.role_settings)} roles>"

    @property
    def dsn(self) -> str:
        """What to connect with: `dsn`, and `lock_timeout` within it. Empty where libpq's own variables decide."""
        dsn: str = self["dsn"] or ""
        if (timeout_s := self["lock_timeout"]) is None:
            return dsn
        # What the DSN, or else PGOPTIONS, sets itself comes later in the text, and wins.
        theirs = conninfo_to_dict(dsn).get("options") or self._startup_options
        options = f"-c lock_timeout={max(1, round(timeout_s * 1000))} {theirs}".strip()
        return make_conninfo(dsn, options=options)

    @property
    def roles(self) -> tuple[str, ...] | dict[str, int]:
        """As `LeaderElection` takes them: names, or names and 64-bit keys as soon as one role has a key of its own."""
        if all(role.key.value is None for role in self.role_settings):
            return tuple(role.name for role in self.role_settings)
        pairs = {role.name: role_pair(role, self["namespace"]) for role in self.role_settings}
        return {name: key1 * 2**32 + key2 % 2**32 for name, (key1, key2) in pairs.items()}

    def election_options(self) -> dict[str, Any]:
        """The other keywords of `LeaderElection`: what was given, and what follows from it. Defaults stay its own."""
        options = {
            value.setting.option: value.value
            for value in self.values.values()
            if value.setting.option not in ("", "dsn") and value.origin != DEFAULT
        }
        # TOML has no word for nothing: false stands for it where a setting is no switch.
        return {
            option: None if value is False and option in ("listen_channel", "retention_s") else value
            for option, value in options.items()
        }


def find_file(path: str | Path | None = None, environ: Mapping[str, str] | None = None) -> Path | None:
    """Which file is meant: `path`, or `$PGLEADERLOCK_CONFIG`, or `pgleaderlock.toml` in this folder if it is there."""
    env = os.environ if environ is None else environ
    if path is not None:
        return Path(path)
    if named := env.get(FILE_VARIABLE):
        return Path(named)
    here = Path(FILE_NAME)
    return here if os.path.lexists(here) else None


def _keyed(roles: dict[str, RoleSettings], key: Value | None, problems: list[Problem]) -> dict[str, RoleSettings]:
    """The roles, with the key that the environment gives to the only one."""
    if key is None:
        return roles
    if len(roles) > 1:
        text = f"the key is one role's, and there are {len(roles)} roles"
        problems.append(key.origin.problem(text, "unset it, and write key = … into [roles.NAME]"))
        return roles
    if not roles:
        by_key = {setting.key: setting for setting in ROLE}
        enabled = Value(by_key["enabled"], by_key["enabled"].default)
        return {ROLE_OF_THE_ENVIRONMENT: RoleSettings(ROLE_OF_THE_ENVIRONMENT, key.origin, key, enabled)}
    return {name: replace(role, key=key) for name, role in roles.items()}


def _completed(values: Mapping[str, Value]) -> dict[str, Value]:
    """With G and T, which follow from each other and from the interval, worked out."""
    found = thresholds(values)
    worked_out = {"late_threshold": found.gate_s, "lease_duration": found.lease_s}
    completed = dict(values)
    for key, duration_s in worked_out.items():
        if values[key].value is None:
            # With the interval alone, both are as the election would have them anyway.
            follows = key == "late_threshold" and values["lease_duration"].value is not None
            origin = Origin("default", "follows from lease_duration") if follows else DEFAULT
            completed[key] = replace(values[key], value=duration_s, origin=origin)
    return completed


def _warnings(config: Config, file: TomlFile | None) -> list[Problem]:
    warnings = []
    dsn, timeout = config.values["dsn"], config.values["lock_timeout"]
    if file is not None and file.world_readable and dsn.origin.kind == "file" and _has_password(dsn.value):
        remedy = f"chmod 640 {file.path}, or take the password out: PGPASSWORD, a password file"
        warnings.append(dsn.origin.problem("everybody on this machine can read the password in this file", remedy))
    limit_s = statement_timeout_s(thresholds(config.values).gate_s)
    if timeout.value is not None and timeout.value >= limit_s:
        text = f"lock_timeout = {timeout.shown} has no effect: a statement ends after {format_duration(limit_s)} anyway"
        warnings.append(timeout.origin.problem(text, "shorten it, or leave it out"))
    return warnings


def _has_password(dsn: str) -> bool:
    try:
        return bool(conninfo_to_dict(dsn).get("password"))
    except psycopg.Error:
        return False
