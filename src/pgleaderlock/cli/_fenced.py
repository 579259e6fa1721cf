"""`--fenced`: an election with epochs and a gate instead of a bare lock, for `run` and `exec`.

Flags win over the environment, that over the file, that over the default: `config` knows. Imports click, `config`,
`election`, `errors`, `keys` and its neighbours. It must never fall back to a bare lock: who asks for a fence and does
not get one would act twice one day.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from pgleaderlock._conninfo import Dsn, libpq_knows_where
from pgleaderlock.cli._contender import Contender, load_config
from pgleaderlock.cli._output import LockKey, resolve_dsn
from pgleaderlock.cli._timing import POSITIVE
from pgleaderlock.config import Config
from pgleaderlock.election import LeaderElection
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.keys import key_pair, key_pair_from_bigint

__all__ = [
    "check_fenced",
    "fenced_config",
    "fenced_options",
    "given",
    "lock_key_of_role",
    "make_election",
    "needs_database",
]

_Command = TypeVar("_Command", bound=Callable[..., Any])

_OPTION_OF = {
    "heartbeat_interval_s": "--health-interval",
    "late_threshold_s": "--late-threshold",
    "session_lease_s": "--session-lease",
    "standby_wait_s": "--standby-wait",
}
_PARAMETERS = re.compile("|".join(rf"\b{re.escape(parameter)}\b" for parameter in _OPTION_OF))
# What a lock has and an election does not: it beats instead of probing, always competes again, and backs off by itself.
_OF_A_LOCK = {
    "health_timeout": "--health-timeout",
    "retry_base": "--retry-base",
    "retry_max": "--retry-max",
    "reconnect_grace": "--reconnect-grace",
    "no_auto_reacquire": "--no-auto-reacquire",
}
_OF_AN_ELECTION = {"late_threshold": "--late-threshold", "node_id": "--node-id", "balance": "--balance"}
# What a lock has too, with a default that is none of an election: it counts if it was written.
_SETTING_OF = {
    "dsn": "dsn",
    "health_interval": "refresh_interval",
    "session_lease": "lease_duration",
    "standby_wait": "standby_wait",
    "allow_pooler": "allow_pooler",
}


def fenced_options(command: _Command) -> _Command:
    """`--fenced`, and `--late-threshold` and `--node-id`, which belong to it."""
    options = (
        click.option(
            "--fenced",
            is_flag=True,
            help="Use epochs and a gate; needs the ledger (pgleaderlock migrate). --health-interval is the heartbeat's "
            "then, 3s by default.",
        ),
        click.option(
            "--late-threshold",
            type=POSITIVE,
            help="With --fenced: how long a heartbeat keeps the gate open.  [default: 2 x interval]",
        ),
        click.option("--node-id", help="With --fenced: who this node is, for people.  [default: the host name]"),
    )
    for option in reversed(options):
        command = option(command)
    return command


def given(ctx: click.Context, parameter: str) -> bool:
    """Was it written on the command line?"""
    return ctx.get_parameter_source(parameter) is click.core.ParameterSource.COMMANDLINE


def check_fenced(ctx: click.Context, contender: Contender, *, fenced: bool) -> None:
    """Refuse options that would be ignored."""
    for parameter, option in (_OF_A_LOCK if fenced else _OF_AN_ELECTION).items():
        if given(ctx, parameter):
            if not fenced:
                raise click.UsageError(f"{option} belongs to --fenced: add that, or drop it")
            raise click.UsageError(f"{option} does not go with --fenced, where it would have no effect: drop it")
    if fenced and (contender.key1 is not None or contender.key2 is not None):
        raise click.UsageError("--fenced needs --name: the ledger knows a role by its name")


def fenced_config(ctx: click.Context, contender: Contender, *, embedded: bool, **flags: object) -> Config:
    """What an election of this command line is: its roles, its database and its settings.

    `flags` are those of an election alone, by the keys of the configuration; None is not given.
    """
    if (dsn := ctx.params["dsn"]) is not None and not embedded:
        resolve_dsn(dsn)  # an empty one is a mistake, wherever it came from
    flags |= {setting: ctx.params[name] for name, setting in _SETTING_OF.items() if given(ctx, name)}
    flags["namespace"] = contender.namespace
    loaded = load_config(contender.path, flags=flags, roles=contender.names or None)
    if not loaded.role_settings:
        raise click.UsageError("which role? Give --name NAME, or a configuration with [roles.NAME]: --config FILE")
    if needs_database(loaded) and not embedded and loaded["dsn"] is None and not libpq_knows_where():
        resolve_dsn(None)
    return loaded


def needs_database(config: Config) -> bool:
    return bool(config["enabled"]) and not config["standalone"]


def lock_key_of_role(config: Config) -> LockKey:
    """The lock of the only role."""
    if len(config.role_settings) > 1:
        names = ", ".join(role.name for role in config.role_settings)
        raise click.UsageError(f"which of the roles? Give one of them with --name: {names}")
    (name,) = config.roles
    keys = config.roles[name] if isinstance(config.roles, Mapping) else None
    namespace: str = config["namespace"]
    pair = key_pair(name, namespace) if keys is None else key_pair_from_bigint(keys)
    return LockKey(*pair, name, namespace)


def make_election(config: Config, dsn: Dsn | None = None, *, grace_s: float = 0.0, hot: bool = True) -> LeaderElection:
    """The election that is meant. What is wrong with the settings is said in the words of the command line.

    `dsn` stands for that of the configuration. Without a lease of the user's own, `grace_s` is added to it: between the
    gate's end here and its opening elsewhere a command has that long to end. Not `hot`: there is one try, and no wait.
    """
    options: dict[str, Any] = {} if dsn is None else {"dsn": dsn}
    if grace_s and not config.values["lease_duration"].is_given:
        options |= {"late_threshold_s": config["late_threshold"], "session_lease_s": config["lease_duration"] + grace_s}
    if not hot:
        options["standby_wait_s"] = 0.0
    try:
        return LeaderElection.from_config(config, **options)
    except ConfigurationError as error:
        raise ConfigurationError(_PARAMETERS.sub(lambda found: _OPTION_OF[found[0]], str(error))) from error
