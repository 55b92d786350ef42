# Everything a developer runs. PYTHON picks the interpreter that creates .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: train test bench lint unit clean
.DEFAULT_GOAL := test

# The stamp depends on pyproject.toml alone: a change of code needs no new installation.
$(VENV)/.run: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.run
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

train: $(VENV)/.run
	$(BIN)/python -m raypipe train jobs/quickstart.yaml
	@echo
	@echo "The command is $(BIN)/raypipe; to have it as raypipe: source $(BIN)/activate"

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# What starts no Ray and takes no longer than a few seconds a test.
unit: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not runs and not slow"

# Tests that start a Ray of their own mostly wait for processes to start: they run beside the others.
test: lint
	@$(BIN)/python -m pytest -m own_ray > .own_ray.log 2>&1 & other=$$!; trap "kill $$other" INT TERM; \
	$(BIN)/python -m pytest -m "not own_ray"; status=$$?; \
	wait $$other || status=1; cat .own_ray.log; exit $$status

bench: $(VENV)/.dev
	$(BIN)/python -m tests.bench

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .hypothesis
