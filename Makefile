# `make help` lists every target. Needs Python (3.11 or later) with venv and pip, make and a C++20 compiler.
PYTHON ?= python3
MODEL ?= smollm2:135m
ARGS ?=
NAME ?= scheduler
SOAK_S ?= 600
CHAOS_S ?= 25
MUTANTS ?= 50000
SEEDS ?= 20

SHELL := /bin/bash
BIN := .venv/bin
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check
PIP_FAILED := { echo "error: pip failed, for the reason above. Packages come from the index of pip's settings: see 'pip config list'." >&2; exit 1; }
NOTE_PYTHON = test "$(origin PYTHON)" = file || test "$$($(BIN)/python -V)" = "$$($(PYTHON) -V 2>/dev/null)" || \
	  echo "note: PYTHON=$(PYTHON) is ignored: .venv exists, with $$($(BIN)/python -V). Remove .venv, or run make clean, to use another." >&2
INSTALLED := .venv/.installed
INSTALLED_TEST := .venv/.installed-test
INSTALLED_DOCS := .venv/.installed-docs
LOCK := packaging/requirements-dev.lock
LOCKED := .venv/.locked
SOURCES := pyproject.toml CMakeLists.txt src/penstock/__init__.py src/penstock/models/codebooks.h $(shell find native -type f)

.DEFAULT_GOAL := help
.PHONY: help install install-locked lock wheels test-wheels serve pull test test-slow test-page test-clients test-schemas test-openapi test-properties test-mutants test-python test-floors test-races test-sanitize test-arm test-cuda test-parity test-soak test-cluster test-monitoring test-image bench lint format docs docs-site clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "Variables: PYTHON=$(PYTHON)  MODEL=$(MODEL)  ARGS='--port 8080 ...' (passed to serve, test, bench)"

install: $(INSTALLED)  ## make .venv and build Penstock into it
	@$(NOTE_PYTHON)

# Editable: Python is used from src/, so that only a change of native/ needs a new build.
$(INSTALLED): $(SOURCES) | .venv
	@echo "Building Penstock into .venv; the first time takes one to five minutes, in which pip is silent."
	@$(PIP_INSTALL) --editable . || $(PIP_FAILED)
	@touch $@

# With the tools of the extra `test` in pyproject.toml.
$(INSTALLED_TEST): $(SOURCES) | .venv
	@echo "Building Penstock and its test tools into .venv; the first time takes two to five minutes, in which pip is silent."
	@$(PIP_INSTALL) --editable '.[test]' || $(PIP_FAILED)
	@touch $(INSTALLED) $@

# The tools alone: the site is made from the source, without importing it.
$(INSTALLED_DOCS): pyproject.toml | .venv
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
	  > $@.txt && $(PIP_INSTALL) -r $@.txt || $(PIP_FAILED)
	@touch $@

# What the lock says and nothing newer, with its hashes: tools of tests, docs and builds.
$(LOCKED): $(LOCK) | .venv
	@$(PIP_INSTALL) --require-hashes -r $(LOCK) || $(PIP_FAILED)
	@touch $@

install-locked: $(LOCKED)  ## install, with exactly the packages of packaging/requirements-dev.lock
	@$(NOTE_PYTHON)
	@$(PIP_INSTALL) --no-deps --no-build-isolation --editable . || $(PIP_FAILED)
	@touch $(INSTALLED) $(INSTALLED_TEST) $(INSTALLED_DOCS)

lock: $(LOCKED)  ## write packaging/requirements-dev.lock anew, with the newest packages that pyproject.toml allows
	@$(BIN)/uv pip compile pyproject.toml --upgrade --universal --generate-hashes --extra hf --extra test --extra docs --group wheels \
	  --quiet --custom-compile-command 'make lock' --output-file $(LOCK)

wheels: $(LOCKED)  ## build wheels for Linux into dist: ARCH=aarch64 for Arm (see packaging/wheels.sh for what it needs)
	@packaging/wheels.sh

test-wheels: $(LOCKED)  ## install a wheel of dist in a Debian 11 and time it up to the first answer: ARGS='--python python3.12 --rounds 3'
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python packaging/test_wheels.py $(ARGS)

.venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' is missing or older than 3.11. Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@command -v c++ g++ clang++ >/dev/null || { \
	  echo "error: no C++ compiler found. Install g++ (Debian, Ubuntu: apt install g++)." >&2; exit 1; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; \
	  echo "error: no virtual environment could be made (Debian, Ubuntu: apt install python3-venv)." >&2; exit 1; }

pull: $(INSTALLED)  ## fetch MODEL's weights into the cache
	@$(NOTE_PYTHON)
	@$(BIN)/penstock pull $(MODEL)

serve: $(INSTALLED)  ## install, fetch MODEL and serve it on http://127.0.0.1:8000
	@$(NOTE_PYTHON)
	@exec $(BIN)/penstock serve $(MODEL) $(ARGS)

test: $(INSTALLED_TEST)  ## install, fetch the default model, check style and types, run all but slow tests (10 to 20 minutes on two free cores)
	@$(NOTE_PYTHON)
	@$(BIN)/penstock pull smollm2:135m
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file benchmarks/mypy.ini
	$(BIN)/lint-imports
# xdist would start the files with the most tests first, so that a file of one long test runs last, beside an idle worker.
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow" $(ARGS)

test-slow: $(INSTALLED_TEST)  ## larger forms of what `make test` checks: more requests, examples and cycles (minutes)
	@$(BIN)/penstock pull smollm2:135m
	$(BIN)/pytest -n 2 -m slow $(ARGS)

