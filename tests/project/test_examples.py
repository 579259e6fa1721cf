"""The examples do what they say: each is run as a process, and so is each command line of the systemd and Kubernetes
files, as written there. Only where a program lies is replaced, and what the machine would supply: DSN, address, port.
"""

import configparser
import contextlib
import inspect
import os
import re
import shlex
import signal
import socket
import sys
import textwrap
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import psycopg
import pytest
import yaml
from psycopg.conninfo import make_conninfo

import pgleaderlock
from pgleaderlock import key_pair, sync
from pgleaderlock.cli.output import EXIT_LOST, EXIT_NOT_WON, EXIT_USAGE
from support.program import PATIENCE_S, Program, started
from support.server_side import holders, terminate

PROJECT = Path(__file__).parents[2]
EXAMPLES = PROJECT / "examples"
DOCS = PROJECT / "docs" / "guard.md"
UNITS = sorted(EXAMPLES.glob("systemd/*.service"))
# Nobody listens there, and the password must never be seen.
NOBODY = "postgresql://app:s3cret@127.0.0.1:1/app"
KILLED_BY_TERM = 128 + signal.SIGTERM


# -- running them -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def example(file: str, dsn: str, **env: str) -> Iterator[Program]:
    # The last variable has to be known before Python starts: so it is a process as users start it, and no fork.
    own = {"PG_DSN": dsn, "PYTHONUNBUFFERED": "1", "PYTHONNODEBUGRANGES": "1"}
    with started([sys.executable, str(EXAMPLES / file)], {**own, **env}) as program:
        yield program


@contextlib.contextmanager
def led(dsn: str, name: str) -> Iterator[None]:
    """Somebody else leads."""
    with (
        psycopg.connect(dsn, autocommit=True, application_name="the-other-one") as conn,
        sync.acquire_leadership(conn, name),
    ):
        yield


def ends(program: Program, code: int) -> None:
    assert program.end() == code, program


def stops(program: Program, code: int = 0) -> None:
    program.signal(signal.SIGTERM)
    ends(program, code)


def test_every_example_is_run_by_a_test() -> None:
    source = "".join(file.read_text() for file in Path(__file__).parents[1].rglob("test_*example*.py"))
    in_files = "".join(
        file.read_text() for folder in ("systemd", "kubernetes") for file in EXAMPLES.glob(f"{folder}/*")
    )
    for file in EXAMPLES.glob("*.py"):
        assert f'"{file.name}"' in source or f"/{file.name}" in in_files, file.name


# -- exit and be restarted --------------------------------------------------------------------------------------------


def test_exit_the_one_that_leads_works_until_sigterm_and_leaves_nothing_held(dsn: str) -> None:
    with example("exit_and_be_restarted.py", dsn) as program:
        program.until("leading: ", "out")
        assert len(holders(dsn, key_pair("billing"))) == 1
        stops(program)
        assert "stopped: released" in program.out
        assert program.err == ""
    assert holders(dsn, key_pair("billing")) == []


def test_exit_the_one_that_does_not_lead_says_who_does_and_exits_75(dsn: str) -> None:
    with led(dsn, "billing"), example("exit_and_be_restarted.py", dsn) as program:
        ends(program, EXIT_NOT_WON)
        assert re.search(r"not leading: leadership of 'billing' is held by backend \d+ \(the-other-one\)", program.out)


def test_exit_the_one_whose_session_ends_exits_76(dsn: str) -> None:
    with example("exit_and_be_restarted.py", dsn) as program:
        program.until("leading: ", "out")
        terminate(dsn, key_pair("billing"))
        ends(program, EXIT_LOST)
        assert "lost: leadership of 'billing' was lost" in program.out


def test_exit_a_database_that_is_away_exits_2_and_shows_no_password() -> None:
    with example("exit_and_be_restarted.py", NOBODY) as program:
        ends(program, EXIT_USAGE)
        assert "database: " in program.out
        assert "s3cret" not in program.out + program.err


# -- sleep and retry --------------------------------------------------------------------------------------------------


def test_retry_it_waits_for_its_turn_and_leads_again_after_a_loss(dsn: str) -> None:
    with contextlib.ExitStack() as first:
        first.enter_context(led(dsn, "billing"))
        with example("sleep_and_retry.py", dsn) as program:
            program.until("attempt 1: somebody else leads", "out")
            first.close()
            program.until("leading: ", "out")
            terminate(dsn, key_pair("billing"))
            program.until("lost: ", "out")
            program.until("leading: ", "out", times=2)
            stops(program)
    assert holders(dsn, key_pair("billing")) == []


