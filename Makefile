# Everything a newcomer types. Each target sets up .venv by itself.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test browser test-slow fuzz check format audit bench bench-peers clean

demo: $(VENV)/ready      ## compare six methods on a small federation with hidden groups
	$(BIN)/coterie compare --out runs/demo

test: $(VENV)/all browser ## the tests
	$(BIN)/pytest -n 2 -m "not slow and not gpu and not shared"

# The pages are clicked through in Debian's chromium; without it, and without root, those tests skip.
browser:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; \
	then apt-get update -qq && apt-get install -y -qq chromium || echo "no chromium: its tests skip"; \
	else echo "no chromium, and no root with apt-get to install it: its tests skip"; fi

test-slow: $(VENV)/all   ## what does not fit into `make test`
	$(BIN)/pytest -n 2 -m "slow"

fuzz: $(VENV)/all        ## hostile input for an hour; FUZZ_SECONDS=60 for a minute
	$(BIN)/python tests/fuzz/run.py --seconds $(or $(FUZZ_SECONDS),3600)

check: $(VENV)/all       ## format, lint, strict types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/all      ## rewrite the code in the house style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

audit: $(VENV)/all       ## known vulnerabilities of what is installed; needs a network
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/pip install --quiet --upgrade pip pip-audit
	.venv-audit/bin/pip-audit --skip-editable --path $$($(BIN)/python -c "import site; print(site.getsitepackages()[0])")

bench: $(VENV)/ready     ## seconds per round of every engine against a plain PyTorch loop; ARGS=--help
	$(BIN)/python bench/run.py $(ARGS)

PEERS := fedjax pfl flower
bench-peers: $(VENV)/ready $(PEERS:%=.venv-peers/%/ready) ## the same against other frameworks
	$(BIN)/python bench/compare.py

clean:                   ## remove the environment and everything the tools cached
	rm -rf $(VENV) .venv-audit .venv-peers .pytest_cache .mypy_cache .ruff_cache .hypothesis

# What simulations need. torch goes first, in the pinned version; constraints.txt says how to get its
# build for CPUs.
$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	@touch $@

# What the tests need beyond that: every extra and the tools.
$(VENV)/all: $(VENV)/ready
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[data,direct,flower,metrics,figures,tune,dp,onnx,pandas]" --group dev
	@touch $@

# They do not resolve together, nor with ours: an environment each, every version pinned.
.venv-peers/%/ready: bench/peers/%.txt
	$(PYTHON) -m venv --clear .venv-peers/$*
	.venv-peers/$*/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	.venv-peers/$*/bin/pip install --quiet --requirement $<
	@touch $@
