"""Whatever a user can name is in the documentation: names, settings, options, variables, exit codes, reasons."""

import ast
import importlib
import inspect
import re
from pathlib import Path
from typing import NamedTuple

import click
import pytest

import pgleaderlock
from pgleaderlock import LeaderElection, LeaderGate, LeaderLock
from pgleaderlock._config.schema import ALERT, ELECTION, ROLE
from pgleaderlock._election.metric_table import METRICS
from pgleaderlock.cli import output
from pgleaderlock.cli.app import COMMANDS
from pgleaderlock.cli.output import DurationType
from pgleaderlock.gate import _EXPLAINED

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "pgleaderlock"
PAGES = {page.name: page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))}
EVERYTHING = "\n".join(PAGES.values())


def words_of_code(text: str) -> set[str]:
    """Every word inside `code` and fenced blocks: a name in running prose is not documentation of that name."""
    blocks = re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return set(re.findall(r"[\w-]+", " ".join([*blocks, *re.findall(r"`([^`\n]+)`", rest)])))


CODE = words_of_code(EVERYTHING)


def missing(wanted: set[str], text: str | None = None) -> list[str]:
    return sorted(wanted - (CODE if text is None else words_of_code(text)))


def test_every_public_name_is_documented() -> None:
    # The three types of callbacks are documented by the tables of callbacks: nobody writes their names.
    types = {"Callback", "ErrorCallback", "StateChangeCallback"}
    assert missing(set(pgleaderlock.__all__) - types - {"RetryStrategy"}) == []
    assert "next_delay_s" in CODE


@pytest.mark.parametrize(("cls", "page"), [(LeaderLock, "lock.md"), (LeaderElection, "election.md")])
def test_every_setting_of_a_constructor_is_in_its_table(cls: type, page: str) -> None:
    rows = "\n".join(line for line in PAGES[page].splitlines() if line.startswith("| `"))
    assert missing(set(inspect.signature(cls).parameters), rows) == []


@pytest.mark.parametrize(
    ("cls", "page"), [(LeaderLock, "lock.md"), (LeaderElection, "election.md"), (LeaderGate, "gate.md")]
)
def test_every_public_method_and_property_is_on_the_page(cls: type, page: str) -> None:
    public = {name for name in vars(cls) if not name.startswith("_")}
    inside = {"emit", "shut_in_child", "opens_at", "deadline", "wait_changed", "wait_idle", "wait_closed", "wait_over"}
    assert missing(public - inside, PAGES[page]) == []


def test_the_defaults_in_the_tables_are_the_real_ones() -> None:
    for cls, page in ((LeaderLock, "lock.md"), (LeaderElection, "election.md")):
        rows = {}
        for line in PAGES[page].splitlines():
            if found := re.match(r"\| `(\w+)` \|(.*)", line):
                rows[found[1]] = [cell.strip() for cell in found[2].split("|")]
        for name, parameter in inspect.signature(cls).parameters.items():
            if isinstance(parameter.default, bool | float | int) or (
                isinstance(parameter.default, str) and parameter.default
            ):
                shown = rows[name][1] if page == "election.md" else rows[name][0]
                wanted = {repr(parameter.default), f"`{parameter.default!r}`".replace("'", '"')}
                if isinstance(parameter.default, float):
                    wanted.add(f"{parameter.default:g}")
                assert shown in wanted, f"{page}: {name} is {parameter.default!r}, the table says {shown}"


LOG_LEVELS = {
    **{name: {name} for name in ("debug", "info", "warning", "error")},
    "failed_at_exit": {"warning"},
    "_warn_seldom": {"warning"},
    "_fail_seldom": {"error"},
    "log": {"debug", "info"},  # the level is chosen first
    "_transition": {"info", "warning"},
}
LOG_FIELDS = {"failed_at_exit": {"error"}, "_transition": {"role", "scope_key", "holder_identity", "epoch", "reason"}}


