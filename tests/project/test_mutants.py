"""The generator of `make mutants` finds what it should, and what is explained as no defect is still there.

The mutants themselves are tried by `make mutants`, which takes its time.
"""

import ast
import gc
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from tools.mutants import _python, _sql
from tools.mutants.generated import PACKAGE, generated, reasons
from tools.mutants.model import Edit, Mutant, Site
from tools.mutants.planted import PLANTED

ROOT = PACKAGE.parents[1]


@pytest.fixture(scope="module")
def mutants() -> list[Mutant]:
    return generated()


def changed(source: str, site: Site) -> str:
    return source[: site.start] + site.new + source[site.end :]


def test_there_are_enough_mutants_and_each_has_a_name_of_its_own(mutants: list[Mutant]) -> None:
    assert len(mutants) >= 150
    names = Counter(mutant.name for mutant in (*mutants, *PLANTED))
    assert {name for name, times in names.items() if times > 1} == set()


def test_every_mutant_changes_its_file_and_few_are_the_same_change(mutants: list[Mutant]) -> None:
    texts = set()
    for mutant in mutants:
        (change,) = mutant.changes
        source = (PACKAGE / change.file).read_text()  # type: ignore[attr-defined]  # all of them are splices
        text = changed(source, change.site)  # type: ignore[attr-defined]
        assert text != source, mutant.name
        texts.add(text)
    assert len(mutants) - len(texts) <= 10


def test_what_is_explained_as_no_defect_is_a_mutant_and_says_why(mutants: list[Mutant]) -> None:
    explained = reasons()
    assert set(explained) - {mutant.name for mutant in mutants} == set()
    assert all(len(reason.split()) >= 5 for reason in explained.values())


