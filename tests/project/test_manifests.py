"""The Helm chart and the manifests written from it: rendered, compared with the schemas of Kubernetes, and run."""

import re
import tomllib
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tools.chart import CHART, MANIFESTS, manifests, rendered

from support.deps import debian_tool
from support.elections import fresh_database
from support.program import PATIENCE_S, command, running

PROJECT = Path(__file__).parents[2]
FILES = (MANIFESTS, *sorted((PROJECT / "examples" / "kubernetes").glob("*.yaml")))
# An older one and the newest whose schemas are at hand. Before 1.28 they demanded onPodConditions in every rule of a
# Job, which Kubernetes itself did not.
VERSIONS = ("1.29", kubernetes_validate.latest_version())
# Of the Prometheus operator: no package that we have brings its schemas.
OPERATOR = "monitoring.coreos.com/v1"
VALUES: dict[str, dict[str, Any]] = {
    "its_own": {},
    "without_a_dashboard": {"dashboard": {"enabled": False}},
    "without_the_operator": {"monitoring": {"operator": False}},
    "with_more_of_everything": {
        "env": [{"name": "PAGES", "value": "3"}],
        "dashboard": {"hosts": ["leaders.example"], "tokens": {"secret": "t", "key": "k"}},
        "monitoring": {"rules": "groups:\n  - name: mine\n    rules: []\n"},
        "database": {"port": 6432},
    },
}

Object = dict[str, Any]


def all_of(text: str) -> list[Object]:
    return [found for found in yaml.safe_load_all(text) if found is not None]


@pytest.fixture
def chart() -> Callable[[Mapping[str, Any]], list[Object]]:
    """Renders the chart with these values."""
    debian_tool("go")
    return lambda values: all_of(rendered(values))


@pytest.fixture(params=VALUES)
def objects(request: pytest.FixtureRequest, chart: Callable[[Mapping[str, Any]], list[Object]]) -> list[Object]:
    return chart(VALUES[request.param])


def of(found: list[Object], kind: str, name: str = "billing") -> Object:
    (one,) = (each for each in found if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return one


def pods(found: list[Object]) -> Iterator[Object]:
    return (each["spec"]["template"] for each in found if each["kind"] == "Deployment")


def valid(found: list[Object], version: str) -> None:
    for each in found:
        if each["apiVersion"] != OPERATOR:
            kubernetes_validate.validate(each, version, strict=True)


def test_the_manifests_are_what_the_chart_says() -> None:
    debian_tool("go")
    assert MANIFESTS.read_text() == manifests(), "run make manifests"


def test_the_chart_is_of_this_version() -> None:
    version = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == version


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_object_has_the_form_that_kubernetes_demands(file: Path, version: str) -> None:
    valid(all_of(file.read_text()), version)


@pytest.mark.parametrize("version", VERSIONS)
def test_so_has_every_object_of_the_chart_whatever_the_values(objects: list[Object], version: str) -> None:
    valid(objects, version)


def test_an_object_with_a_mistyped_field_is_refused() -> None:
    wrong = of(all_of(MANIFESTS.read_text()), "PodDisruptionBudget")
    wrong["spec"]["maxUnavailabel"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        valid([wrong], VERSIONS[-1])


def test_every_pod_is_confined_and_says_what_it_needs(objects: list[Object]) -> None:
    for pod in pods(objects):
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]


def test_selectors_and_ports_name_what_exists(objects: list[Object]) -> None:
    by_labels = {
        tuple(pod["metadata"]["labels"].items()): {
            port["name"] for container in pod["spec"]["containers"] for port in container["ports"]
        }
        for pod in pods(objects)
    }
    policies = set()
    for each in objects:
        spec = each["spec"]
        match each["kind"]:
            case "Deployment":
                assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
                for spread in spec["template"]["spec"].get("topologySpreadConstraints", []):
                    assert spread["labelSelector"] == spec["selector"]
            case "PodDisruptionBudget":
                assert tuple(spec["selector"]["matchLabels"].items()) in by_labels
            case "NetworkPolicy":
                labels = tuple(spec["podSelector"]["matchLabels"].items())
                policies.add(labels)
                assert {port["port"] for rule in spec["ingress"] for port in rule["ports"]} == by_labels[labels]
            case "PodMonitor":
                ports = by_labels[tuple(spec["selector"]["matchLabels"].items())]
                assert {endpoint["port"] for endpoint in spec["podMetricsEndpoints"]} == ports
            case "Service":
                ports = by_labels[tuple(spec["selector"].items())]
                assert {port["targetPort"] for port in spec["ports"]} == ports
    assert policies == set(by_labels), "each pod has a policy"


def test_values_reach_the_objects(chart: Callable[[Mapping[str, Any]], list[Object]]) -> None:
    assert "billing-dashboard" not in {each["metadata"]["name"] for each in chart(VALUES["without_a_dashboard"])}
    plain = chart(VALUES["without_the_operator"])
    assert OPERATOR not in {each["apiVersion"] for each in plain}
    template = of(plain, "Deployment")["spec"]["template"]
    (port,) = template["spec"]["containers"][0]["ports"]
    assert template["metadata"]["annotations"]["prometheus.io/port"] == str(port["containerPort"])
    more = chart(VALUES["with_more_of_everything"])
    assert {"name": "PAGES", "value": "3"} in of(more, "Deployment")["spec"]["template"]["spec"]["containers"][0]["env"]
    (container,) = of(more, "Deployment", "billing-dashboard")["spec"]["template"]["spec"]["containers"]
    assert "--allowed-host=leaders.example" in container["args"]
    assert of(more, "PrometheusRule")["spec"] == {"groups": [{"name": "mine", "rules": []}]}
    assert [6432] in [[port["port"] for port in rule["ports"]] for rule in of(more, "NetworkPolicy")["spec"]["egress"]]


def test_the_rules_are_those_that_are_exported() -> None:
    exported = command("alerts", "export")
    assert exported.code == 0, exported.err
    assert (CHART / "files" / "rules.yml").read_text() == exported.out, "run make manifests"
    assert of(all_of(MANIFESTS.read_text()), "PrometheusRule")["spec"] == yaml.safe_load(exported.out)


def test_the_dashboard_starts_with_its_arguments_and_answers_its_probes(dsn: str, tmp_path: Path) -> None:
    deployment = of(all_of(MANIFESTS.read_text()), "Deployment", "billing-dashboard")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    tokens = tmp_path / "tokens.toml"
    tokens.write_text('[[token]]\nname = "tests"\ntoken = "kD0ozqE3m2nJv8c1kD0ozq"\n')
    tokens.chmod(0o600)
    here = {"--host": "127.0.0.1", "--port": "0", "--token-file": str(tokens)}
    argv = [f"{name}={here[name]}" if (name := word.partition("=")[0]) in here else word for word in container["args"]]
    with fresh_database(dsn, ledger=True) as ledger, running(*argv, env={"PG_DSN": ledger}) as program:
        program.until("listening on", "out")
        (url,) = re.findall(r"listening on (\S+)", program.out)
        for probe in ("readinessProbe", "livenessProbe"):
            address = url + container[probe]["httpGet"]["path"]
            with urllib.request.urlopen(address, timeout=PATIENCE_S) as answer:
                assert answer.status == 200