def logged() -> dict[str, tuple[set[str], set[str]]]:
    """Every event in the source: its levels and its fields."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    calls = [
        node
        for path in SOURCES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and node.args
    ]
    for call in calls:
        *owner, method = ast.unparse(call.func).rsplit(".", 1)
        if method not in LOG_LEVELS or (method in ("debug", "info", "warning", "error") and "log" not in str(owner)):
            continue
        first = call.args[0]
        for name in (first.body, first.orelse) if isinstance(first, ast.IfExp) else (first,):
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                levels, fields = found.setdefault(name.value, (set(), set()))
                levels |= LOG_LEVELS[method]
                fields |= {str(keyword.arg).rstrip("_") for keyword in call.keywords} - {"exc_info"}
                fields |= LOG_FIELDS.get(method, set())
    return found


def test_every_log_event_is_in_the_table_with_its_level_and_fields() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in PAGES["logging.md"].split("## Every event")[1].splitlines()
        if line.startswith("| `")
    ]
    shown = {row[0].strip("`"): (set(row[1].split(", ")), set(re.findall(r"`(\w+)`", row[2]))) for row in rows}
    assert len(shown) == len(rows), "each event once"
    found = logged()
    assert shown.keys() == found.keys()
    assert {name: fields for name, (_, fields) in shown.items()} == {
        name: fields for name, (_, fields) in found.items()
    }
    assert [name for name, (levels, _) in shown.items() if not levels <= found[name][0]] == []


def commands() -> dict[str, click.Command]:
    found: dict[str, click.Command] = {}
    for name, entry in COMMANDS.items():
        module, _, attribute = entry.target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        if isinstance(command, click.Group):
            found |= {f"{name} {below}": command.commands[below] for below in command.commands}
        if not isinstance(command, click.Group) or command.invoke_without_command:
            found[name] = command
    return found


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_option_of_every_command_is_in_its_section(name: str) -> None:
    page = PAGES["cli.md"]
    section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
    shared = page.split("\n## Options of several commands\n")[1].split("\n## ")[0]
    options = {
        option
        for given in commands()[name].params
        if isinstance(given, click.Option) and not given.hidden
        for option in given.opts
    }
    assert options, name
    assert [option for option in sorted(options) if f"`{option}`" not in section + shared] == []
    anchor = name.replace(" ", "-")
    assert f"[`{name}`](#{anchor})" in page, "it is missing from the list of commands"


class Row(NamedTuple):
    """One row of a table of the pages, by the headings of its columns."""

    first: str
    cells: dict[str, str]


def rows_of(text: str) -> list[Row]:
    found: list[Row] = []
    headings: list[str] = []
    for line in text.splitlines():
        if not line.startswith("|"):
            headings = []
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not headings:
            headings = cells
        elif set(line) - set("|-: "):
            found.append(Row(cells[0], dict(zip(headings, cells, strict=True))))
    return found


@pytest.mark.parametrize("name", sorted(commands()))
def test_every_option_has_a_row_with_its_meaning_its_default_and_when_to_change_it(name: str) -> None:
    """What it is counted in is part of its default: `5 s`, `30d`; of a word or a file there is nothing to count."""
    page = PAGES["cli.md"]
    section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
    shared = page.split("\n## Options of several commands\n")[1].split("\n## ")[0]
    rows = rows_of(section) + rows_of(shared)
    for given in commands()[name].params:
        if not isinstance(given, click.Option) or given.hidden:
            continue
        row = next((row for row in rows if f"`{max(given.opts, key=len)}`" in row.first), None)
        assert row is not None, f"{given.opts} has no row"
        for heading in ("meaning", "default", "change it when"):
            assert row.cells.get(heading), f"{given.opts}: nothing is said under {heading!r}"


def test_every_duration_among_the_options_is_shown_with_its_unit() -> None:
    bare = []
    for name, command in commands().items():
        section = PAGES["cli.md"].split(f"\n## {name}\n")[1].split("\n## ")[0]
        rows = {option: row for row in rows_of(section) for option in re.findall(r"`(--[\w-]+)`", row.first)}
        for given in command.params:
            option = max(given.opts, key=len)
            if isinstance(given.type, DurationType) and isinstance(given.default, int | float) and option in rows:
                shown = rows[option].cells["default"]
                if given.default and shown != "the same" and not re.search(r"\d ?(?:ms|s|m|h|d|min)\b", shown):
                    bare.append(f"{name} {option}: {shown}")
    assert bare == []


def test_every_metric_has_its_kind_its_labels_its_unit_its_meaning_and_when_to_look() -> None:
    rows = {
        row.first.strip("`"): row.cells
        for row in rows_of(PAGES["metrics.md"])
        if row.first.startswith("`pgleaderlock_")
    }
    assert list(rows) == [metric.name for metric in METRICS]
    for metric in METRICS:
        cells = rows[metric.name]
        assert cells["kind"] == metric.kind
        assert re.findall(r"`(\w+)`", cells["labels"]) == list(metric.labels)
        for heading in ("unit", "meaning", "look at it when"):
            assert cells[heading], f"{metric.name}: nothing is said under {heading!r}"


def test_every_setting_has_its_unit_its_default_its_meaning_and_when_to_change_it() -> None:
    """Word for word in `tests/config/test_config.py`. Here: nothing of the table is left out, and nothing is empty."""
    for settings, heading in ((ELECTION, "Settings of the election"), (ROLE, "Roles"), (ALERT, "Alerts")):
        section = PAGES["configuration.md"].split(f"\n## {heading}\n")[1].split("\n## ")[0]
        rows = {row.first.strip("`"): row.cells for row in rows_of(section)}
        assert list(rows) == [setting.key for setting in settings]
        for key, cells in rows.items():
            assert cells["what"], key
            assert cells["default"], key
            assert re.fullmatch(r".+ \*.+\*", cells["meaning, and when to change it"]), key


# By hand, from the design. A kind that the SQL writes and that is not here fails the test after the next.
EVENT_KINDS = {
    "acquired",
    "released",
    "lost",
    "evicted",
    "superseded",
    "advanced",
    "forgotten",
    "step_down_requested",
    "drain_requested",
    "resume_requested",
    "drain_began",
    "drain_ended",
    "session_opened",
    "session_ended",
}


@pytest.mark.parametrize("page", ["ledger.md", "operations.md"])
def test_every_kind_of_event_is_on_the_page_with_its_meaning(page: str) -> None:
    rows = rows_of(PAGES[page].split("\n## Events\n")[1].split("\n## ")[0])
    assert {kind for row in rows for kind in re.findall(r"`(\w+)`", row.first)} - {"kind"} == EVENT_KINDS
    for row in rows:
        assert all(row.cells.values()), row.first


def test_no_other_kind_of_event_is_written() -> None:
    """What stands in quotes where the migrations write events: kinds, and a few words of their details."""
    written = set()
    for path in sorted((SOURCES / "_pg" / "sql" / "migrations").glob("*.sql")):
        text = re.sub(r"--.*", "", path.read_text(encoding="utf-8"))
        for statement in re.findall(r"INSERT INTO pgleaderlock\.events\b(.*?);", text, re.DOTALL):
            written |= set(re.findall(r"'([a-z]+(?:_[a-z]+)*)'", statement))
    assert {"acquired", "advanced", "session_ended"} <= written
    assert written - EVENT_KINDS == {"clean", "won"}


def strings_of_the_source() -> set[str]:
    """Every string that is one word. Not by way of `ast`: in Python 3.11 its parser fails when it is interrupted by the
    collection of garbage that the tests before have left."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES.rglob("*.py"))
    return set(re.findall(r"""["'](\w+)["']""", text))


