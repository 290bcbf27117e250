# make setup · make demo · make test; each sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCKS := requirements-dev.lock requirements-cuda.lock
# Exactly the locked versions, each file compared with its hash; no package runs code while it is installed.
INSTALL = $(BIN)/pip install --quiet --require-hashes --only-binary :all: --no-deps --requirement
NEEDS_CUDA = $(BIN)/python -c 'from importlib.metadata import requires; exit("nvidia" not in str(requires("torch")))'

.PHONY: setup demo test lint format figures lock

setup: $(VENV)/installed

$(VENV)/installed: pyproject.toml $(LOCKS)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
	  { echo "unidle needs Python 3.11, 3.12 or 3.13; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Installing into $(VENV); this takes a minute or two."
	$(PYTHON) -m venv $(VENV)
	@# With hashes, pip prefers the index's file to the build of torch that it is configured to use, unless that is alone.
	sed -n '/^torch==/,/[^\\]$$/p' requirements-dev.lock > $(VENV)/torch.lock
	$(BIN)/pip download --quiet --no-deps --only-binary :all: --dest $(VENV)/torch $$(grep -o '^torch==[^ ]*' $(VENV)/torch.lock)
	$(INSTALL) $(VENV)/torch.lock --no-index --find-links $(VENV)/torch
	rm -r $(VENV)/torch
	$(INSTALL) requirements-dev.lock
	@if $(NEEDS_CUDA); then $(INSTALL) requirements-cuda.lock; fi
	$(BIN)/pip install --quiet --no-deps --no-index --no-build-isolation --editable .
	$(BIN)/pip check
	@touch $@

demo: RUN := demo-$(shell date +%Y%m%d-%H%M%S)
demo: setup
	$(BIN)/unidle train --env CartPole-v1 --preset classic --timesteps 150000 --seed 1 \
	  --eval-every 10000 --eval-episodes 20 --target-return 490 --run-name $(RUN)
	@echo
	$(BIN)/unidle eval runs/$(RUN) --episodes 20
	@echo "Now open runs/$(RUN)/report.html in a browser."

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

# After a benchmark: the tables and figures of README.md and docs/ from benchmarks/results/.
figures: setup
	$(BIN)/python tools/figures.py

lock: setup
	$(BIN)/python tools/lock.py $(UPGRADE)
