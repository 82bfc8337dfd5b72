# clusterprof: the targets a contributor types. `make` alone prints this list.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := -m pip install --quiet --disable-pip-version-check

# A file's tests share recordings, so that a worker takes whole files. Many tests wait: three workers
# keep two cores busy.
WORKERS := --numprocesses 3 --dist loadfile --no-loadscope-reorder

# Rooms whose tests start few processes of their own.
UNITS := agent analysis config gate output report trace util test_house.py

COMPILE := $(VENV)-pins/bin/uv pip compile --quiet --upgrade --universal --python-version 3.10 --generate-hashes \
    --custom-compile-command "make pins"

LAB_TARGETS   := score score-full score-rivals score-whatif score-sabotage record-whatif gate-check \
    lab-cluster accept-cluster test-launchers test-frameworks test-frameworks-matrix
BENCH_TARGETS := peers blame-check fuzz import-answers faults faults-long overhead

.DEFAULT_GOAL := help
.PHONY: help demo dev torch test test-fast test-long accept check lint types contracts docs docs-check golden
.PHONY: pins site host bench gpu-check clean $(LAB_TARGETS) $(BENCH_TARGETS)

help: ## print the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile
	@echo "  make -C lab      list the targets of the lab: faults, scores, clusters, frameworks"
	@echo "  make -C bench    list the targets of the benchmarks: other tools, fuzzing, known answers"

$(BIN)/clusterprof: pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; set PYTHON=python3.x" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) --upgrade pip
	$(BIN)/python $(PIP) -e .
	@touch $@

$(VENV)/dev: $(BIN)/clusterprof pyproject.toml lab/pyproject.toml
	$(BIN)/python $(PIP) --group dev -e lab
	@touch $@

$(VENV)/torch: $(VENV)/dev
	$(BIN)/python $(PIP) "torch==2.13.0"
	@touch $@

demo: $(BIN)/clusterprof ## run, record and analyze a job on emulated accelerators; print report and truth
	$(BIN)/clusterprof demo --scenario storage

dev: $(VENV)/dev ## create the virtual environment with everything but torch

torch: $(VENV)/torch

test: $(VENV)/torch ## run all tests, real torch training included (about six minutes)
	$(BIN)/python -m pytest tests -m "not alone and not accept and not long" $(WORKERS)
	$(BIN)/python -m pytest tests -m "alone and not accept and not long"

test-fast: $(VENV)/dev ## run the unit tests of recorder, analysis and output (a minute and a half)
	$(BIN)/python -m pytest $(UNITS:%=tests/%) -m "not alone and not accept and not long and not torch" $(WORKERS)

# Long variants of the tests, and many more generated examples (nightly).
test-long: $(VENV)/torch
	CLUSTERPROF_EXAMPLES=long $(BIN)/python -m pytest tests -m "(long or hypothesis) and not alone and not accept" $(WORKERS)
	$(BIN)/python -m pytest tests -m "long and alone and not accept"

accept: $(VENV)/torch ## compare answers with measured truth at a tolerance (nothing else may run)
	$(BIN)/python -m pytest tests -m accept

check: lint types contracts docs-check test ## run what CI runs

lint: $(VENV)/dev ## check format and style
	$(BIN)/ruff format --check clusterprof tests bench lab
	$(BIN)/ruff check clusterprof tests bench lab

types: $(VENV)/dev ## check static types
	$(BIN)/mypy clusterprof
	$(BIN)/mypy --explicit-package-bases lab/clusterprof_lab bench

contracts: $(VENV)/dev ## check who imports whom
	$(BIN)/lint-imports

docs: $(VENV)/dev ## generate the pages of causes, collectors, signals, commands, importers, accuracy, and the schema
	$(BIN)/python tests/tools/generate_docs.py

docs-check: $(VENV)/dev
	$(BIN)/python tests/tools/generate_docs.py --check

$(VENV)-site/done: pyproject.toml
	$(PYTHON) -m venv $(VENV)-site
	$(VENV)-site/bin/python $(PIP) --upgrade pip
	$(VENV)-site/bin/python $(PIP) --group site
	@touch $@

site: $(VENV)-site/done ## build the documentation as a site in build/site; fails on a dead link
	NO_MKDOCS_2_WARNING=1 $(VENV)-site/bin/mkdocs build -f .ci/mkdocs.yml

# Python 3.10 or newer, any system. No registry is named in them: pip's own settings say from where.
pins: ## renew the pins of what is installed in CI for a release: .ci/requirements.txt, .ci/tools.txt
	$(PYTHON) -m venv $(VENV)-pins
	$(VENV)-pins/bin/python $(PIP) uv
	$(COMPILE) pyproject.toml --output-file .ci/requirements.txt
	$(COMPILE) --group release --output-file .ci/tools.txt

golden: $(VENV)/dev ## accept new golden outputs (review the diff like code)
	CLUSTERPROF_ACCEPT_GOLDEN=1 $(BIN)/python -m pytest $$(grep -rlE "CLUSTERPROF_ACCEPT_GOLDEN|golden_hosts import" --include="test_*.py" tests)

# Capture /proc and /sys of this machine as a fixture: make host NAME=...
host: $(VENV)/dev
	$(BIN)/python tests/tools/capture_host.py $(NAME)

bench: $(VENV)/torch ## measure speed and cost, as ratios within one run
	$(BIN)/python -m bench

# With the packages of PYTHON, whose PyTorch has CUDA: a virtual environment that also sees them.
gpu-check: pyproject.toml ## measure what a real NVIDIA GPU says; writes docs/gpu-notes.md (eight minutes)
	$(PYTHON) -m venv --system-site-packages .venv-gpu
	$(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	    > "$$(.venv-gpu/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth"
	.venv-gpu/bin/python $(PIP) -e .
	.venv-gpu/bin/python bench/gpu_check.py --out gpu-check

clean: ## remove virtual environments and caches
	rm -rf $(VENV) $(VENV)-site $(VENV)-pins .venv-gpu .venv-frameworks-* .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# `make score` is short for `make -C lab score`.
$(LAB_TARGETS):
	@$(MAKE) --no-print-directory -C lab $@

$(BENCH_TARGETS):
	@$(MAKE) --no-print-directory -C bench $@