def test_every_environment_variable_is_documented() -> None:
    # Read by libpq for every connection of every program, and documented there.
    libpq = {"PGCONNECT_TIMEOUT", "PGAPPNAME", "PGOPTIONS", "PGTARGETSESSIONATTRS", "PGSSLMODE"}
    # A file of the server's, and what we tell its programs: nobody sets these for us.
    internal = {"PG_VERSION", "PGDATA"}
    looks = re.compile(r"(?:PG|PG_|PGLEADERLOCK_|LEADER_|HEARTBEAT_|ACQUIRE_|EPOCH_|MSP_)[A-Z0-9_]{3,}")
    variables = (
        {text for text in strings_of_the_source() if looks.fullmatch(text) and not text.startswith("PGL0")}
        - libpq
        - internal
    )
    assert {"PG_CONN_STRING", "PGLEADERLOCK_EPOCH", "LEADER_LOCK_KEY", "PG_DSN", "PGHOST"} <= variables
    assert missing(variables) == []


def test_every_exit_code_is_in_the_table() -> None:
    codes = {value for name, value in vars(output).items() if name.startswith("EXIT_")}
    table = PAGES["cli.md"].split("\n## Exit codes\n")[1].split("\n## ")[0]
    rows = set(re.findall(r"\d+", " ".join(re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE))))
    watchdog = re.findall(r"os\._exit\((\d+)\)", (SOURCES / "gate.py").read_text(encoding="utf-8"))
    assert len(codes) >= 5
    assert {str(code) for code in codes} | set(watchdog) | {"126", "127", "128"} <= rows


def test_every_reason_of_not_leader_is_in_the_table() -> None:
    rows = set(re.findall(r"^\| `(\w+)` \|", PAGES["gate.md"], re.MULTILINE))
    assert {*_EXPLAINED, "epoch_changed"} <= rows


def test_every_link_between_the_pages_leads_somewhere() -> None:
    broken = []
    for page, text in {**{f"docs/{name}": text for name, text in PAGES.items()}, **_top_pages()}.items():
        for target in re.findall(r"\]\(([^)#:\s]+)?(#[\w-]+)?\)", text):
            path, anchor = target
            file = (ROOT / page).parent / path if path else ROOT / page
            if not file.exists():
                broken.append(f"{page}: {path}")
            elif anchor and file.suffix == ".md" and anchor[1:] not in _anchors(file):
                broken.append(f"{page}: {path}{anchor}")
    assert broken == []


def _top_pages() -> dict[str, str]:
    return {page.name: page.read_text(encoding="utf-8") for page in ROOT.glob("*.md")}


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
