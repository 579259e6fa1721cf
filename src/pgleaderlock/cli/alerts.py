"""`pgleaderlock alerts`: alerting rules for Prometheus, from the defaults and the configuration.

It must never connect to a database: rules are also written on machines without one.
"""

from pathlib import Path
from typing import Any

import click

from pgleaderlock.alerts import RUNBOOKS, Alert, Expected, default_alerts, duration, from_rule, merged, rules_yaml
from pgleaderlock.cli.options import POSITIVE, warn
from pgleaderlock.cli.output import EXIT_OK, grouped
from pgleaderlock.config import Config

__all__ = ["alerts"]

_USUAL = Expected()


@click.group(short_help="Write alerting rules for Prometheus.")
def alerts() -> None:
    """The default alerts, and those of [[alerts]] in the configuration."""


_options = grouped(
    click.option(
        "--config",
        "file",
        type=click.Path(path_type=Path),
        help="The configuration, for its [[alerts]], [roles] and timing.  [default: as `config show` finds it]",
    ),
    click.option(
        "--role",
        "roles",
        multiple=True,
        help="A role that must have a leader even if no node was ever seen. May be repeated; adds to [roles].",
    ),
    click.option(
        "--job",
        help="Under which Prometheus scrapes the nodes of those roles.  [default: a node of any job will do]",
    ),
    click.option(
        "--scrape-interval",
        type=POSITIVE,
        default=_USUAL.scrape_interval_s,
        show_default=duration(_USUAL.scrape_interval_s),
        help="How often Prometheus asks the nodes: an alert waits longer than it takes to see a change.",
    ),
    click.option(
        "--failovers",
        type=click.IntRange(min=1),
        default=_USUAL.failovers_max,
        show_default=True,
        help="More of them than this are too many ...",
    ),
    click.option(
        "--failover-window",
        type=POSITIVE,
        default=_USUAL.failover_window_s,
        show_default=duration(_USUAL.failover_window_s),
        help="... within this time.",
    ),
    click.option(
        "--drain-time",
        type=POSITIVE,
        default=_USUAL.drain_s,
        show_default=duration(_USUAL.drain_s),
        help="A drain that takes longer is stuck.",
    ),
    click.option("--no-defaults", is_flag=True, help="Only the [[alerts]] of the configuration."),
)


@alerts.command(short_help="Write a rule file for Prometheus.")
@_options
@click.option(
    "--runbooks",
    metavar="URL",
    default=RUNBOOKS,
    show_default=True,
    help="The page with a section for each default alert, for their annotation runbook_url.",
)
@click.option("--ms-names", is_flag=True, help="Record durations in milliseconds, too, as pgleaderlock_*_ms.")
def export(runbooks: str, ms_names: bool, **options: Any) -> int:
    """Write the rules to standard output, as a file for `rule_files:` of prometheus.yml.

    How long each alert waits follows from the timing of the configuration and from --scrape-interval. An alert of your
    own with the name of a default one takes its place. Metrics that are called forge_leader_* in a condition are
    written with their name here, with a warning on standard error.
    """
    click.echo(rules_yaml(_alerts(**options), runbooks=runbooks, ms_names=ms_names), nl=False)
    return EXIT_OK


@alerts.command("list", short_help="Show the alerts.")
@_options
def list_(**options: Any) -> int:
    """Show what `export` would write, for people: each alert, and the condition below it."""
    for alert in _alerts(**options):
        after = f", after {duration(alert.for_s)}" if alert.for_s else ""
        notify = ", ".join(kind if which == "default" else f"{kind}:{which}" for kind, which in alert.notify.items())
        click.echo(f"{alert.name}: {alert.severity}{after}{f', to {notify}' if notify else ''}")
        click.echo("    " + " ".join(alert.condition.split()))
    return EXIT_OK


def _alerts(
    *,
    file: Path | None,
    roles: tuple[str, ...],
    job: str | None,
    scrape_interval: float,
    failovers: int,
    failover_window: float,
    drain_time: float,
    no_defaults: bool,
) -> tuple[Alert, ...]:
    config = Config.load(file)
    for problem in config.warnings:
        warn(str(problem))
    own = []
    for rule in config.alerts:
        alert, notes = from_rule(rule)
        own.append(alert)
        for note in notes:
            warn(note)
    if no_defaults:
        return tuple(own)
    expected = Expected(
        scrape_interval_s=scrape_interval,
        heartbeat_interval_s=config["refresh_interval"],
        late_threshold_s=config["late_threshold"],
        session_lease_s=config["lease_duration"],
        failovers_max=failovers,
        failover_window_s=failover_window,
        drain_s=drain_time,
        roles=tuple(dict.fromkeys([*(role.name for role in config.role_settings), *roles])),
        namespace=config["namespace"],
        job=job,
    )
    return merged(default_alerts(expected), own)
