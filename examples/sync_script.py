"""A migration that any number of machines may start at the same time: one of them runs it.

No event loop. Exit codes: 0 the schema is as it should be, 2 database, 75 somebody else is at it (try again later: then
there is nothing left to do). Needs PG_DSN.
"""

import os
import sys

import psycopg

from pgleaderlock import LockNotAcquired
from pgleaderlock.errors import DatabaseError
from pgleaderlock.sync import acquire_leadership

DATABASE, NOT_WON = 2, 75
CREATE_VERSIONS = "CREATE TABLE IF NOT EXISTS schema_version (version int PRIMARY KEY)"
MIGRATIONS = (
    "CREATE TABLE invoice (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, sent_at timestamptz)",
    "CREATE INDEX ON invoice (sent_at)",
)


# -- shown in docs/guard.md
def migrate(conn: psycopg.Connection[tuple[int]]) -> None:
    conn.execute(CREATE_VERSIONS)
    done = {version for (version,) in conn.execute("SELECT version FROM schema_version")}
    for version, change in enumerate(MIGRATIONS, 1):
        if version not in done:
            with conn.transaction():
                conn.execute(change)
                conn.execute("INSERT INTO schema_version VALUES (%s)", (version,))
            print("applied", version)


def main() -> int:
    try:
        # The work is done on the connection that holds the lock: it cannot go on when that is gone.
        with psycopg.connect(os.environ["PG_DSN"], autocommit=True) as conn, acquire_leadership(conn, "migrate"):
            migrate(conn)
    except LockNotAcquired as no:
        print("not migrating:", no)
        return NOT_WON
    except (psycopg.OperationalError, DatabaseError) as error:
        print("database:", error)
        return DATABASE
    print("the schema is up to date")
    return 0


# -- until here


if __name__ == "__main__":
    sys.exit(main())
