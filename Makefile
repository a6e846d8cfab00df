# Each target sets up what it needs: an environment in .venv, and Debian's libibverbs1, which Mooncake's wheel loads.
# `make help` prints what stands behind ## here.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
ENGINE ?= mooncake
# The oldest and the newest release of Triton that the kernels are tried with, in its interpreter.
TRITON := $(addprefix .triton/,3.6.0 3.8.0)
DEMO_ARGS ?=
# On a terminal pip shows what it fetches; elsewhere, as in CI, it would fill the log.
PIP_SHOWS := $(shell test -t 2 || echo --quiet)
SOAK_ARGS ?=
SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cuh' -o -name '*.cu') CMakeLists.txt setup.py pyproject.toml

.PHONY: all help demo test full sglang vllm soak bench bench-routes bench-peers gpu-check docs wheel sdist check-wheel lint clean

all: $(VENV)/ready ## the environment in .venv

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1:/p' Makefile | while IFS=: read -r name text; do printf '%-12s %s\n' "$$name" "$$text"; done

# torch is pinned here alone, for a CPU build that installs quickly; the package itself takes torch>=2.11.
$(VENV)/ready: requirements-dev.txt requirements-engines.txt
	@echo "== environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "kvplan needs Python 3.10 or newer, this is " + sys.version)'
	@for tool in g++ cmake; do command -v $$tool >/dev/null || { echo "$$tool is missing. Type: apt-get install -y g++ cmake"; exit 1; }; done
	$(PYTHON) -m venv $(VENV)
	@echo "== installing torch, Mooncake and what tests need (2.5 GB; minutes)"
	$(PY) -m pip install --disable-pip-version-check $(PIP_SHOWS) -r requirements-dev.txt
	@echo "== installing NIXL and Ascend's engine"
	$(PY) -m pip install --disable-pip-version-check $(PIP_SHOWS) --no-deps -r requirements-engines.txt
	@sh tools/libibverbs.sh
	@touch $@

$(VENV)/built: $(VENV)/ready $(SOURCES)
	@echo "== building kvplan"
	$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	@touch $@

demo: $(VENV)/built ## two processes, every byte checked; ENGINE=nixl, DEMO_ARGS=--help
	$(PY) -m kvplan demo --engine $(ENGINE) $(DEMO_ARGS)

.triton/%: | $(VENV)/ready
	@echo "== Triton $*"
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target $@ triton==$*

# Two files at a time: one process would take more than CI's 20 minutes.
TEST_JOBS ?= 2
test: $(VENV)/built $(TRITON) ## all tests that CI runs; KVPLAN_EXAMPLES=20000 draws more random clusters; TEST_JOBS=1
	KVPLAN_TRITON=$(subst $() ,:,$(TRITON)) $(PY) -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder

# Stops, kills and refusals at random, 500 an engine; no byte may change once it was called settled.
SOAK_FAULTS ?= 500
soak: $(VENV)/built ## processes killed, stopped and refused at random; SOAK_FAULTS=500, SOAK_ARGS="--seed 7"
	$(PY) -m tests.soak --engine mooncake --faults $(SOAK_FAULTS) $(SOAK_ARGS)
	$(PY) -m tests.soak --engine nixl --faults $(SOAK_FAULTS) $(SOAK_ARGS)

# In an environment of its own, .venv-sglang, which is kept: 6.3 GB. docs/sglang.md says what each test shows.
SGLANG_ARGS ?=
sglang: ## SGLang's own servers and managers with kvplan (6.3 GB, half an hour); SGLANG_ARGS="-k heads"
	PYTHON=$(PYTHON) sh tools/sglang_env.sh
	.venv-sglang/bin/python -m pytest -p no:cacheprovider tests/sglang $(SGLANG_ARGS)

# In an environment of its own, .venv-vllm, which is kept: 4 GB. docs/vllm.md says what each test shows.
VLLM_ARGS ?=
vllm: ## real vLLM engines with KvplanConnector (4 GB, half an hour); VLLM_ARGS="-k nixl"
	PYTHON=$(PYTHON) sh tools/vllm_env.sh
	.venv-vllm/bin/python -m pytest -p no:cacheprovider tests/vllm $(VLLM_ARGS)

# What is too long for CI. FULL_EXAMPLES: random clusters of each property, and random calls of each of SGLang's functions.
# FULL_SEEDS: orders in which the emulator runs the kernels. FULL_FUZZ: seconds of forged input.
FULL_EXAMPLES ?= 10000
FULL_SEEDS ?= 20
FULL_FUZZ ?= 600
full: $(VENV)/built $(TRITON) ## all that is too long for CI: make sglang, make vllm, make test with long matrices, fuzzing, make soak, make check-wheel. Hours
	KVPLAN_EXAMPLES=$(FULL_EXAMPLES) $(MAKE) sglang
	$(MAKE) vllm
	KVPLAN_EXAMPLES=$(FULL_EXAMPLES) KVPLAN_SIMT_SEEDS=$(FULL_SEEDS) $(MAKE) test
	$(PY) -m tests.fuzz --seconds $(FULL_FUZZ)
	$(MAKE) soak
	$(MAKE) check-wheel

bench: $(VENV)/built ## the table in docs/performance.md, and its plot
	$(PY) -m bench

# Two processes a case, over Mooncake and NIXL; minutes. BENCH_ROUTES_ARGS="--runs 1 --only cases" is sooner.
BENCH_ROUTES_ARGS ?=
bench-routes: $(VENV)/built ## direct, packed and few beside each other, every byte checked, and where they cross
	$(PY) -m bench.routes $(BENCH_ROUTES_ARGS)

bench-peers: ## SGLang's planner beside it, in an environment of its own (6 GB)
	sh bench/peers/setup.sh

# On a machine with a GPU, by the Python that has torch there; needs no network. Figures go to bench/RESULTS.md by hand.
GPU_ARGS ?=
gpu-check: ## builds, tests and measures on a machine with a GPU; PYTHON=the one that has torch, GPU_ARGS="--minutes 3"
	$(PYTHON) tools/gpu_check.py $(GPU_ARGS)

lint: $(VENV)/built ## ruff, mypy, import-linter
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# In an environment of its own: the site's packages need none of kvplan's, and may ask for other versions of the same.
.venv-docs/ready: docs/requirements.txt
	@echo "== environment of the documentation in .venv-docs"
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	@touch $@

docs: .venv-docs/ready ## the documentation as a site, in build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict
	@echo "open build/site/index.html"

# Python versions that tools/check_wheel.sh looks for, on PATH.
WHEEL_PYTHONS ?= python3.10 python3.11 python3.12 python3.13 python3.14
wheel: $(VENV)/ready ## a manylinux wheel in dist/, with device code where nvcc is
	PY=$(PY) sh tools/wheel.sh

sdist: $(VENV)/ready ## a source distribution in dist/
	rm -f dist/*.tar.gz
	$(PY) -c 'import setuptools.build_meta as b; print("dist/" + b.build_sdist("dist"))' | tail -1

check-wheel: wheel sdist ## dist/ installed into fresh environments of every Python that is here, and used from another folder
	sh tools/check_wheel.sh $(WHEEL_PYTHONS)

clean: ## all that is built, but for the environments of SGLang and vLLM
	rm -rf $(VENV) .venv-docs .triton build dist *.egg-info kvplan/*.so kvplan/*.fatbin
