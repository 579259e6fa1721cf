"""`pgleaderlock drain NODE`: asks a node to give up all its roles and to compete for none, until it is resumed.

The request is durable: it is carried out also if this command ends first. Imports click, `history` and its neighbours.
It asks, and never ends anybody's session.
"""

import asyncio
from collections import Counter

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
from pgleaderlock.cli._output import EXIT_NO, EXIT_OK, dsn_option
from pgleaderlock.cli._timing import POSITIVE
from pgleaderlock.cli.step_down import TIMEOUT_S, Refused, Request
from pgleaderlock.errors import ConnectionError

__all__ = ["drain"]

NOBODY_YET = "nobody yet"
SUCCESSORS_S = 10.0
"""The node is drained by then, whoever leads next: a role that no other node is after would be waited for in vain."""


@click.command(short_help="Ask a node to give up all its roles.")
@dsn_option
@namespace_option
@channel_option
@click.option("--resume", is_flag=True, help="Let it compete again instead.")
@click.option("--timeout", type=POSITIVE, default=TIMEOUT_S, help="How long to wait for the outcome.  [default: 1m]")
@click.argument("node")
def drain(*, dsn: str, namespace: str, channel: str, resume: bool, timeout: float, node: str) -> int:
    """Ask NODE to end its work, give up its roles and compete for none: before it is shut down or repaired.

    With --resume it competes again; so it does when it is started again. The request is kept in the ledger for 5
    minutes: Ctrl-C ends the wait and not the request.

    Exit codes: 0 done, 1 the node does not live, or not in time, or it was refused; 2 it could not be asked.
    """
    request = Request()
    try:
        return asyncio.run(
            _drain(dsn, request, node, namespace=namespace, channel=channel, timeout_s=timeout, resume=resume)
        )
    except KeyboardInterrupt:
        return request.left_open()


async def _drain(
    dsn: str, request: Request, node_id: str, *, namespace: str, channel: str, timeout_s: float, resume: bool
) -> int:
    async with open_ledger(dsn, "drain", listen=channel, to_write=True) as look:
        await _check_node(look, namespace, node_id)
        led = [role.role for role in await history.all_roles(look, namespace) if role.node_id == node_id]
        statement = "history_ask_resume" if resume else "history_ask_drain"
        request.number = await ask(look, statement, node_id=node_id, namespace=namespace, channel=channel)
        if request.number is None:
            raise Refused(f"{node_id} does not live any more, so nobody was asked", EXIT_NO)
        what = "compete again" if resume else f"drain {len(led)} role{'s' * (len(led) != 1)}"
        click.echo(f"{node_id}: asked to {what} (request {request.number})", err=True)
        done = await _outcome(look, namespace, node_id, request.number, timeout_s, resume=resume)
        if done is None:
            raise Refused(
                f"{node_id}: not done within {span(timeout_s)}; the request stays"
                + ("" if resume else ", and ends when the work of the node has"),
                EXIT_NO,
            )
        if done.outcome in ("refused", "expired"):
            raise Refused(f"{node_id}: {done.outcome}" + (f": {done.detail}" if done.detail else ""), EXIT_NO)
        request.number = None  # it is carried out: a Ctrl-C from here on leaves nothing behind
        click.echo(f"{node_id}: competes again" if resume else await _sum_up(look, namespace, node_id, led, done))
        return EXIT_OK


async def _check_node(look: LedgerLook, namespace: str, node_id: str) -> None:
    known = await history.nodes(look, namespace, heard_within_s=history.EVER_S)
    of_name = [node for node in known if node.node_id == node_id]
    if not of_name:
        live = sorted({node.node_id for node in known if node.state == "alive"})
        raise Refused(
            f"node {node_id!r} is not known in namespace {namespace!r}: alive are {', '.join(live) or 'none'}"
        )
    if not any(node.state == "alive" for node in of_name):
        last = of_name[-1]
        raise Refused(
            f"{node_id}: not alive ({last.state}, last heard {span(last.heartbeat_age_s)} ago): nobody to ask", EXIT_NO
        )


async def _outcome(
    look: LedgerLook, namespace: str, node_id: str, number: int, timeout_s: float, *, resume: bool
) -> history.RequestView | None:
    """The request once it is closed and the node leads nothing any more; None when the time is up."""

    async def answer() -> history.RequestView | None:
        asked = await history.request(look, number)
        if asked is None or asked.done_at is None:
            return None
        if resume or asked.outcome in ("refused", "expired"):
            return asked
        leads = sum(node.leads for node in await history.nodes(look, namespace) if node.node_id == node_id)
        return asked if leads == 0 else None

    return await until(look, timeout_s, answer)


async def _sum_up(look: LedgerLook, namespace: str, node_id: str, led: list[str], done: history.RequestView) -> str:
    """Who leads now what the node had led."""
    if not led:
        return f"{node_id}: drained; it led nothing"
    unclean = f" ({done.detail})" if done.detail else ""
    drained = f"{node_id}: drained{unclean}; {len(led)} role{'s' * (len(led) != 1)}"
    try:
        now = Counter(await _leaders(look, namespace, led))
    except ConnectionError as error:
        return f"{drained}; who leads now is not known: {error}"
    return f"{drained}, led now: " + ", ".join(f"{count} by {leader}" for leader, count in sorted(now.items()))


async def _leaders(look: LedgerLook, namespace: str, names: list[str]) -> list[str]:
    """Who leads each of these, as soon as all are led again; who does so far, when that takes too long."""
    leaders: list[str] = []

    async def all_led() -> bool | None:
        views = {role.role: role for role in await history.all_roles(look, namespace)}
        leaders[:] = [views[name].node_id or NOBODY_YET for name in names]
        nobody_would = all(views[name].candidates == 0 for name in names)
        return True if NOBODY_YET not in leaders or nobody_would else None

    await until(look, SUCCESSORS_S, all_led)
    return leaders
