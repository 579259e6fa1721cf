"""`pgleaderlock history ROLE`: who led a role, from when to when, why it ended, and how long nobody led.

Imports click, `history` and its neighbours. It looks, and takes no lock.
"""

import asyncio
import csv
import json
import statistics
import sys
from collections.abc import Sequence

import click

from pgleaderlock import history as ledger
from pgleaderlock.cli._operations import namespace_option, open_ledger, plain_table, short_moment, span, table_console
from pgleaderlock.cli._output import DURATION, EXIT_NO, EXIT_OK, dsn_option
from pgleaderlock.cli._table import print_table

__all__ = ["history"]

NARROW_COLUMNS = 90
LIMIT = 100
_MORE = "the newest {limit} terms; older ones were left out (--limit shows more)"


@click.command(short_help="Show who led a role, and how long nobody did.")
@dsn_option
@namespace_option
@click.option("--since", type=DURATION, help="Only terms of this time up to now, such as 1d.  [default: all]")
@click.option("--limit", type=click.IntRange(min=1), default=LIMIT, show_default=True, help="At most so many terms.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for programs.")
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values for a spreadsheet.")
@click.argument("role")
def history(
    *, dsn: str, namespace: str, since: float | None, limit: int, as_json: bool, as_csv: bool, role: str
) -> int:
    """Show the terms of ROLE, the newest first: who led, from when to when, and why the term ended.

    FAILOVER is the time from the end of the term before to the start of this one: the time without a leader. A term
    that was lost counts as ended at its leader's last heartbeat.

    Exit codes: 0 there are terms, 1 there are none, 2 it could not be found out.
    """
    if as_json and as_csv:
        raise click.UsageError("--json and --csv exclude each other: give one or the other")
    found, more = asyncio.run(_terms(dsn, namespace, role, since, limit))
    if as_json:
        view = {"namespace": namespace, "role": role, "terms": [ledger.as_json(term) for term in found], "more": more}
        click.echo(json.dumps(view, indent=2))
    elif as_csv:
        _print_csv(found)
    elif not found:
        within = "" if since is None else f" in the last {span(since)}"
        click.echo(f"{role}: no term{within} in namespace {namespace} (the roles: pgleaderlock roles)")
    else:
        _print(found)
    if more and not as_json:
        click.echo(_MORE.format(limit=limit), err=True)
    return EXIT_OK if found else EXIT_NO


async def _terms(
    dsn: str, namespace: str, role: str, since_s: float | None, limit: int
) -> tuple[list[ledger.Term], bool]:
    found: list[ledger.Term] = []
    async with open_ledger(dsn, "history") as look:
        async for term in ledger.all_terms(look, namespace, role, since_s=since_s):
            if len(found) == limit:
                return found, True
            found.append(term)
    return found, False


def _print_csv(found: Sequence[ledger.Term]) -> None:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    columns = list(ledger.Term.__dataclass_fields__)
    writer.writerow(columns)
    for term in found:
        shown = ledger.as_json(term)
        writer.writerow([shown[column] for column in columns])


def _print(found: Sequence[ledger.Term]) -> None:
    console = table_console()
    narrow = console.width < NARROW_COLUMNS
    columns = ["epoch", "node", "began", *([] if narrow else ["ended"]), "lasted", "end", "failover"]
    rows = []
    for term in found:
        ended = [] if narrow else [short_moment(term.ended_at)]
        began = short_moment(term.began_at, narrow=narrow)
        end = term.reason or ("leads" if term.ended_at is None else "-")
        rows.append([str(term.epoch), term.node_id, began, *ended, span(term.lasted_s), end, span(term.failover_s)])
    print_table(console, plain_table(columns, rows, right=("epoch", "lasted", "failover"), gap=1 if narrow else 2))
    console.print(_summary(found))


def _summary(found: Sequence[ledger.Term]) -> str:
    nodes = len({term.node_id for term in found})
    text = f"{len(found)} term{'s' * (len(found) != 1)}, {nodes} node{'s' * (nodes != 1)}"
    gaps = sorted(term.failover_s for term in found if term.failover_s is not None)
    if gaps:
        text += f"; leaderless: median {span(statistics.median(gaps))}, longest {span(gaps[-1])}"
    return text
