# Every target prepares .venv itself: it needs Python 3.11 and a C++ compiler, nothing else.
PYTHON ?= python3.11
BIN := .venv/bin
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile
ALONE := $(BIN)/python -m pytest -q

.PHONY: demo test test-all lint bench clean

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: .venv/ready
	$(BIN)/gristmill demo out/demo

test: .venv/ready
	$(PYTEST) -m 'not slow and not peers'
	$(ALONE) -m 'peers and not slow'

test-all: .venv/ready
	$(PYTEST) -m 'not peers'
	$(ALONE) -m peers

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/ready
	$(BIN)/python -m scripts.bench_mine
	$(BIN)/python -m scripts.bench_lid
	$(BIN)/python -m scripts.bench_scale --sizes 0.1 1 5 --workers 1 2
	$(BIN)/python -m scripts.bench_scale --sizes 0.1 --workers 1 --set run.exchange=shuffle
	$(BIN)/python -m scripts.bench_peers

clean:
	rm -rf .venv out
