# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
#
# Each of these sets up .venv first, where that is still to be done.
#   make demo        a real vLLM engine on the CPU, served by the kvcr tier
#   make demo-peers  two OpenAI servers, one of which pulls from the other
#   make test        all tests          PYTEST_ARGS="-k plugin" picks some
#   make lint        ruff, mypy, shellcheck
#   make bench       measurements beside other tiers     BENCH_ARGS="--quick"
#   make dashboards  dashboard and alerts, with a real Prometheus
#   make fleet       routers, ranks, a guard: real ones  FLEET_ARGS="router guard"
#   make soak        random faults for ten minutes       SOAK_ARGS="--seconds 60"
#   make matrix      the tests on every pair of releases MATRIX_ARGS="--adapter-level"
#   make gpu-check   a GPU's blocks, moved and timed     GPU_PYTHON=python3
#   make upstream-tree  what a pull request to vLLM carries, tested in vLLM's tree
#   make docs        the documentation as a site, in build/site
#   make dist        wheel and sdist in dist/, checked for an index
#   make clean       removes environments and caches
# PYTHON=... names the Python (3.11 to 3.14) that .venv is made with.

VENV_PYTHON := .venv/bin/python
VENV_BIN := .venv/bin
PYTEST_ARGS ?=
BENCH_ARGS ?=
SOAK_ARGS ?=
FLEET_ARGS ?=
MATRIX_ARGS ?=
DASHBOARDS_ARGS ?=
GPU_PYTHON ?= python3
GPU_ARGS ?=
SHELL_SCRIPTS = .ci/run $(shell find scripts .buildkite -name '*.sh' 2>/dev/null)

# vLLM's hashes of blocks have to be the same in each process.
export PYTHONHASHSEED := 0
# GiB; the models used here are tiny.
export VLLM_CPU_KVCACHE_SPACE ?= 1
# Nothing is downloaded and nothing reported while a demo or a test runs.
export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1

.PHONY: help setup setup-peers demo demo-peers test lint bench dashboards fleet soak \
	gpu-check matrix docs dist upstream-tree clean

help:
	@sed -n 's/^#   //p' Makefile

setup:
	@python=$$(scripts/find_python.sh) && "$$python" -m scripts.setup_env

setup-peers:
	@python=$$(scripts/find_python.sh) && "$$python" -m scripts.setup_env --peers

demo: setup
	@$(VENV_PYTHON) -m vllm_kvcr.demo

# On the vLLM that lets an idle engine with peers sleep: two fit on two cores.
demo-peers: setup-peers
	@PYTHONPATH=$(CURDIR)/.venv/peers-vllm $(VENV_PYTHON) -m vllm_kvcr.demo --peers

test: export VLLM_LOGGING_LEVEL ?= WARNING
test: setup-peers
	@$(VENV_PYTHON) -m pytest $(PYTEST_ARGS)

lint: setup
	$(VENV_BIN)/ruff check .
	$(VENV_BIN)/ruff format --check .
	$(VENV_BIN)/mypy
	$(VENV_BIN)/shellcheck $(SHELL_SCRIPTS)

# Only here, because only here numbers are to be published.
bench: setup
	@$(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check \
		-e ".[bench]" > .venv.log 2>&1 || { tail -15 .venv.log; exit 1; }
	@$(VENV_PYTHON) -m benchmarks $(BENCH_ARGS)

# With --picture FILE the dashboard is drawn, which takes matplotlib.
dashboards: setup-peers
	@PYTHONPATH=$(CURDIR)/.venv/peers-vllm $(VENV_PYTHON) -m scripts.dashboard_check \
		$(DASHBOARDS_ARGS)

fleet: setup-peers
	@$(VENV_PYTHON) -m tests.fleet $(FLEET_ARGS)

soak: export VLLM_LOGGING_LEVEL ?= WARNING
soak: setup
	@$(VENV_PYTHON) -m tests.soak $(SOAK_ARGS)

# In the Python that has the CUDA build; .venv has the one for the CPU.
gpu-check:
	@$(GPU_PYTHON) -m scripts.gpu_check $(GPU_ARGS)

matrix:
	@python=$$(scripts/find_python.sh) && "$$python" -m scripts.matrix $(MATRIX_ARGS)

# Each installs its tools itself, because nothing else needs them.
docs: setup
	@$(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check \
		-e ".[docs]" > .venv.log 2>&1 || { tail -15 .venv.log; exit 1; }
	@NO_MKDOCS_2_WARNING=1 $(VENV_PYTHON) -m mkdocs build --quiet

dist: setup
	@$(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check \
		-e ".[dist]" > .venv.log 2>&1 || { tail -15 .venv.log; exit 1; }
	@rm -rf dist && $(VENV_PYTHON) -m build --no-isolation > .venv.log 2>&1 || \
		{ tail -15 .venv.log; exit 1; }
	@$(VENV_PYTHON) -m twine check --strict dist/*

upstream-tree:
	@python=$$(scripts/find_python.sh) && "$$python" -m scripts.upstream_tree && \
		"$$python" -m scripts.matrix --pairs in-tree --faults

clean:
	rm -rf .venv .matrix .venv.lock .venv.log .mypy_cache .pytest_cache .ruff_cache .hypothesis
