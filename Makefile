# clusterprof: what a contributor types. `make` alone prints this list.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
SPLIT  ?= dev
SLICE  ?= ci
SCORE  ?= score-$(SPLIT)
ANSWERS ?=
TORCH  ?= 2.13.0
FORMAT ?=
N      ?= 1000000
FRAMEWORKS_VENV ?= .venv-frameworks-$(TORCH)

.DEFAULT_GOAL := help
.PHONY: help demo dev torch test test-long check lint types contracts golden docs docs-check host bench
.PHONY: gate-check score score-full score-whatif score-rivals score-sabotage blame-check lab-cluster accept-cluster test-launchers test-frameworks test-frameworks-matrix peers import-answers fuzz record-whatif clean

help: ## print the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-22s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/clusterprof: pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; set PYTHON=python3.x" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/dev: $(BIN)/clusterprof pyproject.toml lab/pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --group dev -e lab
	@touch $@

$(VENV)/torch: $(VENV)/dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "torch==2.13.0"
	@touch $@

demo: $(BIN)/clusterprof ## the whole job on emulated accelerators: record, analyse, report beside the truth
	$(BIN)/clusterprof demo --scenario storage

dev: $(VENV)/dev ## virtual environment with everything but torch

test: $(VENV)/torch ## all tests, real torch training included (about ten minutes)
	$(BIN)/python -m pytest tests -m "not quiet and not long" --numprocesses 2
	$(BIN)/python -m pytest tests -m "quiet and not long"

test-long: $(VENV)/torch ## variants of the tests that take long, and many more examples
	CLUSTERPROF_EXAMPLES=long $(BIN)/python -m pytest tests -m "(long or hypothesis) and not quiet" --numprocesses 2
	$(BIN)/python -m pytest tests -m "long and quiet"

check: lint types contracts docs-check test ## what CI runs: lint, types, contracts, docs, tests

lint: $(VENV)/dev ## format and lint
	$(BIN)/ruff format --check clusterprof tests bench lab
	$(BIN)/ruff check clusterprof tests bench lab

types: $(VENV)/dev ## static types
	$(BIN)/mypy clusterprof

contracts: $(VENV)/dev ## who may import whom
	$(BIN)/lint-imports

golden: $(VENV)/dev ## accept new golden outputs (review the diff like code)
	CLUSTERPROF_ACCEPT_GOLDEN=1 $(BIN)/python -m pytest tests/renderers tests/golden

docs: $(VENV)/dev ## generate docs/causes, docs/collectors, docs/signals.md and docs/accuracy.md
	$(BIN)/python tests/tools/generate_docs.py

docs-check: $(VENV)/dev ## fail when generated pages are not current
	$(BIN)/python tests/tools/generate_docs.py --check

host: $(VENV)/dev ## capture this machine's /proc and /sys as a fixture: make host NAME=…
	$(BIN)/python tests/tools/capture_host.py $(NAME)

bench: $(VENV)/torch ## speed and cost, as ratios in one run
	$(BIN)/python -m bench

fuzz: $(VENV)/dev ## a million mutated files per format (FORMAT=name for one, N=inputs); goes on where it stopped
	PYTHONPATH=.:tests $(BIN)/python -m fuzz.run --format "$(FORMAT)" --inputs $(N)

lab-cluster: $(VENV)/torch ## real faults on two nodes made of namespaces (root): recordings beside the truth
	$(BIN)/python -m clusterprof_lab.real.accept

accept-cluster: $(VENV)/torch ## the same three times over, analyses and rules of thumb judged by the truth (15 minutes)
	$(BIN)/python -m clusterprof_lab.real.accept --judge

blame-check: $(VENV)/dev ## who was at fault in 403 synthetic jobs; the bound of clocks in 10,000 trials
	$(BIN)/python -m bench blame_truth clock_bound

gate-check: $(VENV)/dev ## repeated runs of simulated jobs, clean and 5 % slower, through the gate (five minutes)
	$(BIN)/python -m clusterprof_lab.repeats

score: $(VENV)/torch ## a slice of the corpus of known faults, all tools judged by the truth: SPLIT=dev (minutes)
	$(BIN)/python -m clusterprof_lab.score --split $(SPLIT) --slice ci --out $(SCORE) $(ANSWERS)

