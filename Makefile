# Two commands for a newcomer: `make demo` and `make test`. `make help` lists the rest.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
MEMBERS := schemas runtime sdk gateway $(wildcard services/*)

.DEFAULT_GOAL := help
.PHONY: help install lock schemas lint test demo up bench clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

install: $(VENV)/installed ## the virtual environment with the locked packages and the workspace in it

$(UV): requirements-bootstrap.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Headrace needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements-bootstrap.txt
	@touch $@

$(VENV)/installed: $(UV) requirements.lock $(MEMBERS:%=%/pyproject.toml)
	$(UV) pip sync --quiet --require-hashes --python $(BIN)/python requirements.lock
	$(UV) pip install --quiet --no-deps --no-build-isolation --python $(BIN)/python $(MEMBERS:%=--editable ./%)
	@touch $@

DISTRIBUTIONS := schemas runtime gateway $(notdir $(wildcard services/*))
COMPILE := $(UV) pip compile --quiet --universal --generate-hashes --python-version 3.11 --no-annotate --no-header

lock: $(UV) ## resolve every dependency again, with hashes, for every platform
	$(COMPILE) requirements-bootstrap.in -o requirements-bootstrap.txt
	$(COMPILE) requirements.in -o requirements.lock \
	  --no-emit-package headrace $(DISTRIBUTIONS:%=--no-emit-package headrace-%)
