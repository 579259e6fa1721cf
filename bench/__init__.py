"""Measures the figures: each beside a raw limit or a peer in the same run. Exits with 1 if a figure misses its limit.

    make bench                      all of them
    .venv/bin/python -m bench start  only those whose name contains "start"

The tests never assert durations; the benchmarks do. A machine is noisy, so every figure is taken in rounds that
alternate between the baseline and ours, and the ratio counts. The baselines (`raw_*.py`) use the same driver, the same
connection settings and the same event loop as we do: a slow baseline would flatter us.
"""