def test_retry_sigterm_while_it_waits_ends_it_with_0(dsn: str) -> None:
    with led(dsn, "billing"), example("sleep_and_retry.py", dsn) as program:
        program.until("attempt 1: ", "out")
        stops(program)
        assert "leading" not in program.out


def test_retry_when_its_patience_is_over_the_last_reason_is_its_exit_code(dsn: str) -> None:
    with led(dsn, "billing"), example("sleep_and_retry.py", dsn, PATIENCE_S="0") as program:
        ends(program, EXIT_NOT_WON)
        assert "gave up: leadership of 'billing' is held by backend" in program.out
    with example("sleep_and_retry.py", NOBODY, PATIENCE_S="0") as program:
        ends(program, EXIT_USAGE)
        assert "gave up: " in program.out
        assert "s3cret" not in program.out + program.err


# -- go on without ----------------------------------------------------------------------------------------------------


def test_without_the_role_it_serves_all_the_same(dsn: str) -> None:
    with led(dsn, "statistics"), example("go_on_without.py", dsn) as program:
        program.until("going on without: leadership of 'statistics' is held by", "out")
        assert program.process.poll() is None
        stops(program)
        assert "serving\n" in program.out
        assert "leading" not in program.out


def test_without_a_database_it_serves_all_the_same() -> None:
    with example("go_on_without.py", NOBODY) as program:
        program.until("going on without: ", "out")
        assert program.process.poll() is None
        stops(program)
        assert "serving\n" in program.out


def test_with_the_role_it_does_both_and_goes_on_when_the_role_is_lost(dsn: str) -> None:
    with example("go_on_without.py", dsn) as program:
        program.until("leading: ", "out")
        terminate(dsn, key_pair("statistics"))
        program.until("going on without: leadership of 'statistics' was lost", "out")
        assert program.process.poll() is None
        stops(program)


# -- readiness --------------------------------------------------------------------------------------------------------


def port_of(program: Program) -> int:
    program.until("listening on port ", "out")
    program.until("\n", "out")
    return int(program.out.split("\n")[0].rsplit(" ", 1)[1])


def status_of(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE_S) as answer:
            return int(answer.status)
    except HTTPError as refused:
        with refused:
            return refused.code


def test_ready_is_503_while_another_leads_and_200_while_this_one_does(dsn: str) -> None:
    with contextlib.ExitStack() as first:
        first.enter_context(led(dsn, "billing"))
        with example("readiness.py", dsn, READY_PORT="0") as program:
            port = port_of(program)
            assert [status_of(port, path) for path in ("/ready", "/healthz", "/other")] == [503, 200, 404]
            first.close()
            program.until("leading: ", "out")
            assert [status_of(port, path) for path in ("/ready", "/healthz", "/other")] == [200, 200, 404]
            stops(program)


def test_ready_a_client_that_says_nothing_or_nonsense_keeps_nobody_from_an_answer(dsn: str) -> None:
    with example("readiness.py", dsn, READY_PORT="0") as program:
        port = port_of(program)
        program.until("leading: ", "out")
        with (
            socket.create_connection(("127.0.0.1", port), PATIENCE_S),
            socket.create_connection(("127.0.0.1", port), PATIENCE_S) as nonsense,
        ):
            nonsense.sendall(b"nonsense\r\n\r\n")
            assert nonsense.recv(100).startswith(b"HTTP/1.1 400 ")
            assert status_of(port, "/ready") == 200
        stops(program)
        assert program.err == ""


def test_ready_while_the_database_is_away_it_runs_and_is_not_ready() -> None:
    with example("readiness.py", NOBODY, READY_PORT="0") as program:
        port = port_of(program)
        assert [status_of(port, path) for path in ("/ready", "/healthz")] == [503, 200]
        stops(program)


# -- the sync twin ----------------------------------------------------------------------------------------------------


