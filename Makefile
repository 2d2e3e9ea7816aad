# What a person or CI types. Set-up itself is tools/setup.sh; everything else runs tools of .venv.

PYTHON ?= python3
UV_VERSION := 0.13.7
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
PYTEST_ARGS ?=
# What PYTEST_ARGS picks may all be in the other half: pytest says 5 if it has nothing to run.
NONE_IS_FINE := || test $$? = 5
# Most of a JVM's start is spent compiling for a long life, which those of tests don't have.
SHORT_LIVED := JAVA_TOOL_OPTIONS="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow explore check bench docs lock format clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make .venv with the locked packages, and see to Java (PYTHON=python3.12 picks another Python)
	@PYTHON="$(PYTHON)" tools/setup.sh

demo: setup ## run the vehicle-map demo
	@$(BIN)/holdfast demo

test: setup ## unit, spark and cluster tests that take seconds (PYTEST_ARGS="-k name" picks some)
	@$(PYTEST) -m "not slow" -n 3 --dist loadfile tests/unit $(PYTEST_ARGS) $(NONE_IS_FINE)  # some wait for disks
	@$(SHORT_LIVED) $(PYTEST) -m "not slow" tests/cluster $(PYTEST_ARGS) $(NONE_IS_FINE)
	@$(SHORT_LIVED) $(PYTEST) -m "not slow" -n 2 --dist loadfile tests/spark $(PYTEST_ARGS) $(NONE_IS_FINE)

test-slow: setup ## the tests that take minutes
	@$(PYTEST) -m slow -n 2 tests/unit $(PYTEST_ARGS) $(NONE_IS_FINE)
	@$(PYTEST) -m slow tests/cluster tests/spark $(PYTEST_ARGS) $(NONE_IS_FINE)

explore: setup ## unit tests with other examples each time; what they find becomes a test of its own
	@HYPOTHESIS_PROFILE=explore $(PYTEST) -m "not slow" -n 2 --dist loadfile tests/unit $(PYTEST_ARGS)

check: setup ## lint, format, types and documentation, as CI checks them
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@told=$$($(MKDOCS) build --strict 2>&1) || { echo "$$told"; exit 1; }  # --quiet would hide what strict is about

bench: setup ## the throughput benchmark, in its quick form
	@$(BIN)/python -m bench throughput --quick

docs: setup ## build the documentation into site/
	@$(MKDOCS) build --strict

lock: setup ## resolve requirements.lock again from pyproject.toml (LOCK_ARGS=--upgrade takes newer versions)
	@$(BIN)/python -m pip install --quiet uv==$(UV_VERSION)
	@$(BIN)/uv pip compile pyproject.toml --universal --python-version 3.10 --all-extras \
		--no-emit-index-url --no-emit-find-links --no-config --no-python-downloads --custom-compile-command "make lock" \
		--quiet --output-file requirements.lock $(LOCK_ARGS)

format: setup ## format the code and mend what ruff can mend
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

clean: ## delete what builds, tests and Spark leave behind (.venv and .bench stay)
	@rm -rf site build dist htmlcov .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis \
		spark-warehouse metastore_db derby.log artifacts
	@find . -path ./.venv -prune -o -path ./.bench -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
