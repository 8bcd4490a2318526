# Everything runs in .venv, made here and filled from constraints.txt. The stamps say what is installed already, so a
# second call installs nothing; `make run` installs the runtime only.

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
# --no-compile: Python compiles what it imports by itself; torch alone has thousands of files that nobody imports.
# for that it must be free to write, which container images like to forbid.
export PYTHONDONTWRITEBYTECODE :=
PIP_WITHOUT_PINS := $(BIN)/python -m pip --disable-pip-version-check install -q --no-compile
PIP := $(PIP_WITHOUT_PINS) -c constraints.txt
INPUTS := pyproject.toml constraints.txt
# kernels are tested in Triton's interpreter. Builds of torch for accelerators bring their own Triton, which stays.
TRITON := triton==3.9.0
# the sm120 backend's calls are held against the real package. What it needs on a GPU (gigabytes) it does not need for
# that; so it stands in a folder of its own, which only the tests read, and pip misses nothing in the environment. The
# oldest that is tested stands in another one, before the newest on the path.
FLASHINFER := --no-deps --upgrade --target $(VENV)/flashinfer flashinfer-python==0.7.4
OLDEST_FLASHINFER := --no-deps --upgrade --target $(VENV)/flashinfer-oldest flashinfer-python==0.7.2.post1
WITH_OLDEST_FLASHINFER := PYTHONPATH=$(CURDIR)/$(VENV)/flashinfer-oldest
FLASHINFER_NEEDS := apache-tvm-ffi nvidia-ml-py requests
# the newest transformers that is served stands in constraints.txt; this is the oldest. It stands in a folder of its own,
# before the newest on the path; both need the same versions of everything else.
TRANSFORMERS := --no-deps --upgrade --target $(VENV)/transformers transformers==5.23.0
WITH_TRANSFORMERS := PYTHONPATH=$(CURDIR)/$(VENV)/transformers
# what differs between releases: names, arguments, configurations, classes that are replaced, and answers
TRANSFORMERS_TESTS := tests/core/model/test_configurations.py $(addprefix tests/integrations/test_transformers_, \
	$(addsuffix .py, advice arguments attention entries patch patch_weights patching releases rope))
# the oldest torch that is served runs the tests of the reference, without Triton, in an environment of its own. It names its
# own sympy.
OLDEST_TORCH := torch==2.6.0
OLDEST_TORCH_ENV := .venv-oldest-torch
OLDEST_TORCH_TESTS := tests/test_config.py tests/test_plugins.py tests/test_single_layer.py tests/compat/test_flash_mla.py \
	tests/selection $(addprefix tests/core/, contract memory/test_memory_plan.py metadata model torch_ops \
	attention/test_forward_mqa.py attention/test_lse_merge.py)
# files that load Triton, and one that counts time
OLDEST_TORCH_TESTS += $(addprefix --ignore=tests/, core/metadata/test_draft_windows.py core/metadata/test_length_bounds.py \
	core/metadata/test_padding.py selection/test_deterministic.py selection/test_reference_ops.py \
	selection/test_slow_plugins.py selection/test_tracing.py)
# adapters for engines are tested against the engines' own Python, with torch for CPUs, in an environment of their own:
# the engines pin other versions of what `make test` uses. Their compiled parts are not needed, and not installed.
ENGINES := .venv-engines
ENGINE_BIN := $(ENGINES)/bin
ENGINE_PIP := $(ENGINE_BIN)/python -m pip --disable-pip-version-check install -q --no-compile
VLLM := vllm==0.33.0
# each of these stands in a folder of its own, since its own tests alone may find it
LMDEPLOY := lmdeploy==0.18.0
TOKENSPEED := tokenspeed_kernel==0.1.4
# the oldest vLLM that is served, and the newest engines that pip finds, stand in folders of their own, before the others
# on the path.
OLDEST_VLLM := vllm==0.32.0
OLDEST := $(CURDIR)/$(ENGINES)/oldest
NEWEST ?= $(CURDIR)/$(ENGINES)/newest
# of vLLM's adapter, with $(OLDEST)
OLDEST_PATH := PYTHONPATH=$(OLDEST):$(CURDIR)/integrations/dsv4attn-vllm

.DEFAULT_GOAL := help
.PHONY: help run run-parallel test test-rest test-slow test-all test-transformers test-flashinfer test-engines engines test-engines-oldest test-oldest-torch fetch-newest-engines check-engine-internals lint hooks bench docs wheels-check release-check clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-22s %s\n", $$1, $$2}' Makefile
	@echo '  ARGS="..." is passed on, as in: make test ARGS="-k layers"'

run: $(VENV)/.stamp-run ## serve a small trace through the attention, checked (ARGS="--trace long": the longer one)
	$(BIN)/dsv4attn run $(ARGS)

run-parallel: $(VENV)/.stamp-run ## serve the longer trace over two ranks with gloo, each with a part of the entries
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 -m dsv4attn run --verbose --trace long --context-parallel 2 $(ARGS)

