"""`python -m pgleaderlock` is the same program as `pgleaderlock`. Nothing else may live here."""

from pgleaderlock.cli import main

if __name__ == "__main__":
    main()
