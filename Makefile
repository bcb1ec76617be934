# make train   set up, then train SmolLM2-135M on MiniHack     CONFIG=file.py runs another config, ARGS="..." is passed on
# make test    set up, then run the tests                      ARGS="tests/rl -k grpo" selects some
# make test-harness   install the real coding harnesses (npm, pip), and test them end to end
# make test-sglang    install SGLang (no GPU needed), and test its backend on real servers     TORCH=torch==2.13.0+cpu where pip needs it
# make test-sglang-jax   the same for sglang-jax     PYTHON312=/path/to/python3.12
# make bench   speed beside PyTorch, TRL and Tunix             ARGS=grpo selects: grpo train decode prefill rollouts ...
# make scale   compile training steps for TPUs that are elsewhere, and check that they fit (docs/scale.md)
# make tasks   500 tasks of software engineering, made here (docs/swe.md)
# make soak    500 steps with faults and kills, which end as the run in which nothing fails
# make parity  ALFWorld beside TextWorld, models beside transformers, losses beside TRL's and verl's   ALFWORLD_DATA=DIR, ARGS="--train-per-type 300"
# make check   what CI runs: format, lint, types, layout, tests
.DEFAULT_GOAL := help
.PHONY: help train test tasks test-harness test-sglang test-sglang-jax bench parity parity-alfworld parity-losses parity-models soak scale lint check format requirements setup setup-test clean

VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
CONFIG ?= experiments/configs/minihack_room.py

ARGS ?=
# The first Python on the path that is new enough, if PYTHON=... does not name one.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
INSTALL := VIRTUAL_ENV=$(VENV) $(BIN)/uv pip install --quiet

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

train: $(VENV)/.train
	$(BIN)/metagym train --config="$(CONFIG)" $(ARGS)

test: $(VENV)/.test
	$(PY) -m pytest $(ARGS)

test-harness: $(VENV)/.test
	METAGYM_TEST_HARNESS=1 $(PY) -m pytest tests/harness $(ARGS)

test-sglang: $(VENV)/.test $(VENV)-sglang/.done
	METAGYM_TEST_SGLANG="$(CURDIR)/$(VENV)-sglang/bin/python" $(PY) -m pytest -s tests/sglang $(ARGS)

# By pip, which knows where CPU wheels of PyTorch are; a plain `torch` may bring gigabytes of CUDA. SGLang's CPU path is tested, so
# without its dependencies, most of which are CUDA's.
TORCH ?= torch==2.13.0
$(VENV)-sglang/.done: $(VENV)/.uv requirements/sglang.txt
	@$(PYTHON) -m venv --clear $(VENV)-sglang
	@$(VENV)-sglang/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	@$(VENV)-sglang/bin/python -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.23
	@VIRTUAL_ENV=$(VENV)-sglang $(BIN)/uv pip install --quiet -r requirements/sglang.txt
	@touch $@

test-sglang-jax: $(VENV)/.test $(VENV)-sglang-jax/.done
	METAGYM_TEST_SGLANG_JAX="$(CURDIR)/$(VENV)-sglang-jax/bin/python" $(PY) -m pytest -s tests/sglang/jax_test.py $(ARGS)

PYTHON312 ?= python3.12
$(VENV)-sglang-jax/.done: $(VENV)/.uv
	@$(PYTHON312) -m venv --clear $(VENV)-sglang-jax
	@VIRTUAL_ENV=$(VENV)-sglang-jax $(BIN)/uv pip install --quiet sglang-jax==0.0.2
	@touch $@

bench: $(VENV)/.train
	$(PY) benchmarks/run.py $(ARGS)

# libtpu has an environment of its own: beside it, JAX looks for a TPU at every start.
scale: $(VENV)-tpu/.scale
	$(VENV)-tpu/bin/python -m metagym.experiments.scale $(ARGS)

$(VENV)-tpu/.scale: $(VENV)/.train requirements/train.txt pyproject.toml
	@$(BIN)/uv venv --quiet --allow-existing --python $(PY) $(VENV)-tpu
	@VIRTUAL_ENV=$(VENV)-tpu $(BIN)/uv pip install --quiet -r requirements/train.txt \
		"jax[tpu]==$$($(PY) -c 'import jax; print(jax.__version__)')"
	@VIRTUAL_ENV=$(VENV)-tpu $(BIN)/uv pip install --quiet --no-deps --no-build-isolation -e .
	@touch $@

