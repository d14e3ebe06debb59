PYTHON ?= python3
BIN := .venv/bin
# A file's tests share what they set up, so they stay on one worker.
PARALLEL := -n auto --maxprocesses 4 --dist loadfile

.PHONY: setup quickstart test test-all check format bench

# A half-made environment is made again: the stamp is written last.
.venv/.made: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch .venv/.made

setup: .venv/.made  ## make .venv and install everything that the tests need

quickstart: setup  ## generate data, train regular and Step-JEPA, evaluate both, print one table
	$(BIN)/python examples/quickstart.py

test: setup  ## the test suite, without the slow tests
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow"

test-all: setup  ## every test
	$(BIN)/python -m pytest $(PARALLEL)

check: setup  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup  ## put the code in form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup  ## measure training against TRL, evaluation against one prompt at a time
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/bench.py
	$(BIN)/python benchmarks/bench_preparation.py
	$(BIN)/python benchmarks/bench_evaluation.py
