"""Debian's tools in a test: one that cannot be had (no Debian, no network) is a loud skip, and in CI a failure.

Imports pytest and `tools.debian`.
"""

import subprocess

import pytest
from tools.debian import FetchError, Tool, provide

__all__ = ["debian_tool"]


def debian_tool(name: str) -> Tool:
    """The tool of this name, fetched if need be."""
    try:
        return provide(name)
    except (FetchError, OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"needs {name}: run `make test-deps` on Debian, with a network ({error})")