test-page: $(INSTALLED_TEST)  ## the page at / in headless Chromium (apt install chromium chromium-driver), and its pictures in the docs
	PENSTOCK_PICTURES=docs/images $(BIN)/pytest tests/page $(ARGS)

test-clients: $(INSTALLED)  ## the clients that people have, each in an environment of its own: ARGS=litellm for one (downloads them; minutes)
	@tests/clients/run.sh $(ARGS)

test-schemas: $(INSTALLED)  ## answers to JSON schemas against jsonschema and its suite of tests (downloads both; a minute)
	@tests/schemas/run.sh $(ARGS)

test-openapi: $(INSTALLED)  ## every route of /openapi.json against schemathesis, with and without a key (downloads it; minutes)
	@tests/openapi/run.sh

test-properties: $(INSTALLED_TEST)  ## tests/properties with the random examples of SEEDS new seeds; a failure prints its seed (minutes)
	@for seed in $$(shuf -i 1-999999999 -n $(SEEDS)); do \
	  HYPOTHESIS_PROFILE=seeded $(BIN)/pytest tests/properties -q --hypothesis-seed=$$seed $(ARGS) || { \
	    echo "Failed with seed $$seed. To repeat: HYPOTHESIS_PROFILE=seeded pytest tests/properties --hypothesis-seed=$$seed" >&2; exit 1; }; \
	done

test-mutants: $(INSTALLED_TEST)  ## MUTANTS mutated requests to all routes: no 5xx, no hang, nothing left behind (minutes)
	@$(BIN)/penstock pull smollm2:135m
	@$(BIN)/penstock pull minilm
	PENSTOCK_MUTANTS=$(MUTANTS) $(BIN)/pytest -s tests/e2e/test_mutants.py $(ARGS)

test-python:  ## all tests under another Python, beside .venv: PYTHON=python3.14t (builds again; 15 to 20 minutes)
	@tests/pythons/run.sh newest $(ARGS)

test-floors:  ## all tests with the oldest dependencies that pyproject.toml allows: PYTHON=python3.11 (the same)
	@tests/pythons/run.sh oldest $(ARGS)

test-races: $(INSTALLED_TEST)  ## data races between the threads of a step, by GCC's ThreadSanitizer (builds again; 10 to 20 minutes)
	@tests/backends/sanitized.sh races $(ARGS)

test-sanitize: $(INSTALLED_TEST)  ## the kernels of every variant under GCC's sanitizers of memory and undefined behaviour (builds again; many minutes)
	@tests/backends/sanitized.sh memory $(ARGS)

test-arm: $(INSTALLED)  ## the kernels of 64-bit Arm, cross-built and run by QEMU (apt install g++-aarch64-linux-gnu qemu-user-static mmdebstrap)
	@tests/arm/run.sh tests $(ARGS)

test-cuda: $(INSTALLED_TEST)  ## tests of the GPU backend, without a GPU in Triton's interpreter (downloads torch; minutes)
	@tests/backends/cuda/run.sh $(ARGS)

test-parity: $(INSTALLED)  ## compare with transformers in its own environment (downloads torch; minutes)
	@tests/parity/run.sh $(ARGS)

test-soak: $(INSTALLED_TEST)  ## load at full memory, twice for SOAK_S seconds, and 1,000 adapters: resident memory has to stay flat
	@$(BIN)/penstock pull smollm2:135m
	PENSTOCK_SOAK_S=$(SOAK_S) $(BIN)/pytest -s tests/soak $(ARGS)
	PENSTOCK_SOAK_S=$(SOAK_S) $(BIN)/pytest tests/server/test_adapters.py -k under_traffic

test-cluster: $(INSTALLED_TEST)  ## a front and replicas, also on Ray, and as processes that are killed, stopped and delayed for CHAOS_S seconds
	@CHAOS_S=$(CHAOS_S) tests/cluster/run.sh $(ARGS)

test-monitoring: $(INSTALLED_TEST)  ## rules, alerts and the board against a real Prometheus (apt install prometheus)
	@command -v prometheus >/dev/null && command -v promtool >/dev/null || { echo "error: Prometheus is missing: apt install prometheus" >&2; exit 1; }
	$(BIN)/pytest tests/monitoring $(ARGS)

test-image: $(INSTALLED_TEST)  ## build packaging/Containerfile with podman and check the image: size, start, rights, stop (minutes)
	@tests/image/run.sh $(ARGS)

bench: $(INSTALLED_TEST)  ## run one benchmark: NAME=scheduler ARGS='...' (see benchmarks/)
	@$(BIN)/python benchmarks/$(NAME).py $(ARGS)

lint: $(INSTALLED_TEST)  ## check style, types and layering, without tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file benchmarks/mypy.ini
	$(BIN)/lint-imports

format: $(INSTALLED_TEST)  ## rewrite the code in house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED_TEST)  ## write docs/configuration.md, tables in docs/notes/checked-models.md and docs/http-api.md, packaging/monitoring
	@page=$$($(BIN)/python tests/configuration_page.py) && echo "$$page" > docs/configuration.md
	@PYTHONPATH=tests $(BIN)/python -m parity.checked
	@$(BIN)/python tests/sampling_table.py
	@$(BIN)/penstock monitoring render packaging/monitoring --target penstock:8000

docs-site: $(INSTALLED_DOCS)  ## build the documentation site in build/site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Built. To read it: python3 -m http.server --directory build/site 8001"

clean:  ## remove builds, environments and caches (not the fetched weights)
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
