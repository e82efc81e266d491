# `make demo` runs the main job, `make test` lints, type-checks and tests. Each makes .venv itself, on a machine with or
# without a GPU, and takes seconds to find it ready the next time. PYTHON=... picks the interpreter (3.10 to 3.13).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHONS := python3 python3.13 python3.12 python3.11 python3.10
PYTHON ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
# Two processes of one thread each: kernels' thread pools would only fight over the cores.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
WORKERS ?= 2
FILE ?=

.PHONY: help demo test lint pytest clean-venv

help:
	@echo 'make demo [FILE=text.txt]   run the expert MLP of real tokens, fused against unfused'
	@echo 'make test                   ruff, mypy and the whole test suite'
	@echo 'make lint                   ruff and mypy only'

demo: $(READY)
	$(BIN)/python samples/fused_vs_unfused.py $(if $(FILE),"$(FILE)")

test: lint pytest

pytest: $(READY)
	$(ONE_THREAD) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --benchmark-disable $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check --output-format concise .
	$(BIN)/mypy

# The kernels' packages exist for Linux only, and not for every interpreter: without them the tests that compile
# kernels skip and say so.
$(READY): pyproject.toml setup.py constraints.txt Makefile
	@if ! [ -x $(BIN)/python ]; then \
		for candidate in $(if $(PYTHON),'$(PYTHON)',$(PYTHONS)); do \
			if "$$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; \
				then python=$$candidate; break; fi; \
		done; \
		if [ -z "$${python:-}" ]; then echo 'no Python 3.10 to 3.13 found: install one, or give PYTHON=/path/to/python' >&2; exit 1; fi; \
		"$$python" -m venv $(VENV) || { rm -rf $(VENV); echo 'this Python makes no environment; on Debian: apt-get install python3-venv' >&2; exit 1; }; \
	fi
	$(BIN)/python -m pip install -q -c constraints.txt setuptools
	if [ "$$(uname -s)" = Linux ] && $(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[cuda,test,lint]'; \
		then :; else echo 'the cuda extra is not installable here: going on without it'; \
		$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[test,lint]'; fi
	mkdir -p $(VENV)/src && ln -sfn ../.. $(VENV)/src/opfuse
	touch $@

clean-venv:
	rm -rf $(VENV)
