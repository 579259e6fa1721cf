"""Options that several commands share, and the objects made from them: a lock, an election, a client of a lock server.

The defaults are the library's own; a test compares them. Errors name the options of the command line
(`in_option_words`). With `--fenced`, a flag overrides the environment, the environment overrides the file, and the file
overrides the default, as in `Config`.

It must never print a password or a token, and never use a bare lock where `--fenced` was asked for: without the fence,
two nodes could act at the same time.
"""

import difflib
import os
import re
import ssl
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, Unpack

import click

from pgleaderlock._config.schema import ELECTION
from pgleaderlock._config.toml import read_toml
from pgleaderlock._pg.conninfo import Dsn, libpq_knows_where
from pgleaderlock.cli.output import (
    EXIT_USAGE,
    NAMESPACE_VARIABLE,
    DurationType,
    LockKey,
    VariableOption,
    grouped,
    lock_key_of,
    remembered,
    remembered_option,
    resolve_dsn,
    without_passwords,
)
from pgleaderlock.client import AsyncLockClient, LockClient
from pgleaderlock.config import FILE_NAME, Config, ConfigFileError, find_file
from pgleaderlock.election import LeaderElection
from pgleaderlock.errors import ConfigurationError
from pgleaderlock.keys import DEFAULT_NAMESPACE, key_pair, key_pair_from_bigint
from pgleaderlock.lock import LeaderLock, LockOptions

__all__ = [
    "POSITIVE",
    "Contender",
    "ServerOptions",
    "allow_pooler_option",
    "check_fenced",
    "contender_options",
    "fenced_config",
    "fenced_options",
    "given",
    "in_option_words",
    "load_config",
    "lock_key_of_role",
    "make_election",
    "make_lock",
    "needs_database",
    "read_config",
    "server_options",
    "timing_options",
    "warn",
]

POSITIVE = DurationType(zero_allowed=False)
_FILE = click.Path(path_type=Path)
TOKEN_ENV = "PGLEADERLOCK_TOKEN"  # noqa: S105 - the name of a variable
TOKEN_FILE_BYTES_MAX = 4096

_Command = TypeVar("_Command", bound=Callable[..., Any])


# --- Names: keyword of the library → option


def _parameter(option: str) -> str:
    """The name under which click passes an option on."""
    return option.removeprefix("--").replace("-", "_")


_OPTION_OF = {setting.option: setting.flag for setting in ELECTION if setting.flag and setting.kind.is_duration} | {
    "health_interval_s": "--health-interval",
    "health_timeout_s": "--health-timeout",
    "reconnect_grace_s": "--reconnect-grace",
    "base_s": "--retry-base",
    "max_s": "--retry-max",
    "allow_pooler=True": "--allow-pooler",
}
_KEYWORDS = re.compile(rf"\b({'|'.join(_OPTION_OF)})\b")
# An election has heartbeats instead of probes, always competes again, and has its own back-off.
_OF_A_LOCK = ("--health-timeout", "--retry-base", "--retry-max", "--reconnect-grace", "--no-auto-reacquire")
_OF_AN_ELECTION = ("--late-threshold", "--node-id", "--hold", "--balance")


def in_option_words(text: str) -> str:
    """The text with the library's keywords replaced by the options that set them."""
    return _KEYWORDS.sub(lambda found: _OPTION_OF[found[0]], text)


def given(ctx: click.Context, parameter: str) -> bool:
    """Was the option given on the command line?"""
    return ctx.get_parameter_source(parameter) is click.core.ParameterSource.COMMANDLINE


# --- Groups of options


def timing_options(command: _Command) -> _Command:
    """`--health-interval`, `--health-timeout` and `--session-lease`, in seconds; the last two may be None."""
    return grouped(
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
    )(command)


def allow_pooler_option(command: _Command) -> _Command:
    """`--allow-pooler`."""
    return click.option(
        "--allow-pooler", is_flag=True, help="Go through a connection pooler in session mode; others are refused."
    )(command)


def fenced_options(command: _Command) -> _Command:
    """`--fenced`, and `--late-threshold`, `--node-id` and `--hold`, which belong to it."""
    return grouped(
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
        click.option(
            "--node-id",
            help="With --fenced: who this node is, for people.  [default: the host name, numbered if taken]",
        ),
        click.option(
            "--hold",
            type=click.Choice(["session", "lease"]),
            help="With --fenced: lease works through any pooler, but a killed leader is replaced later.  [default: "
            "session]",
        ),
    )(command)


# --- What `run` and `exec` compete for: one lock, or with `--fenced` the roles of a configuration


