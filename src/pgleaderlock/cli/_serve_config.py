"""The file of `pgleaderlock serve --config`: TOML, one key an option, and an error that names the line.

What the file says takes the place of the options' defaults: an option and its environment variable come first.

Imports click, `_config_file` and the standard library. Must never take a key that it does not know for a remark.
"""

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from pgleaderlock._config_file import ConfigFileError, read_toml

__all__ = ["read_config"]


def read_config(path: Path, options: Iterable[click.Parameter]) -> dict[str, Any]:
    """What the file sets, by parameter name. Raises `click.UsageError`."""
    known = {option.name: option for option in options if isinstance(option, click.Option) and option.name != "config"}
    try:
        file = read_toml(path)
    except ConfigFileError as error:
        raise click.UsageError(f"--config {error}") from error
    for key, value in file.document.items():
        where = f"--config {file.where((key,))}"
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
            raise click.UsageError(f"{where}: unknown setting {key!r}: {remedy}")
        _check_type(where, key, value, known[key])
    return file.document


def _check_type(where: str, key: str, value: Any, option: click.Option) -> None:
    if isinstance(value, dict):
        raise click.UsageError(f"{where}: there are no sections: write {key} = … at the top")
    if option.multiple != isinstance(value, list):
        wanted = 'a list: ["one", "two"]' if option.multiple else "one value, no list"
        raise click.UsageError(f"{where}: {key} takes {wanted}")
    if option.is_flag != isinstance(value, bool):
        raise click.UsageError(f"{where}: {key} is {'true or false' if option.is_flag else 'neither true nor false'}")
