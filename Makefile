# Sets up and runs everything from a clone: `make demo`, `make test`. All of it stays in .venv; outside of it only
# Debian packages are installed, and only where this user may. A target that has nothing to do ends at once.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PYTEST_ARGS ?=
# More processes than cores: tests that start jobs wait for half of their time.
JOBS ?= 4
FUZZ_SECONDS ?= 60
FLEET_RANKS ?= 100 1000
SOAK_SECONDS ?= 600
FUZZ_INPUTS ?= 1000000000
FUZZ_CASES ?= 20000
FUZZ_REPORTS ?= 2000
FUZZ_FLAGS ?= -O1 -g
FUZZ_FORMATS ?= memory-snapshot xplane chakra nsys rocprof pipeline-operations metrics flight-recorder card facts

# $(call meanwhile,command,tests) runs a command while the tests run, and fails if one of both does.
meanwhile = @{ $(1); } & other=$$!; tests=0; $(2) || tests=$$?; wait $$other; exit $$tests

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Tests start hundreds of Pythons, each of which would compile etloom again.
unexport PYTHONDONTWRITEBYTECODE

# $(call apt,packages): install Debian packages, where there is apt-get and this user is root or may sudo unasked.
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo -n)
apt = { command -v apt-get && $(SUDO) true && echo "installing $(1)" >&2 && { $(SUDO) apt-get -qq update || true; } \
	&& $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get -qq -y install --no-install-recommends $(1); } >/dev/null
# $(call need,test,what,packages) fails with one sentence where the test still fails after apt.
need = { $(1); } &>/dev/null || { $(call apt,$(3)) 2>/dev/null && { $(1); } &>/dev/null; } \
	|| { echo "etloom needs $(2), which could not be installed from here: apt-get install $(3)" >&2; exit 1; }
# $(call want,test,consequence,packages) goes on without.
want = { $(1); } &>/dev/null || { $(call apt,$(3)) 2>/dev/null && { $(1); } &>/dev/null; } \
	|| echo "$(2) (apt-get install $(3))" >&2

.PHONY: help setup build-native demo demo-train record-demo test test-only test-ray check style lint lint-package docs reference audit format fuzz fuzz-coverage fuzz-native fuzz-readers test-sanitized fuzz-verbs fuzz-replays fuzz-reports soak bench bench-predict bench-diagnosis bench-natural bench-fleet bench-gpu bench-hangs clean

help:
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 20

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "etloom needs Python 3.10 or newer: make PYTHON=python3.12" >&2; exit 1; }
	@$(call need,$(PYTHON) -c 'import ensurepip$(comma) venv',the venv module of Python,python3-venv)
	$(PYTHON) -m venv --clear $(VENV)
	@$(PIP) install --upgrade 'pip>=25.1'
comma := ,

$(VENV)/.system: | $(BIN)/python
	@$(call need,c++ --version,a C++ compiler,build-essential)
	@$(call need,test -f "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h",the C headers of Python,python3-dev)
	@$(call want,c++ -E -x c++ - <<< '#include <simdjson.h>',no simdjson here: CMake will fetch a pinned release,libsimdjson-dev)
	@touch $@

# The plain index's torch brings gigabytes of CUDA on Linux. A CPU build bears the version $(TORCH)+cpu, which that
# index never holds: so we ask what pip is configured with (a mirror, a folder of wheels) for exactly that, and only
# then PyTorch's own index of CPU builds. macOS has one build for all; TORCH_INDEX= takes the plain one anywhere.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	@echo "installing torch $(TORCH)"
ifeq ($(if $(filter Darwin,$(shell uname)),,$(TORCH_INDEX)),)
	@$(PIP) install torch==$(TORCH)
else
	@$(PIP) install torch==$(TORCH)+cpu 2>/dev/null \
		|| $(PIP) install torch==$(TORCH) --index-url $(TORCH_INDEX) --timeout 20 --retries 1 \
		|| { echo "no CPU build of torch $(TORCH) in pip's index nor in $(TORCH_INDEX): make TORCH_INDEX=URL names another" >&2; exit 1; }
endif
	@touch $@

