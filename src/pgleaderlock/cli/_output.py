"""What all commands share: exit codes, options, durations and consoles.

Imports click, rich (inside, because `--help` needs none), `config`, `_conninfo`, `errors` and `keys`. Nothing here may
print a DSN: it may hold a password, and what is printed ends up in logs and terminals.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pgleaderlock._conninfo import LIBPQ_VARIABLES, libpq_knows_where
from pgleaderlock.config import parse_duration_s
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.keys import DEFAULT_NAMESPACE, check_key_pair, key_pair

if TYPE_CHECKING:
    from rich.console import Console

    _FloatType = click.ParamType[float]
else:
    # Generic for type checkers only: click 8.1 cannot be subscripted.
    _FloatType = click.ParamType

__all__ = [
    "DURATION",
    "EXIT_LOST",
    "EXIT_NO",
    "EXIT_NOT_WON",
    "EXIT_OK",
    "EXIT_USAGE",
    "DurationType",
    "LockKey",
    "dsn_option",
    "exit_code_for_signal",
    "lock_key_of",
    "lock_options",
    "optional_dsn_option",
    "resolve_dsn",
    "stderr_console",
    "stdout_console",
    "without_passwords",
]

EXIT_OK = 0
EXIT_NO = 1
EXIT_USAGE = 2
EXIT_NOT_WON = 75
EXIT_LOST = 76

_NO_DSN = (
    "no database given: use --dsn postgresql://user@host/dbname, or set PG_DSN, or libpq's variables "
    f"({', '.join(LIBPQ_VARIABLES)})"
)

_Command = TypeVar("_Command", bound=Callable[..., Any])


def exit_code_for_signal(signum: int) -> int:
    """What a shell reports for a process that signal `signum` ended."""
    return 128 + signum


def without_passwords(text: str) -> str:
    """The text with the password of each URI and of each `password=…` in it hidden."""
    # To the last @: a password may contain one. Without any, the text may have been cut off in front of it, unless what
    # stands there is a port.
    text = re.sub(r"(\w://[^\s:/@]*):(?:\S*(?=@)|(?!\d{1,5}(?:[/,;.)\s]|$))[^\s@]+(?=\s|$))", r"\1:***", text)
    return re.sub(r"(password\s*=\s*)('(?:[^'\\]|\\.)*'?|[^\s&)]+)", r"\1***", text)


class DurationType(_FloatType):
    """A duration on the command line, in seconds for the program: `5`, `5s`, `200ms`, `1m`."""

    name = "duration"

    def __init__(self, *, zero_allowed: bool = True) -> None:
        self._zero_allowed = zero_allowed

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            duration_s = parse_duration_s(value)
        except ConfigurationError as error:
            self.fail(str(error), param, ctx)
        if duration_s == 0 and not self._zero_allowed:
            self.fail("must be longer than zero", param, ctx)
        return duration_s


DURATION = DurationType()


def resolve_dsn(given: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """The connection string to use: what was given, or "" when libpq's own variables say it all.

    Without either it is a usage error. Never a private database instead: five hosts would get five leaders.
    """
    if given is not None:
        stripped = given.strip()
        if not stripped:
            raise click.UsageError("--dsn (or PG_DSN) is empty; " + _NO_DSN)
        return stripped
    if libpq_knows_where(environ):
        return ""
    raise click.UsageError(_NO_DSN)


def dsn_option(command: _Command) -> _Command:
    """`--dsn`, passed on as `dsn: str`, resolved."""
    return _dsn_option(command, lambda _ctx, _param, value: resolve_dsn(value))


def optional_dsn_option(command: _Command) -> _Command:
    """`--dsn`, passed on as `dsn: str | None` as given, for commands that can do without. See `resolve_dsn`."""
    return _dsn_option(command, None)


def _dsn_option(command: _Command, callback: Callable[[click.Context, click.Parameter, Any], Any] | None) -> _Command:
    option = click.option(
        "--dsn",
        envvar="PG_DSN",
        show_envvar=True,
        metavar="DSN",
        callback=callback,
        help="Where the database is: a URI or key=value pairs. Without it, libpq's PG* variables.",
    )
    return option(command)


@dataclass(frozen=True)
class LockKey:
    """Which lock is meant. `name` is None when it was given by its keys."""

    key1: int
    key2: int
    name: str | None = None
    namespace: str = DEFAULT_NAMESPACE

    def __str__(self) -> str:
        return self.name if self.name is not None else f"{self.key1}/{self.key2}"


def lock_options(command: _Command) -> _Command:
    """`--name` (with `--namespace`) or `--key1` and `--key2`, passed on as one `lock_key: LockKey`."""
    # The four are collected by the last of them, so that each command receives one value that is right.
    options = (
        click.option("--name", expose_value=False, is_eager=True, callback=_remember, help="The lock's name."),
        click.option(
            "--namespace",
            expose_value=False,
            is_eager=True,
            callback=_remember,
            help=f"Keeps equal names of different applications apart.  [default: {DEFAULT_NAMESPACE}]",
        ),
        click.option(
            "--key1",
            type=int,
            expose_value=False,
            is_eager=True,
            callback=_remember,
            help="Instead of a name: the first key of the advisory lock.",
        ),
        click.option("--key2", "lock_key", type=int, callback=_collect, help="Instead of a name: the second key."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _remember(ctx: click.Context, param: click.Parameter, value: object) -> None:
    ctx.meta[f"{__name__}.{param.name}"] = value


def _collect(ctx: click.Context, _param: click.Parameter, key2: int | None) -> LockKey | None:
    if ctx.resilient_parsing:  # Completion in a shell asks without values.
        return None
    name, namespace, key1 = (ctx.meta.get(f"{__name__}.{option}") for option in ("name", "namespace", "key1"))
    try:
        return lock_key_of(name, namespace, key1, key2)
    except ConfigurationError as error:
        raise click.UsageError(str(error)) from error


def lock_key_of(name: str | None, namespace: str | None, key1: int | None, key2: int | None) -> LockKey:
    """The lock that these options mean, or a usage error."""
    if name is not None:
        if key1 is not None or key2 is not None:
            raise click.UsageError("--name and --key1/--key2 exclude each other: give one or the other")
        namespace = DEFAULT_NAMESPACE if namespace is None else namespace
        return LockKey(*key_pair(name, namespace), name, namespace)
    if namespace is not None:
        raise click.UsageError("--namespace belongs to --name: keys are taken as they are")
    if key1 is None and key2 is None:
        raise click.UsageError("which lock? Give --name NAME, or --key1 and --key2")
    if key1 is None or key2 is None:
        raise click.UsageError("--key1 and --key2 belong together: give both")
    return LockKey(*check_key_pair(key1, key2))


def stdout_console() -> "Console":
    """For results. Colour only on a terminal and without NO_COLOR; width of the terminal, or COLUMNS."""
    return _console(stderr=False)


def stderr_console() -> "Console":
    """For what accompanies the results."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> "Console":
    from rich.console import Console  # noqa: PLC0415 - takes longer to import than --help takes to answer.

    # Neither words nor numbers are coloured by guessing, and nothing that comes from a database is taken as markup.
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)
