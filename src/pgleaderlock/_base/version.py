"""The version of the installed library, read in one place."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["VERSION"]

try:
    VERSION = version("pgleaderlock")
except PackageNotFoundError:  # a source tree that was never installed
    VERSION = "0+unknown"
