"""What `run` and `exec` compete for, and which file they read: `--config`, `--name`, `--namespace`, `--key1`, `--key2`.

One lock, or with `--fenced` the roles of a configuration. Imports click, `config`, `errors` and `_output`. It must
never print a password, and never take a plain lock for a role without saying what of the file it does not read.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from pgleaderlock.cli._output import EXIT_USAGE, LockKey, lock_key_of, without_passwords
from pgleaderlock.config import FILE_NAME, Config, ConfigFileError, find_file
from pgleaderlock.errors import ConfigurationError

__all__ = ["Contender", "contender_options", "load_config", "warn"]

_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class Contender:
    """As the command line said it."""

    path: Path | None
    names: tuple[str, ...]
    namespace: str | None
    key1: int | None
    key2: int | None

    def lock_key(self) -> LockKey:
        """The one lock that is meant, for a plain lock."""
        if len(self.names) > 1:
            raise click.UsageError("several --name need --fenced: a plain lock is one")
        try:
            return lock_key_of(self.names[0] if self.names else None, self.namespace, self.key1, self.key2)
        except ConfigurationError as error:
            raise click.UsageError(str(error)) from error

    def plain_dsn(self, dsn: str | None) -> str | None:
        """The database of a plain lock: what was given, or the file's. Nothing else of a file is a plain lock's."""
        found = find_file(self.path) if dsn is None or self.path is not None else None
        if found is None:
            return dsn
        loaded = load_config(found, environ={})
        unread = [
            value.setting.key for value in loaded.values.values() if value.is_given and value.setting.key != "dsn"
        ]
        unread += ["[roles]"] if loaded.role_settings else []
        if unread:
            warn(f"{found}: without --fenced only its dsn is used, and not {', '.join(unread)}")
        return dsn if dsn is not None else loaded["dsn"]


def contender_options(*, several: bool) -> Callable[[_Command], _Command]:
    """The five options, passed on as one `contender: Contender`; `several` names with `--fenced`, or one."""
    many = " With --fenced it may be given several times, and without it all roles of the configuration are meant."
    one = " With --fenced and a configuration of one role it may be left out."
    options = (
        click.option(
            "--config",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Settings, roles and the database; without --fenced the database alone.  "
            f"[default: $PGLEADERLOCK_CONFIG, or ./{FILE_NAME}]",
            **_quietly,
        ),
        click.option("--name", multiple=True, help=f"The lock's name.{many if several else one}", **_quietly),
        click.option(
            "--namespace",
            help="Keeps equal names of different applications apart.  [default: pgleaderlock]",
            **_quietly,
        ),
        click.option("--key1", type=int, help="Instead of a name: the first key of the advisory lock.", **_quietly),
        click.option("--key2", "contender", type=int, callback=_collect, help="Instead of a name: the second key."),
    )

    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def load_config(
    path: Path | None,
    *,
    flags: Mapping[str, object] | None = None,
    roles: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """The configuration. Every mistake in it is printed, one line each, and ends the program with 2."""
    try:
        loaded = Config.load(path, environ, flags, roles)
    except ConfigFileError as error:
        for problem in error.problems:
            _print("error:", str(problem))
        raise SystemExit(EXIT_USAGE) from error
    for warning in loaded.warnings:
        warn(str(warning))
    return loaded


def warn(text: str) -> None:
    _print("warning:", text)


def _print(what: str, text: str) -> None:
    print(what, without_passwords(" ".join(text.split())), file=sys.stderr, flush=True)


# --- The four are collected by the last of them, so that each command receives one value.


def _remember(ctx: click.Context, param: click.Parameter, value: object) -> None:
    ctx.meta[f"{__name__}.{param.name}"] = value


def _collect(ctx: click.Context, _param: click.Parameter, key2: int | None) -> Contender:
    path, names, namespace, key1 = (
        ctx.meta.get(f"{__name__}.{option}") for option in ("config", "name", "namespace", "key1")
    )
    return Contender(path, tuple(names or ()), namespace, key1, key2)


_quietly: dict[str, Any] = {"expose_value": False, "is_eager": True, "callback": _remember}
