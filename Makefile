# Everything a developer runs. PYTHON picks the interpreter that creates .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# The oldest Python that pyproject.toml promises, and all that `make matrix` looks for.
OLDEST := 3.10
PYTHONS ?= python3.10 python3.11 python3.12 python3.13 python3.14
# What no interpreter but the oldest can tell without running it: a name of the standard library that came later.
NEWER = $(BIN)/vermin --target=$(OLDEST)- --violations --no-tips --quiet --eval-annotations --backport typing_extensions raypipe

# Tests start hundreds of processes that import raypipe.
unexport PYTHONDONTWRITEBYTECODE

# Run by an environment's Python: the folders of the packages of interpreter $(1), among them torch, on its path too.
PACKAGES_OF = import pathlib, subprocess, sysconfig; \
  folder = pathlib.Path(sysconfig.get_path("purelib")); \
  theirs = """import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\\n")"""; \
  (folder / "torch_of_python.pth").write_text(subprocess.check_output(["$(1)", "-c", theirs], text=True))

.PHONY: train train-short test test-all bench peers verl docs gpu shim lint unit matrix oldest clean
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
	$(NEWER)
	$(BIN)/mypy

# What starts no Ray and takes less than half a second a test, two at a time.
unit: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 -m "not runs and not slow and not exhaustive"

# mypy and the tests that start a Ray of their own, which often wait, run beside all others: those that share one Ray, then
# what starts none, two at a time and with less priority, which end if one of the two crashes:
# with another worker pytest-xdist may wait for ever. test-all takes the exhaustive ones too. What one process captures
# or compiles, the others find.
test: CASES := and not exhaustive
test test-all: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(NEWER)
	@export RAYPIPE_TESTS_CACHE=$$(mktemp -d); trap 'rm -rf "$$RAYPIPE_TESTS_CACHE"' EXIT; \
	( $(BIN)/mypy && $(BIN)/python -m pytest -m "own_ray $(CASES)" tests ) > .own_ray.log 2>&1 & other=$$!; \
	trap "kill $$other" INT TERM; \
	$(BIN)/python -m pytest -m "runs and not own_ray $(CASES)"; status=$$?; \
	nice -n 5 $(BIN)/python -m pytest -n 2 --dist loadfile --max-worker-restart 0 -m "not runs $(CASES)" || status=1; \
	wait $$other || status=1; cat .own_ray.log; exit $$status

# Every interpreter at hand among the promised ones: an installation of its own, a short job, and the tests of `unit`.
matrix:
	@failed=; for python in $(PYTHONS); do \
	  $$python -c '' 2>/dev/null || { echo "$$python: not here"; continue; }; \
	  echo "$$python: installing, a short job, the unit tests"; \
	  $(MAKE) --no-print-directory VENV=.venv-$$python PYTHON=$$python train-short unit || failed="$$failed $$python"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

# The oldest versions of what pyproject.toml names, under the oldest Python. torch's is built for CUDA: 7 GB.
LOWEST := .venv-oldest
oldest:
	test -x $(LOWEST)/bin/uv || { python$(OLDEST) -m venv $(LOWEST) && $(LOWEST)/bin/python -m pip install --quiet uv; }
	$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct \
	  --editable '.[hf,data,tensorboard,mlflow,wandb,serve]'
	$(LOWEST)/bin/uv pip install --quiet --python $(LOWEST)/bin/python pytest pytest-xdist hypothesis 'moto[server]>=5'
	$(LOWEST)/bin/python -m pytest -n 2 -m "not runs and not slow and not exhaustive"

train-short: $(VENV)/.run
	rm -rf $(VENV)/short
	$(BIN)/python -m raypipe train jobs/quickstart.yaml --set train.steps=4 --run-dir $(VENV)/short

bench: $(VENV)/.dev peers
	$(BIN)/python -m tests.bench

# DeepSpeed, in an environment of its own over the packages of $(VENV); says how large that is. Where it cannot be had,
# `make bench` leaves it out and says so.
PEERS := .venv-peers
peers: $(VENV)/.dev
	@test -e $(PEERS)/bin/deepspeed || { $(BIN)/python -m venv --clear $(PEERS) && \
	  $(PEERS)/bin/python -c '$(call PACKAGES_OF,$(abspath $(BIN))/python)' && \
	  $(PEERS)/bin/python -m pip install --quiet --editable '.[peers]' && du -sh $(PEERS); } || \
	  { rm -rf $(PEERS); echo "DeepSpeed is left out: it could not be installed"; }

# verl, in an environment of its own over the packages of $(VENV), and the test of our engine for it. Python's own pip
# may be so old that it tries versions for more than half an hour.
VERL := .venv-verl
verl: $(VENV)/.dev
	@test -e $(VERL)/.done || { $(BIN)/python -m venv --clear $(VERL) && \
	  $(VERL)/bin/python -c '$(call PACKAGES_OF,$(abspath $(BIN))/python)' && \
	  $(VERL)/bin/python -m pip install --quiet --upgrade pip && \
	  $(VERL)/bin/python -m pip install --quiet --editable '.[verl]' && touch $(VERL)/.done; }
	$(VERL)/bin/python -m pytest tests/service/test_verl_engine.py

# The docs as a site, in site/; a broken link or reference is an error.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet -f .mkdocs.yml

# Needs a GPU, and for PYTHON an interpreter whose own torch is built for CUDA: that one is used as it is, also where
# PYTHON is itself a virtual environment's. What else is missing is installed into a virtual environment beside it, from
# GPU_WHEELS (a folder of wheels) where there is no index. Each section's file is in GPU_REPORT when it ends. Without a
# GPU it says so and ends with status 2.
GPU_VENV := .venv-gpu
GPU_REPORT ?= gpu-report
GPU_WHEELS ?=
GPU_PIP = -m pip install --quiet $(if $(GPU_WHEELS),--no-index --find-links $(GPU_WHEELS))
# The folders of the packages of $(PYTHON), among them torch, on the path of the other environment.
GPU_PATH = import pathlib, subprocess, sysconfig; \
  folder = pathlib.Path(sysconfig.get_path("purelib")); \
  theirs = """import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\\n")"""; \
  (folder / "torch_of_python.pth").write_text(subprocess.check_output(["$(PYTHON)", "-c", theirs], text=True))
gpu:
	@$(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null || \
	  { echo "no GPU: the torch of $(PYTHON) finds no CUDA device (make gpu PYTHON=... chooses the interpreter)"; exit 2; }
	test -x $(GPU_VENV)/bin/python || $(PYTHON) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/python -c '$(call PACKAGES_OF,$(PYTHON))'
	$(GPU_VENV)/bin/python $(GPU_PIP) --editable '.[dev]'
	$(GPU_VENV)/bin/python -m tests.bench.gpu --report $(GPU_REPORT)

# What is written for GPUs over a GPU that is not there (tests/gpu_shim), with torch's CUDA build in an environment of
# its own; says how large that is, and where it cannot be had.
shim: $(VENV)/.dev
	$(BIN)/python -m tests.gpu_shim.shim

clean:
	rm -rf $(VENV) .venv-* build dist *.egg-info .mypy_cache .ruff_cache .hypothesis
