# Two commands bring a machine that has only Python (3.11 or later) and make all the way: `make demo` and `make test`.
# Everything they need goes into .venv and .deps below this folder; nothing is installed on the machine.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
# `make PYTHON=/path/to/python3.13 …` chooses the interpreter; otherwise the first of these that is new enough.
PYTHON ?=
CANDIDATES := $(if $(PYTHON),$(PYTHON),python3 python3.13 python3.12 python3.11)
# Test processes side by side; `make test WORKERS=8`. More than cores, since many tests mostly wait.
WORKERS ?= 5
# Mutants side by side; `make mutants JOBS=8 ARGS=--resume`.
JOBS ?= 2
# More arguments for pytest; `make test ARGS='-k embedded'`.
ARGS ?=
# The tests start many Python processes. What these have compiled is kept, below .venv, whatever the environment says:
# compiling takes longer than most of the tests.
PYTEST := PYTHONDONTWRITEBYTECODE= PYTHONPYCACHEPREFIX='$(CURDIR)/$(VENV)/pycache' \
  $(PY) -m pytest -q -n $(WORKERS) --dist=worksteal tests
# The folders that exist among those which the checks read.
CHECKED = $(wildcard src tests bench examples tools)

# Behind a proxy the certificates of the machine count, not those that uv brings along.
export UV_SYSTEM_CERTS := 1
export UV_NO_PROGRESS := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help install demo test test-long proof mutants test-pg spec check format bench test-deps lock-deps diagram manifests screenshots wheel clean distclean

help: ## Show this list
	@echo 'make TARGET, where TARGET is one of:'
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1|\2/p' $(firstword $(MAKEFILE_LIST)) | while IFS='|' read -r name text; do \
	  printf '%-14s %s\n' "$$name" "$$text"; done

demo: $(STAMP) ## Three nodes, a killed leader and its successor, on a private PostgreSQL
	@$(VENV)/bin/pgleaderlock demo

test: $(STAMP) ## The tests, at small counts, without those that are long by nature
	$(PYTEST) -m 'not long' $(ARGS)

test-long: $(STAMP) ## The tests that are long by nature: storms, crashes, browsers, model checking, clean installs
	$(PYTEST) -m long $(ARGS)

proof: $(STAMP) ## Every test, the long ones too, at the full counts: takes long
	PGLEADERLOCK_PROOF=1 $(PYTEST) $(ARGS)

mutants: $(STAMP) ## Plant defects into copies of the source and show that the tests catch each: takes hours
	$(PY) -m tools.mutants --jobs $(JOBS) $(ARGS)

test-pg: $(STAMP) ## Every test on other PostgreSQL binaries: make test-pg BIN=/usr/lib/postgresql/15/bin
	@test -n '$(BIN)' || { echo 'Say which binaries: make test-pg BIN=/usr/lib/postgresql/15/bin' >&2; exit 2; }
	PGLEADERLOCK_PG_BIN='$(BIN)' $(PYTEST) $(ARGS)

spec: $(STAMP) ## Check the specifications in spec/ with TLC, and the recorded histories
	spec/run.sh ci
	spec/run.sh trace

check: $(STAMP) ## Lint, format, types and the direction of imports
	$(VENV)/bin/ruff check $(CHECKED)
	$(VENV)/bin/ruff format --check $(CHECKED)
	$(VENV)/bin/mypy --strict $(CHECKED)
	$(VENV)/bin/lint-imports

format: $(STAMP) ## Format the code and mend what can be mended
	$(VENV)/bin/ruff format $(CHECKED)
	$(VENV)/bin/ruff check --fix $(CHECKED)

bench: $(STAMP) ## Measure, and fail when a figure is missed
	$(PY) -m bench

test-deps: $(STAMP) ## Fetch the Debian tools that some tests need into .deps (no root, nothing installed)
	$(PY) -m tools.debian

lock-deps: $(STAMP) ## Choose new versions: requirements-dev.in becomes requirements-dev.txt
	$(VENV)/bin/uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-header --upgrade \
	  --python-version 3.11 --output-file requirements-dev.txt requirements-dev.in
	@! grep -nE '://|^-' requirements-dev.txt || { echo 'requirements-dev.txt holds an address.' >&2; exit 1; }

diagram: $(STAMP) ## Draw the state machine anew from its table, into docs/state-machine.md
	$(PY) tools/state_diagram.py

manifests: $(STAMP) ## Write examples/deploy/kubernetes.yaml anew from the Helm chart
	$(PY) -m tools.chart

screenshots: $(STAMP) ## Take the pictures of docs/dashboard.md anew; ARGS=--measure prints how quick the pages are
	PYTHONPATH=tests $(PY) -m tools.screenshots $(ARGS)

wheel: $(STAMP) ## Build the wheel into dist/
	$(VENV)/bin/uv build --quiet --wheel --no-build-isolation --python $(PY) --out-dir dist .
	@ls dist/*.whl

clean: ## Remove caches and built files
	rm -rf dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## Remove the environment and the unpacked tools as well
	rm -rf $(VENV) .deps

install: $(STAMP) ## Make the virtual environment in .venv (the other targets do so by themselves)

# The stamp comes last, so that a set-up which was interrupted is done again. pip is used once, for uv at its pinned
# version and hash; uv installs the rest. The project itself is editable, and its build backend is among the pinned.
$(STAMP): requirements-dev.txt pyproject.toml
	@found=; for candidate in $(CANDIDATES); do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo 'pgleaderlock needs Python 3.11 or later; tried: $(CANDIDATES).' >&2; \
	  echo 'Install one, or name it: make PYTHON=/path/to/python3.13 $(MAKECMDGOALS)' >&2; exit 1; \
	fi; \
	if ! "$$found" -c 'import ensurepip, venv' 2>/dev/null; then \
	  echo "$$found cannot make virtual environments: its module ensurepip is missing." >&2; \
	  echo 'On Debian and Ubuntu it is in a package of its own: apt install python3-venv' >&2; exit 1; \
	fi; \
	if ! $(VENV)/bin/python -m pip --version >/dev/null 2>&1; then \
	  echo "Making $(VENV) with $$found"; \
	  "$$found" -m venv --clear $(VENV); \
	fi
	@sed -n '/^uv==/,/^ *#/p' requirements-dev.txt > $(VENV)/uv.txt
	@$(PY) -m pip install --quiet --require-hashes --no-deps -r $(VENV)/uv.txt
	@$(VENV)/bin/uv pip sync --quiet --python $(PY) --require-hashes requirements-dev.txt
	@$(VENV)/bin/uv pip install --quiet --python $(PY) --no-deps --no-build-isolation --editable .
	@touch $(STAMP)
	@echo 'The environment in $(VENV) is ready.'
