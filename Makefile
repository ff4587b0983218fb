# `make` lints and tests. `make demo` shows tierd at work. Both set up what is missing.
SHELL := /bin/bash
PY := .venv/bin/python
.DEFAULT_GOAL := all
# Every target is a command but those that begin with a dot.
.PHONY: all \
	bench \
	bench-controller \
	bench-dashboard \
	bench-gpu \
	bench-kv \
	bench-life \
	bench-operator \
	bench-remote \
	bench-report \
	bench-sglang \
	bench-storage \
	bench-vllm \
	build \
	chaos \
	clean \
	crash \
	demo \
	gpu-test \
	lab \
	lab-rdma \
	lint \
	packages \
	pages \
	sanitizers \
	setup \
	sim \
	sim-mutants \
	sim-soak \
	stubs \
	test \
	test-sglang \
	test-vllm

all: lint test

# The stamp is newer than what decides the environment, or setup runs again.
.venv/.ready: pyproject.toml tools/setup.sh
	tools/setup.sh
	touch $@
setup: .venv/.ready build

# The native core is rebuilt when a source changed; `pip install -e` of an unchanged tree costs seconds.
CORE := $(wildcard tierd/io/_core/*.cc tierd/io/_core/*.h) CMakeLists.txt
.venv/.built: .venv/.ready $(CORE)
	$(PY) -m pip install -q --no-build-isolation --no-deps -e .
	touch $@
build: .venv/.built

stubs: build
	tools/stubs.sh

lint: build
	tools/stubs.sh --check
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# A file's tests stay in one process: they share their daemon.
test: build
	$(PY) -m pytest -m "not lab and not gpu and not pages and not rdma" -n 2 --dist loadfile

# Loop devices, broken disks: as root; skips by name elsewhere.
lab: build
	$(PY) -m pytest -m lab tests

# Small virtual machines with real RDMA verbs (docs/operating/remote.md): as root, x86-64.
lab-rdma: build
	TIERD_LAB_RDMA=1 $(PY) -m pytest -m rdma -v tests/lab/rdma
# The same machines, for longer; all records of bench/results/remote.json.
bench-remote: build
	$(PY) -m bench.remote

# SGLang's real modules, both releases, in environments of their own (.venv-sglang).
.venv-sglang/.ready: .venv/.built tests/engines/sglang/requirements.txt tools/sglang_venvs.sh
	tools/sglang_venvs.sh
test-sglang: .venv-sglang/.ready
	$(PY) -m pytest tests/engines/sglang
bench-sglang: .venv-sglang/.ready
	$(PY) -m bench.sglang

# vLLM's real modules of 0.33.0, and a whole vLLM 0.32.0 for CPUs (.venv-vllm).
.venv-vllm/.ready: .venv/.built tests/engines/vllm/requirements.txt tools/vllm_venvs.sh
	tools/vllm_venvs.sh
test-vllm: .venv-vllm/.ready
	$(PY) -m pytest tests/engines/vllm
bench-vllm: .venv-vllm/.ready
	$(PY) -m bench.vllm

demo: build
	$(PY) -m tierd.cli demo

# sdist and wheel in dist/, tried in an empty environment.
packages: .venv/.ready
	PYTHON=.venv/bin/python tools/packages.sh

# The dashboard in Chromium, every command that the documentation shows (as root), the documentation as
# a site in build/site.
.venv/.pages: .venv/.ready tools/pages_setup.sh
	tools/pages_setup.sh
	touch $@
pages: .venv/.built .venv/.pages
	$(PY) -m pytest -m pages tests/pages -rs
	$(PY) -m tests.docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict

sanitizers: .venv/.ready
	tools/sanitizers.sh

# Daemons and engines are killed while rows are compared (docs/operating/failures.md). By hand:
# python -m tests.chaos --kills 1000 --tokens is the soak, --seed and --case replay.
chaos: build
	$(PY) -m tests.chaos

# The simulator (docs/simulator.md): SEED=N replays one run.
SEEDS ?= 10000
sim: build
	$(PY) -m tests.sim $(if $(SEED),--seed $(SEED),--seeds 300)
sim-soak: build
	$(PY) -m tests.sim --seeds $(SEEDS)
sim-mutants: build
	$(PY) -m tests.sim.mutants
crash: build
	$(PY) -m tests.sim.crash

bench: build
	$(PY) -m bench.first_light
# Makes its sessions once; takes a quarter of an hour.
bench-controller: build
	$(PY) -m bench.controller
# Both need a CUDA GPU.
gpu-test: build
	TRITON_INTERPRET=0 $(PY) -m pytest tests/gpu -m gpu
bench-gpu: build
	$(PY) -m bench.gpu
# A few minutes on the CPU; the GPU part is `python -m bench.kv_gpu` (docs/kv.md).
bench-kv: build
	$(PY) -m bench.kv
# Needs root, for a loop device; `python -m bench.storage --only PART...` runs a part.
bench-storage: build
	$(PY) -m bench.storage
bench-life: build
	$(PY) -m bench.life
# --quick tries it; the parts that take times want a machine that does nothing else.
bench-operator: build
	$(PY) -m bench.operator
# In Chromium; `--docs` runs the documentation's commands and `--wheel` builds the packages as well.
bench-dashboard: .venv/.built .venv/.pages
	$(PY) -m bench.dashboard --docs --wheel
bench-report: build
	$(PY) -m bench.report

clean:
	rm -rf build dist .venv/.built .pytest_cache .mypy_cache .ruff_cache
