"""Figures, measured: each next to a raw limit or a peer in the same run, and a non-zero exit when one is missed.

    make bench                      all of them
    .venv/bin/python -m bench start  only those whose name contains "start"

Durations are never asserted in the tests; they are asserted here. A machine is noisy, so every figure is taken in
rounds that alternate between the baseline and ours, and what counts is the ratio. The baselines (`raw_*.py`) use the
same driver, the same connection settings and the same event loop as we do: a slow baseline would be a lie.
"""
