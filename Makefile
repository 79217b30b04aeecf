# trainmover: everything a person does with a clone. `make demo` first.
#
# Needs Python 3.11 or newer (with its venv module), git and make; the rest is installed into .venv.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SEEDS ?= 1000
FIRST ?= 0
TESTS ?= tests
export OMP_NUM_THREADS ?= 1

.PHONY: help venv demo test test-all lint compiled check sim docs clean

help:
	@echo "make demo    train a small GPT, switch one machine over, kill another, compare every number"
	@echo "make test    every test, a few minutes per tier (TESTS=tests/unit for a part)"
	@echo "make test-all  also those marked long: death at every phase, baselines"
	@echo "make lint    ruff, mypy, import contracts, house lints"
	@echo "make check   that, and unit and policy tests: before every commit"
	@echo "make sim     simulate the deciders (SEEDS=1000 FIRST=0)"
	@echo "make docs    render the pages that are generated from code"
	@echo "make venv    only set up .venv"
	@echo "make clean   remove caches, build output and runs (keeps .venv)"

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt tools/make_venv.sh
	@tools/make_venv.sh $(VENV)
	@touch $@

demo: $(STAMP)
	@$(BIN)/trainmover demo

test: compiled
	@$(BIN)/python -m pytest -m "not long" $(TESTS)

test-all: compiled
	@$(BIN)/python -m pytest $(TESTS)

# Each job of a test starts half a dozen processes: they must not compile this tree each.
compiled: $(STAMP)
	@$(BIN)/python -m compileall -q src tests

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/tidy.py

check: lint
	$(BIN)/python -m pytest -q tests/unit tests/policy

sim: $(STAMP)
	@$(BIN)/trainmover simulate --seeds $(SEEDS) --first $(FIRST)

docs: $(STAMP)
	@$(BIN)/python tools/render_docs.py

clean:
	rm -rf build dist runs demo-report .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests tools examples -name __pycache__ -type d -prune -exec rm -rf {} +
