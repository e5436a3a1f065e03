# Every target does its own set-up, in .venv and build/; a second call is quick.
#
#   PYTHON=...   the interpreter for .venv (default: the first of those below that will do)
#   ARGS=...     more arguments for the program or for pytest, e.g. make test ARGS='-k cancel',
#                or make test ARGS='-n0 --pdb' in one process

# With pipefail, because `| tee` would hide a failure otherwise.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

# New enough, able to make virtual environments, and with the headers to compile an extension.
USABLE := import os, sys, sysconfig, venv, ensurepip; \
	sys.exit(sys.version_info < (3, 11) or \
	not os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h')))
PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 python3; do \
	$$python -c "$(USABLE)" 2>/dev/null && { echo $$python; break; }; done)
NO_PYTHON := no Python >= 3.11 with the venv module and the C headers was found; \
	on Debian and Ubuntu: apt-get install python3-venv python3-dev

export PIP_DISABLE_PIP_VERSION_CHECK := 1
BIN := .venv/bin
LOGS := build/logs
# A file of tests is one process's, so that its tests keep their order and what they share.
PARALLEL := --numprocesses auto --maxprocesses 8 --dist loadfile
MODULE := aiordma/_native/_lib.abi3.so
# The folders too, so that a file that is gone counts as a change.
NATIVE := $(shell find native -type d -o -name '*.[ch]') aiordma/_native/build.py setup.py

.PHONY: help
help: ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 16

# ---- set-up ---------------------------------------------------------------------------------

$(BIN)/python:
	@$(if $(PYTHON),,echo "$(NO_PYTHON)" >&2; exit 1)
	$(PYTHON) -m venv .venv

# One stamp per extra of pyproject.toml; installing compiles the module too.
.venv/.%: pyproject.toml setup.py | $(BIN)/python
	$(BIN)/pip install --quiet --editable '.[$*]'
	@touch $@ $(MODULE)

$(MODULE): $(NATIVE) | $(BIN)/python
	$(BIN)/pip install --quiet --no-deps --editable .
	@touch $@

# ---- use and tests --------------------------------------------------------------------------

.PHONY: echo test programs software network examples bench instructions many cost soak softroce counts
echo: .venv/.cli $(MODULE) ## both ends of an echo on the embedded device: sizes, latency, throughput
	$(BIN)/aiordma echo $(ARGS)

test: .venv/.test $(MODULE) ## all tests that need no hardware: C, then Python
	$(MAKE) --no-print-directory -C tests/soft check
	@mkdir -p $(LOGS)
	$(BIN)/python -m pytest $(PARALLEL) --ignore tests/programs --ignore tests/software \
		--ignore tests/network $(ARGS) | tee $(LOGS)/embedded0
	@echo 'Not run here, as they need packages: the tests of unmodified verbs programs (make programs),' \
		'and of software carried over RDMA (make software);' \
		'and as they need root: those between network namespaces (make network).'

programs: .venv/.test $(MODULE) ## unmodified verbs programs, and rdma-core's own tests, on the embedded device
	$(BIN)/python -m pytest tests/programs $(ARGS)

software: .venv/.software $(MODULE) ## aiohttp, websockets, grpclib, redis: carried over RDMA (Debian: redis-server)
	$(BIN)/python -m pytest tests/software $(ARGS)

# What needs a kernel that can lose packets (tc-netem(8)) runs in the virtual machine where this one
# cannot.
network: .venv/.test $(MODULE) ## the device between network namespaces: root, iproute2
	$(BIN)/python -m pytest tests/network --ignore tests/network/test_netem.py $(ARGS)
	@if tests/network/has-netem; then \
		$(BIN)/python -m pytest tests/network/test_netem.py $(ARGS); \
	else \
		echo 'The kernel of this machine has no netem: tests/network/test_netem.py in the virtual machine.'; \
		tests/softroce/vm $(BIN)/python -m pytest -p no:cacheprovider --timeout 600 \
			tests/network/test_netem.py $(ARGS); \
	fi

examples: .venv/.test $(MODULE) ## run every example
	$(BIN)/python -m pytest tests/examples

bench: .venv/.dev $(MODULE) ## what aiordma reaches beside other ways, into bench/RESULTS.md
	$(BIN)/python -m bench $(or $(ARGS),all)

instructions: .venv/.test $(MODULE) ## how many instructions an operation takes, beside those recorded (valgrind)
	$(BIN)/python -m bench instructions $(ARGS)

many: .venv/.test $(MODULE) ## what 10,000 queue pairs and 1,000 connections cost that do nothing
	$(MAKE) --no-print-directory -C tests/soft check ONLY=test_many
	$(BIN)/python -m bench many $(ARGS)

cost: .venv/.test $(MODULE) ## memory and CPU of idle connections, memory of a large transfer
	$(BIN)/python -m bench cost $(ARGS)

