"""The files for Kubernetes, systemd, Prometheus, Alertmanager and Grafana: each is used as far as that goes without a
cluster. Command lines are run as they are written there, and probes are asked where the files say.
"""

import configparser
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import yaml

from pgleaderlock._election.metric_table import METRICS, PREFIX, words_outside_strings
from pgleaderlock.cli.exec.command import exec_
from pgleaderlock.cli.serve import dashboard, serve
from pgleaderlock.cli.service import Notifier
from support.deps import debian_tool
from support.elections import fresh_database
from support.monitoring import MONITORING, queries
from support.program import PATIENCE_S, Program, environment, port_of, running

PROJECT = Path(__file__).parents[2]
DEPLOY = PROJECT / "examples" / "deploy"
UNIT = DEPLOY / "pgleaderlock.service"
UNITS = sorted((PROJECT / "examples").glob("*/*.service"))
PAGE = PROJECT / "docs" / "deployment.md"
PROGRAM = Path(sys.executable).parent / "pgleaderlock"
TIMING = ("--health-interval", "200ms", "--late-threshold", "5s")


@pytest.fixture
def ledger(dsn: str) -> Iterator[str]:
    with fresh_database(dsn, ledger=True) as fresh:
        yield fresh


def status_of(port: str | int, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE_S) as answer:
            return int(answer.status)
    except HTTPError as error:
        with error:
            return error.code


# -- systemd ----------------------------------------------------------------------------------------------------------


class Supervisor:
    """The other end of NOTIFY_SOCKET: what was said to systemd, message by message."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.said: list[str] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._socket.settimeout(PATIENCE_S)

    def hears(self, line: str) -> None:
        """Returns once a message had this line."""
        while not any(line in message.split("\n") for message in self.said):
            self.said.append(self._socket.recv(4096).decode())

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def supervisor(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Supervisor]:
    listening = Supervisor(str(tmp_path / "notify") if request.param == "path" else f"@pgl-{uuid.uuid4().hex}")
    yield listening
    listening.close()


def test_what_is_said_to_systemd(supervisor: Supervisor) -> None:
    notifier = Notifier.from_environ({"NOTIFY_SOCKET": supervisor.address, "WATCHDOG_USEC": "2500000"})
    assert notifier is not None
    assert notifier.watchdog_s == 2.5
    notifier.ready("standing\nby")
    notifier.status("leading, epoch 3")
    notifier.alive()
    notifier.stopping()
    supervisor.hears("STOPPING=1")
    assert supervisor.said == [
        "READY=1\nSTATUS=standing by",
        "STATUS=leading, epoch 3",
        "WATCHDOG=1",
        "STOPPING=1\nSTATUS=ending",
    ]
    notifier.close()


@pytest.mark.parametrize("address", ["", "relative", "@", "/", "vsock:2:1"])
def test_without_a_socket_of_systemd_there_is_nobody_to_tell(address: str) -> None:
    assert Notifier.from_environ({"NOTIFY_SOCKET": address}) is None
    assert Notifier.from_environ({}) is None


@pytest.mark.parametrize(
    ("usec", "pid", "watchdog_s"),
    [("", "", None), ("0", "", None), ("nonsense", "", None), ("1000", "ours", 0.001), ("1000", "1", None)],
)
def test_the_watchdog_of_another_process_is_not_ours(usec: str, pid: str, watchdog_s: float | None) -> None:
    pid = str(os.getpid()) if pid == "ours" else pid
    notifier = Notifier.from_environ({"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": usec, "WATCHDOG_PID": pid})
    assert notifier is not None
    assert notifier.watchdog_s == watchdog_s
    notifier.close()


def test_a_supervisor_that_does_not_listen_stops_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    notifier = Notifier(str(tmp_path / "nobody"))
    notifier.ready("alone")
    notifier.alive()
    assert caplog.text.count("notify_failed") == 1
    notifier.close()


def unit() -> dict[str, dict[str, str]]:
    parser = configparser.RawConfigParser(delimiters=("=",), comment_prefixes=("#", ";"), strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(UNIT.read_text().replace("\\\n", ""))
    return {section: dict(parser[section]) for section in parser.sections()}


def here(argv: list[str], **changed: str) -> list[str]:
    """A command line as written, with the programs where they lie here and these options changed."""
    words = [str(PROGRAM) if Path(word).name == "pgleaderlock" else word for word in argv]
    words = [sys.executable if Path(word).name == "python" else word for word in words]
    words = [str(PROJECT / "examples" / "worker.py") if word.endswith("/worker.py") else word for word in words]
    for option, value in changed.items():
        words[words.index(f"--{option.replace('_', '-')}") + 1] = value
    return words


@contextlib.contextmanager
def started(argv: list[str], **env: str) -> Iterator[Program]:
    process = subprocess.Popen(
        argv, env=environment(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        yield Program(process)
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def systemd_analyze(*args: object) -> subprocess.CompletedProcess[str]:
    if not Path("/usr/bin/systemd-analyze").exists():
        pytest.skip("needs systemd-analyze: install systemd")
    return subprocess.run(
        ["/usr/bin/systemd-analyze", *map(str, args)], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(params=UNITS, ids=lambda path: path.stem)
def unit_here(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A unit in which only the place of the programs is replaced."""
    file = tmp_path / Path(request.param).name
    file.write_text(Path(request.param).read_text().replace("/opt/billing/bin", str(PROGRAM.parent)))
    return file