# The package is installed without its native part, which is built in place: new Python files are seen at once and a
# change in native/ costs one compilation. This is all that `make demo` needs.
$(VENV)/.package: pyproject.toml | $(BIN)/python
	@echo "installing etloom"
	@$(PIP) install 'scikit-build-core>=0.11' 'nanobind>=2.7' 'cmake>=3.22' ninja
	@$(PIP) install --no-build-isolation --editable . -C wheel.cmake=false -C wheel.py-api= -C editable.mode=inplace
	@touch $@

$(VENV)/.packages: constraints.txt $(VENV)/.package $(VENV)/.torch
	@echo "installing the packages of pyproject.toml"
	@$(PIP) install --constraint constraints.txt --group dev
	@touch $@

$(VENV)/.docs: pyproject.toml $(VENV)/.packages
	@echo "installing the packages that build the documentation"
	@$(PIP) install --constraint constraints.txt --group docs
	@touch $@

$(VENV)/.browser: | $(BIN)/python
	@$(call want,command -v chromium || command -v chromium-browser || command -v google-chrome,no browser: the tests of the report are skipped,chromium fonts-dejavu-core)
	@touch $@

build/dev/build.ninja: $(VENV)/.system $(VENV)/.package
	@cmake -S . -B build/dev -G Ninja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DCMAKE_BUILD_TYPE=Release \
		-DCMAKE_LIBRARY_OUTPUT_DIRECTORY=$(CURDIR)/src/etloom >/dev/null
	@touch $@

build-native: build/dev/build.ninja ## build etloom._native in place
	@cmake --build build/dev

$(VENV)/.ray: pyproject.toml $(VENV)/.packages
	@$(PIP) install 'ray>=2.40'
	@touch $@

test-ray: setup $(VENV)/.ray ## the tests that need a Ray cluster, which they start on this host
	$(BIN)/python -m pytest -q tests/exports/test_ray.py tests/collector/test_ray_actors.py $(PYTEST_ARGS)

setup: build-native $(VENV)/.packages ## install everything into .venv

demo: build-native ## report, findings and a what-if of the bundled recording: run/report.html; without torch
	$(BIN)/etloom demo --out run

demo-train: setup ## train on two ranks, collect, link, print the summary, write run/report.html
	OMP_NUM_THREADS=1 $(BIN)/etloom collect --out run --overwrite --steps 3:8 -- $(BIN)/torchrun --nproc-per-node 2 examples/train_ddp.py --steps 10
	$(BIN)/etloom report run

record-demo: setup ## record the run of `etloom demo` again
	$(BIN)/python benchmarks/record_demo.py

style: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

lint: style ## format, style, types
	$(BIN)/mypy

# Fast tests only. Here and in `make test` each property has a quarter of its random examples; pytest alone has all.
QUICK := -m "not slow" --hypothesis-profile=quick
# Tests that follow each other share fixtures and traces: each process gets one stretch, and takes from another's end.
PARALLEL := -n $(JOBS) --dist worksteal
ifdef PACKAGE
check: lint-package
	$(BIN)/python -m pytest -q $(QUICK) tests/$(PACKAGE) $(PYTEST_ARGS)
else
check: style ## lint and the fast tests in parallel; PACKAGE=linker does so for one package only
	$(call meanwhile,$(BIN)/mypy,$(BIN)/python -m pytest -q $(PARALLEL) $(QUICK) $(PYTEST_ARGS))
endif

lint-package: setup
	$(BIN)/ruff format --check src/etloom/$(PACKAGE) tests/$(PACKAGE)
	$(BIN)/ruff check src/etloom/$(PACKAGE) tests/$(PACKAGE)
	$(BIN)/mypy src/etloom/$(PACKAGE)

test: style $(VENV)/.docs $(VENV)/.browser ## lint, the documentation, and every test
	$(call meanwhile,$(BIN)/mypy && $(BUILD_DOCS),$(ALL_TESTS))

BUILD_DOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
ALL_TESTS := $(BIN)/python -m pytest -q $(PARALLEL) --hypothesis-profile=quick $(PYTEST_ARGS)
test-only: setup $(VENV)/.browser
	$(ALL_TESTS)

docs: setup $(VENV)/.docs ## build the documentation into build/site; fails on dead links
	$(BUILD_DOCS)

