"""`--fenced`: an election with epochs and a gate instead of a bare lock, for `run` and `exec`.

Imports click, `election`, `_election_settings`, `errors` and its neighbours. It must never fall back to a bare lock:
who asks for a fence and does not get one would act twice one day.
"""

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

from pgleaderlock._conninfo import Dsn
from pgleaderlock.cli._output import LockKey
from pgleaderlock.cli._timing import POSITIVE
from pgleaderlock.election import LeaderElection
from pgleaderlock.errors import ConfigurationError

__all__ = ["check_fenced", "fenced_options", "given", "make_election"]

_Command = TypeVar("_Command", bound=Callable[..., Any])

_OPTION_OF = {
    "heartbeat_interval_s": "--health-interval",
    "late_threshold_s": "--late-threshold",
    "session_lease_s": "--session-lease",
    "standby_wait_s": "--standby-wait",
}
_PARAMETERS = re.compile("|".join(rf"\b{re.escape(parameter)}\b" for parameter in _OPTION_OF))
_HEARTBEAT_INTERVAL_S = 3.0
# What a lock has and an election does not: it beats instead of probing, always competes again, and backs off by itself.
_OF_A_LOCK = {
    "health_timeout": "--health-timeout",
    "retry_base": "--retry-base",
    "retry_max": "--retry-max",
    "reconnect_grace": "--reconnect-grace",
    "no_auto_reacquire": "--no-auto-reacquire",
}


def fenced_options(command: _Command) -> _Command:
    """`--fenced` and `--late-threshold`, which belongs to it."""
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
    )
    for option in reversed(options):
        command = option(command)
    return command


def given(ctx: click.Context, parameter: str) -> bool:
    """Was it written on the command line?"""
    return ctx.get_parameter_source(parameter) is click.core.ParameterSource.COMMANDLINE


def check_fenced(ctx: click.Context, lock_key: LockKey, *, fenced: bool) -> None:
    """Refuse options that would be ignored."""
    if not fenced:
        if given(ctx, "late_threshold"):
            raise click.UsageError("--late-threshold belongs to --fenced: add that, or drop it")
        return
    if lock_key.name is None:
        raise click.UsageError("--fenced needs --name: the ledger knows a role by its name")
    for parameter, option in _OF_A_LOCK.items():
        if given(ctx, parameter):
            raise click.UsageError(f"{option} does not go with --fenced, where it would have no effect: drop it")


def make_election(
    dsn: Dsn,
    lock_key: LockKey,
    *,
    interval_s: float | None,
    late_threshold_s: float | None,
    session_lease_s: float | None,
    standby_wait_s: float,
    allow_pooler: bool,
    grace_s: float = 0.0,
) -> LeaderElection:
    """The election that is meant. What is wrong with the settings is said in the words of the command line.

    Without a lease of the user's own, `grace_s` is added to it: between the gate's end here and its opening elsewhere
    a command has that long to end.
    """
    assert lock_key.name is not None, "check_fenced has refused that"
    interval_s = _HEARTBEAT_INTERVAL_S if interval_s is None else interval_s
    gate_s = 2 * interval_s if late_threshold_s is None else late_threshold_s
    if session_lease_s is None and grace_s:
        session_lease_s = gate_s + max(1.0, gate_s / 10) + grace_s
    try:
        return LeaderElection(
            dsn,
            lock_key.name,
            namespace=lock_key.namespace,
            heartbeat_interval_s=interval_s,
            late_threshold_s=late_threshold_s,
            session_lease_s=session_lease_s,
            standby_wait_s=standby_wait_s,
            allow_pooler=allow_pooler,
        )
    except ConfigurationError as error:
        raise ConfigurationError(_PARAMETERS.sub(lambda found: _OPTION_OF[found[0]], str(error))) from error
