# Every target works by itself on a fresh machine with Python, a C++20 compiler and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.setup
DOCS := $(VENV)/.docs
SIMULATED := build/simulated_device/_simulated_device.so
NATIVE := $(wildcard native/*.h native/*.inl native/*.cpp)
SANITIZERS := address,undefined thread
# Three processes for two cores: ranks often wait for each other. Each takes a third of the tests in the order of
# collection, and what another has left when its own are done.
PARALLEL := -n 3 --dist worksteal
QUICK := not medium and not slow

.PHONY: setup demo simulated-device unit test test-device test-medium test-medium-sample test-slow test-slow-sample test-full test-chaos test-mutants test-mutants-sample fuzz fuzz-sample test-sanitized test-versions test-aarch64 test-model replay replay-record bench docs docs-version wheel release lint clean

setup: $(SETUP)

$(SETUP): pyproject.toml constraints.txt CMakeLists.txt $(NATIVE)
	@echo "Setting up $(VENV): downloads torch and other packages, and compiles the kernels. This takes some minutes."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt "torch==2.13.0"
	$(BIN)/pip install -q -c constraints.txt -e ".[train,test,lint]"
	touch $@

demo: $(SETUP) $(SIMULATED)
	$(BIN)/longshore demo
	PYTHONPATH=tests $(BIN)/python -m simulated_device.demo

# Layout, passes, copies, tiles and the window, without a process of ranks: a minute and a half.
unit: $(SETUP)
	$(BIN)/python -m pytest $(PARALLEL) -m "$(QUICK)" tests/layout tests/transfer tests/tiles tests/store \
		tests/kernels/test_reference.py tests/kernels/test_reference_rules.py tests/kernels/test_formats.py

test: $(SETUP) test-device
	$(BIN)/python -m pytest $(PARALLEL) -m "$(QUICK)"

# Tests in processes whose accelerator is the simulated one.
ON_DEVICE := --simulated-device tests/simulated_device tests/transfer tests/tiles tests/tracing/test_device_times.py \
	tests/engine/test_on_device.py tests/test_activations.py tests/streaming tests/cli/test_streaming.py \
	tests/optim/test_device.py tests/checkpoint/test_device.py tests/test_fuzz.py
test-device: $(SETUP) $(SIMULATED)
	$(BIN)/python -m pytest $(PARALLEL) -m "(simulated or gpu) and $(QUICK)" $(ON_DEVICE)

# Tests that take seconds, and more rows of most tables.
MEDIUM := medium and not slow
test-medium: $(SETUP) $(SIMULATED)
	$(BIN)/python -m pytest $(PARALLEL) -m "$(MEDIUM)" $(ROWS)
	$(BIN)/python -m pytest $(PARALLEL) -m "(simulated or gpu) and $(MEDIUM)" $(ON_DEVICE) $(ROWS)

# What CI runs of them: a quarter of each test's rows, other ones for each commit; all of the tests in a file, or of a
# source file, that the commit touched.
COMMIT := $$(git rev-parse HEAD)
CHANGED := $$(git log -1 --format= --name-only --diff-filter=AMR | tr '\n' ' ')
test-medium-sample: ROWS = --share 0.25 --share-of $(COMMIT) --whole "$(CHANGED)"
test-medium-sample: test-medium

# It compiles in about two minutes of one core.
simulated-device: $(SIMULATED)

$(SIMULATED): $(SETUP) tests/simulated_device/__main__.py $(wildcard tests/simulated_device/native/*)
	PYTHONPATH=tests $(BIN)/python -m simulated_device

test-slow: $(SETUP) $(SIMULATED)
	$(BIN)/python -m pytest $(PARALLEL) -m "slow and not full"
	$(BIN)/python -m pytest $(PARALLEL) -m "(simulated or gpu) and slow and not full" $(ON_DEVICE)

# A fortieth of that, another one for each commit.
test-slow-sample: $(SETUP) $(SIMULATED)
	$(BIN)/python -m pytest $(PARALLEL) -m "slow and not full" --share 0.025 --share-of $(COMMIT)
	$(BIN)/python -m pytest $(PARALLEL) -m "(simulated or gpu) and slow and not full" $(ON_DEVICE) --share 0.025 --share-of $(COMMIT)

test-full: $(SETUP)
	$(BIN)/python -m pytest $(PARALLEL)

test-chaos: $(SETUP) $(SIMULATED)
	$(BIN)/python -m pytest -n 2 -m chaos --seeds 10000
	$(BIN)/python -m pytest -n 2 -m chaos --seeds 10000 --simulated-device tests/streaming

test-mutants: $(SETUP) $(SIMULATED)
	PYTHONPATH=tests $(BIN)/python -m mutants

# What fits two minutes, another sample for each commit.
test-mutants-sample: $(SETUP) $(SIMULATED)
	PYTHONPATH=tests $(BIN)/python -m mutants --minutes 1 --seed $(COMMIT)

# Random programs for so many minutes on one rank (half of them with an optimizer, half with an engine), for as many on
# two, and for as many on one and on two simulated accelerators, where models are streamed; each that is not plain
# PyTorch's is made small and printed. python -m fuzz --help says how to choose vocabularies.
FUZZ_MINUTES ?= 60
FUZZ := PYTHONPATH=tests $(BIN)/python -m fuzz
fuzz: $(SETUP) $(SIMULATED)
	$(FUZZ) --minutes $(FUZZ_MINUTES) --ranks 1
	$(FUZZ) --minutes $(FUZZ_MINUTES) --ranks 2
	$(FUZZ) --minutes $(FUZZ_MINUTES) --ranks 1 --simulated-device
	$(FUZZ) --minutes $(FUZZ_MINUTES) --ranks 2 --simulated-device

# Some of each, other programs for each commit.
fuzz-sample: $(SETUP) $(SIMULATED)
	$(FUZZ) --minutes 0.7 --ranks 1 --seeds-of $(COMMIT)
	$(FUZZ) --minutes 0.7 --ranks 2 --seeds-of $(COMMIT)
	$(FUZZ) --minutes 0.7 --ranks 1 --simulated-device --seeds-of $(COMMIT)
	$(FUZZ) --minutes 0.5 --ranks 2 --simulated-device --seeds-of $(COMMIT)

test-sanitized: $(SETUP)
	scripts/test_sanitized.sh $(SANITIZERS)

# Several versions of torch and Python, each in an environment of its own: gigabytes from the index of packages.
# VERSIONS="--python 3.12 --torch 2.8 --torch 2.13 --quick" chooses; --python takes an interpreter, too.
VERSIONS ?=
test-versions:
	$(PYTHON) -m scripts.check_versions $(VERSIONS)

# Cross-compiled, and run by qemu: the native tests, a wheel, and steps with the bits that this machine has. Needs Debian's
# g++-aarch64-linux-gnu and qemu-user, and apt that knows arm64; it says so. AARCH64="--torch 2.8.0": beside another torch.
AARCH64 ?=
test-aarch64: $(SETUP)
	$(BIN)/python -m scripts.aarch64 $(AARCH64)

# What goes into and comes out of the native kernels, and the collectives, in some forty runs, compared with
# tests/replay/recorded.json; replay-record writes that anew, for a change that is meant to change them.
replay: $(SETUP)
	PYTHONPATH=tests $(BIN)/python -m replay

replay-record: $(SETUP)
	PYTHONPATH=tests $(BIN)/python -m replay --record

test-model:
	scripts/check_model.sh

bench: $(SETUP)
	$(BIN)/python -m benchmarks

# build/docs/index.html opens without a server, with its search; nothing is fetched.
docs: $(DOCS)
	$(BIN)/python -m scripts.docs --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# The documentation of this version beside those of others, as commits on the branch gh-pages, which this does not push.
# A release is 0.1 and the latest; DOCS_VERSION=dev DOCS_ALIAS= is what is not released yet.
DOCS_VERSION ?= $(shell sed -n 's/^version = "\([0-9]*\.[0-9]*\).*/\1/p' pyproject.toml)
DOCS_ALIAS ?= latest
docs-version: $(DOCS)
	$(BIN)/python -m scripts.docs --check
	$(BIN)/python -m scripts.docs.versions $(DOCS_VERSION) $(DOCS_ALIAS)

$(DOCS): $(SETUP)
	$(BIN)/python -m scripts.extra docs | xargs $(BIN)/pip install -q -c constraints.txt
	touch $@

# A source distribution and wheels in dist/, each installed and tried where there is no compiler.
wheel: $(SETUP)
	$(BIN)/python -m scripts.extra ship | xargs $(BIN)/pip install -q -c constraints.txt
	TOOLS=$(BIN)/python scripts/check_wheel.sh dist

# What is uploaded, made of the last commit: built twice, compared, checked, and tried where there is no compiler. The
# wheel is for $(PYTHON); RELEASE="--python python3.11 --python python3.12" builds others, and --once does not compare.
RELEASE ?=
release: $(SETUP)
	$(BIN)/python -m scripts.extra ship | xargs $(BIN)/pip install -q -c constraints.txt
	$(BIN)/python -m scripts.release $(RELEASE)

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python -m scripts.shape

clean:
	rm -rf $(VENV) build .pytest_cache .ruff_cache .hypothesis