@pytest.fixture
def empty_database(dsn: str) -> Iterator[str]:
    """A database of the test's own: a migration leaves tables."""
    name = "example_migration"
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name}".encode())
    yield make_conninfo(dsn, dbname=name)
    with psycopg.connect(dsn, autocommit=True) as admin:
        admin.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def test_the_migration_is_applied_once(empty_database: str) -> None:
    for applied in (2, 0):
        with example("sync_script.py", empty_database) as program:
            ends(program, 0)
            assert program.out.count("applied") == applied
            assert "up to date" in program.out


def test_the_migration_exits_75_while_another_is_at_it_and_changes_nothing(empty_database: str) -> None:
    with led(empty_database, "migrate"), example("sync_script.py", empty_database) as program:
        ends(program, EXIT_NOT_WON)
        assert "(the-other-one)" in program.out
    with psycopg.connect(empty_database) as look:
        assert look.execute("SELECT to_regclass('invoice'), to_regclass('schema_version')").fetchone() == (None, None)


def test_the_migration_whose_session_ends_exits_2_and_what_it_was_at_is_rolled_back(empty_database: str) -> None:
    with psycopg.connect(empty_database, autocommit=True) as blocker:
        blocker.execute("CREATE TABLE schema_version (version int PRIMARY KEY)")
        with blocker.transaction():
            blocker.execute("LOCK schema_version")  # the migration stops at its first question
            with example("sync_script.py", empty_database) as program:
                _until_somebody_waits(blocker)
                terminate(empty_database, key_pair("migrate"))
                ends(program, EXIT_USAGE)
                assert "database: " in program.out
        assert blocker.execute("SELECT to_regclass('invoice')").fetchone() == (None,)


def _until_somebody_waits(conn: psycopg.Connection[Any]) -> None:
    """Nothing announces it: looked for, within bounds."""
    for _ in range(3000):
        row = conn.execute("SELECT count(*), pg_sleep(0.01) FROM pg_locks WHERE NOT granted").fetchone()
        if row is not None and row[0]:
            return
    pytest.fail("nobody waits")


def test_the_migration_without_a_database_exits_2_and_shows_no_password() -> None:
    with example("sync_script.py", NOBODY) as program:
        ends(program, EXIT_USAGE)
        assert "s3cret" not in program.out + program.err


def test_of_two_blocking_workers_one_works_and_the_other_after_sigterm(dsn: str) -> None:
    with example("blocking_worker.py", dsn) as first:
        first.until("tick", "out")
        with example("blocking_worker.py", dsn) as second:
            stops(first)
            second.until("tick", "out")
            stops(second)


# -- the files of systemd and Kubernetes ------------------------------------------------------------------------------


def here(argv: Sequence[str]) -> list[str]:
    """The command line as written, with the programs where they lie on this machine."""
    programs = {"python": sys.executable, "pgleaderlock": str(Path(sys.executable).parent / "pgleaderlock")}
    found = []
    for word in argv:
        if word.endswith(".py"):
            assert word.startswith("/"), f"{word}: services have no folder of their own"
            word = str(EXAMPLES / Path(word).name)  # noqa: PLW2901
            assert Path(word).is_file(), word
        elif Path(word).name in programs:
            word = programs[Path(word).name]  # noqa: PLW2901
        found.append(word)
    # By the interpreter of its first line, as the kernel does it: `support.preloaded` starts that quickly.
    return [sys.executable, *found] if found[0] == programs["pgleaderlock"] else found


@dataclass(frozen=True)
class Verdict:
    """What a supervisor makes of an exit code."""

    failure: bool
    restarted: bool


class Unit:
    """A unit file, read as systemd.service(5) and systemd.exec(5) say."""

    def __init__(self, path: Path) -> None:
        parser = configparser.RawConfigParser(delimiters=("=",), comment_prefixes=("#", ";"), strict=True)
        parser.optionxform = str  # type: ignore[assignment, method-assign]
        parser.read_string(path.read_text())
        self.unit, self.service = dict(parser["Unit"]), dict(parser["Service"])

    @property
    def argv(self) -> list[str]:
        argv = shlex.split(self.service["ExecStart"])
        assert argv[0].startswith("/")
        return here(argv)

    def env(self, dsn: str) -> dict[str, str]:
        """What Environment= says and what the file of EnvironmentFile= names, with the DSN of this test."""
        named = dict(word.split("=", 1) for word in shlex.split(self.service["Environment"]))
        file = EXAMPLES / "systemd" / Path(self.service["EnvironmentFile"]).name
        lines = [line for line in file.read_text().splitlines() if line and not line.startswith("#")]
        assert [line.split("=", 1)[0] for line in lines] == ["PG_DSN"]
        return {**named, "PG_DSN": dsn}

    def verdict(self, code: int) -> Verdict:
        """In the order of the manual: what prevents, what forces, then Restart=. A clean exit is no failure."""
        assert self.service["Restart"] == "on-failure"
        failure = code != 0 and code not in self._codes("SuccessExitStatus")
        if code in self._codes("RestartPreventExitStatus"):
            return Verdict(failure, restarted=False)
        return Verdict(failure, restarted=code in self._codes("RestartForceExitStatus") or failure)

    def _codes(self, setting: str) -> set[int]:
        return {int(code) for code in self.service.get(setting, "").split()}


