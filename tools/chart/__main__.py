"""`make manifests`: the rules that the chart brings along, then what the chart says."""

from pgleaderlock.alerts import default_alerts, rules_yaml
from tools.chart import MANIFESTS, RULES, manifests

RULES.write_text(rules_yaml(default_alerts()))
MANIFESTS.write_text(manifests())
