# make setup · make demo · make test · make docs; each sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCKS := requirements.lock requirements-dev.lock requirements-cuda.lock
# Exactly the locked versions, each file compared with its hash; no package runs code while it is installed.
INSTALL = $(BIN)/pip install --quiet --require-hashes --only-binary :all: --no-deps --requirement
EDITABLE = $(BIN)/pip install --quiet --no-deps --no-index --no-build-isolation --editable .
NEEDS_CUDA = $(BIN)/python -c 'from importlib.metadata import requires; exit("nvidia" not in str(requires("torch")))'

.PHONY: setup demo test lint format docs figures reference lock

setup: $(VENV)/installed

# What unidle needs without extras, and unidle itself.
$(VENV)/core: pyproject.toml $(LOCKS)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	  { echo "unidle needs Python 3.11, 3.12 or 3.13; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Installing into $(VENV); this takes a minute or two."
	$(PYTHON) -m venv $(VENV)
	@# With hashes, pip prefers the index's file to the build of torch that it is configured to use, unless that is alone.
	sed -n '/^torch==/,/[^\\]$$/p' requirements.lock > $(VENV)/torch.lock
	$(BIN)/pip download --quiet --no-deps --only-binary :all: --dest $(VENV)/torch $$(grep -o '^torch==[^ ]*' $(VENV)/torch.lock)
	$(INSTALL) $(VENV)/torch.lock --no-index --find-links $(VENV)/torch
	rm -r $(VENV)/torch
	$(INSTALL) requirements.lock
	@if $(NEEDS_CUDA); then $(INSTALL) requirements-cuda.lock; fi
	$(EDITABLE)
	@touch $@

$(VENV)/installed: $(VENV)/core
	$(INSTALL) requirements-dev.lock
	$(EDITABLE)
	$(BIN)/pip check
	@touch $@

demo: $(VENV)/core
	$(BIN)/unidle demo

# Compiled files spare each of the many processes that tests start a tenth of a second, even where they are disabled.
test: setup lint
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The documentation as a site in site/; a broken link is an error. Open site/index.html.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# After a benchmark: the tables and figures of README.md and docs/ from benchmarks/results/.
figures: setup
	$(BIN)/python tools/figures.py

# After a change of flags, settings or docstrings: the reference pages in docs/, from the code.
reference: setup
	$(BIN)/python tools/reference.py

lock: setup
	$(BIN)/python tools/lock.py $(UPGRADE)
