"""Every SQL statement of the library, by name. The texts are in the `.sql` files in `sql/`.

A statement begins at `-- name: NAME`. The comment lines below it explain it and are not sent. A line `-- include: NAME`
is replaced by the text of another statement, so that a part common to several statements is written once.
"""

import re
from functools import cache
from importlib.resources import files

__all__ = ["statement"]

_INCLUDE = re.compile(r"^[ ]*-- include: (\w+)$", re.MULTILINE)
_COMMENT = re.compile(r"^[ ]*(--.*)?\n", re.MULTILINE)


def statement(name: str) -> bytes:
    """The text of a named statement, with `%(parameter)s` placeholders."""
    return _all()[name]


@cache
def _all() -> dict[str, bytes]:
    sources: dict[str, str] = {}
    for entry in files("pgleaderlock._pg").joinpath("sql").iterdir():
        if entry.name.endswith(".sql"):
            for chunk in entry.read_text(encoding="utf-8").split("-- name:")[1:]:
                name, _, body = chunk.partition("\n")
                if sources.setdefault(name.strip(), body) is not body:
                    raise ValueError(f"two statements are named {name.strip()!r}")
    return {name: _text(body, sources) for name, body in sources.items()}


def _text(body: str, sources: dict[str, str]) -> bytes:
    whole = _INCLUDE.sub(lambda included: sources[included[1]], body)
    return _COMMENT.sub("", whole + "\n").strip().rstrip(";").encode()
