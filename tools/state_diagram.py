#!/usr/bin/env python3
"""Draws the transition table into docs/state-machine.md, between the two markers there.

The table in `pgleaderlock._lock.fsm` is the only source: a diagram drawn by hand would be wrong after the next change.
With `--check` nothing is written, and the exit code is 1 if the page is stale.

Imports pgleaderlock and the standard library.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from pgleaderlock._lock.fsm import TABLE, Row, Rules

PAGE = Path(__file__).resolve().parent.parent / "docs" / "state-machine.md"
BEGIN = "<!-- begin: drawn by tools/state_diagram.py from the table, do not edit -->"
END = "<!-- end: drawn by tools/state_diagram.py -->"


def rules(row: Row) -> str:
    """When a row applies, in words; empty if always."""
    named = {name: getattr(row, name) for name in Rules.__dataclass_fields__}
    return ", ".join(name if value else f"not {name}" for name, value in named.items() if value is not None)


def diagram() -> str:
    """The changes of state; inputs that change nothing are in the table only."""
    edges: dict[tuple[str, str], list[str]] = {}
    for row in TABLE:
        if row.source is not row.target:
            label = f"{row.input.value} ({when})" if (when := rules(row)) else row.input.value
            edges.setdefault((row.source.name, row.target.name), []).append(label)
    lines = [f"    {source} --> {target}: {'<br/>'.join(labels)}" for (source, target), labels in edges.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", "    [*] --> STOPPED", *lines, "```"])


def table() -> str:
    lines = ["| in state | input | when | next state | callbacks | also |", "|---|---|---|---|---|---|"]
    for row in TABLE:
        told = ", ".join(f"`{action.value}`" for action in row.actions if action.value.startswith("on_"))
        done = "; ".join(action.value for action in row.actions if not action.value.startswith("on_"))
        target = row.target.name if row.target is not row.source else "the same"
        lines.append(f"| {row.source.name} | {row.input.value} | {rules(row)} | {target} | {told} | {done} |")
    return "\n".join(lines)


def drawn(page: str) -> str:
    """The page, with a new drawing between its markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE.name} has lost its markers: put {BEGIN!r} and {END!r} back")
    return f"{before}{BEGIN}\n\n{diagram()}\n\n{table()}\n\n{END}{after}"


def main(arguments: Sequence[str]) -> int:
    page = PAGE.read_text(encoding="utf-8")
    fresh = drawn(page)
    if list(arguments) == ["--check"]:
        if fresh != page:
            sys.stderr.write(f"{PAGE.name} is stale: run tools/state_diagram.py\n")
            return 1
        return 0
    if arguments:
        sys.stderr.write("usage: state_diagram.py [--check]\n")
        return 2
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