# one thread a worker: two workers with a thread pool each only fight over two cores. worksteal: neighbours, which share
# modules, fixtures and recordings of kernels, stay in one worker.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test: $(VENV)/.stamp-test ## run the tests, without planted bugs, full products and slow ones
	$(PYTEST) -m "not (mutation or matrix or slow)" $(ARGS)

test-rest: $(VENV)/.stamp-test ## run planted bugs and full products, which `make test` leaves out
	$(PYTEST) -m "(mutation or matrix) and not slow" $(ARGS)

test-slow: $(VENV)/.stamp-test ## run the tests that take minutes each: hours in all
	$(PYTEST) -m slow $(ARGS)

test-all: $(VENV)/.stamp-test ## run all of these
	$(PYTEST) -m "slow or not slow" $(ARGS)

test-transformers: $(VENV)/.stamp-transformers ## run the tests of the transformers integration with the oldest release
	$(WITH_TRANSFORMERS) $(BIN)/python -c 'import transformers as t; print("transformers", t.__version__); assert "$(TRANSFORMERS)".endswith("==" + t.__version__)'
	$(WITH_TRANSFORMERS) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not (mutation or matrix or slow)" $(TRANSFORMERS_TESTS) $(ARGS)

# what differs between releases: signatures, descriptions, metadata
test-flashinfer: $(VENV)/.stamp-flashinfer ## hold the calls of the sm120 backend against the oldest FlashInfer that is tested
	$(WITH_OLDEST_FLASHINFER) $(BIN)/python -c 'from importlib.metadata import version as v; print("flashinfer", v("flashinfer-python")); assert "$(OLDEST_FLASHINFER)".endswith("==" + v("flashinfer-python"))'
	$(WITH_OLDEST_FLASHINFER) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -k "real or capture or as_they_are" tests/backends/sm120/test_flashinfer_package.py tests/backends/sm120/test_formats.py $(ARGS)

engines: $(ENGINES)/.stamp-lmdeploy $(ENGINES)/.stamp-tokenspeed ## install the engines' own Python in .venv-engines

test-engines: engines ## run the tests of the engine adapters in integrations/
	cd integrations/dsv4attn-vllm && OMP_NUM_THREADS=1 ../../$(ENGINE_BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)
	cd integrations/dsv4attn-sglang && OMP_NUM_THREADS=1 ../../$(ENGINE_BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)
	cd integrations/dsv4attn-flash-mla && PYTHONPATH=$(CURDIR)/$(ENGINES)/lmdeploy OMP_NUM_THREADS=1 ../../$(ENGINE_BIN)/python -m pytest $(ARGS)
	cd integrations/dsv4attn-tokenspeed && PYTHONPATH=$(CURDIR)/$(ENGINES)/tokenspeed OMP_NUM_THREADS=1 ../../$(ENGINE_BIN)/python -m pytest $(ARGS)

test-engines-oldest: $(ENGINES)/.stamp-vllm-oldest ## run the tests of vLLM's adapter with the oldest release that is served
	$(OLDEST_PATH) $(ENGINE_BIN)/python -c 'from importlib.metadata import version as v; print("vllm", v("vllm")); assert "$(OLDEST_VLLM)".endswith("==" + v("vllm"))'
	cd integrations/dsv4attn-vllm && $(OLDEST_PATH) OMP_NUM_THREADS=1 ../../$(ENGINE_BIN)/python -m pytest -n 2 $(ARGS)

test-oldest-torch: $(OLDEST_TORCH_ENV)/.stamp ## run the tests of the reference with the oldest torch that is served
	$(OLDEST_TORCH_ENV)/bin/python -c 'import torch; print("torch", torch.__version__); assert torch.__version__.startswith("$(OLDEST_TORCH)".split("==")[1])'
	OMP_NUM_THREADS=1 $(OLDEST_TORCH_ENV)/bin/python -m pytest -n 2 -m "not (mutation or matrix or slow)" $(OLDEST_TORCH_TESTS) $(ARGS)

fetch-newest-engines: $(ENGINES)/.stamp-sglang ## unpack the Python files of pip's newest vLLM and SGLang for check-engine-internals
	$(ENGINE_BIN)/python integrations/engine_python.py --target $(NEWEST) vllm sglang

check-engine-internals: $(ENGINES)/.stamp-sglang ## name the internals that moved in the newest engines (NEWEST=FOLDER: of their Python files)
	$(ENGINE_BIN)/python integrations/moved_internals.py $(NEWEST)

lint: $(VENV)/.stamp-dev ## ruff, codespell, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy

hooks: $(VENV)/.stamp-dev ## let git run the checks of changed files before each commit (pre-commit)
	$(BIN)/pre-commit install

bench: $(VENV)/.stamp-run ## measure the backends of this machine
	$(BIN)/dsv4attn bench $(ARGS)

docs: $(VENV)/.stamp-docs ## build the pages of docs/ and an API reference in site/, without a warning
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