def test_systemd_takes_the_unit(unit_here: Path) -> None:
    done = systemd_analyze("verify", "--man=no", unit_here)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_unit_exposes_little_of_the_machine(unit_here: Path) -> None:
    # The threshold is in tenths: from 3.1 on, the exit code is 1.
    done = systemd_analyze("security", "--offline=true", "--threshold=30", unit_here)
    assert done.returncode == 0, done.stdout


def test_the_unit_says_what_the_program_does() -> None:
    service = unit()["Service"]
    assert service["Type"] == "notify"
    assert service["KillMode"] == "mixed"
    words = shlex.split(service["ExecStart"])
    grace_s = float(words[words.index("--grace") + 1].removesuffix("s"))
    assert grace_s < float(service["TimeoutStopSec"])
    known = {option for given in exec_.params for option in given.opts}
    assert {word for word in words[: words.index("--")] if word.startswith("--")} <= known


def test_the_unit_runs_and_systemd_hears_of_it_from_start_to_stop(supervisor: Supervisor, ledger: str) -> None:
    argv = here(shlex.split(unit()["Service"]["ExecStart"]), metrics_port="0")
    env = {"PG_DSN": ledger, "PYTHONUNBUFFERED": "1", "NOTIFY_SOCKET": supervisor.address, "WATCHDOG_USEC": "200000"}
    with started([*argv[: argv.index("--")], *TIMING, *argv[argv.index("--") :]], **env) as program:
        supervisor.hears("READY=1")
        supervisor.hears("STATUS=leading, epoch 1")
        program.until("sending invoices", "out")
        supervisor.said.clear()
        supervisor.hears("WATCHDOG=1")
        program.signal(signal.SIGTERM)
        supervisor.hears("STOPPING=1")
        assert program.end() in (0, 143)


def test_server_dashboard_and_probes_fit_on_one_machine() -> None:
    words = shlex.split(unit()["Service"]["ExecStart"])
    ports = {next(given.default for given in command.params if given.name == "port") for command in (serve, dashboard)}
    ports.add(int(words[words.index("--metrics-port") + 1]))
    assert len(ports) == 3


def test_the_command_that_exec_runs_does_not_speak_for_it(ledger: str, tmp_path: Path) -> None:
    supervisor = Supervisor(str(tmp_path / "notify"))
    with contextlib.closing(supervisor):
        argv = [str(PROGRAM), "exec", "--name", "quiet", "--", sys.executable, "-c"]
        show = "import os; print([n for n in os.environ if n.startswith(('NOTIFY', 'WATCHDOG'))])"
        with started(
            [*argv, show], PG_DSN=ledger, NOTIFY_SOCKET=supervisor.address, WATCHDOG_USEC="900000000"
        ) as program:
            assert program.end() == 0, program.err
            assert program.out.strip() == "[]"
        supervisor.hears("READY=1")
        supervisor.hears("STOPPING=1")


