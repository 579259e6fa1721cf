"""FastAPI: every worker serves, and one of them works. Needs PG_DSN, and a ledger (`pgleaderlock migrate`).

uvicorn fastapi_app:app --workers 4
"""

import asyncio
import os
from typing import Annotated

from fastapi import Depends, FastAPI

from pgleaderlock import LeaderElection, LeaderToken
from pgleaderlock.contrib.fastapi import leader_lifespan, leader_required, leader_route

# -- shown in docs/frameworks.md
election = LeaderElection.from_env("billing")  # PG_DSN and the rest; it connects when the worker starts


async def send_invoices(token: LeaderToken) -> None:
    """Runs in the worker that leads, and is cancelled when another one may lead."""
    print(f"leading: epoch {token.epoch}, process {os.getpid()}", flush=True)
    while await asyncio.sleep(1.0, result=True):
        ...  # your work, fenced by the token


app = FastAPI(
    lifespan=leader_lifespan(election, {"billing": send_invoices}),
    routes=[leader_route(election)],  # GET /leader: 200 in the worker that leads, 503 in the others
)


@app.post("/books/close")
async def close_books(token: Annotated[LeaderToken, Depends(leader_required(election, "billing"))]) -> dict[str, int]:
    """Only in the worker that leads: the others answer 503."""
    return {"epoch": token.epoch}


# -- until here
