"""`pgleaderlock nodes`: who takes part in the elections of a namespace.

Imports click, `history` and its neighbours. It looks, and takes no lock.
"""

import asyncio
import json
from collections.abc import Sequence

import click

from pgleaderlock import history
from pgleaderlock.cli._operations import namespace_option, open_ledger, plain_table, span, table_console
from pgleaderlock.cli._output import DURATION, EXIT_NO, EXIT_OK, dsn_option
from pgleaderlock.cli._table import print_table

__all__ = ["nodes"]

NARROW_COLUMNS = 90


@click.command(short_help="List the nodes and what they do.")
@dsn_option
@namespace_option
@click.option(
    "--since", type=DURATION, default=3600.0, help="Also nodes that have gone within this time.  [default: 1h]"
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for programs.")
def nodes(dsn: str, namespace: str, since: float, as_json: bool) -> int:
    """List the nodes: which live, how many roles each leads, which drain, which have gone lately.

    A node is `silent` when it has not been heard for longer than its lease, and has not said goodbye: it crashed, or is
    cut off. Two processes with one node id are two lines. By the ledger: informational, and old when it is read.

    Exit codes: 0 at least one node that would lead is alive, 1 none is, 2 it could not be found out.
    """
    found = asyncio.run(_nodes(dsn, namespace, since))
    if as_json:
        view = {"namespace": namespace, "nodes": [history.as_json(node) for node in found], "authoritative": False}
        click.echo(json.dumps(view, indent=2))
    else:
        _print(found, namespace)
    return EXIT_OK if any(node.state == "alive" and node.candidate for node in found) else EXIT_NO


async def _nodes(dsn: str, namespace: str, since: float) -> Sequence[history.NodeView]:
    async with open_ledger(dsn, "nodes") as look:
        return await history.nodes(look, namespace, heard_within_s=since)


def _print(found: Sequence[history.NodeView], namespace: str) -> None:
    console = table_console()
    if not found:
        click.echo(f"no node of namespace {namespace} has been heard lately")
        return
    narrow = console.width < NARROW_COLUMNS
    columns = ["node", "state", "leads", "heartbeat"] + ([] if narrow else ["up for", "host", "pid", "version"])
    rows = []
    for node in found:
        cells = [node.node_id, words(node), str(node.leads), span(node.heartbeat_age_s)]
        up_s = (node.last_heartbeat - node.started_at).total_seconds()
        rows.append(cells + ([] if narrow else [span(up_s), node.host, str(node.os_pid), node.library_version]))
    print_table(console, plain_table(columns, rows, right=("leads", "heartbeat", "up for", "pid")))


def words(node: history.NodeView) -> str:
    """What a node does, in a few words."""
    if node.state != "alive":
        return node.state
    extra = [
        word
        for word, holds in (("drains", node.draining), ("observes", not node.candidate), ("balances", node.balance))
        if holds
    ]
    return ", ".join(["alive", *extra])
