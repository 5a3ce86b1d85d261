# The verbs that people and CI call. `make setup` makes .venv from nothing; every other verb runs it first.
PYTHON ?= python3
OPTIONS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.paceline-setup

.PHONY: setup demo fmt check test test-all bench clean

setup: $(STAMP)

# torch comes first and alone: it is the one large package, and nothing after it may choose another version.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,ray]'
	touch $@

demo: setup
	$(BIN)/paceline demo $(OPTIONS)

fmt: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit/test_imports.py

# Tests that need a GPU skip themselves where there is none.
test: setup
	$(BIN)/python -m pytest -m 'not slow' $(OPTIONS)

test-all: setup
	$(BIN)/python -m pytest $(OPTIONS)

bench: setup
	$(BIN)/python -m benchmarks $(OPTIONS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
