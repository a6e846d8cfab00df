# Each target sets up what it needs: an environment in .venv, and Debian's libibverbs1, which Mooncake's wheel loads.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
ENGINE ?= mooncake
# The oldest and the newest release of Triton that the kernels are tried with, in its interpreter.
TRITON := $(addprefix .triton/,3.6.0 3.8.0)
DEMO_ARGS ?=
SOAK_ARGS ?=
SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cuh' -o -name '*.cu') CMakeLists.txt setup.py pyproject.toml

.PHONY: all demo test full sglang soak bench bench-peers gpu-check lint clean

all: $(VENV)/ready

# torch is pinned here alone, for a CPU build that installs quickly; the package itself takes torch>=2.11.
$(VENV)/ready: requirements-dev.txt requirements-engines.txt
	@echo "== environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "kvplan needs Python 3.10 or newer, this is " + sys.version)'
	@for tool in g++ cmake; do command -v $$tool >/dev/null || { echo "$$tool is missing. Type: apt-get install -y g++ cmake"; exit 1; }; done
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-engines.txt
	@sh tools/libibverbs.sh
	@touch $@

$(VENV)/built: $(VENV)/ready $(SOURCES)
	@echo "== building kvplan"
	$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	@touch $@

demo: $(VENV)/built
	$(PY) -m kvplan demo --engine $(ENGINE) $(DEMO_ARGS)

.triton/%: | $(VENV)/ready
	@echo "== Triton $*"
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target $@ triton==$*

test: $(VENV)/built $(TRITON)
	KVPLAN_TRITON=$(subst $() ,:,$(TRITON)) $(PY) -m pytest

# Stops, kills and refusals at random, 500 an engine; no byte may change once it was called settled.
SOAK_FAULTS ?= 500
soak: $(VENV)/built
	$(PY) -m tests.soak --engine mooncake --faults $(SOAK_FAULTS) $(SOAK_ARGS)
	$(PY) -m tests.soak --engine nixl --faults $(SOAK_FAULTS) $(SOAK_ARGS)

# SGLang's own servers and managers with the plugin, in an environment of their own that is kept (6 GB).
sglang:
	PYTHON=$(PYTHON) sh tools/sglang_env.sh
	.venv-sglang/bin/python -m pytest -p no:cacheprovider tests/sglang

# All that is too long for CI: properties with more clusters, SGLang's servers (6 GB, kept), 500 faults an engine. Hours.
FULL_EXAMPLES ?= 10000
full: $(VENV)/built $(TRITON)
	KVPLAN_EXAMPLES=$(FULL_EXAMPLES) KVPLAN_TRITON=$(subst $() ,:,$(TRITON)) $(PY) -m pytest
	$(MAKE) sglang
	$(MAKE) soak

bench: $(VENV)/built
	$(PY) -m bench

bench-peers:
	sh bench/peers/setup.sh

# On a machine with a GPU, by the Python that has torch there; needs no network. Figures go to bench/RESULTS.md by hand.
gpu-check:
	$(PYTHON) tools/gpu_check.py

lint: $(VENV)/built
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

clean:
	rm -rf $(VENV) .triton build *.egg-info kvplan/*.so kvplan/*.fatbin
