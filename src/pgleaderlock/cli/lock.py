"""`pgleaderlock lock`: a lock server's locks from the command line.

It must never print a bearer token. A lease id is enough to release the lease: `acquire` prints it, and `get` does only
if the server shows it to this token.
"""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from pgleaderlock._base.clock import BOOT_CLOCK
from pgleaderlock.cli.exec.command import lock_exec
from pgleaderlock.cli.options import POSITIVE, ServerOptions, server_options
from pgleaderlock.cli.output import (
    DURATION,
    EXIT_LOST,
    EXIT_NO,
    EXIT_NOT_WON,
    EXIT_OK,
    json_option,
    print_table,
    printable,
    stdout_console,
)
from pgleaderlock.client import Lease, LeaseLost, LockHeld, LockInfo
from pgleaderlock.client._wire import Granted
from pgleaderlock.errors import ConfigurationError

__all__ = ["lock"]

DEFAULT_TTL_S = 30.0
PAGE_SIZE = 500

_ttl_option = click.option("--ttl", "ttl_s", type=POSITIVE, default=DEFAULT_TTL_S, help="How long.  [default: 30s]")


@click.group(short_help="Take, keep and look at locks of a lock server.")
def lock() -> None:
    """Locks of a lock server (`pgleaderlock serve`): leases with fencing tokens, over HTTP."""


lock.add_command(lock_exec)


@lock.command(short_help="Take a lease of a lock.")
@server_options
@_ttl_option
@click.option("--wait", "wait_s", type=DURATION, default=0.0, help="Wait for its turn, up to this long.  [default: 0]")
@click.option("--owner", help="Who we are.  [default: host, pid and a random part]")
@json_option
@click.argument("name")
def acquire(*, server: ServerOptions, ttl_s: float, wait_s: float, owner: str | None, as_json: bool, name: str) -> int:
    """Take a lease of the lock NAME, and print it. It ends by itself after --ttl unless it is renewed.

    To run something while holding a lock, use `lock exec`.

    Exit codes: 0 acquired, 75 somebody else holds it, 2 usage or server.
    """
    with server.client(owner) as client:
        try:
            lease = client.acquire(name, ttl_s, wait_s=wait_s)
        except LockHeld as held:
            _print(f"not acquired: {held}", {"acquired": False, **_held_json(held)}, as_json=as_json)
            return EXIT_NOT_WON
    pairs = {"fencing token": lease.fencing_token, "owner": lease.owner_id, "lease id": lease.lease_id}
    text = f"acquired: {lease.lock_name}, for {lease.ttl_s:g} s unless it is renewed"
    _print("\n".join([text, *_lines(pairs)]), {"acquired": True, **_lease_json(lease)}, as_json=as_json)
    return EXIT_OK


def _lease_options(command: Any) -> Any:
    options = (
        click.option(
            "--lease",
            "lease_file",
            type=click.Path(path_type=Path, allow_dash=True),
            help="A file with what `lock acquire --json` has printed; - is standard input.",
        ),
        click.option("--owner", help="Instead of --lease: its owner."),
        click.option("--lease-id", help="Instead of --lease: its id."),
        click.option("--fencing-token", type=int, help="Instead of --lease: its fencing token."),
        click.argument("name", required=False),
    )
    for option in reversed(options):
        command = option(command)
    return command


@lock.command(short_help="Extend a lease from now.")
@server_options
@_lease_options
@_ttl_option
@json_option
def renew(*, server: ServerOptions, ttl_s: float, as_json: bool, **given: Any) -> int:
    """Extend a lease of the lock NAME: it is good for --ttl from now.

    Exit codes: 0 renewed, 76 lost: it had ended before, 2 usage or server.
    """
    lease = _lease_given(ttl_s, **given)
    with server.client() as client:
        try:
            client.renew(lease, ttl_s)
        except LeaseLost as lost:
            view = {"renewed": False, "lock_name": lease.lock_name, "reason": lost.reason}
            _print(f"lost: {lost}", view, as_json=as_json)
            return EXIT_LOST
    text = f"renewed: {lease.lock_name}, for {ttl_s:g} s from now"
    _print(text, {"renewed": True, **_lease_json(lease)}, as_json=as_json)
    return EXIT_OK


@lock.command(short_help="Give a lease back.")
@server_options
@_lease_options
@json_option
def release(*, server: ServerOptions, as_json: bool, **given: Any) -> int:
    """Give a lease of the lock NAME back. Somebody else's lease is never touched.

    Exit codes: 0 released, 1 it had ended before, 2 usage or server.
    """
    lease = _lease_given(DEFAULT_TTL_S, **given)
    with server.client() as client:
        released = client.release(lease)
    text = f"released: {lease.lock_name}" if released else f"not released: {lease.lock_name} had ended before"
    _print(text, {"released": released, "lock_name": lease.lock_name}, as_json=as_json)
    return EXIT_OK if released else EXIT_NO


@lock.command(short_help="Show a lock.")
@server_options
@json_option
@click.argument("name")
def get(*, server: ServerOptions, as_json: bool, name: str) -> int:
    """Show who holds the lock NAME. Informational: the answer is old when you read it.

    Exit codes: 0 somebody holds it, 1 nobody does, 2 usage or server.
    """
    with server.client() as client:
        info = client.get(name)
    lines = [f"{info.lock_name}: {'held' if info.held else 'free'}", *_lines(_pairs_of(info))]
    _print("\n".join(lines), asdict(info), as_json=as_json)
    return EXIT_OK if info.held else EXIT_NO