# -- the command line's own endpoint ----------------------------------------------------------------------------------


def test_run_answers_on_its_port_and_leader_follows_the_gate(ledger: str) -> None:
    options = ("run", "--name", "served", "--fenced", "--dsn", ledger, "--metrics-port", "0", *TIMING)
    with running(*options) as leader:
        leader.until("gate_open")
        with running(*options) as standby:
            standby.until("gate_shut")
            ports = port_of(leader), port_of(standby)
            assert [status_of(port, "/leader") for port in ports] == [200, 503]
            assert [status_of(port, "/readyz") for port in ports] == [200, 200]
            assert [status_of(port, "/metrics") for port in ports] == [200, 200]
            leader.signal(signal.SIGTERM)
            assert leader.end() == 0
            standby.until("gate_open")
            assert status_of(ports[1], "/leader") == 200


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--metrics-port", "0"), "--metrics-port belongs to --fenced"),
        (("--fenced", "--metrics-host", "::1"), "--metrics-host belongs to --metrics-port"),
        (("--fenced", "--metrics-port", "70000"), "70000 is not in the range"),
        (("--fenced", "--metrics-port", "0", "--metrics-host", "no.such.host.invalid"), "cannot listen on"),
    ],
)
@pytest.mark.parametrize("command", ["run", "exec"])
def test_options_that_cannot_be_meant_are_refused(command: str, options: tuple[str, ...], text: str) -> None:
    after = ("--", "true") if command == "exec" else ()
    with running(command, "--name", "x", "--dsn", "postgresql://127.0.0.1:1/x", *options, *after) as program:
        assert program.end() == 2
        assert text in program.err


# -- Kubernetes -------------------------------------------------------------------------------------------------------


def deployment() -> dict[str, Any]:
    found = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    (one,) = (each for each in found if (each["kind"], each["metadata"]["name"]) == ("Deployment", "billing"))
    assert isinstance(one, dict)
    return one


