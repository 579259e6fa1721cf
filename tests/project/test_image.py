"""The container image: what the Dockerfile says is read, linted and run; it is built where a builder is at hand."""

import contextlib
import json
import re
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.program import PATIENCE_S, environment, running

PROJECT = Path(__file__).parents[2]
DOCKERFILE = PROJECT / "Dockerfile"
BUILDERS = ("docker", "podman")
BUILD_S = 600.0
TOKENS = '[[token]]\nname = "tests"\ntoken = "kD0ozqE3m2nJv8c1kD0ozq"\n'


def instructions() -> dict[str, str]:
    """The instructions of the last stage, by name; the last one of a name counts, as in an image."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", "")
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        if name == "FROM":
            found.clear()
        found[name] = rest.strip()
    return found


def words(name: str) -> list[str]:
    """A command in its exec form."""
    text = instructions()[name]
    command: list[str] = json.loads(text[text.index("[") :])
    return command


def health(url: str) -> int:
    """What the image's own check says of this address."""
    program, *rest = words("HEALTHCHECK")
    assert program == "python"
    done = subprocess.run(
        [sys.executable, *rest], env=environment({"HEALTH_URL": url}), capture_output=True, timeout=60, check=False
    )
    return done.returncode


def test_the_dockerfile_passes_its_linter() -> None:
    linter = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([linter, DOCKERFILE], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_is_slim_not_root_and_has_no_shell_in_front() -> None:
    found = instructions()
    assert found["FROM"].endswith("-slim")
    assert found["USER"].isdigit()
    assert int(found["USER"]) > 0
    assert words("ENTRYPOINT") == ["pgleaderlock"]


def test_only_what_the_image_needs_is_sent_to_the_builder() -> None:
    sent = {line[2:] for line in (PROJECT / ".dockerignore").read_text().splitlines() if line.startswith("!/")}
    copied = {
        word
        for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE.read_text(), re.MULTILINE)
        for word in line.split()[:-1]
    }
    assert sent == copied
    assert all((PROJECT / name).exists() for name in sent)


def test_its_server_starts_and_its_health_check_follows(tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(TOKENS)
    (tmp_path / "tokens").chmod(0o600)
    here = {"sqlite:////data/locks.db": f"sqlite:///{tmp_path}/locks.db", "0.0.0.0": "127.0.0.1"}
    here["/run/secrets/pgleaderlock-tokens"] = str(tmp_path / "tokens")
    argv = [here.get(word, word) for word in words("CMD")]
    with running(*argv, "--port", "0") as server:
        server.until("listening on", "out")
        url = re.findall(r"listening on (\S+)", server.out)[0] + "/healthz"
        assert health(url) == 0
    assert health(url) != 0


# -- built ------------------------------------------------------------------------------------------------------------


def builder() -> str | None:
    """A program that can build and run images on this machine now, not only its client."""
    for name in BUILDERS:
        if shutil.which(name) and _answers(name):
            return name
    return None


def _answers(program: str) -> bool:
    return subprocess.run([program, "info"], capture_output=True, timeout=60, check=False).returncode == 0


def docker(program: str, *args: object, timeout_s: float = 60.0) -> str:
    done = subprocess.run(
        [program, *map(str, args)], capture_output=True, text=True, timeout=timeout_s, cwd=PROJECT, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@contextlib.contextmanager
def container(program: str, image: str, folder: Path) -> Iterator[str]:
    hardened = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges")
    secret = f"--volume={folder / 'tokens'}:/run/secrets/pgleaderlock-tokens:ro"
    name = docker(program, "run", "--detach", *hardened, "--tmpfs=/data:mode=1777", secret, image)
    try:
        yield name
    finally:
        docker(program, "rm", "--force", name)


@pytest.mark.long
@pytest.mark.timeout(2 * BUILD_S)
def test_the_image_runs_read_only_without_root_where_a_builder_is_at_hand(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    program = builder()
    if program is None:
        record_property("not_tested", f"the image was not built: none of {', '.join(BUILDERS)} runs here")
        return
    (tmp_path / "tokens").write_text(TOKENS)
    (tmp_path / "tokens").chmod(0o444)
    image = f"pgleaderlock-test:{uuid.uuid4().hex}"
    docker(program, "build", "--tag", image, ".", timeout_s=BUILD_S)
    try:
        with container(program, image, tmp_path) as name:
            assert docker(program, "exec", name, "id", "-u") == instructions()["USER"]
            deadline = time.monotonic() + PATIENCE_S
            check = [program, "exec", name, *words("HEALTHCHECK")]
            while subprocess.run(check, capture_output=True, timeout=60, check=False).returncode != 0:
                assert time.monotonic() < deadline, docker(program, "logs", name)
                time.sleep(0.2)
    finally:
        docker(program, "rmi", "--force", image)