@pytest.fixture(params=UNITS, ids=lambda path: path.stem)
def unit(request: pytest.FixtureRequest) -> Unit:
    return Unit(request.param)


def test_there_is_a_unit_for_exec_and_one_for_the_program() -> None:
    assert [path.stem for path in UNITS] == ["billing-exec", "billing-python"]


def test_systemd_the_standby_exits_75_which_is_no_failure_and_is_started_again(unit: Unit, dsn: str) -> None:
    with led(dsn, "billing"), started(unit.argv, unit.env(dsn)) as program:
        ends(program, EXIT_NOT_WON)
        assert "the-other-one" in program.out + program.err
    assert unit.verdict(EXIT_NOT_WON) == Verdict(failure=False, restarted=True)


def test_systemd_the_leader_that_has_lost_exits_76_and_is_started_again(unit: Unit, dsn: str) -> None:
    with started(unit.argv, unit.env(dsn)) as program:
        program.until("sending invoices", "out")
        terminate(dsn, key_pair("billing"))
        ends(program, EXIT_LOST)
    assert unit.verdict(EXIT_LOST) == Verdict(failure=True, restarted=True)


def test_systemd_the_leader_that_is_stopped_exits_0_and_is_left_alone(unit: Unit, dsn: str) -> None:
    with started(unit.argv, unit.env(dsn)) as program:
        program.until("sending invoices", "out")
        stops(program)
    assert unit.verdict(0) == Verdict(failure=False, restarted=False)
    assert holders(dsn, key_pair("billing")) == []


def test_systemd_a_database_that_is_away_exits_2_and_is_tried_again(unit: Unit) -> None:
    with started(unit.argv, unit.env(NOBODY)) as program:
        ends(program, EXIT_USAGE)
        assert "s3cret" not in program.out + program.err
    assert unit.verdict(EXIT_USAGE) == Verdict(failure=True, restarted=True)


def test_systemd_a_command_that_does_not_catch_sigterm_exits_143_and_that_is_clean(dsn: str) -> None:
    unit = Unit(EXAMPLES / "systemd" / "billing-exec.service")
    argv = unit.argv
    command = [sys.executable, "-c", "print('up'); import signal; signal.pause()"]
    with started([*argv[: argv.index("--") + 1], *command], unit.env(dsn)) as program:
        program.until("up", "out")
        stops(program, KILLED_BY_TERM)
    assert unit.verdict(KILLED_BY_TERM) == Verdict(failure=False, restarted=False)


def test_systemd_a_standby_is_never_given_up_and_a_stop_reaches_the_worker_once(unit: Unit) -> None:
    assert unit.unit["StartLimitIntervalSec"] == "0"
    assert int(unit.service["RestartSec"]) > 0
    assert int(unit.service["TimeoutStopSec"]) > 0
    if "exec" in unit.argv:
        assert unit.service["KillMode"] == "mixed"


def kubernetes(file: str) -> dict[str, dict[str, Any]]:
    """The objects of a file by their kind."""
    return {found["kind"]: found for found in yaml.safe_load_all((EXAMPLES / "kubernetes" / file).read_text())}


def env_of(container: Mapping[str, Any], dsn: str, **machine: str) -> dict[str, str]:
    """What the container names, its secret filled in; `machine` replaces only what is named."""
    secrets = {("billing-db", "dsn"): dsn}
    env = {}
    for entry in container["env"]:
        reference = entry.get("valueFrom", {}).get("secretKeyRef")
        env[entry["name"]] = secrets[reference["name"], reference["key"]] if reference else entry["value"]
    assert env["PG_DSN"] == dsn, "a DSN has no place in the file itself"
    assert machine.keys() <= env.keys()
    return {**env, **machine}


