"""Prints a table so that it reads well in a terminal, in a file and in a mail.

Imports rich for its types only.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["print_table"]


def print_table(console: "Console", table: "Table") -> None:
    """rich fills each line up to the table's width; those blanks are left out."""
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        console.file.write(line.rstrip() + "\n")
