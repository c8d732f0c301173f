# From a clean clone: make look, make test. Everything else is in CONTRIBUTING.md.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: look test check docs wheel bench gpu clean

look: $(READY)
	@$(BIN)/foci look "Jane is hungry, and she's really craving pasta from Italy."

test: $(READY)
	$(BIN)/python -m pytest -n auto

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)
	@$(BIN)/python -m pip install -qq -e '.[dev,docs]' -c constraints.txt
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/build/html
	@echo "written: docs/build/html/index.html"

wheel:
	PYTHON=$(PYTHON) .ci/wheel

bench: $(READY)
	$(BIN)/foci bench

# The machine with the GPU brings its own torch and triton: nothing is installed there.
# In parallel if it has pytest-xdist: most of the time goes to compiling kernels.
gpu:
	$(PYTHON) -m pytest -m gpu $$($(PYTHON) -c 'from importlib.util import find_spec; print("-n auto" if find_spec("xdist") else "")')

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"foci needs Python 3.11 or newer, $(PYTHON) is {sys.version.split()[0]}")'
	@echo "setting up .venv: once, and again when pyproject.toml or constraints.txt changes; this takes minutes"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -qq -e '.[dev]' -c constraints.txt
	@touch $@
