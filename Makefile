# Everything a newcomer types. Each target sets up .venv by itself.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test test-slow check format bench clean

demo: $(VENV)/ready      ## compare six methods on a small federation with hidden groups
	$(BIN)/coterie compare --out runs/demo

test: $(VENV)/ready      ## the tests
	$(BIN)/pytest -n 2 -m "not slow and not gpu and not shared"

test-slow: $(VENV)/ready ## what does not fit into `make test`
	$(BIN)/pytest -n 2 -m "slow"

check: $(VENV)/ready     ## format, lint, strict types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/ready    ## rewrite the code in the house style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/ready     ## seconds a round of every engine against a plain PyTorch loop
	$(BIN)/coterie bench

clean:                   ## remove the environment and everything the tools cached
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch goes first and pinned: resolved on its own it brings gigabytes of CUDA libraries.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable . --group dev
	@touch $@