@dataclass(frozen=True)
class Contender:
    """The values of `--config`, `--name`, `--namespace`, `--key1` and `--key2`."""

    path: Path | None
    names: tuple[str, ...]
    namespace: str | None
    key1: int | None
    key2: int | None

    def lock_key(self) -> LockKey:
        """The lock that the options select, for a plain lock."""
        if len(self.names) > 1:
            raise click.UsageError("several --name need --fenced: a plain lock is one")
        try:
            return lock_key_of(self.names[0] if self.names else None, self.namespace, self.key1, self.key2)
        except ConfigurationError as error:
            raise click.UsageError(str(error)) from error

    def plain_dsn(self, dsn: str | None) -> str | None:
        """The database of a plain lock: the given one, or the file's. A warning names the other settings in the
        file."""
        found = find_file(self.path) if dsn is None or self.path is not None else None
        if found is None:
            return dsn
        loaded = load_config(found, environ={})
        unread = [key for key, value in loaded.values.items() if value.is_given and key != "dsn"]
        unread += ["[roles]"] if loaded.role_settings else []
        if unread:
            warn(f"{found}: without --fenced only its dsn is used, and not {', '.join(unread)}")
        return dsn if dsn is not None else loaded["dsn"]


def contender_options(*, several: bool) -> Callable[[_Command], _Command]:
    """The five options, passed on as one `contender: Contender`; with `--fenced` several names, or one."""
    many = " With --fenced it may be given several times, and without it all roles of the configuration are meant."
    one = " With --fenced and a configuration of one role it may be left out."
    return grouped(
        remembered_option(
            "--config",
            type=_FILE,
            metavar="FILE",
            help="Settings, roles and the database; without --fenced the database alone.  "
            f"[default: $PGLEADERLOCK_CONFIG, or ./{FILE_NAME}]",
        ),
        remembered_option("--name", multiple=True, help=f"The lock's name.{many if several else one}"),
        remembered_option(
            "--namespace",
            help=f"Keeps equal names of different applications apart.  [default: ${NAMESPACE_VARIABLE}, with --fenced "
            f"the configuration's, or {DEFAULT_NAMESPACE}]",
        ),
        remembered_option("--key1", type=int, help="Instead of a name: the first key of the advisory lock."),
        click.option(
            "--key2", "contender", type=int, callback=_collect_contender, help="Instead of a name: the second key."
        ),
    )


def _collect_contender(ctx: click.Context, _param: click.Parameter, key2: int | None) -> Contender:
    path, names, namespace, key1 = remembered(ctx, "config", "name", "namespace", "key1")
    return Contender(path, tuple(names or ()), namespace, key1, key2)


def make_lock(dsn: Dsn, lock_key: LockKey, **options: Unpack[LockOptions]) -> LeaderLock:
    """The lock for these options. Errors name the options of the command line."""
    try:
        if lock_key.name is not None:
            return LeaderLock.for_name(dsn, lock_key.name, namespace=lock_key.namespace, **options)
        return LeaderLock(dsn, lock_key.key1, lock_key.key2, **options)
    except ConfigurationError as error:
        raise ConfigurationError(in_option_words(str(error))) from error


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


# --- `--fenced`: an election with epochs and a gate instead of a bare lock


def check_fenced(ctx: click.Context, contender: Contender, *, fenced: bool) -> None:
    """Refuse options that would be ignored."""
    for option in _OF_A_LOCK if fenced else _OF_AN_ELECTION:
        if given(ctx, _parameter(option)):
            if not fenced:
                raise click.UsageError(f"{option} belongs to --fenced: add that, or drop it")
            raise click.UsageError(f"{option} does not go with --fenced, where it would have no effect: drop it")
    if fenced and (contender.key1 is not None or contender.key2 is not None):
        raise click.UsageError("--fenced needs --name: the ledger knows a role by its name")


def fenced_config(ctx: click.Context, contender: Contender, *, embedded: bool, **flags: object) -> Config:
    """The configuration of this command line's election: its roles, its database and its settings.

    `flags` are those of an election only, by the keys of the configuration; None means not given.
    """
    if (dsn := ctx.params["dsn"]) is not None and not embedded:
        resolve_dsn(dsn)  # an empty DSN is a mistake, whatever its origin
    for setting in ELECTION:
        # The default of a lock's option does not apply to an election: use the option only if it was given.
        parameter = _parameter(setting.flag)
        if parameter in ctx.params and given(ctx, parameter):
            flags[setting.key] = ctx.params[parameter]
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
    key = config.roles[name] if isinstance(config.roles, Mapping) else None
    namespace: str = config["namespace"]
    pair = key_pair(name, namespace) if key is None else key_pair_from_bigint(key)
    return LockKey(*pair, name, namespace)