# The image's address is its own; a test stays on loopback, at whichever port is free.
LOOPBACK = {"READY_HOST": "127.0.0.1", "READY_PORT": "0"}


def test_kubernetes_the_deployment_fits_together() -> None:
    objects = kubernetes("deployment.yaml")
    spec = objects["Deployment"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert (spec["replicas"], pod["restartPolicy"]) == (2, "Always")
    assert spec["strategy"] == {"type": "Recreate"}
    assert pod["terminationGracePeriodSeconds"] > 0
    (port,) = container["ports"]
    env = env_of(container, "")
    assert (env["READY_HOST"], env["READY_PORT"]) == ("0.0.0.0", str(port["containerPort"]))
    assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": port["name"]}
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": port["name"]}
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    assert objects["Service"]["spec"]["selector"] == spec["selector"]["matchLabels"]
    assert objects["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]


def test_kubernetes_of_two_replicas_one_is_ready_and_the_other_after_it_was_stopped(dsn: str) -> None:
    (container,) = kubernetes("deployment.yaml")["Deployment"]["spec"]["template"]["spec"]["containers"]
    ready, alive = (container[probe]["httpGet"]["path"] for probe in ("readinessProbe", "livenessProbe"))
    argv, env = here(container["command"]), env_of(container, dsn, **LOOPBACK)
    with started(argv, env) as leader:
        leader.until("leading: ", "out")
        with started(argv, env) as standby:
            assert [status_of(port_of(program), ready) for program in (leader, standby)] == [200, 503]
            assert [status_of(port_of(program), alive) for program in (leader, standby)] == [200, 200]
            stops(leader)
            standby.until("leading: ", "out")
            assert status_of(port_of(standby), ready) == 200
            terminate(dsn, key_pair("billing"))
            ends(standby, EXIT_LOST)


def test_kubernetes_a_dsn_that_cannot_be_used_exits_2() -> None:
    (container,) = kubernetes("deployment.yaml")["Deployment"]["spec"]["template"]["spec"]["containers"]
    with started(here(container["command"]), env_of(container, "s3cret nonsense", **LOOPBACK)) as program:
        ends(program, EXIT_USAGE)
        assert "s3cret" not in program.out + program.err


class Job:
    """The Job of the CronJob, read as the reference of `podFailurePolicy` says."""

    def __init__(self) -> None:
        self.spec: dict[str, Any] = kubernetes("cronjob.yaml")["CronJob"]["spec"]["jobTemplate"]["spec"]
        self.pod: dict[str, Any] = self.spec["template"]["spec"]
        (self.container,) = self.pod["containers"]
        self.argv = here(self.container["command"])

    def action(self, code: int) -> str:
        """What becomes of the job after a pod that exited so: rules in their order, the first that fits."""
        if code == 0:
            return "Complete"
        for rule in self.spec["podFailurePolicy"]["rules"]:
            wanted = rule["onExitCodes"]
            if (code in wanted["values"]) == {"In": True, "NotIn": False}[wanted["operator"]]:
                return str(rule["action"])
        return "Count"

    def run(self, dsn: str, **machine: str) -> contextlib.AbstractContextManager[Program]:
        return started(self.argv, env_of(self.container, dsn, **machine))


@pytest.fixture
def job() -> Job:
    return Job()


def test_kubernetes_the_job_has_what_its_failure_policy_demands_and_an_end(job: Job) -> None:
    assert job.pod["restartPolicy"] == "Never"
    assert job.spec["activeDeadlineSeconds"] > 0  # an ignored failure is tried again without end otherwise
    assert job.spec["backoffLimit"] > 0
    for rule in job.spec["podFailurePolicy"]["rules"]:
        wanted = rule["onExitCodes"]
        assert rule["action"] in {"FailJob", "Ignore", "Count"}
        assert wanted["values"] == sorted(set(wanted["values"]))
        assert wanted["operator"] == "NotIn" or 0 not in wanted["values"]  # the API refuses 0 for In


def test_kubernetes_the_job_that_leads_runs_to_its_end(job: Job, dsn: str) -> None:
    with job.run(dsn) as program:
        ends(program, 0)
        assert "the report is done" in program.out
    assert job.action(0) == "Complete"


def test_kubernetes_the_job_that_does_not_lead_exits_75_and_is_tried_again_uncounted(job: Job, dsn: str) -> None:
    with led(dsn, "nightly-report"), job.run(dsn) as program:
        ends(program, EXIT_NOT_WON)
        assert program.out == ""
    assert job.action(EXIT_NOT_WON) == "Ignore"


def test_kubernetes_the_job_that_has_lost_exits_76_and_is_counted(job: Job, dsn: str) -> None:
    with job.run(dsn, REPORT_PAGES="1000000") as program:
        program.until("page 1\n", "out")
        terminate(dsn, key_pair("nightly-report"))
        ends(program, EXIT_LOST)
    assert job.action(EXIT_LOST) == "Count"


def test_kubernetes_the_job_that_is_deleted_ends_by_sigterm_and_leaves_nothing_held(job: Job, dsn: str) -> None:
    with job.run(dsn, REPORT_PAGES="1000000") as program:
        program.until("page 1\n", "out")
        stops(program, KILLED_BY_TERM)
    assert holders(dsn, key_pair("nightly-report")) == []


def test_kubernetes_the_job_without_a_database_exits_2_and_is_counted(job: Job) -> None:
    with job.run(NOBODY) as program:
        ends(program, EXIT_USAGE)
        assert "s3cret" not in program.out + program.err
    assert job.action(EXIT_USAGE) == "Count"


@pytest.mark.parametrize(("mode", "code"), [(None, 127), (0o644, 126)])
def test_kubernetes_a_command_that_cannot_be_run_fails_the_job_at_once(
    job: Job, dsn: str, tmp_path: Path, mode: int | None, code: int
) -> None:
    command = tmp_path / "report"
    if mode is not None:
        command.touch(mode)
    argv = [*job.argv[: job.argv.index("--") + 1], str(command)]
    with started(argv, env_of(job.container, dsn)) as program:
        ends(program, code)
    assert job.action(code) == "FailJob"


# -- the page that shows them -----------------------------------------------------------------------------------------

SHOWN = re.compile(r"<!-- (examples/\S+) -->\n+```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
REGION = re.compile(r"^ *# -- shown in (docs/\w+\.md)\n(.*?)^ *# -- until here$", re.MULTILINE | re.DOTALL)


def test_every_snippet_of_a_page_is_the_marked_part_of_its_example() -> None:
    shown = {
        (str(page.relative_to(PROJECT)), file): snippet.strip("\n")
        for page in DOCS.parent.glob("*.md")
        for file, snippet in SHOWN.findall(page.read_text())
    }
    pages = {page for page, _ in shown}  # the client's page has a test of its own
    marked = {
        (page, str(path.relative_to(PROJECT))): textwrap.dedent(region).strip("\n")
        for path in EXAMPLES.rglob("*.*")
        # What a template of the chart has is shown as it is rendered, in kubernetes.yaml.
        if path.suffix in {".py", ".yaml", ".service"} and path.parent.name != "templates"
        for page, region in REGION.findall(path.read_text())
        if page in pages
    }
    assert shown == marked


@pytest.mark.parametrize(
    "function",
    [
        pgleaderlock.acquire_leadership,
        pgleaderlock.acquire_leadership_with_retry,
        pgleaderlock.acquire_leadership_blocking,
        sync.acquire_leadership,
        sync.LeadershipGuard.lost,
    ],
    ids=lambda function: f"{function.__module__}.{function.__qualname__}",
)
def test_the_page_names_every_function_and_argument(function: Any) -> None:
    page = DOCS.read_text()
    assert function.__name__ in page
    for argument in inspect.signature(function).parameters:
        assert argument == "self" or re.search(rf"\b{argument}\b", page), argument


def test_the_pages_name_everything_that_a_guard_has_and_every_example() -> None:
    page = DOCS.read_text()
    for name in vars(pgleaderlock.LeadershipGuard):
        if not name.startswith("_"):
            assert f"`{name}" in page or f".{name}" in page, name
    pages = "".join(file.read_text() for file in DOCS.parent.glob("*.md"))
    for file in (*EXAMPLES.glob("*.py"), *UNITS, *EXAMPLES.glob("kubernetes/*.yaml")):
        assert os.fspath(file.relative_to(PROJECT)) in pages, file
