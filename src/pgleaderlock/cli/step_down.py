"""`pgleaderlock step-down ROLE`: asks the leader of a role to give it up, and says who leads then.

The request is durable: it is carried out also if this command ends first. Imports click, `history` and its neighbours.
It asks, and never ends anybody's session.
"""

import asyncio
import difflib
from collections.abc import Sequence
from dataclasses import dataclass

import click

from pgleaderlock import history
from pgleaderlock.cli._operations import (
    LedgerLook,
    ask,
    channel_option,
    namespace_option,
    open_ledger,
    span,
    until,
)
from pgleaderlock.cli._output import EXIT_NO, EXIT_OK, EXIT_USAGE, dsn_option, exit_code_for_signal
from pgleaderlock.cli._timing import POSITIVE
from pgleaderlock.errors import PgLeaderLockError

__all__ = ["Request", "step_down"]

TIMEOUT_S = 60.0
NAMES_SHOWN = 10
SIGINT = 2


class Refused(PgLeaderLockError):
    """What was asked cannot be done as things are."""

    def __init__(self, text: str, exit_code: int = EXIT_USAGE) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@dataclass
class Request:
    """The number of what was asked, once it has been."""

    number: int | None = None

    def left_open(self) -> int:
        """For Ctrl-C: says what stays behind, and gives the exit code."""
        if self.number is not None:
            click.echo(f"\nstopped waiting; request {self.number} stays, and will be carried out", err=True)
        return exit_code_for_signal(SIGINT)


@click.command("step-down", short_help="Ask a role's leader to give it up.")
@dsn_option
@namespace_option
@channel_option
@click.option("--to", "to_node", metavar="NODE", help="Who should lead next; the others leave it a head start.")
@click.option("--timeout", type=POSITIVE, default=TIMEOUT_S, help="How long to wait for the outcome.  [default: 1m]")
@click.argument("role")
def step_down(*, dsn: str, namespace: str, channel: str, to_node: str | None, timeout: float, role: str) -> int:
    """Ask the leader of ROLE to step down, wait for the outcome, and print who leads now.

    The leader ends its work first, as in a drain. The request is kept in the ledger for 5 minutes: Ctrl-C ends the wait
    and not the request.

    Exit codes: 0 it stepped down and the role is led again, 1 nobody leads, or not in time, or it was refused; 2 it
    could not be asked.
    """
    request = Request()
    try:
        return asyncio.run(
            _step_down(dsn, request, role, namespace=namespace, channel=channel, to_node=to_node, timeout_s=timeout)
        )
    except KeyboardInterrupt:
        return request.left_open()


async def _step_down(
    dsn: str, request: Request, name: str, *, namespace: str, channel: str, to_node: str | None, timeout_s: float
) -> int:
    async with open_ledger(dsn, "step-down", listen=channel, to_write=True) as look:
        before = await _leader(look, namespace, name)
        if to_node is not None:
            if before.node_id == to_node:
                click.echo(f"{name}: {to_node} leads already (epoch {before.epoch})")
                return EXIT_OK
            await _check_successor(look, namespace, to_node)
        request.number = await ask(
            look, "history_ask_step_down", role=name, namespace=namespace, to_node_id=to_node, channel=channel
        )
        if request.number is None:
            raise Refused(f"{name}: nobody leads it any more, so nobody was asked", EXIT_NO)
        click.echo(f"{name}: asked {before.node_id} to step down (request {request.number})", err=True)
        done = await _outcome(look, before, request.number, timeout_s)
        return await _told(look, before, done, timeout_s, to_node)


async def _leader(look: LedgerLook, namespace: str, name: str) -> history.RoleView:
    found = await history.role(look, namespace, name)
    if found is None:
        known = [role.role for role in await history.roles(look, namespace)]
        similar = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(similar)}?" if similar else "`pgleaderlock roles` lists what there is"
        raise Refused(f"role {name!r} has never been led in namespace {namespace!r}: {hint}")
    if found.state == "free":
        raise Refused(f"{name}: nobody leads it now, so there is nobody to step down", EXIT_NO)
    return found


async def _check_successor(look: LedgerLook, namespace: str, to_node: str) -> None:
    live = [
        node.node_id
        for node in await history.nodes(look, namespace)
        if node.state == "alive" and node.candidate and not node.draining
    ]
    if to_node not in live:
        raise Refused(f"node {to_node!r} would not lead: {_names(live)}")


def _names(live: Sequence[str]) -> str:
    shown = ", ".join(live[:NAMES_SHOWN]) + (" and others" if len(live) > NAMES_SHOWN else "")
    return f"the candidates that live are {shown}" if live else "no candidate is alive"


async def _outcome(
    look: LedgerLook, before: history.RoleView, number: int, timeout_s: float
) -> history.RequestView | None:
    """The request once it is closed and, if it was carried out, the role is led again; None when the time is up."""

    async def answer() -> history.RequestView | None:
        asked = await history.request(look, number)
        if asked is None or asked.done_at is None:
            return None
        if asked.outcome in ("refused", "expired"):
            return asked
        now = await history.role(look, before.namespace, before.role)
        return asked if now is not None and now.state == "led" and now.epoch > before.epoch else None

    return await until(look, timeout_s, answer)


async def _told(
    look: LedgerLook, before: history.RoleView, done: history.RequestView | None, timeout_s: float, to_node: str | None
) -> int:
    name = before.role
    if done is not None and done.outcome in ("refused", "expired"):
        raise Refused(f"{name}: {done.outcome}" + (f": {done.detail}" if done.detail else ""), EXIT_NO)
    now = await history.role(look, before.namespace, name)
    if done is None or now is None or now.state == "free":
        if now is not None and now.state == "free":
            raise Refused(
                f"{name}: {before.node_id} has stepped down, and nobody leads after {span(timeout_s)}", EXIT_NO
            )
        raise Refused(
            f"{name}: {before.node_id} has not stepped down within {span(timeout_s)}; the request stays, "
            "and is carried out when its work has ended",
            EXIT_NO,
        )
    (term,) = await history.terms(look, before.namespace, name, limit=1)
    again = " again: there is no other candidate" if now.node_id == before.node_id and now.candidates < 2 else ""
    click.echo(
        f"{name}: {before.node_id} -> {now.node_id}{again}, epoch {before.epoch} -> {now.epoch}, "
        f"{span(term.failover_s)} without a leader"
    )
    if to_node is not None and now.node_id != to_node:
        click.echo(f"{to_node} was not the one who won it", err=True)
        return EXIT_NO
    return EXIT_OK