def make_election(config: Config, dsn: Dsn | None = None, *, grace_s: float = 0.0, hot: bool = True) -> LeaderElection:
    """The election for this configuration. Errors name the options of the command line.

    `dsn` replaces that of the configuration. If the user has not set the lease, `grace_s` is added to it: a command has
    that long to end between the end of the gate here and its opening elsewhere. Without `hot` there is one try, and no
    wait.
    """
    options: dict[str, Any] = {} if dsn is None else {"dsn": dsn}
    if grace_s and not config.values["lease_duration"].is_given:
        options |= {"late_threshold_s": config["late_threshold"], "session_lease_s": config["lease_duration"] + grace_s}
    if not hot:
        options["standby_wait_s"] = 0.0
    try:
        return LeaderElection.from_config(config, **options)
    except ConfigurationError as error:
        raise ConfigurationError(in_option_words(str(error))) from error


# --- A lock server: where it is, and with which token. The token comes from a file or from the environment, because
# other users of the machine can read a command line.


@dataclass(frozen=True)
class ServerOptions:
    """The addresses of the servers, and how to connect to them."""

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
    """`--server`, `--token-file`, `--ca-file` and `--timeout`, passed on as one `server: ServerOptions`."""
    return grouped(
        remembered_option(
            "--server",
            "urls",
            metavar="URL",
            multiple=True,
            cls=VariableOption,
            called="a server's URL",
            envvar="PGLEADERLOCK_SERVER",
            show_envvar=True,
            help="The lock server, http://host:port. May be given several times: the next one is asked when one fails.",
        ),
        remembered_option(
            "--token-file",
            type=_FILE,
            help="A file with the bearer token alone.  [default: the variable PGLEADERLOCK_TOKEN]",
        ),
        remembered_option(
            "--ca-file", type=_FILE, help="Certificates to trust for https, instead of the system's (PEM)."
        ),
        click.option(
            "--timeout",
            "server",
            type=POSITIVE,
            default=5.0,
            callback=_collect_server,
            help="How long to wait for an answer, beyond --wait.  [default: 5s]",
        ),
    )(command)


def _collect_server(ctx: click.Context, _param: click.Parameter, timeout_s: float) -> ServerOptions | None:
    if ctx.resilient_parsing:  # Completion in a shell asks without values.
        return None
    urls, token_file, ca_file = remembered(ctx, "urls", "token_file", "ca_file")
    # In the environment variable, several addresses are separated by blanks or commas.
    separate = tuple(url for text in urls or () for url in text.replace(",", " ").split())
    if not separate:
        raise click.UsageError("no lock server given: use --server http://host:7420, or set PGLEADERLOCK_SERVER")
    return ServerOptions(separate, _token(token_file), timeout_s, ca_file)


def _token(token_file: Path | None) -> str | None:
    if token_file is None:
        token = os.environ.get(TOKEN_ENV, "").strip()
        if not re.fullmatch(r"[!-~]*", token):
            raise click.UsageError(f"{TOKEN_ENV} must be one word of visible ASCII characters")
        return token or None
    try:
        with token_file.open("rb") as file:
            text = file.read(TOKEN_FILE_BYTES_MAX + 1)
        token = text.decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--token-file {token_file} cannot be read: {error}") from error
    if not token or len(text) > TOKEN_FILE_BYTES_MAX or len(token.split()) != 1:
        raise click.UsageError(f"--token-file {token_file} must hold one token and nothing else")
    return token


# --- The file of `serve --config`: TOML with one key per option, which takes the place of the options' defaults


def read_config(path: Path, options: Iterable[click.Parameter]) -> dict[str, Any]:
    """The settings of the file, by parameter name. Raises `click.UsageError`, also for an unknown key."""
    known = {option.name: option for option in options if isinstance(option, click.Option) and option.name != "config"}
    try:
        file = read_toml(path)
    except ConfigFileError as error:
        raise click.UsageError(f"--config {error}") from error
    for key, value in file.document.items():
        where = f"--config {file.where((key,))}"
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
            raise click.UsageError(f"{where}: unknown setting {key!r}: {remedy}")
        _check_type(where, key, value, known[key])
    return file.document


def _check_type(where: str, key: str, value: Any, option: click.Option) -> None:
    if isinstance(value, dict):
        raise click.UsageError(f"{where}: there are no sections: write {key} = … at the top")
    if option.multiple != isinstance(value, list):
        wanted = 'a list: ["one", "two"]' if option.multiple else "one value, no list"
        raise click.UsageError(f"{where}: {key} takes {wanted}")
    if option.is_flag != isinstance(value, bool):
        raise click.UsageError(f"{where}: {key} is {'true or false' if option.is_flag else 'neither true nor false'}")
