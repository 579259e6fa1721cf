"""The options that describe a lock's timing, and a lock made of what the command line said.

Imports click, `lock`, `errors` and `_output`. The defaults are the library's own: a test compares them.
"""

import re
from collections.abc import Callable
from typing import Any, TypeVar, Unpack

import click

from pgleaderlock._conninfo import Dsn
from pgleaderlock.cli._output import DurationType, LockKey
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.lock import LEASE_INTERVALS, LeaderLock, LockOptions

__all__ = ["POSITIVE", "allow_pooler_option", "in_option_words", "lease_or_default_s", "make_lock", "timing_options"]

POSITIVE = DurationType(zero_allowed=False)

_Command = TypeVar("_Command", bound=Callable[..., Any])

_OPTION_OF = {
    "health_interval_s": "--health-interval",
    "health_timeout_s": "--health-timeout",
    "session_lease_s": "--session-lease",
    "reconnect_grace_s": "--reconnect-grace",
    "standby_wait_s": "--standby-wait",
    "base_s": "--retry-base",
    "max_s": "--retry-max",
}
_PARAMETERS = re.compile("|".join(rf"\b{re.escape(parameter)}\b" for parameter in _OPTION_OF))


def timing_options(command: _Command) -> _Command:
    """`--health-interval`, `--health-timeout` and `--session-lease`, in seconds; the last two may be None."""
    options = (
        click.option(
            "--health-interval",
            type=POSITIVE,
            default=5.0,
            help="How often a leader asks the server whether its session is alive.  [default: 5s]",
        ),
        click.option(
            "--health-timeout", type=POSITIVE, help="How long it waits for an answer.  [default: the interval]"
        ),
        click.option(
            "--session-lease",
            type=POSITIVE,
            help="After this silence the server drops a leader.  [default: 3 x interval]",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def allow_pooler_option(command: _Command) -> _Command:
    """`--allow-pooler`."""
    return click.option(
        "--allow-pooler", is_flag=True, help="Go through a connection pooler in session mode; others are refused."
    )(command)


def lease_or_default_s(session_lease: float | None, health_interval: float) -> float:
    """The lease that a lock with these settings would have."""
    return LEASE_INTERVALS * health_interval if session_lease is None else session_lease


def make_lock(dsn: Dsn, lock_key: LockKey, **options: Unpack[LockOptions]) -> LeaderLock:
    """The lock that is meant. What is wrong with the settings is said in the words of the command line."""
    try:
        if lock_key.name is not None:
            return LeaderLock.for_name(dsn, lock_key.name, namespace=lock_key.namespace, **options)
        return LeaderLock(dsn, lock_key.key1, lock_key.key2, **options)
    except ConfigurationError as error:
        raise ConfigurationError(in_option_words(str(error))) from error


def in_option_words(text: str) -> str:
    """The library's parameter names as the options that set them."""
    return _PARAMETERS.sub(lambda found: _OPTION_OF[found[0]], text)