reference: setup ## write the generated pages of docs/reference, and docs/gallery.md
	$(BIN)/python docs/generate_reference.py

$(VENV)/.audit: | $(BIN)/python
	@$(PIP) install 'pip-audit>=2.9'
	@touch $@

audit: setup $(VENV)/.docs $(VENV)/.audit ## look up known vulnerabilities of every installed package
	$(BIN)/pip-audit --skip-editable

PEERS := benchmarks/.venv-peers
$(PEERS)/.packages: | $(BIN)/python
	@echo "installing the peers that the benchmarks run beside us"
	$(PYTHON) -m venv --clear $(PEERS)
	@$(PEERS)/bin/python -m pip -qq --disable-pip-version-check install 'traceinsight==0.6.*' 'orjson>=3.10' \
		|| $(PEERS)/bin/python -m pip -qq --disable-pip-version-check install 'HolisticTraceAnalysis==0.5.*' 'orjson>=3.10'
	@touch $@

bench: setup $(PEERS)/.packages ## write docs/benchmarks.md, peers next to etloom; ETLOOM_BENCH_SIZES="50 1500" sets the sizes in MB
	$(BIN)/python benchmarks/write_page.py

bench-predict: setup ## predictions next to measured and published values
	$(BIN)/python benchmarks/predict/run.py

bench-fleet: setup ## a store of generated runs of 100 and 1,000 ranks; FLEET_RANKS="100 10000" sets the sizes
	$(BIN)/python benchmarks/fleet/run.py --ranks $(FLEET_RANKS)

bench-gpu: setup ## findings and what-ifs next to times measured on a GPU here; needs a torch with CUDA in .venv
	@cd benchmarks/gpu && $(CURDIR)/$(BIN)/python measure.py --out recorded && $(CURDIR)/$(BIN)/python compare.py recorded

bench-hangs: setup ## causes of hangs: generated dumps and real gloo jobs with known faults
	$(BIN)/python benchmarks/hangs/dumps.py
	$(BIN)/python benchmarks/hangs/real_jobs.py --faults 200 --healthy 50
	$(BIN)/python benchmarks/hangs/debug_server.py --jobs 100

bench-diagnosis: setup ## accuracy of findings: problems injected into real traces, and bugs in a training run on two ranks
	$(BIN)/python benchmarks/diagnosis/injected.py
	$(BIN)/python benchmarks/diagnosis/run.py

bench-natural: setup ## findings next to an expert's verdicts on real traces (ETLOOM_DATA)
	$(BIN)/python benchmarks/natural/run.py --write

format: setup ## put the sources into the project's format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