parity: parity-models parity-losses parity-alfworld

# TextWorld's planner is C++ that is built here, in minutes.
parity-alfworld: $(VENV)-alfworld/.done
	$(VENV)-alfworld/bin/python -m pytest tests/envs/alfworld_test.py tests/metagym/adapter_test.py -k textworld
	ALFWORLD_DATA="$(ALFWORLD_DATA)" $(VENV)-alfworld/bin/python benchmarks/parity_alfworld.py $(ARGS)

parity-losses: $(VENV)/.train
	$(PY) benchmarks/conformance/losses.py $(ARGS)

parity-models: $(VENV)/.train $(VENV)-transformers/.done
	$(PY) benchmarks/conformance/transformers_parity.py check --peer $(VENV)-transformers/bin/python

$(VENV)-alfworld/.done: $(VENV)/.uv pyproject.toml
	@$(BIN)/uv venv --quiet --allow-existing --python $(PY) $(VENV)-alfworld
	@VIRTUAL_ENV=$(VENV)-alfworld $(BIN)/uv pip install --quiet -e ".[alfworld]" pytest pytest-timeout
	@touch $@

$(VENV)-transformers/.done: $(VENV)/.uv
	@$(BIN)/uv venv --quiet --allow-existing --python $(PY) $(VENV)-transformers
	@VIRTUAL_ENV=$(VENV)-transformers $(BIN)/uv pip install --quiet $(addprefix --find-links ,$(PIP_FIND_LINKS)) \
		torch==2.13.0 transformers==5.24.0 peft==0.21.2 safetensors
	@touch $@

soak: $(VENV)/.test
	SOAK_STEPS=500 $(PY) -m pytest -s tests/trust/soak_test.py

tasks: $(VENV)/.train
	$(BIN)/metagym tasks build --out=runs/tasks --kind=mutation --count=500 $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright

check: lint test

format: $(VENV)/.test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

setup: $(VENV)/.train
setup-test: $(VENV)/.test

$(VENV)/.uv: requirements/bootstrap.txt
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
		echo "MetaGym needs Python 3.11, 3.12 or 3.13; '$(PYTHON)' is not one. Name one with: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
		echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu it needs the package python3-venv." >&2; exit 1; }
	@$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/bootstrap.txt
	@touch $@

# The packages come first, so that a failure there can name its usual cause; the project itself is installed in place.
define install
	@echo "installing $(1)"; $(INSTALL) --require-hashes --no-deps --build-constraints requirements/bootstrap.txt -r $(1) || { \
		echo "Installing $(1) failed. If the lines above speak of nle, cmake or a compiler: there is no ready-made NLE for this" \
			"machine, and building it needs a C++ compiler, cmake, bison, flex and libbz2 (Debian: apt-get install" \
			"build-essential cmake bison flex libbz2-dev)." >&2; exit 1; }
	@$(INSTALL) --no-deps --no-build-isolation -e .
endef

$(VENV)/.train: $(VENV)/.uv requirements/train.txt pyproject.toml
	$(call install,requirements/train.txt)
	@touch $@

$(VENV)/.test: $(VENV)/.train requirements/test.txt
	$(call install,requirements/test.txt)
	@touch $@

COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	--no-header --no-annotate
requirements: $(VENV)/.uv
	$(COMPILE) $(ARGS) requirements/bootstrap.in -o requirements/bootstrap.txt
	$(COMPILE) $(ARGS) -c requirements/bootstrap.txt --extra train --extra minihack --extra swe pyproject.toml requirements/weights.in \
		-o requirements/train.txt
	$(COMPILE) $(ARGS) -c requirements/bootstrap.txt -c requirements/train.txt --extra train --extra minihack --extra swe --extra dev \
		pyproject.toml requirements/weights.in -o requirements/test.txt

clean:
	rm -rf $(VENV) $(VENV)-tpu $(VENV)-alfworld $(VENV)-transformers $(VENV)-sglang $(VENV)-sglang-jax build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
