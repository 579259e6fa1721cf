"""The map in `docs/architecture.md` is true: the files and functions that it names exist, and no room is missing."""

import ast
import re
from pathlib import Path

import pytest
from tools.mutants._python import parsed

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "pgleaderlock"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
# `room/file.py`, `room/` or `room/file.py:Class.method`
NAMED = sorted(set(re.findall(r"`((?:[\w.-]+/)*[\w.-]+(?:\.py|\.sql|\.toml|\.js|\.css|\.md|/))(?::([\w.]+))?`", PAGE)))


def place(path: str) -> Path:
    inside = PACKAGE / path
    return inside if inside.exists() else ROOT / path


def names_in(path: Path) -> set[str]:
    found = set()
    for node in parsed(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if hasattr(part, "name")}
        if isinstance(node, ast.Assign):
            found |= {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


@pytest.mark.parametrize(("path", "name"), NAMED, ids=[":".join(filter(None, named)) for named in NAMED])
def test_what_the_map_names_exists(path: str, name: str) -> None:
    where = place(path)
    assert where.exists()
    if name and where.suffix == ".py":
        assert name in names_in(where)


def test_every_room_and_every_door_is_on_the_map() -> None:
    rooms = {f"{path.name}/" for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    doors = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py", "__main__.py", "ledger.py", "balance.py"}
    assert rooms | doors <= {path for path, _ in NAMED}