# Of one input in MB, beside what the sanitizers and the other inputs leave behind; the fuzzer itself limits the time.
FUZZ_LIMITS := quarantine_size_mb=16:malloc_context_size=8:hard_rss_limit_mb=1024:max_allocation_size_mb=1024
NATIVE := $(wildcard native/parse/*.cpp)
OBSERVER := $(wildcard native/parse/observer_*.cpp) native/parse/buffer.cpp
FUZZ_BUILD = -std=c++20 $(FUZZ_FLAGS) -fsanitize=address$(comma)undefined -fno-sanitize-recover=all -DNDEBUG -Inative/parse
build/fuzz/fuzz: fuzz/fuzz.cpp $(NATIVE) $(wildcard native/parse/*.hpp)
	@$(call need,c++ -E -x c++ - <<< '#include <simdjson.h>',simdjson to fuzz its parsers,libsimdjson-dev)
	@mkdir -p $(@D)
	c++ $(FUZZ_BUILD) fuzz/fuzz.cpp $(NATIVE) -lsimdjson -pthread -o $@

build/fuzz/fuzz_observer: fuzz/fuzz_observer.cpp $(OBSERVER) native/parse/observer.hpp
	@mkdir -p $(@D)
	c++ $(FUZZ_BUILD) fuzz/fuzz_observer.cpp $(OBSERVER) -o $@

fuzz: fuzz-native fuzz-verbs fuzz-replays ## feed mutated traces to the parsers under sanitizers, and through every verb and replay

fuzz-verbs: setup ## mutated traces of every format through every verb: FUZZ_CASES inputs
	PYTHONPATH=tests $(BIN)/python -m fuzzing --inputs $(FUZZ_CASES)

fuzz-replays: setup ## hostile execution traces through both replays: FUZZ_CASES inputs
	PYTHONPATH=tests $(BIN)/python -m fuzzing.replays --inputs $(FUZZ_CASES)

fuzz-reports: setup $(VENV)/.browser ## reports of FUZZ_REPORTS mutated traces in a browser: no script, message or request
	PYTHONPATH=tests $(BIN)/python -m fuzzing.reports --inputs $(FUZZ_REPORTS)

fuzz-native: build/fuzz/fuzz build/fuzz/fuzz_observer ## feed mutated traces to the parsers under sanitizers for FUZZ_SECONDS, at most FUZZ_INPUTS
	cd build/fuzz && ASAN_OPTIONS=$(FUZZ_LIMITS) \
		./fuzz $(FUZZ_SECONDS) $(FUZZ_INPUTS) $(CURDIR)/tests/corpus/*
	cd build/fuzz && ASAN_OPTIONS=$(FUZZ_LIMITS) ./fuzz_observer $(FUZZ_SECONDS) $(FUZZ_INPUTS)

build/fuzz/coverage: fuzz/fuzz.cpp $(NATIVE) $(wildcard native/parse/*.hpp)
	@$(call need,command -v clang++,clang,clang)
	@mkdir -p $(@D)
	clang++ -std=c++20 -O1 -g -fsanitize=fuzzer$(comma)address$(comma)undefined -fno-sanitize-recover=all -DNDEBUG \
		-DETLOOM_LIBFUZZER -Inative/parse fuzz/fuzz.cpp $(NATIVE) -lsimdjson -pthread -o $@

fuzz-coverage: build/fuzz/coverage ## libFuzzer on the parsers for FUZZ_SECONDS; build/fuzz/corpus is kept
	@mkdir -p build/fuzz/corpus
	cd build/fuzz && ./coverage corpus $(CURDIR)/tests/corpus -max_total_time=$(FUZZ_SECONDS) -timeout=10 -rss_limit_mb=2048 -print_final_stats=1

$(VENV)/.atheris: pyproject.toml $(VENV)/.packages
	@$(PIP) install 'atheris>=3'
	@touch $@

# PYTHONPATH, because atheris instruments only what Python finds on its path.
fuzz-readers: setup $(VENV)/.atheris ## coverage-guided fuzzing of the readers in Python (FUZZ_FORMATS) for FUZZ_SECONDS each
	@mkdir -p build/fuzz
	for format in $(FUZZ_FORMATS); do \
		PYTHONPATH=src $(BIN)/python fuzz/readers.py $$format build/fuzz/readers/$$format \
			-max_total_time=$(FUZZ_SECONDS) -artifact_prefix=build/fuzz/; done

# A copy of the package with another library in it; the interpreter must load that of the sanitizers first.
SANITIZED := $(CURDIR)/build/sanitized
test-sanitized: setup ## the tests of the native parts with AddressSanitizer and UndefinedBehaviorSanitizer
	@rm -rf $(SANITIZED)/package && mkdir -p $(SANITIZED)/package && cp -r src/etloom $(SANITIZED)/package
	@rm -f $(SANITIZED)/package/etloom/_native*.so
	@cmake -S . -B $(SANITIZED) -G Ninja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DCMAKE_BUILD_TYPE=RelWithDebInfo \
		-DCMAKE_CXX_FLAGS="-fsanitize=address$(comma)undefined -fno-sanitize-recover=all" \
		-DCMAKE_LIBRARY_OUTPUT_DIRECTORY=$(SANITIZED)/package/etloom >/dev/null
	@cmake --build $(SANITIZED)
	LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$(SANITIZED)/package \
		$(BIN)/python -m pytest -q -p no:cacheprovider --hypothesis-profile=quick tests/core/test_native_reference.py \
		tests/formats/test_reader_perfetto.py $(PYTEST_ARGS)

soak: setup ## compare random jobs alone and under `etloom collect` for SOAK_SECONDS
	$(BIN)/python tests/collector/soak.py $(SOAK_SECONDS)

clean: ## remove what was built; .venv stays
	rm -rf build dist run src/etloom/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis benchmarks/.data
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