soak: .venv/.test $(MODULE) ## random traffic between processes, some killed, every byte verified: SECONDS=600, SEED=
	$(BIN)/python -m tests.soak $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED)) $(ARGS)

# One boot for both. The guest is emulated, many times slower than this machine, so what uses no
# device is not tested there again.
softroce: .venv/.test .venv/.software $(MODULE) ## the same tests and the echo on rxe0, a SoftRoCE device in a VM (root, Debian)
	@mkdir -p $(LOGS)
	tests/softroce/vm sh -euc '\
		$(BIN)/python -m pytest -p no:cacheprovider --timeout 600 --device rxe0 $(PARALLEL) \
			--ignore tests/abi --ignore tests/core --ignore tests/programs --ignore tests/network \
			$(foreach one,aiohttp grpclib redis,--ignore tests/software/test_$(one).py) $(ARGS); \
		$(BIN)/aiordma echo --device rxe0' | tee $(LOGS)/rxe0

counts: test softroce ## write the numbers of passed tests on each device into README.md
	$(BIN)/python tests/counts.py embedded0=$(LOGS)/embedded0 rxe0=$(LOGS)/rxe0

.PHONY: docs
docs: .venv/.test $(MODULE) ## write the generated parts of docs/: states, reference
	$(BIN)/python -m tests.docs

# ---- checks ---------------------------------------------------------------------------------

.PHONY: lint types abi
lint: .venv/.dev ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.dev ## mypy, strict
	$(BIN)/mypy

abi: .venv/.test ## our ABI header against the distribution's (libibverbs-dev, librdmacm-dev)
	$(BIN)/python -m tests.abi.abi_check
	$(BIN)/python -m pytest --quiet tests/abi

# ---- coverage -------------------------------------------------------------------------------

.PHONY: coverage
# Counts of a branch are differences of others, and those of a process that was killed or forked in the
# middle may not fit together; what is judged is lines.
coverage: .venv/.dev ## which lines of the embedded device the C tests run; fails below 95 %
	rm -rf build/soft/coverage
	$(MAKE) --no-print-directory -C tests/soft check COVERAGE=yes
	$(BIN)/gcovr --root . --filter native/soft/ --sort uncovered-number --fail-under-line 95 \
		--gcov-ignore-parse-errors negative_hits.warn_once_per_file build/soft/coverage/native

# ---- sanitizers -----------------------------------------------------------------------------

# A copy of the tree, so that the instrumented module never takes the place of the plain one.
ASAN := build/asan
ASAN_FLAGS := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -O1 -g
# libstdc++ as well: loaded later (by numpy), its exceptions would pass the sanitizer by.
ASAN_PRELOAD = $(shell for name in libasan.so libstdc++.so.6; do \
	realpath -e "$$($(CC) -print-file-name=$$name)" 2>/dev/null; done)
# Python itself does not give all its memory back, hence no leak detection, and the tests compare
# resident memory, hence a small quarantine: the C tests have both in full.
ASAN_ENVIRONMENT = PYTHONPATH=$(CURDIR)/$(ASAN) PYTHONMALLOC=malloc LD_PRELOAD="$(ASAN_PRELOAD)" \
	ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=1 UBSAN_OPTIONS=print_stacktrace=1

.PHONY: asan tsan
asan: .venv/.test ## C tests and Python tests under the address and undefined-behaviour sanitizers
	$(MAKE) --no-print-directory -C tests/soft check SANITIZE=address,undefined
	rm -rf $(ASAN)
	mkdir -p $(ASAN)
	cp -R $(wildcard aiordma native tests examples bench docs .ci *.py *.toml *.md Makefile MANIFEST.in \
		LICENSE) $(ASAN)
	cd $(ASAN) && AIORDMA_CFLAGS='$(ASAN_FLAGS)' AIORDMA_LDFLAGS='$(ASAN_FLAGS)' \
		../../$(BIN)/pip install --quiet --no-deps --target installed .
	cp $(ASAN)/installed/aiordma/_native/*.so $(ASAN)/aiordma/_native/
	cd $(ASAN) && $(ASAN_ENVIRONMENT) ../../$(BIN)/python -m pytest -p no:cacheprovider --timeout 600 \
		$(PARALLEL) --one-way --ignore tests/programs --ignore tests/software --ignore tests/network $(ARGS)

tsan: ## C tests under the thread sanitizer
	$(MAKE) --no-print-directory -C tests/soft check SANITIZE=thread

.PHONY: fuzz
fuzz: ## fuzz what comes from elsewhere, SECONDS=60 each (clang, libclang-rt-14-dev)
	$(MAKE) --no-print-directory -C tests/fuzz run

# ---- the rest -------------------------------------------------------------------------------

.PHONY: clean
clean: ## remove everything that was built or fetched
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f aiordma/_native/_lib.c aiordma/_native/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
