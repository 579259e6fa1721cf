"""`pgleaderlock roles`: every role of a namespace, and who leads it.

Imports click, `history` and its neighbours. It looks, and takes no lock.
"""

import asyncio
import json

import click

from pgleaderlock import history
from pgleaderlock.cli._operations import namespace_option, open_ledger, plain_table, short_moment, span, table_console
from pgleaderlock.cli._output import EXIT_NO, EXIT_OK, dsn_option
from pgleaderlock.cli._table import print_table

__all__ = ["roles"]

NARROW_COLUMNS = 100


@click.command(short_help="List the roles and who leads each.")
@dsn_option
@namespace_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for programs.")
def roles(dsn: str, namespace: str, as_json: bool) -> int:
    """List every role that was ever led, with its leader, epoch, tenure and the age of the leader's heartbeat.

    A role is `free` when nobody leads it, and `silent` when its leader has not been heard for longer than its lease.
    By the ledger: informational, and old when it is read.

    Exit codes: 0 every role is led, 1 one is free or silent, 2 it could not be found out.
    """
    found = asyncio.run(_roles(dsn, namespace))
    if as_json:
        view = {"namespace": namespace, "roles": [history.as_json(role) for role in found], "authoritative": False}
        click.echo(json.dumps(view, indent=2))
    else:
        _print(found, namespace)
    return EXIT_OK if all(role.state == "led" for role in found) else EXIT_NO


async def _roles(dsn: str, namespace: str) -> list[history.RoleView]:
    async with open_ledger(dsn, "roles") as look:
        return await history.all_roles(look, namespace)


def _print(found: list[history.RoleView], namespace: str) -> None:
    console = table_console()
    if not found:
        click.echo(f"no role has been led in namespace {namespace} yet")
        return
    narrow = console.width < NARROW_COLUMNS
    columns = ["role", "leader", "epoch", "tenure", "heartbeat"] + ([] if narrow else ["leads since", "candidates"])
    rows = []
    for role in found:
        cells = [role.role, leader(role), str(role.epoch), span(role.tenure_s), span(role.heartbeat_age_s)]
        rows.append(cells + ([] if narrow else [short_moment(role.acquired_at), str(role.candidates)]))
    print_table(console, plain_table(columns, rows, right=("epoch", "tenure", "heartbeat", "candidates")))
    console.print(summary(found))


def leader(role: history.RoleView) -> str:
    """The node that leads, and what an operator should know about it."""
    if role.state == "free":
        return "(nobody)"
    remark = " (silent)" if role.state == "silent" else " (drains)" if role.draining else ""
    return f"{role.node_id}{remark}"


def summary(found: list[history.RoleView]) -> str:
    """All roles in one line."""
    states = [role.state for role in found]
    parts = [f"{states.count('led')} led"]
    parts += [f"{states.count(state)} {state}" for state in ("silent", "free") if state in states]
    candidates = found[0].candidates if found else 0
    return f"{len(found)} role{'s' * (len(found) != 1)}: {', '.join(parts)}; candidates: {candidates}"