@lock.command("list", short_help="List locks.")
@server_options
@click.option("--prefix", default="", help="Only those whose names begin so.")
@click.option("--held", "only_held", is_flag=True, help="Only those that somebody holds.")
@json_option
def list_(*, server: ServerOptions, prefix: str, only_held: bool, as_json: bool) -> int:
    """List the locks that are held or have been, in the order of their names.

    Exit codes: 0, or 2 usage or server.
    """
    with server.client() as client:
        found = [info for info in client.list_locks(prefix, page_size=PAGE_SIZE) if info.held or not only_held]
    if found and not as_json:
        _print_locks(found)
    else:
        _print("no locks", {"locks": [asdict(info) for info in found]}, as_json=as_json)
    return EXIT_OK


@lock.command("break", short_help="Free a lock by force.")
@server_options
@json_option
@click.argument("name")
def break_(*, server: ServerOptions, as_json: bool, name: str) -> int:
    """Free the lock NAME, whoever holds it. Needs an admin token, and is recorded by the server.

    The holder finds out when it next renews: until then it may still act. What it guards must refuse its fencing token.

    Exit codes: 0 it is free, 2 usage or server.
    """
    with server.client() as client:
        was = client.break_lock(name)
    text = f"not broken: {name} was free"
    if was.held:
        text = f"broken: {name} was held by {was.owner_id} with fencing token {was.fencing_token}"
    _print(text, {"broken": was.held, "was": asdict(was)}, as_json=as_json)
    return EXIT_OK


def _lease_given(
    ttl_s: float,
    *,
    lease_file: Path | None,
    owner: str | None,
    lease_id: str | None,
    fencing_token: int | None,
    name: str | None,
) -> Lease:
    if lease_file is not None:
        if owner or lease_id or fencing_token is not None:
            raise click.UsageError("--lease has it all: give no --owner, --lease-id and --fencing-token with it")
        fields = _read_lease(lease_file)
        if name is not None and name != fields["lock_name"]:
            raise click.UsageError(f"--lease is of the lock {fields['lock_name']!r}, not of {name!r}")
    elif name is None or owner is None or lease_id is None or fencing_token is None:
        raise click.UsageError("which lease? Give --lease FILE, or NAME, --owner, --lease-id and --fencing-token")
    else:
        fields = {"lock_name": name, "owner_id": owner, "lease_id": lease_id, "fencing_token": fencing_token}
    granted = Granted(waited_ms=0, replayed=False, **fields)
    # The server decides whether the lease is still valid: here it begins now.
    return Lease(granted, ttl_s, BOOT_CLOCK.now(), BOOT_CLOCK)


def _read_lease(path: Path) -> dict[str, Any]:
    kinds = {"lock_name": str, "owner_id": str, "lease_id": str, "fencing_token": int}
    try:
        with click.open_file(str(path), encoding="utf-8") as file:
            fields = json.loads(file.read(64 * 1024))
        found = {name: fields[name] for name in kinds}
    except OSError as error:
        raise ConfigurationError(f"--lease {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"--lease {path} is not what `lock acquire --json` prints") from error
    if not all(isinstance(found[name], kind) for name, kind in kinds.items()):
        raise ConfigurationError(f"--lease {path} is not what `lock acquire --json` prints")
    return found


def _lease_json(lease: Lease) -> dict[str, Any]:
    fields = ("lock_name", "owner_id", "lease_id", "fencing_token", "ttl_s")
    return {name: getattr(lease, name) for name in fields} | {"remaining_s": round(lease.remaining_s, 3)}


def _held_json(held: LockHeld) -> dict[str, Any]:
    fields = ("lock_name", "current_owner_id", "current_expiry_ms", "recommended_retry_s", "reason")
    return {name: getattr(held, name) for name in fields}


def _print(text: str, view: dict[str, Any], *, as_json: bool) -> None:
    """The outcome, as `text` for people or as `view` for programs."""
    click.echo(json.dumps(view, indent=2, ensure_ascii=False) if as_json else text)


def _lines(pairs: dict[str, Any]) -> list[str]:
    return [f"{name:<14} {value}" for name, value in pairs.items()]


def _pairs_of(info: LockInfo) -> dict[str, Any]:
    pairs: dict[str, Any] = {"fencing token": info.fencing_token, "version": info.version}
    if info.held:
        pairs = {"owner": info.owner_id, "expires": _expires(info), **pairs}
    if info.lease_id is not None:
        pairs["lease id"] = info.lease_id
    return {**pairs, "waiting": info.waiters}


def _expires(info: LockInfo) -> str:
    """The expiry in words. It depends on the wall clocks of two machines: hence "about"."""
    if info.lease_expiry_ms is None:
        return "-"
    return f"in about {max(0.0, info.lease_expiry_ms / 1000 - time.time()):.1f} s"


def _print_locks(found: list[LockInfo]) -> None:
    from rich import box  # noqa: PLC0415 - takes longer to import than --help takes to answer.
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, show_edge=False)
    for heading in ("lock", "owner"):
        table.add_column(heading, overflow="fold", ratio=1)
    table.add_column("token", justify="right", no_wrap=True)
    table.add_column("expires", no_wrap=True)
    for info in found:
        owner = info.owner_id if info.held else None
        expires = _expires(info).removeprefix("in about ") if info.held else "-"
        # Names come from other programs: control characters are escaped.
        cells = (printable(info.lock_name), printable(owner or "-"), str(info.fencing_token), expires)
        table.add_row(*(Text(cell) for cell in cells))
    print_table(stdout_console(), table)
