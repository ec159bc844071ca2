# make quickstart   the comparison of the README, from nothing
# make test         the whole test suite
# make lint types bench docs clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: quickstart test lint types bench docs clean

quickstart: $(VENV)/core
	$(BIN)/fedretain compare examples/quickstart.yaml --out runs/quickstart

test: $(VENV)/dev
	$(BIN)/python -m pytest --numprocesses 2

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/dev
	$(BIN)/mypy

bench: $(VENV)/core
	$(BIN)/python -m benchmarks

docs: $(VENV)/dev
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site build dist .pytest_cache .mypy_cache .ruff_cache

# PyTorch goes first and alone, so that the build named in the constraints is the one that everything else meets.
$(VENV)/core: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "fedretain needs Python 3.11 or newer; try: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) $$(grep '^torch==' constraints.txt)
	$(PIP) --editable .
	touch $@

$(VENV)/dev: $(VENV)/core
	$(PIP) --editable '.[hub,figures,board,track,dev]'
	touch $@