score-whatif: $(VENV)/dev ## predicted gains of fixing each fault beside the same job without it: SPLIT=dev (minutes)
	-$(BIN)/python -m clusterprof_lab whatif --split $(SPLIT) --out $(SCORE)-whatif
	@test -d $(SCORE)-paired || echo "make: no real jobs beside it: make record-whatif"
	test ! -d $(SCORE)-paired || $(BIN)/python -m clusterprof_lab whatif --split $(SPLIT) \
	    --paired $(SCORE)-paired --out $(SCORE)-whatif-paired

record-whatif: $(VENV)/torch ## real jobs with the fault on and off in turns, for score-whatif (root, 25 minutes)
	$(BIN)/python -m clusterprof_lab.real.paired --split $(SPLIT) --out $(SCORE)-paired

score-full: $(VENV)/torch ## the whole corpus, real processes too (root, hours); writes what docs/accuracy.md is made of
	-$(BIN)/python -m clusterprof_lab lab run --split $(SPLIT) --seeds 1 --out $(SCORE)/real
	$(BIN)/python -m clusterprof_lab.score --split $(SPLIT) --slice full --out $(SCORE) \
	    --recorded $(SCORE)/real $(ANSWERS)
	$(BIN)/python -m clusterprof_lab.score.page --store $(SCORE)/score.json

score-rivals: $(VENV)/torch ## TraceML on the corpus's real jobs, scored beside ours: TRACEML_PYTHON=VENV/bin/python SLICE=ci
	@test -n "$(TRACEML_PYTHON)" || { echo "make: set TRACEML_PYTHON to a python with traceml-ai and torch" >&2; exit 2; }
	$(BIN)/python -m clusterprof_lab.rivals.corpus --python $(TRACEML_PYTHON) --split $(SPLIT) --slice $(SLICE) --out $(SCORE)-rivals
	$(BIN)/python -m clusterprof_lab.score --split $(SPLIT) --slice $(SLICE) --testbed real --out $(SCORE) --answers TraceML=$(SCORE)-rivals

score-sabotage: $(VENV)/dev ## three faults put into the attribution: the score must catch each
	$(BIN)/python -m clusterprof_lab.score.sabotage

# Pinned one by one: a library that does not install here leaves its tests skipped, with a reason.
FRAMEWORKS := lightning==2.6.6 pytorch-lightning==2.6.6 transformers==4.57.6 accelerate==1.15.0 \
    torchdata==0.11.0 webdataset==1.0.2 mosaicml-streaming==0.13.0 spdl==0.8.0 jax==0.10.2 \
    tensorflow-cpu==2.21.0 nvidia-dali-cuda120==2.4.0 deepspeed==0.19.8 megatron-core==0.16.1

$(FRAMEWORKS_VENV)/made: pyproject.toml Makefile
	$(PYTHON) -m venv $(FRAMEWORKS_VENV)
	$(FRAMEWORKS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(FRAMEWORKS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "torch==$(TORCH)" setuptools -e . --group dev
	@for each in $(FRAMEWORKS); do \
	    DS_BUILD_OPS=0 $(FRAMEWORKS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check \
	        --no-build-isolation "torch==$(TORCH)" $$each || echo "make: $$each does not install here"; \
	done
	@touch $@

test-frameworks: $(FRAMEWORKS_VENV)/made ## hooks against the real frameworks, pinned (docs/frameworks.md): TORCH=2.13.0, gigabytes
	$(FRAMEWORKS_VENV)/bin/python -m pytest -rs tests/probe

test-frameworks-matrix: $(VENV)/dev ## the same against oldest and newest versions (hours, gigabytes): ROWS="torch-2.4 lightning"
	$(BIN)/python tests/tools/framework_matrix.py $(foreach each,$(ROWS),--only $(each))

test-launchers: $(VENV)/dev ## mpirun, mpiexec, srun and flux as far as they are installed; says how to get the rest
	$(BIN)/python -m pytest -rs tests/lab/test_launchers.py

peers: $(VENV)/dev ## the numbers of other tools on the same traces, each in its own environment
	$(BIN)/python -m bench.peers.run

import-answers: $(VENV)/dev ## what imported traces with a known answer give; needs ../shared/data
	$(BIN)/python tests/tools/import_answers.py
	$(BIN)/python tests/tools/generate_docs.py

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) .venv-frameworks-* .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
