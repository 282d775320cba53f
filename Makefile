# Every target sets up what it needs: .venv, with the exact versions of constraints.txt.
# Nothing is installed again until pyproject.toml, constraints.txt or this file changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet --constraint constraints.txt
export FLWR_TELEMETRY_ENABLED ?= 0
export FLWR_DISABLE_UPDATE_CHECK ?= 1
export RAY_USAGE_STATS_ENABLED ?= 0

.PHONY: run test test-all coverage check bench bench-peers compare docs deploy-demo format clean
.DEFAULT_GOAL := run

run: $(VENV)/installed ## the main job: federated runs on embedded data, and a report
	@$(BIN)/fed-dp simulate digits

test: $(VENV)/installed-dev ## every behaviour once, on two processes
	@$(BIN)/python -m pytest -n 3 -rs

test-all: $(VENV)/installed-dev ## all cases of all tests but those marked slow; more random examples
	@HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-thorough} $(BIN)/python -m pytest -n 2 -rs -m 'not slow'

coverage: $(VENV)/installed-dev ## what share of the lines the tests run; fails below the limits
	@rm -f .coverage .coverage.*
	@$(BIN)/python -m pytest -n 3 --cov --cov-report=
	@$(BIN)/coverage report --skip-covered --fail-under=90
	@for part in mechanisms accounting sharing; do \
	  $(BIN)/coverage report --include="fed_dp/$$part/*" --fail-under=95 | tail -1 | sed "s/^TOTAL/$$part/" || exit 1; done

check: $(VENV)/installed-dev ## style, types, layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

bench: $(VENV)/installed-dev ## benchmarks; fails when a ratio is over its limit
	@$(BIN)/python benchmarks/run.py

bench-peers: $(VENV)/installed-dev ## ours beside Flower's simulation and pfl, each in its own environment
	@$(BIN)/python benchmarks/compare_peers.py

compare: $(VENV)/installed ## all mechanisms on embedded data, at two ε, with a report
	@$(BIN)/fed-dp compare --quick

docs: $(VENV)/installed-docs ## the documentation site in docs/_build; its examples are run
	@$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build
	@$(BIN)/python -m pytest tests/test_documentation.py
	@echo "docs/_build/index.html"

deploy-demo: $(VENV)/installed-secure ## four hospitals as four sites on this machine, over TLS
	@$(BIN)/fed-dp deploy demo

format: $(VENV)/installed-dev
	@$(BIN)/ruff check --fix --quiet .
	@$(BIN)/ruff format --quiet .

clean:
	rm -rf $(VENV) docs/_build .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "fed_dp needs Python 3.11 or newer; try: make PYTHON=python3.11")'
	@echo "setting up $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(VENV)/bin/python pyproject.toml constraints.txt Makefile
	@echo "installing fed_dp and what it needs (a few minutes the first time)"
	@$(PIP) --editable '.[simulation,report]'
	@touch $@

$(VENV)/installed-secure: $(VENV)/installed
	@$(PIP) --editable '.[secure]'
	@touch $@

$(VENV)/installed-docs: $(VENV)/installed-dev
	@$(PIP) --editable '.[docs]'
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed
	@echo "installing the tools for tests and checks"
	@$(PIP) --editable '.[dev]'
	@touch $@
