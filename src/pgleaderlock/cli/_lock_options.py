"""What all commands that speak to a lock server share: which server, with which token.

Imports click and `_output`; the client only when a command runs. Must never print a token: it is read from a file or
from the environment, because other users of the machine can read a command line.
"""

import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from pgleaderlock.cli._output import DurationType
from pgleaderlock.client import AsyncLockClient, LockClient
from pgleaderlock.errors import ConfigurationError

__all__ = ["POSITIVE", "ServerOptions", "server_options"]

POSITIVE = DurationType(zero_allowed=False)
TOKEN_ENV = "PGLEADERLOCK_TOKEN"  # noqa: S105 - the name of a variable
TOKEN_FILE_BYTES_MAX = 4096
_NO_SERVER = "no lock server given: use --server http://host:7420, or set PGLEADERLOCK_SERVER"

_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class ServerOptions:
    """Where the servers are, and how to speak to them."""

    urls: tuple[str, ...]
    token: str | None
    timeout_s: float
    ca_file: Path | None

    def client(self, owner_id: str | None = None) -> LockClient:
        return LockClient(self.urls, owner_id=owner_id, **self._settings())

    def async_client(self, owner_id: str | None = None, *, connections_max: int = 64) -> AsyncLockClient:
        return AsyncLockClient(self.urls, owner_id=owner_id, connections_max=connections_max, **self._settings())

    def _settings(self) -> dict[str, Any]:
        context = None
        if self.ca_file is not None:
            try:
                context = ssl.create_default_context(cafile=str(self.ca_file))
            except (OSError, ssl.SSLError) as error:
                raise ConfigurationError(f"--ca-file {self.ca_file} cannot be used: {error}") from error
        return {"token": self.token, "request_timeout_s": self.timeout_s, "ssl_context": context}


def server_options(command: _Command) -> _Command:
    """`--server`, `--token-file`, `--timeout` and `--ca-file`, passed on as one `server: ServerOptions`."""
    options = (
        click.option(
            "--server",
            "urls",
            metavar="URL",
            multiple=True,
            envvar="PGLEADERLOCK_SERVER",
            show_envvar=True,
            expose_value=False,
            is_eager=True,
            callback=_remember,
            help="The lock server, http://host:port. May be given several times: the next one is asked when one fails.",
        ),
        click.option(
            "--token-file",
            type=click.Path(path_type=Path),
            expose_value=False,
            is_eager=True,
            callback=_remember,
            help="A file with the bearer token alone.  [default: the variable PGLEADERLOCK_TOKEN]",
        ),
        click.option(
            "--ca-file",
            type=click.Path(path_type=Path),
            expose_value=False,
            is_eager=True,
            callback=_remember,
            help="Certificates to trust for https, instead of the system's (PEM).",
        ),
        click.option(
            "--timeout",
            "server",
            type=POSITIVE,
            default=5.0,
            callback=_collect,
            help="How long to wait for an answer, beyond --wait.  [default: 5s]",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _remember(ctx: click.Context, param: click.Parameter, value: object) -> None:
    ctx.meta[f"{__name__}.{param.name}"] = value


def _collect(ctx: click.Context, _param: click.Parameter, timeout_s: float) -> ServerOptions | None:
    if ctx.resilient_parsing:  # Completion in a shell asks without values.
        return None
    urls, token_file, ca_file = (ctx.meta.get(f"{__name__}.{name}") for name in ("urls", "token_file", "ca_file"))
    # In the variable, several are separated by blanks or commas.
    given = tuple(url for text in urls or () for url in text.replace(",", " ").split())
    if not given:
        raise click.UsageError(_NO_SERVER)
    return ServerOptions(given, _token(token_file), timeout_s, ca_file)


def _token(token_file: Path | None) -> str | None:
    if token_file is None:
        return os.environ.get(TOKEN_ENV) or None
    try:
        with token_file.open("rb") as file:
            text = file.read(TOKEN_FILE_BYTES_MAX + 1)
        token = text.decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--token-file {token_file} cannot be read: {error}") from error
    if not token or len(text) > TOKEN_FILE_BYTES_MAX or len(token.split()) != 1:
        raise click.UsageError(f"--token-file {token_file} must hold one token and nothing else")
    return token
