"""What the lock server documents is what it does: schemathesis asks all that it allows, and much else."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.counts import count, proof_asked
from support.lockserver import lock_server

pytestmark = pytest.mark.long

RUN_TIMEOUT_S = 1500


@pytest.mark.timeout(RUN_TIMEOUT_S + 60)
@pytest.mark.parametrize("tokens", [False, True], ids=["open", "with tokens"])
def test_every_answer_is_one_that_the_description_promises(tmp_path: Path, tokens: bool) -> None:
    # The tokens change nothing about what may be asked: at small counts it is asked in every way without them.
    phases = "coverage,fuzzing,stateful" if proof_asked() or not tokens else "fuzzing"
    with lock_server(tmp_path, "--max-wait", "50ms", tokens=tokens) as server:
        # A key that belongs to another request is refused, although nothing is wrong with its form.
        accepted = '["2xx", "401", "403", "404", "409", "422", "5xx"]'
        identity = server.ask("GET", "/healthz").headers["x-lock-store"]  # any other store is refused without a look
        (tmp_path / "schemathesis.toml").write_text(
            f'[parameters]\n"header.X-Lock-Store" = "{identity}"\n'
            f"[checks.positive_data_acceptance]\nexpected-statuses = {accepted}\n",
            encoding="utf-8",
        )
        authorization = ["--header", f"Authorization: Bearer {server.admin_token}"] if tokens else []
        done = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
                *("--phases", phases, "--checks", "all"),
                *(
                    "--max-examples",
                    str(count(4, 650 if tokens else 1_900)),
                    "--workers",
                    "2",
                    "--generation-database",
                    "none",
                ),
                *("--suppress-health-check", "all", "--warnings", "off", "--no-color", *authorization),
            ],
            cwd=tmp_path,  # it leaves its cache where it runs
            env={**os.environ, "PYTHONWARNINGS": "default"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-6000:]
        found = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
        assert found is not None, done.stdout[-3000:]
        asked, passed = int(found[1]), int(found[2])
        assert asked == passed
        assert asked >= count(20, 2_500 if tokens else 7_500)  # together 10,000
        assert server.ask("GET", "/readyz", token=server.admin_token).status == 200
        assert "request_failed" not in server.program.err
        assert server.stop() == 0
