"""The demo's output: a live table below the story in a terminal, one line per event otherwise.

Plain output is plain: no control characters, nothing wrapped, and ASCII only, so that it reads well in any log.

It only shows, and must never decide anything.
"""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

from pgleaderlock._base.clock import BOOT_CLOCK
from pgleaderlock.cli.demo.cluster import Node
from pgleaderlock.cli.output import stdout_console

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

__all__ = ["LiveScreen", "PlainScreen", "Screen", "make_screen"]

FRAMES_PER_S = 12
_STYLES = {
    "leads": "bold green",
    "waits at the server": "cyan",
    "frozen": "bold blue",
    "killed": "bold red",
    "died": "bold red",
}
_WORDS = {
    "acquiring": "waits at the server",
    "follower": "follows",
    "leader": "leads",
    "releasing": "gives the lock back",
}


class Screen(Protocol):
    """An output for the story."""

    def tell(self, text: str, style: str = "") -> None:
        """Show that something has happened."""
        ...

    def showing(self, nodes: Mapping[str, Node]) -> contextlib.AbstractContextManager[None]:
        """While entered, show the nodes, if this screen can do so."""
        ...

    def sum_up(self, title: str, rows: Iterable[tuple[str, str]], hint: str) -> None:
        """The summary at the end."""
        ...


def make_screen() -> Screen:
    """A live screen if the terminal supports it, otherwise a plain one."""
    if sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        return LiveScreen(stdout_console())
    return PlainScreen()


class PlainScreen:
    """One line per event, with the seconds since the start."""

    def __init__(self) -> None:
        self._began_at = BOOT_CLOCK.now()

    def tell(self, text: str, style: str = "") -> None:
        print(f"{BOOT_CLOCK.now() - self._began_at:6.2f} s  {text}", flush=True)

    @contextlib.contextmanager
    def showing(self, nodes: Mapping[str, Node]) -> Iterator[None]:
        yield

    def sum_up(self, title: str, rows: Iterable[tuple[str, str]], hint: str) -> None:
        rows = list(rows)
        width = max(len(what) for what, _ in rows)
        lines = [f"  {what:<{width}}  {outcome}" for what, outcome in rows]
        print("", title, *lines, "", hint, sep="\n", flush=True)


class LiveScreen:
    """The story scrolls, the nodes stay below it."""

    def __init__(self, console: "Console") -> None:
        self._console = console
        self._began_at = BOOT_CLOCK.now()

    def tell(self, text: str, style: str = "") -> None:
        from rich.text import Text  # noqa: PLC0415 - takes longer to import than --help takes to answer.

        at = Text(f"{BOOT_CLOCK.now() - self._began_at:5.1f} s", style="dim")
        self._console.print(_grid([(at, Text(text, style=style))]))

    @contextlib.contextmanager
    def showing(self, nodes: Mapping[str, Node]) -> Iterator[None]:
        from rich.live import Live  # noqa: PLC0415

        live = Live(
            console=self._console,
            get_renderable=lambda: _nodes_table(list(nodes.values())),
            refresh_per_second=FRAMES_PER_S,
        )
        with live:
            yield

    def sum_up(self, title: str, rows: Iterable[tuple[str, str]], hint: str) -> None:
        from rich.text import Text  # noqa: PLC0415

        self._console.print()
        self._console.print(Text(title, style="bold"))
        self._console.print(_grid([(Text(f"  {what}"), Text(outcome, style="bold")) for what, outcome in rows]))
        self._console.print()
        self._console.print(Text(hint, style="dim"))


def _grid(rows: "list[tuple[RenderableType, RenderableType]]") -> "RenderableType":
    from rich.table import Table  # noqa: PLC0415

    # Two columns, so that a long text goes on below its beginning and not below the time.
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for row in rows:
        grid.add_row(*row)
    return grid


def _nodes_table(nodes: list[Node]) -> "RenderableType":
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(box=box.ROUNDED, border_style="dim", header_style="dim")
    table.add_column("node", width=8)
    table.add_column("pid", width=8, justify="right")
    table.add_column("state", width=20)
    table.add_column("work done", width=10, justify="right")
    for node in nodes:
        word = _word(node)
        style = _STYLES.get(word, "")
        cells = (node.name, str(node.pid or "-"), word, str(node.claims or "-"))
        table.add_row(*(Text(cell, style=style) for cell in cells))
    return table


def _word(node: Node) -> str:
    if node.ended is not None:
        return node.ended
    return "frozen" if node.frozen else _WORDS.get(node.state, node.state)
