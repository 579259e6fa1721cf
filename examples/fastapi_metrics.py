"""Metrics of several workers: each listens on a port of its own. Needs PG_DSN, and a ledger (`pgleaderlock migrate`).

uvicorn fastapi_metrics:app --workers 4
"""

import contextlib
import os
from collections.abc import AsyncIterator

from fastapi import FastAPI

from pgleaderlock import ConfigurationError, LeaderElection
from pgleaderlock.contrib.fastapi import leader_lifespan
from pgleaderlock.metrics import ElectionMetrics
from pgleaderlock.probes import ProbeServer

# -- shown in docs/frameworks.md
election = LeaderElection.from_env("billing")
metrics = ElectionMetrics(election)
FIRST_PORT = int(os.environ.get("PROBES_PORT", "7430"))
PORTS = range(FIRST_PORT, FIRST_PORT + 16)  # more than workers: Prometheus scrapes them all, and some are not there


async def probes() -> ProbeServer:
    """On the first port of the range that no other worker has."""
    for port in PORTS:
        with contextlib.suppress(ConfigurationError):
            server = ProbeServer(election, port=port, metrics=metrics.exposition)
            await server.start()
            print(f"metrics on port {port}", flush=True)
            return server
    raise ConfigurationError(f"no port from {PORTS[0]} to {PORTS[-1]} is free")


@contextlib.asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with leader_lifespan(election)(app):
        server = await probes()
        try:
            yield
        finally:
            await server.close()


app = FastAPI(lifespan=lifespan)
# -- until here