def test_the_edits_of_the_planted_mutants_still_apply(tmp_path: Path) -> None:
    for mutant in PLANTED:
        package = tmp_path / mutant.name
        for edit in mutant.changes:
            assert isinstance(edit, Edit)
            if not (package / edit.file).exists():
                (package / edit.file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(PACKAGE / edit.file, package / edit.file)
            edit.plant(package)


def test_the_tests_that_are_responsible_exist(mutants: list[Mutant]) -> None:
    selections = {test for mutant in (*mutants, *PLANTED) for test in mutant.tests}
    for selected in selections:
        file, _, name = selected.removeprefix("--deselect=").partition("::")
        source = (ROOT / file).read_text()
        assert not name or re.search(rf"def {re.escape(name.partition('[')[0])}\(", source), selected


# --- Python


class ParsesAtItsEnd:
    """Garbage as other tests leave it: a task whose exception nobody has seen prints a traceback."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        ast.parse("a = f(b) + 1")


def test_a_source_is_parsed_while_garbage_is_about_to_be_collected() -> None:
    source = (PACKAGE / "gate.py").read_text()
    threshold = gc.get_threshold()
    gc.set_threshold(50, 2, 2)
    try:
        for _ in range(20):
            for _ in range(20):
                ParsesAtItsEnd()
            assert _python.parsed(source).body
    finally:
        gc.set_threshold(*threshold)
        gc.collect()


def of_python(body: str) -> dict[str, list[str]]:
    """Kind of change → what the body of a function becomes."""
    source = f"def f(self, a, b):\n    {body}\n"
    found: dict[str, list[str]] = {}
    for site in _python.sites(source, "f"):
        found.setdefault(site.operator, []).append(changed(source, site).splitlines()[-1].strip())
    return found


@pytest.mark.parametrize(
    ("body", "changes"),
    [
        ("return a < b", {"compare": ["return a <= b", "return a >= b"]}),
        ("return a is None", {"compare": ["return a is not None"]}),
        ("return a and b", {"drop-term": ["return True and b", "return a and True"]}),
        ("return a or b", {"drop-term": ["return False or b", "return a or False"]}),
        ("return not a", {"negate": ["return (a)"]}),
        ("return b if a else 'x'", {"negate": ["return b if not (a) else 'x'"]}),
        ("return min(a, b)", {"min-max": ["return max(a, b)"]}),
        ("return a + b", {"calculate": ["return (a - b)"]}),
        ("return 'a' + b", {}),
        ("return 1.5", {"constant": ["return 15.0"]}),
        ("return 0", {"constant": ["return 1"]}),
        ("return True", {"constant": ["return False"]}),
        ("self.a = b", {"drop": ["pass"]}),
        ("a()", {"drop": ["pass"]}),
        ("raise a", {"drop": ["pass"]}),
        ("timeout_s = a", {"longer": ["timeout_s = (a) * 10"]}),
        ("sent_at = a", {"later": ["sent_at = (a) + 60.0"]}),
        (
            "return a - self.gate_s",
            {"calculate": ["return (a + self.gate_s)"], "longer": ["return a - (self.gate_s * 10)"]},
        ),
        ("self.owner.notify(X(1))", {}),
        ("a = 'ä'; self.b = 'ö'", {"drop": ["a = 'ä'; pass"]}),
    ],
)
def test_what_a_generator_knows_of_python(body: str, changes: dict[str, list[str]]) -> None:
    assert of_python(body) == changes


# --- SQL


def of_sql(body: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for site in _sql.function_sites(body, 0, len(body)):
        found.setdefault(site.operator, []).append(" ".join(changed(body, site).split()))
    return found


@pytest.mark.parametrize(
    ("body", "changes"),
    [
        ("SELECT a WHERE b = c", {"drop-condition": ["SELECT a WHERE true"]}),
        (
            "SELECT a WHERE b = c AND d ORDER BY e",
            {"drop-term": ["SELECT a WHERE true AND d ORDER BY e", "SELECT a WHERE b = c AND true ORDER BY e"]},
        ),
        (
            "SELECT a WHERE (b OR c) AND d",
            {
                "drop-term": [
                    "SELECT a WHERE true AND d",
                    "SELECT a WHERE (false OR c) AND d",
                    "SELECT a WHERE (b OR false) AND d",
                    "SELECT a WHERE (b OR c) AND true",
                ]
            },
        ),
        ("SELECT a WHERE b BETWEEN 0 AND 1", {"drop-condition": ["SELECT a WHERE true"]}),
        (
            "SELECT a WHERE b AND CASE WHEN c THEN d END ORDER BY e",
            {
                "drop-term": [
                    "SELECT a WHERE true AND CASE WHEN c THEN d END ORDER BY e",
                    "SELECT a WHERE b AND true ORDER BY e",
                ],
                "negate": ["SELECT a WHERE b AND CASE WHEN NOT (c) THEN d END ORDER BY e"],
            },
        ),
        ("SELECT CASE WHEN a THEN b END", {"negate": ["SELECT CASE WHEN NOT (a) THEN b END"]}),
        (
            "SELECT a FOR NO KEY UPDATE OF b SKIP LOCKED",
            {"no-row-lock": ["SELECT a"], "wait-for-row": ["SELECT a FOR NO KEY UPDATE OF b"]},
        ),
        ("SELECT a FOR UPDATE", {"no-row-lock": ["SELECT a"]}),
        ("SELECT pg_advisory_xact_lock(a)", {"exchange": ["SELECT pg_advisory_xact_lock_shared(a)"]}),
        ("SELECT greatest(a, true)", {"exchange": ["SELECT least(a, true)", "SELECT greatest(a, false)"]}),
        ("SELECT interval '5 minutes'", {"constant": ["SELECT interval '50 minutes'"]}),
        ("SELECT 'a < 5 AND b' -- c < 7", {}),
        ("SELECT f(a => b), c ->> 'd', e -> 'f'", {}),
        ("DECLARE a text; b constant text := c; BEGIN RETURN b; END", {}),
        ("UPDATE a SET b = 1, c = f(x, y)", {"drop-set": ["UPDATE a SET c = f(x, y)", "UPDATE a SET b = 1"]}),
        (
            "BEGIN IF a THEN PERFORM b; END IF; c := d; END",
            {
                "negate": ["BEGIN IF NOT (a) THEN PERFORM b; END IF; c := d; END"],
                "drop": ["BEGIN IF a THEN NULL; END IF; c := d; END", "BEGIN IF a THEN PERFORM b; END IF; NULL; END"],
            },
        ),
    ],
)
def test_what_a_generator_knows_of_sql(body: str, changes: dict[str, list[str]]) -> None:
    assert of_sql(body) == changes


def test_of_a_function_that_a_later_migration_replaces_only_the_last_definition_counts(tmp_path: Path) -> None:
    old = "CREATE FUNCTION pgleaderlock.f() AS $$ old $$;\nCREATE FUNCTION pgleaderlock.f_more() AS $$ other $$;\n"
    (tmp_path / "0001_a.sql").write_text(old)
    (tmp_path / "0002_b.sql").write_text("CREATE OR REPLACE FUNCTION pgleaderlock.f() AS $body$ new $body$;\n")
    path, start, end = _sql.latest_definition(tmp_path, "f")
    assert path.read_text()[start:end] == " new "
    with pytest.raises(LookupError):
        _sql.latest_definition(tmp_path, "g")
