"""The output of a load run: a live table in a terminal, one line per second otherwise, and a table at the end.

It fits into 60 columns. It only shows, and must never decide anything.
"""

import asyncio
import contextlib
import os
import sys
from typing import TYPE_CHECKING

from pgleaderlock.cli.load.engine import COUNTED, Run
from pgleaderlock.cli.output import print_table, stdout_console

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["report", "show_progress"]

FRAMES_PER_S = 4
LINE_EVERY_S = 1.0


async def show_progress(run: Run) -> None:
    """Show the progress until cancelled."""
    if sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        await _live(run)
    else:
        await _lines(run)


async def _live(run: Run) -> None:
    from rich.console import Group  # noqa: PLC0415 - takes longer to import than --help takes to answer.
    from rich.live import Live  # noqa: PLC0415

    over = False
    with Live(
        console=stdout_console(),
        get_renderable=lambda: Group(*([] if over else _tables(run))),
        refresh_per_second=FRAMES_PER_S,
        transient=True,
    ):
        try:
            await asyncio.Event().wait()
        finally:
            over = True  # the last frame is empty, because `report` prints the tables whole on any terminal


async def _lines(run: Run) -> None:
    before = 0
    with contextlib.suppress(BrokenPipeError):
        while True:
            await asyncio.sleep(LINE_EVERY_S)
            done = run.figures.operations
            acquire = run.figures.latencies["acquire"]
            print(
                f"{run.running_s:5.0f} s  {(done - before) / LINE_EVERY_S:7.0f} op/s  "
                f"p50 {acquire.percentile_s(0.5) * 1000:.1f} p99 {acquire.percentile_s(0.99) * 1000:.1f} ms  "
                f"errors {run.figures.counts['errors']}  violations {run.violations.total}",
                flush=True,
            )
            before = done


def report(run: Run) -> None:
    """Print the tables, the first violations and the verdict."""
    console = stdout_console()
    for table in _tables(run):
        print_table(console, table)
    for violation in run.violations.kept[:10]:
        print(f"VIOLATION {violation.rule}: {violation.lock_name}: {violation.text}")
    if run.figures.last_error:
        print(f"last error: {run.figures.last_error}")
    verdict = "every invariant held"
    if run.violations.total:
        verdict = "AN INVARIANT WAS BROKEN"
    elif not run.figures.counts["acquired"]:
        verdict = "nothing was shown"
    print(f"{run.settings.clients} clients, {run.running_s:.1f} s: {verdict}", flush=True)


def _tables(run: Run) -> "list[Table]":
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    seconds = max(run.running_s, 1e-9)
    counts = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    counts.add_column(f"after {run.running_s:.0f} s", no_wrap=True)
    counts.add_column("count", justify="right", no_wrap=True)
    counts.add_column("a second", justify="right", no_wrap=True)
    broken = run.violations.total
    counts.add_row(Text("violations", style="bold red" if broken else "green"), str(broken), "")
    for key, words in COUNTED.items():
        count = run.figures.counts[key]
        counts.add_row(words, str(count), f"{count / seconds:.1f}")
    writes = sum(resource.writes for resource in run.resources.values())
    counts.add_row("writes accepted", str(writes), f"{writes / seconds:.1f}")
    latency = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
    latency.add_column("ms", no_wrap=True)
    for heading in ("count", "p50", "p95", "p99", "max"):
        latency.add_column(heading, justify="right", no_wrap=True)
    for what, found in run.figures.latencies.items():
        shown = [found.percentile_s(share) for share in (0.5, 0.95, 0.99)] + [found.max_s]
        latency.add_row(what, str(found.count), *(f"{value * 1000:.1f}" for value in shown))
    return [counts, latency]
