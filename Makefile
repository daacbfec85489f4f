# Two commands do everything: `make demo` (the main job, live) and `make test` (the tests). Each sets up what it needs.
SHELL := /bin/sh
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help demo test check tools bench format clean

help: ## What there is
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

demo: $(READY) engine ## The main job, live, on the real engine and a real Postgres (ARGS=--keep leaves it running)
	@$(BIN)/orca-infra demo $(ARGS)

test: check engine ## All tests, on the real parts
	$(BIN)/pytest -q tests/db tests/engine $(ARGS)

check: $(READY) ## The quick loop: format, lint, layers, types, and the tests without servers
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/lint-imports --no-logo > .venv/lint-imports.log || { cat .venv/lint-imports.log; exit 1; }
	$(BIN)/mypy
	$(BIN)/pytest -q tests/unit tests/golden

bench: $(READY) engine ## One bench: make bench BENCH=pass
	@$(BIN)/python bench/$(BENCH).py $(ARGS)

tools: $(READY) ## Find or build every pinned tool
	@$(PYTHON) tools/build.py

format: $(READY) ## Format and mend what can be mended by itself
	$(BIN)/ruff format --quiet .
	$(BIN)/ruff check --fix --quiet .

clean: ## Remove what this checkout made (not the tools cache)
	rm -rf .venv .tools .mypy_cache .pytest_cache .ruff_cache .hypothesis

.PHONY: engine
engine: $(READY)
	@$(PYTHON) tools/build.py pulumi

$(READY): pyproject.toml uv.lock tools/setup.py
	@$(PYTHON) tools/setup.py
	@touch $(READY)
