# On a fresh Debian machine: `make demo` to see it work, `make test` to see everything tested.

PYTHON ?= /usr/bin/python3
VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
UV_VERSION := 0.13.9
BASELINES_LOCK := benchmarks/quality/baselines/requirements.lock

.DEFAULT_GOAL := help
.PHONY: help setup tools baselines check test unit demo bench overhead quality lock clean

help: ## Say what can be made
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/  make \1	\2/p' Makefile | expand -t 16

setup: $(VENV)/.installed ## Create .venv with the locked dependencies and both commands

tools: $(VENV)/.tools ## Bring what the integration tests start: Java and Maven for Apache Kafka, Prometheus

baselines: $(VENV)/.baselines ## Bring the published detectors that ours is compared with, apart from the environment

check: setup ## Lint, formatting, types and import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check tools baselines ## Everything: check, then all tests, Apache Kafka and Prometheus included
	$(BIN)/pytest -m apart -n 2 --dist loadfile
	$(BIN)/pytest -m "not apart"

unit: setup baselines ## The tests that start no broker
	$(BIN)/pytest -m "not broker"

demo: setup ## A simulated job with three faults, each found, explained and resolved, in 90 seconds
	$(BIN)/failslow demo

bench: setup ## Measure against named baselines, in one run each
	for benchmark in benchmarks/bench_*.py; do $(BIN)/python $$benchmark || exit 1; done

overhead: setup ## Measure what observing costs a real process, as root, in 8 minutes; writes build/overhead.json
	$(BIN)/python -m benchmarks.overhead

quality: setup baselines ## Judge the labelled corpus and real series, and published methods (hours; goes on where it stopped)
	$(BIN)/python -m benchmarks.quality --part all
	$(BIN)/python -m benchmarks.quality.compare --part all
	$(BIN)/python -m benchmarks.quality.compare_series --held-out --cv 0.1 --cv 0.05 --cv 0.03
	$(BIN)/python -m benchmarks.quality.document

lock: $(UV) ## Renew requirements.lock, and that of the baselines, from pyproject.toml
	$(UV) pip compile pyproject.toml --group dev --universal --python-version 3.11 --upgrade --generate-hashes \
		--no-emit-index-url --no-annotate --custom-compile-command "make lock" --quiet -o requirements.lock
	$(UV) pip compile --group baselines --no-deps --universal --python-version 3.11 --generate-hashes \
		--no-emit-index-url --no-annotate --custom-compile-command "make lock" --quiet -o $(BASELINES_LOCK)

clean: ## Remove .venv, caches and build results
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(UV):
	@deploy/debian.sh python $(PYTHON)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)

$(VENV)/.installed: requirements.lock pyproject.toml | $(UV)
	$(UV) pip sync --quiet --python $(BIN)/python --require-hashes requirements.lock
	$(UV) pip install --quiet --python $(BIN)/python --no-deps -e .
	@touch $@

$(VENV)/.baselines: $(BASELINES_LOCK) | $(VENV)/.installed
	$(UV) pip sync --quiet --python $(BIN)/python --target $(VENV)/baselines --require-hashes $(BASELINES_LOCK)
	@touch $@

$(VENV)/.tools: deploy/debian.sh | $(UV)
	@deploy/debian.sh tools $(VENV)/debian
	@touch $@
