# `make quickstart` and `make test` do their whole set-up in .venv first, with uv where it is there, else with pip.
# Settings: PYTHON=python3.12 picks the interpreter, EXTRAS=torch,dev the extras that are installed.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS ?= torch,mlx,jax,dev
UV := $(shell command -v uv 2>/dev/null)

# The first Python on the PATH that is new enough; empty where there is none.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)

# A folder of wheels that pip is told of is told to uv as well (pip wants spaces between several, uv commas).
space := $(subst ,, )
comma := ,
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS ?= $(subst $(space),$(comma),$(strip $(PIP_FIND_LINKS)))
endif
ifdef CI
QUIET := --quiet
endif
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: quickstart test check setup clean

quickstart: $(STAMP)
	$(BIN)/instep quickstart

test: check
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
ifneq ($(UV),)
	test -x $(BIN)/python || uv venv --python '>=3.11' $(VENV)
	uv pip install $(QUIET) --python $(BIN)/python --editable '.[$(EXTRAS)]' --constraint constraints.txt
else
	@test -n '$(PYTHON)' || { echo 'instep needs Python 3.11 or newer: none found; install one, install uv, or give PYTHON=/path/to/python'; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'instep needs Python 3.11 or newer, found: $(PYTHON)'; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(QUIET) --upgrade pip
	$(BIN)/python -m pip install $(QUIET) --editable '.[$(EXTRAS)]' --constraint constraints.txt
endif
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache dist build
