"""A leader that the benchmark kills: it takes the lock, prints that, and waits.

python -m bench.holder DSN KEY1 KEY2
"""

import signal
import sys

import psycopg


def main(dsn: str, key1: int, key2: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SELECT pg_advisory_lock(%s, %s)", (key1, key2))
        print("held", flush=True)
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
