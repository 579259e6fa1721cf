"""`make manifests`: writes the alerting rules of the chart, then the rendered chart."""

from pgleaderlock.alerts import default_alerts, rules_yaml
from tools.chart import MANIFESTS, RULES, manifests

RULES.write_text(rules_yaml(default_alerts()))
MANIFESTS.write_text(manifests())
