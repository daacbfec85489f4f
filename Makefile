# Two commands do everything: `make demo` (the main job, live) and `make test` (the tests). Each sets up what it needs.
SHELL := /bin/sh
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help demo test check image cluster tools bench docs format clean

help: ## What there is
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1\t/' | expand -t 16

demo: $(READY) tools ## The main job, live, on the real parts (ARGS=--keep leaves it running)
	@$(BIN)/orca-infra demo $(ARGS)

# Most of these tests wait for a server or an engine: more at a time than there are cores take less time. There is one real node at a time.
test: check tools ## All tests, on the real parts
	$(BIN)/pytest -q -n 3 --dist loadfile tests/db tests/contract tests/engine tests/gcp tests/cluster tests/sim $(ARGS)
	$(BIN)/pytest -q tests/node $(ARGS)

check: $(READY) ## The quick loop: format, lint, layers, types, and the tests without servers
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/lint-imports --no-logo > .venv/lint-imports.log || { cat .venv/lint-imports.log; exit 1; }
	$(BIN)/mypy
	$(BIN)/pytest -q -n auto tests/unit tests/golden

bench: $(READY) tools ## One bench: make bench BENCH=pass
	@$(BIN)/python bench/$(BENCH).py $(ARGS)

image: $(READY) tools ## Prepare the context of the image in dist/image
	@$(BIN)/python tools/image.py

cluster: $(READY) tools ## A real Kubernetes control plane with kwok nodes, until Ctrl-C
	@$(BIN)/python -m orca_infra.testing.cluster

tools: $(READY) ## Find or build every pinned tool (once per machine; about 25 minutes when cold)
	@$(PYTHON) tools/build.py

docs: $(READY) ## The documentation as a site in .site; a warning is an error
	$(BIN)/mkdocs build --quiet

format: $(READY) ## Format and mend what can be mended by itself
	$(BIN)/ruff format --quiet .
	$(BIN)/ruff check --fix --quiet .

clean: ## Remove what this checkout made (not the tools cache)
	rm -rf .site .venv .tools .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(READY): pyproject.toml uv.lock tools/setup.py
	@$(PYTHON) tools/setup.py
	@touch $(READY)