wheels-check: $(VENV)/.stamp-release ## build all packages, check their contents, and run them from their wheels
	$(BIN)/python release/check.py --draft

release-check: $(VENV)/.stamp-release ## as wheels-check, and refuse what must not be released: the placeholder of the project's address
	$(BIN)/python release/check.py

clean: ## remove the environment and everything built
	rm -rf $(VENV) $(ENGINES) $(OLDEST_TORCH_ENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find dsv4attn tests integrations -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.stamp-venv:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "dsv4attn needs Python 3.10 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# a wider install covers the narrower ones, so it leaves their stamps too.
$(VENV)/.stamp-run: $(VENV)/.stamp-venv $(INPUTS)
	$(PIP) -e .
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-venv $(INPUTS)
	$(PIP) -e '.[test]' $(FLASHINFER_NEEDS)
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) $(TRITON)
	rm -rf $(VENV)/flashinfer # pip would leave the metadata of another version
	$(PIP) $(FLASHINFER)
	@touch $(VENV)/.stamp-run $@

$(VENV)/.stamp-transformers: $(VENV)/.stamp-test Makefile
	$(PIP_WITHOUT_PINS) $(TRANSFORMERS)
	@touch $@

$(VENV)/.stamp-flashinfer: $(VENV)/.stamp-test Makefile
	rm -rf $(VENV)/flashinfer-oldest
	$(PIP_WITHOUT_PINS) $(OLDEST_FLASHINFER)
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-venv $(INPUTS)
	$(PIP) -e '.[dev]' $(FLASHINFER_NEEDS)
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) $(TRITON)
	rm -rf $(VENV)/flashinfer # pip would leave the metadata of another version
	$(PIP) $(FLASHINFER)
	@touch $(VENV)/.stamp-run $(VENV)/.stamp-test $@

$(VENV)/.stamp-docs: $(VENV)/.stamp-venv $(INPUTS)
	$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mkdocstrings needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PIP) -e '.[docs]'
	@touch $(VENV)/.stamp-run $@

$(VENV)/.stamp-release: $(VENV)/.stamp-venv $(INPUTS)
	$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11) and "the wheel for vLLM needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PIP) -e '.[release]'
	@touch $(VENV)/.stamp-run $@

$(OLDEST_TORCH_ENV)/.stamp: $(INPUTS) Makefile
	$(PYTHON) -m venv $(OLDEST_TORCH_ENV)
	grep -v -e '^torch==' -e '^sympy==' constraints.txt > $(OLDEST_TORCH_ENV)/constraints.txt
	$(OLDEST_TORCH_ENV)/bin/python -m pip --disable-pip-version-check install -q --no-compile -c $(OLDEST_TORCH_ENV)/constraints.txt \
		$(OLDEST_TORCH) -e . pytest pytest-xdist hypothesis setuptools
	# builds for CUDA bring a Triton that is too old to be served
	$(OLDEST_TORCH_ENV)/bin/python -m pip --disable-pip-version-check uninstall -q -y triton
	@touch $@

$(ENGINES)/.stamp-base: $(INPUTS)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "the engines need Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(ENGINES)
	$(ENGINE_PIP) -c constraints.txt -e . pytest pytest-xdist $(TRITON)
	@touch $@

$(ENGINES)/.stamp-vllm: $(ENGINES)/.stamp-base integrations/engine_python.py $(wildcard integrations/dsv4attn-vllm/*.t*)
	$(ENGINE_PIP) --no-deps -r integrations/dsv4attn-vllm/requirements-test.txt
	$(ENGINE_BIN)/python integrations/engine_python.py $(VLLM)
	$(ENGINE_PIP) --no-deps -e integrations/dsv4attn-vllm
	@touch $@

$(ENGINES)/.stamp-vllm-oldest: $(ENGINES)/.stamp-vllm Makefile
	$(ENGINE_BIN)/python integrations/engine_python.py --target $(OLDEST) $(OLDEST_VLLM)
	@touch $@

# after vLLM's, whose pins its own repeat
$(ENGINES)/.stamp-sglang: $(ENGINES)/.stamp-vllm $(wildcard integrations/dsv4attn-sglang/*.t*)
	$(ENGINE_PIP) --no-deps -r integrations/dsv4attn-sglang/requirements-test.txt
	$(ENGINE_PIP) --no-deps -e integrations/dsv4attn-sglang
	@touch $@

# the wheel for LMDeploy is not installed: it would be `flash_mla` for the tests of the others
$(ENGINES)/.stamp-lmdeploy: $(ENGINES)/.stamp-sglang Makefile
	$(ENGINE_BIN)/python integrations/engine_python.py --target $(CURDIR)/$(ENGINES)/lmdeploy $(LMDEPLOY)
	@touch $@

$(ENGINES)/.stamp-tokenspeed: $(ENGINES)/.stamp-sglang Makefile
	$(ENGINE_BIN)/python integrations/engine_python.py --target $(CURDIR)/$(ENGINES)/tokenspeed $(TOKENSPEED)
	@touch $@
