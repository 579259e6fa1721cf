"""Every SQL statement of the library, by name. The texts live in the `.sql` files beside this module.

A statement begins at `-- name: NAME`; the comment lines below it say why it is as it is, and stay out of
what is sent. Sits at the bottom: imports the standard library only.
"""

from functools import cache
from importlib.resources import files

__all__ = ["statement"]


def statement(name: str) -> bytes:
    """The text of a named statement, with `%(parameter)s` placeholders."""
    return _all()[name]


@cache
def _all() -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for entry in files(__name__).iterdir():
        if entry.name.endswith(".sql"):
            for name, text in _split(entry.read_text(encoding="utf-8")):
                if name in found:
                    raise ValueError(f"two statements are named {name!r}")
                found[name] = text.encode()
    return found


def _split(source: str) -> list[tuple[str, str]]:
    parts = []
    for chunk in source.split("-- name:")[1:]:
        name, _, body = chunk.partition("\n")
        kept = [line for line in body.splitlines() if line.strip() and not line.lstrip().startswith("--")]
        parts.append((name.strip(), "\n".join(kept).strip().rstrip(";")))
    return parts
