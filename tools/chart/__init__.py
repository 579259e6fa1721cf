"""Renders the Helm chart of `examples/deploy/chart`: `make manifests` writes the result into kubernetes.yaml.

Go's own engine (`render.go`) executes the templates, with those of Helm's functions that the chart uses.
"""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tools.debian import DEPS, provide

__all__ = ["CHART", "MANIFESTS", "RELEASE", "RULES", "manifests", "rendered"]

HERE = Path(__file__).resolve().parent
CHART = HERE.parents[1] / "examples" / "deploy" / "chart"
RULES = CHART / "files" / "rules.yml"
MANIFESTS = CHART.parent / "kubernetes.yaml"
RELEASE = "billing"
_HEAD = f"""\
# Three processes, one of which leads: an election with epochs, watched through its own probes; and the dashboard.
# Written by `make manifests` from the chart beside it, for those who do without Helm: helm template {RELEASE} chart
"""


def rendered(values: Mapping[str, Any] | None = None, release: str = RELEASE) -> str:
    """The manifests of the chart, with these values over its own. Raises the errors of fetching and running Go."""
    go = provide("go")
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    own = yaml.safe_load((CHART / "values.yaml").read_text())
    data = {
        "Values": _merged(own, values or {}),
        "Release": {"Name": release},
        "Chart": {"Name": chart["name"], "AppVersion": chart["appVersion"]},
    }
    settings = {"GOROOT": str(go.path.parents[1]), "GOCACHE": str(DEPS / "go-cache"), "GO111MODULE": "off"}
    done = subprocess.run(
        [go.path, "run", HERE / "render.go", CHART],
        input=json.dumps(data),
        env={**go.env, **settings, "CGO_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    if done.returncode:
        raise ValueError(f"the chart cannot be rendered: {done.stderr.strip()}")
    return done.stdout


def manifests() -> str:
    """The text of kubernetes.yaml."""
    return _HEAD + rendered()


def _merged(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge values as Helm does: tables are merged, other values are replaced."""
    found = dict(own)
    for name, value in given.items():
        old = found.get(name)
        found[name] = _merged(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return found
