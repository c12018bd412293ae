# What a newcomer runs: `make demo`, `make test`. Everything lives in .venv; nothing else is installed.
VENV   := .venv
BIN    := $(VENV)/bin
# Without a name, the Python that .venv was made with; `make PYTHON=python3.12 ...` makes it anew with another one.
PYTHON ?= $(if $(wildcard $(VENV)/.ready),$(BIN)/python,python3)
# Tells interpreters apart, and says the same for one and for a venv of it; nothing for one that is too old.
PROBE  := -c 'import sys; sys.version_info >= (3, 11) and print(sys.base_prefix, sys.version)'
# ggml is compiled here: its default build uses OpenMP (a second computing thread makes it 30-80x slower) and
# leaves llamafile's kernels out (docs/decisions/0002-ggml-build.md).
GGML_FLAGS := -DGGML_LLAMAFILE=ON -DGGML_OPENMP=OFF

.PHONY: setup demo test test-slow test-vulkan test-browser test-packaging screenshots lint types check bench-setup bench clean

setup: $(VENV)/.ready

ifneq ($(shell $(PYTHON) $(PROBE) 2>&1),$(shell $(BIN)/python $(PROBE) 2>/dev/null))
.PHONY: $(VENV)/.ready
endif
$(VENV)/.ready: pyproject.toml Makefile
	@$(PYTHON) $(PROBE) 2>/dev/null | grep -q . || { echo "swarmnode needs Python 3.11 or newer; '$(PYTHON)' is:" \
		"$$($(PYTHON) --version 2>&1 | head -n 1). Name another: make PYTHON=python3.12 $(or $(MAKECMDGOALS),setup)" >&2; exit 1; }
	@# nothing is kept of a venv of another Python, or of one that was left half made
	@{ [ "$$($(PYTHON) $(PROBE))" = "$$($(BIN)/python $(PROBE))" ] && $(BIN)/python -m pip --version; } >/dev/null 2>&1 || \
		{ rm -f $@; echo "$(PYTHON) -m venv --clear $(VENV)"; $(PYTHON) -m venv --clear $(VENV); }
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "compiling ggml: about a minute on two fast cores, several on slower ones; pip is silent meanwhile ..."
	CMAKE_ARGS="$(GGML_FLAGS)" $(BIN)/python -m pip install --quiet --no-cache-dir --no-binary ggml-python ggml-python==0.0.45
	@# setuptools warns at length about editable installations; nothing about this one is wrong
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --editable '.[backbone,dev]'
	@touch $@

demo: setup
	$(BIN)/swarmnode demo

test: setup
	$(BIN)/python -m pytest -n auto --dist worksteal --ignore=tests/process
	@# they wait more than they compute, and want to find the cores free
	$(BIN)/python -m pytest -n auto --dist worksteal tests/process

test-slow: setup
	$(BIN)/python -m pytest -m 'slow and not vulkan'

# A second backend, in a venv of its own; GGML_VK_VISIBLE_DEVICES lets ggml take a driver that runs on the CPU.
test-vulkan:
	PYTHON="$(PYTHON)" tools/vulkan/setup.sh
	GGML_VK_VISIBLE_DEVICES=$${GGML_VK_VISIBLE_DEVICES:-0} .venv-vulkan/bin/python -m pytest -m 'vulkan and not slow' tests/vulkan

# The dashboard in a headless Chromium, which has to be there (the tests say how to get one).
test-browser: setup
	$(BIN)/python -m pip install --quiet --editable '.[browser]'
	$(BIN)/python -m pytest -m browser tests/browser

# The same, and keep the pictures that docs show.
screenshots: setup
	$(BIN)/python -m pip install --quiet --editable '.[browser]'
	SWARMNODE_SCREENSHOTS=1 $(BIN)/python -m pytest -m browser tests/browser/test_pictures.py

# The sdist and the wheel in new venvs, from a package index; the first time pip compiles ggml, and keeps it.
test-packaging: setup
	$(BIN)/python -m pytest -m packaging tests/packaging

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

check: lint types test

# The peer of benchmarks/decode.py, in a venv of its own: prebuilt, and never a dependency.
bench-setup: setup
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --only-binary :all: xllamacpp==2026.10.11549

# 15 minutes, 14 GB of disk and as much memory; on a machine that does nothing else (benchmarks/README.md).
BENCH := $(or $(TMPDIR),/tmp)/swarmnode-bench
bench: setup
	mkdir -p $(BENCH)
	test -f $(BENCH)/big-4x256.gguf || $(BIN)/python -m benchmarks.big_model $(BENCH)/big-4x256.gguf
	$(BIN)/python -m benchmarks.kernels
	$(BIN)/python -m benchmarks.channel
	$(BIN)/python -m benchmarks.worker_memory
	$(BIN)/python -m benchmarks.decode $(BENCH)/big-4x256.gguf --work $(BENCH)

clean:
	rm -rf $(VENV) .venv-bench .venv-vulkan build dist *.egg-info
