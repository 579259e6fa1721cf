"""Plants defects into copies of the source and shows that the tests catch each of them.

A green suite proves little unless it turns red when a promise is broken. A mutant breaks one promise in one way and
names the tests that must notice. For every mutant the source is copied to a temporary folder, the defect is planted
there, and just those tests run against the copy: at least one must fail. The same tests must pass on a copy without a
defect, so that a test which fails anyway proves nothing here.

Some mutants are written by hand (`planted.py`), most are generated (`generated.py`): every small change that a
generator knows, in each function on which safety depends. `equivalent.toml` explains each mutant that no test can
notice.

    python -m tools.mutants                 all of them
    python -m tools.mutants TEXT …          those with one of these texts in their names
    python -m tools.mutants --list          the names of the mutants
    python -m tools.mutants --resume        all but those that were caught by an earlier, interrupted run
    python -m tools.mutants --explained     the explained ones: if a test catches one, it is a defect after all

Exit code 1 if a mutant survives without an explanation, if its text is no longer in the code (adapt the mutant), if an
explanation has no mutant, or if a test fails on the sound source. Imports the standard library only.
"""

import argparse
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tools.mutants.generated import PACKAGE, generated, reasons
from tools.mutants.model import Mutant
from tools.mutants.planted import PLANTED
from tools.mutants.run import ROOT, Verdict, baseline_s, judge

CAUGHT = ROOT / ".mutants.json"
JOBS = 2


class _Caught:
    """Records which mutants were caught, and in which source, so that an interrupted run can be resumed."""

    def __init__(self, *, resume: bool) -> None:
        sources = sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".sql"))
        self._source = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
        self._names = self._read() if resume else []

    def _read(self) -> list[str]:
        known = json.loads(CAUGHT.read_text()) if CAUGHT.exists() else {}
        return list(known.get(self._source, []))

    def __contains__(self, mutant: Mutant) -> bool:
        return mutant.name in self._names

    def add(self, mutant: Mutant) -> None:
        """Add the mutant to the file, and keep what another run may have written meanwhile."""
        CAUGHT.write_text(json.dumps({self._source: [*self._read(), mutant.name]}))


def main() -> int:
    options = _options()
    mutants, explained = [*PLANTED, *generated()], reasons()
    unexplained = [mutant for mutant in mutants if (mutant.name in explained) == options.explained]
    chosen = [
        mutant for mutant in unexplained if not options.texts or any(text in mutant.name for text in options.texts)
    ]
    if options.list:
        say("\n".join(mutant.name for mutant in chosen))
        return 0
    for name in (stale := sorted(set(explained) - {mutant.name for mutant in mutants})):
        say(f"STALE      equivalent.toml explains what is no mutant: {name}")
    caught = _Caught(resume=options.resume)
    left = [mutant for mutant in chosen if mutant not in caught]
    began = time.monotonic()
    counted = _run(left, options.jobs, caught)
    if counted is None:
        return 1
    wrong = counted["caught"] if options.explained else counted["survived"]
    say(
        f"{len(chosen)} mutants in {(time.monotonic() - began) / 60:.0f} min: {counted['caught']} caught,"
        f" {len(chosen) - len(left)} caught before, {counted['survived']} survived, {counted['broken']} broken;"
        f" {len(explained)} more are explained, {len(stale)} explanations are stale"
    )
    return 1 if wrong or counted["broken"] or stale or not chosen else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="only mutants with one of these texts in their names")
    parser.add_argument("--list", action="store_true", help="show the names and leave")
    parser.add_argument("--resume", action="store_true", help="without those that were caught in this very source")
    parser.add_argument("--explained", action="store_true", help="those of equivalent.toml: none may be caught")
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"how many mutants side by side (default: {JOBS})")
    return parser.parse_args()


def _run(mutants: Sequence[Mutant], jobs: int, caught: _Caught) -> "Counter[str] | None":
    """How many verdicts of each kind there were; None if the tests fail on the sound source."""
    with ThreadPoolExecutor(jobs) as pool:
        selections = list(dict.fromkeys(mutant.tests for mutant in mutants))
        try:
            sound_s = dict(zip(selections, pool.map(baseline_s, selections), strict=True))
        except RuntimeError as error:
            say(f"UNSOUND    on the source as it is, {error}")
            return None
        for tests, took_s in sound_s.items():
            say(f"sound      {took_s:5.1f} s  {' '.join(tests)}")
        counted: Counter[str] = Counter()
        verdicts = pool.map(lambda mutant: judge(mutant, sound_s[mutant.tests]), mutants)
        for mutant, verdict in zip(mutants, verdicts, strict=True):
            counted[verdict.kind] += 1
            _tell(mutant, verdict)
            if verdict.kind == "caught":
                caught.add(mutant)
    return counted


def _tell(mutant: Mutant, verdict: Verdict) -> None:
    if verdict.kind == "caught":
        say(f"caught     {verdict.took_s:5.1f} s  {mutant.name}  by {verdict.detail.rpartition('::')[2]}")
    else:
        say(f"{verdict.kind.upper():10} {verdict.took_s:5.1f} s  {mutant.name}\n           {verdict.detail}")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