def test_the_deployment_fits_together() -> None:
    spec = deployment()["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    (port,) = container["ports"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert env["PROBES_PORT"] == str(port["containerPort"])
    assert {container[probe]["httpGet"]["port"] for probe in ("readinessProbe", "livenessProbe")} == {port["name"]}
    (command,) = container["lifecycle"]["preStop"]["exec"]["command"][2:]
    drain_s = int(re.findall(r"--timeout (\d+)s", command)[0])
    own_s = float(re.findall(r"DRAIN_TIMEOUT_S = ([\d.]+)", (DEPLOY / "worker.py").read_text())[0])
    assert pod["terminationGracePeriodSeconds"] > drain_s + own_s


def test_the_pod_answers_its_probes_drains_before_it_is_stopped_and_ends_cleanly(ledger: str, tmp_path: Path) -> None:
    (container,) = deployment()["spec"]["template"]["spec"]["containers"]
    ready, alive = (container[probe]["httpGet"]["path"] for probe in ("readinessProbe", "livenessProbe"))
    env = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    env |= {"PG_DSN": ledger, "PROBES_HOST": "127.0.0.1", "PROBES_PORT": "0", "HOSTNAME": socket.gethostname()}
    argv = [sys.executable, str(DEPLOY / Path(container["command"][1]).name)]
    assert container["command"][0] == "python"
    with started(argv, **env) as pod:
        pod.until("probes on port", "out")
        pod.until("leading: ", "out")
        port = re.findall(r"probes on port (\d+)", pod.out)[0]
        assert [status_of(port, path) for path in (ready, alive, "/leader")] == [200, 200, 200]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
            assert b'pgleaderlock_gate_open{role="billing"} 1.0' in answer.read()
        done = subprocess.run(
            container["lifecycle"]["preStop"]["exec"]["command"],
            env=environment(
                {**env, "HOSTNAME": socket.gethostname(), "PATH": f"{PROGRAM.parent}:{os.environ['PATH']}"}
            ),
            capture_output=True,
            text=True,
            timeout=2 * PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0
        assert "drained" in done.stdout, done.stdout + done.stderr
        pod.until("the work has ended", "out")
        assert [status_of(port, path) for path in (ready, alive, "/leader")] == [200, 200, 503]
        pod.signal(signal.SIGTERM)
        assert pod.end() == 0, pod.err


def test_the_pod_whose_work_fails_says_why_and_ends(ledger: str, tmp_path: Path) -> None:
    text = (DEPLOY / "worker.py").read_text()
    assert text.count("await asyncio.Event().wait()") == 1
    broken = tmp_path / "worker.py"
    broken.write_text(text.replace("await asyncio.Event().wait()", 'raise RuntimeError("out of paper")'))
    with started([sys.executable, str(broken)], PG_DSN=ledger, PROBES_PORT="0") as pod:
        assert pod.end() == 1
        assert "work_failed role=billing epoch=1" in pod.err
        assert "RuntimeError: out of paper" in pod.err


# -- Prometheus, Alertmanager, Grafana --------------------------------------------------------------------------------


def tool(name: str, *args: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    found = debian_tool(name)
    return subprocess.run(
        [found.path, *map(str, args)], env=found.env, cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )


def test_prometheus_takes_its_file_with_the_exported_rules(tmp_path: Path) -> None:
    with started([str(PROGRAM), "alerts", "export"]) as program:
        assert program.end() == 0, program.err
        (tmp_path / "pgleaderlock-rules.yml").write_text(program.out)
    (tmp_path / "prometheus.yml").write_text((MONITORING / "prometheus.yml").read_text())
    done = tool("promtool", "check", "config", tmp_path / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 rules found" in done.stdout


def test_alertmanager_takes_its_file() -> None:
    done = tool("amtool", "check-config", MONITORING / "alertmanager.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 receivers" in done.stdout


@pytest.mark.parametrize(
    ("labels", "receivers"),
    [
        ("notify_pagerduty=default severity=critical", "pagerduty,nobody-else"),
        ("notify_slack=#ops severity=warning", "slack"),
        ("notify_pagerduty=default notify_slack=#ops severity=critical", "pagerduty,slack"),
        ("severity=critical", "pagerduty,slack"),
        ("severity=warning", "slack"),
    ],
)
def test_each_alert_reaches_whom_it_names(labels: str, receivers: str) -> None:
    config = MONITORING / "alertmanager.yml"
    done = tool("amtool", "config", "routes", "test", f"--config.file={config}", *labels.split())
    assert (done.returncode, done.stdout.strip()) == (0, receivers), done.stderr


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    names = {metric.name for metric in METRICS}
    shown: set[str] = set()
    for query in queries():
        for word in words_outside_strings(query):
            if word[2].startswith(PREFIX):
                shown.add(re.sub(r"(_seconds)_(?:bucket|sum|count)$", r"\1", word[2]))
    assert shown == names


def test_the_panels_lie_side_by_side_and_have_numbers_of_their_own() -> None:
    panels = json.loads((MONITORING / "grafana-dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


# -- the page ---------------------------------------------------------------------------------------------------------

SHOWN = re.compile(r"<!-- (examples/\S+) -->\n+```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
REGION = re.compile(r"^ *# -- shown in docs/deployment\.md\n(.*?)^ *# -- until here$", re.MULTILINE | re.DOTALL)


def test_every_snippet_of_the_page_is_the_marked_part_of_its_example() -> None:
    shown = dict(SHOWN.findall(PAGE.read_text()))
    marked = {
        str(path.relative_to(PROJECT)): textwrap.dedent(found[0]).strip("\n")
        for path in DEPLOY.iterdir()
        if path.is_file() and (found := REGION.findall(path.read_text()))
    }
    assert {file: text.strip("\n") for file, text in shown.items()} == marked


def test_every_file_is_named_on_a_page() -> None:
    pages = "".join(page.read_text() for page in (PROJECT / "docs").glob("*.md"))
    for file in (*DEPLOY.iterdir(), *MONITORING.iterdir()):
        if file.is_file():
            assert str(file.relative_to(PROJECT)) in pages, file.name
