"""The former place of the election's ledger statements; they live in `pgleaderlock._election.ledger`."""

from pgleaderlock._election.ledger import *  # noqa: F403 - the names that this path has always had.
from pgleaderlock._election.ledger import __all__  # noqa: F401 - and no others.
