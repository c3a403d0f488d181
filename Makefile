# Two commands set everything up: `make demo` and `make check`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Tests start many processes: with byte code written by the first, each starts a second sooner.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup native demo check ci portable browser ray processes interpreted without-options check-gpu check-gpu-offline gpu-report format lint types imports test bench-smoke fuzz schedules faults soak versions docs dist try-install sbom licenses release real-run bench papers papers-demo papers-train clean

help:
	@echo "make demo    run the shipped model with a quarter of its experts in memory, by plain LRU and as"
	@echo "             Greenroom does it, and prove that nothing has changed"
	@echo "make check   formatting, lint, spelling, types, import rules, tests"
	@echo "make ci      what takes longer than that: processes, interpreted, check-gpu-offline, bench-smoke, portable, browser, fuzz, schedules, faults, docs, without-options"
	@echo "make processes  tests that start whole programs"
	@echo "make interpreted  what is for a GPU, on a CPU: Triton's kernels in its interpreter, the GPU report"
	@echo "make native  compile the kernels in C++ (folder native/), if they changed"
	@echo "make portable  the kernels compiled for aarch64, and compared in an emulator with those for AVX2"
	@echo "make browser  the live page and the report of simulate in Chromium, which is installed by apt-get where that is allowed"
	@echo "make ray     deploy/ray.py on a Ray cluster of three nodes in processes; installs Ray"
	@echo "make bench-smoke  every script of benchmarks/ on tiny inputs"
	@echo "make fuzz    damaged files and requests of every format that is read (FUZZ_SECONDS=N, FUZZ_INPUTS=N)"
	@echo "make schedules  threads of driver and engine, in 308 chosen orders"
	@echo "make faults  every operation on files, memory and threads fails in turn; power cuts (FAULTS=N of each kind)"
	@echo "make without-options  the checks of a copy of the project in which an option is deleted, for each"
	@echo "make check-gpu  the tests that need a CUDA device (torch with CUDA in this environment)"
	@echo "make check-gpu-offline  Triton's kernels compiled without a GPU, and their machine code examined"
	@echo "make gpu-report  tests and measurements on a GPU into a folder (OUT=DIR, PART=NAME)"
	@echo "make docs    the documentation as a site, in build/site"
	@echo "make dist    sdist and wheel in dist/, checked"
	@echo "make try-install  the wheel in fresh environments of each Python (PYTHONS=\"3.11 3.12\"), by pipx and uvx"
	@echo "make sbom    the bill of materials of what a user installs, build/sbom.json"
	@echo "make licenses  the licences of what a user installs, against a list"
	@echo "make release  dist, try-install, sbom, licenses"
	@echo "make real-run MODEL=owner/name  download, verify, run and measure a model; one block of Markdown"
	@echo "make format  rewrite the sources in the project's format"
	@echo "make soak    the long tests, and versions"
	@echo "make versions  the tests with the oldest and the newest releases of the dependencies"
	@echo "make bench   the measurements (needs a quiet machine, 15 GB of disk and an hour)"
	@echo "make papers  the papers' figures and tables (TRACES=DIR has the recordings)"
	@echo "make papers-train  the demo model's recordings and predictors, from which ProMoE's are made"
	@echo "make clean   remove the environment and the tools' caches; compiled kernels and bench-data stay"

setup: $(READY)

# The compiled kernels, built in place; only what changed is compiled again. `setup` builds them too.
native: export PATH := $(CURDIR)/$(BIN):$(PATH)
native:
	@cmake -S native -B build/native -G Ninja -DCMAKE_MAKE_PROGRAM="$$(command -v ninja)" > /dev/null
	@MAKEFLAGS= cmake --build build/native

# torch first, in the version that the constraints name: what depends on it then takes that one. The
# tools that build Greenroom are those of this environment, so `native` goes on where they stopped.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade --constraint constraints.txt pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch cmake editables hatchling ninja
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[dev]"
	touch $(READY)

# Tools of releases, in an environment of their own.
TOOLS := build/tools
$(TOOLS)/.ready: pyproject.toml
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --upgrade pip
	$(TOOLS)/bin/python -m pip install --quiet --group release
	touch $@

# The same model, text, memory and link twice. The experts are tiny, so a link that is slow on purpose
# stands in for the disk of a large model's: it carries one expert in the time of two layers.
DEMO := run demo "Once upon a time" --cache 25% --read-limit 40MB --live --temperature 0.8 --seed 7 --max-new-tokens 120 --raw
demo: export GREENROOM_LEARNED = off
demo: $(READY) native
	@printf '\n\033[1mReactive\033[0m: a quarter of the experts in memory by LRU, and each miss is waited for (link: 40 MB/s)\n\n'
	@$(BIN)/greenroom $(DEMO) --policy lru --prefetch off
	@printf '\n\033[1mGreenroom\033[0m: the same memory, link and text\n\n'
	@$(BIN)/greenroom $(DEMO) --prefetch auto --no-guard
	@printf '\nA token takes less time (TPOT): experts that come again soon stay in memory, so fewer are missed,'
	@printf '\nand reads of the next layer begin while this layer is computed, so that misses are waited for less\n(late: a read that was under way when its expert was needed).\n'
	@printf '\n\033[1mProof\033[0m: nothing of this changes what the model says\n\n'
	@$(BIN)/greenroom verify demo --cache 25%

# Two at a time: mypy without its cache takes 20 seconds of one core.
check: $(READY)
	$(MAKE) --no-print-directory --jobs 2 lint types imports test

# What is left out of `make check` because it takes longer. Continuous integration runs both.
ci: processes interpreted check-gpu-offline bench-smoke portable browser fuzz schedules faults docs without-options
# Its damaged files are the same in each run: `make fuzz` and `make soak` look for new ones.
ci: export GREENROOM_FUZZ_SEED = 1

# With the Python that has a torch for this machine's GPU: make check-gpu PYTHON=python3
GPU_PYTHON := $(if $(filter file,$(origin PYTHON)),$(or $(wildcard $(BIN)/python),$(PYTHON)),$(PYTHON))
GPU_TESTS := GREENROOM_TEST_GPU=1 PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON) -m pytest tests/gpu --timeout 300

# Most of the time goes to Triton's compiler, so tests run in processes; two of them fill the GPU's
# memory, and run alone and last.
check-gpu:
	$(GPU_TESTS) -n auto --dist worksteal -m "not fills_memory"
	$(GPU_TESTS) -m fills_memory

# Triton's kernels compiled for GPUs that are not here: is their machine code within its limits? What
# was compiled is kept in build/offline-gpu, so the second run takes seconds.
check-gpu-offline: $(READY) native
	TRITON_INTERPRET=0 OMP_NUM_THREADS=1 nice $(BIN)/python -m pytest -m offline_gpu tests/offline_gpu -n 2 --dist worksteal

# Tests and measurements on a GPU, 30 minutes; what OUT has already is not done again.
OUT ?= gpu-report
gpu-report:
	PYTHONPATH="src$${PYTHONPATH:+:$$PYTHONPATH}" $(GPU_PYTHON) benchmarks/gpu_report --out $(OUT) $(if $(PART),--part $(PART))

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell src native tests docs benchmarks examples *.py *.md Makefile

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports

# Three at a time: two cores have work while a test waits.
test: $(READY) native
	$(BIN)/python -m pytest -m "not slow and not bench_smoke and not process and not interpreted and not portable and not browser and not ray and not offline_gpu" --durations=10 -n 3 --dist worksteal

# Tests that start whole programs, for seconds each: servers, kills, interrupts, guarded memory.
processes: $(READY) native
	$(BIN)/python -m pytest -m "process and not slow" --durations=10 -n 2 --dist worksteal

# What is for a GPU, without one.
interpreted: $(READY) native
	$(BIN)/python -m pytest -m "interpreted and not slow" --durations=10 -n 3 --dist worksteal

# The kernels for aarch64, compiled by zig's Clang and run in an emulator of that processor.
portable: export PATH := $(CURDIR)/$(BIN):$(PATH)
portable: $(READY) native
	$(BIN)/python -m pip install --quiet --constraint constraints.txt unicorn ziglang
	@CXX="$(CURDIR)/$(BIN)/python -m ziglang c++ -target aarch64-linux-gnu" \
		cmake -S native -B build/aarch64 -G Ninja \
		-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
		-DCMAKE_LIBRARY_OUTPUT_DIRECTORY=$(CURDIR)/build/aarch64/lib > /dev/null
	@cmake --build build/aarch64
	$(BIN)/python -m pytest -m portable tests/runtime/kernels/native

# The live page and the report in a real browser, driven by Playwright. The browser is Debian's, not Playwright's own.
browser: $(READY) native
	@command -v chromium > /dev/null || test "$$(id -u)" != 0 || ! command -v apt-get > /dev/null || \
		{ apt-get update && apt-get install --yes --no-install-recommends chromium; } > /dev/null || true
	@command -v chromium > /dev/null || echo "make browser: skipped, because there is no chromium: apt-get install chromium"
	! command -v chromium > /dev/null || { \
		$(BIN)/python -m pip install --quiet --constraint constraints.txt playwright && \
		$(BIN)/python -m pytest -m browser --durations=10 tests/server/page tests/sim/page; }

# Replicas of the server on a Ray cluster whose nodes are processes. One cluster for all tests.
ray: $(READY) native
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[dev,ray]"
	$(BIN)/python -m pytest -m ray -p no:randomly --durations=10 tests/deploy/ray

# Every script of benchmarks/, on tiny inputs: does it run, and does it print what it should?
bench-smoke: $(READY) native
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[dev,bench]"
	$(BIN)/python -m pytest -m bench_smoke --durations=10 -n 2 --dist worksteal tests/benchmarks

# Each option of the scheduler can be deleted, and all: the checks of copies without. Tests of what
# knows no options are left out.
APART := tests/config tests/core tests/sim tests/plan tests/cli tests/hf/attach tests/hf/load \
	tests/hf/measure tests/hf/memory tests/hf/test_defaults.py tests/runtime/driver tests/server/api
without-options: $(READY) native
	TESTS="$(APART)" $(BIN)/python tests/without_options.py

# Damaged files of every format that is read, for so many seconds of the processor, or so many files;
# what is read wrongly is kept in tests/data/corpus, which `make check` reads again.
FUZZ_SECONDS ?= 60
fuzz: $(READY) native
	GREENROOM_FUZZ_SECONDS=$(FUZZ_SECONDS) GREENROOM_FUZZ_INPUTS=$(FUZZ_INPUTS) PYTHONPATH=src \
		$(BIN)/python -m tests.fuzz

# In environments of their own in build/versions; NAMES="oldest" tries one of them.
NAMES := oldest newest
versions: $(TOOLS)/.ready native
	for name in $(NAMES); do $(TOOLS)/bin/python release/try_versions.py $$name || exit 1; done

# Threads of driver, engine and their workers in 308 orders, of which `make check` tries a third.
schedules: $(READY) native
	GREENROOM_TEST_EXAMPLES=all $(BIN)/python -m pytest -m "not slow" tests/schedules/test_scenarios.py

# Every operation on files, memory and threads fails in turn, and the power is cut: at most FAULTS
# places of each kind in each scenario. `make soak` tries all.
FAULTS ?= 3
SCENARIOS ?= run run-pack pack trace-record batch pull serve serve-prompts
faults: $(READY) native
	PYTHONPATH=src $(BIN)/python -m tests.faults.run $(SCENARIOS) --most $(FAULTS)
	PYTHONPATH=src $(BIN)/python -m tests.faults.power_cuts --most $(FAULTS)

# The slow tests, all examples of those by hypothesis (`make check` tries a third), and what goes on
# where the last run ended. Counts add up in build/soak/counts.json.
SCHEDULES ?= 20000
KILLS ?= 1000
SERVER_MINUTES ?= 60
REQUESTS ?= 10000
soak: $(READY) native
	$(MAKE) --no-print-directory fuzz FUZZ_INPUTS=1000000
	GREENROOM_TEST_EXAMPLES=all $(BIN)/python -m pytest -m "slow or hypothesis"
	PYTHONPATH=src $(BIN)/python -m tests.schedules.run --schedules $(SCHEDULES)
	PYTHONPATH=src $(BIN)/python -m tests.schedules.mutants
	PYTHONPATH=src $(BIN)/python -m tests.mutants
	$(MAKE) --no-print-directory faults FAULTS=1000000 SCENARIOS=
	PYTHONPATH=src $(BIN)/python -m tests.faults.mutants
	PYTHONPATH=src $(BIN)/python -m tests.faults.soak --minutes $(SERVER_MINUTES)
	PYTHONPATH=src $(BIN)/python -m tests.kills.run --kills $(KILLS)
	PYTHONPATH=src $(BIN)/python -m tests.memory.run --requests $(REQUESTS)
	PYTHONPATH=src $(BIN)/python -m tests.memory.mutants
	PYTHONPATH=src $(BIN)/python -m tests.differential.run --seconds 3600
	$(MAKE) --no-print-directory versions

# The wheel is built from the sdist, so it has what anybody's build from the index would have. The
# libraries need an old libc alone, so auditwheel changes the wheel's tag and nothing else.
dist: $(TOOLS)/.ready
	rm -rf dist build/dist
	$(TOOLS)/bin/python -m build --outdir build/dist .
	PATH="$(CURDIR)/$(TOOLS)/bin:$$PATH" $(TOOLS)/bin/auditwheel repair --wheel-dir dist build/dist/*.whl
	mv build/dist/*.tar.gz dist/
	$(TOOLS)/bin/twine check --strict dist/*
	$(TOOLS)/bin/check-wheel-contents dist/*.whl
	$(TOOLS)/bin/python release/check_files.py dist

# The newest releases of the dependencies, as a user gets them; with CONSTRAINT=constraints.txt those
# of the tests, whose torch is for CPUs alone.
PYTHONS := 3.11 3.12 3.13 3.14
try-install: $(TOOLS)/.ready
	$(TOOLS)/bin/python release/try_install.py dist --python $(PYTHONS) --tools \
		$(if $(CONSTRAINT),--constraint $(CONSTRAINT))

# Of the first environment that `make try-install` left.
INSTALLED = $(or $(firstword $(wildcard build/install/*/bin/python)),$(error make try-install comes first))
sbom: $(TOOLS)/.ready
	$(TOOLS)/bin/cyclonedx-py environment --output-reproducible --output-format JSON \
		--output-file build/sbom.json $(INSTALLED)

licenses: $(TOOLS)/.ready
	$(TOOLS)/bin/pip-licenses --python=$(INSTALLED) --from=mixed --format=json > build/licenses.json
	$(TOOLS)/bin/python release/check_licenses.py < build/licenses.json

release:
	$(MAKE) --no-print-directory dist
	$(MAKE) --no-print-directory try-install
	$(MAKE) --no-print-directory sbom
	$(MAKE) --no-print-directory licenses

# The pages of docs/ and a reference made of the sources. Broken links are errors.
docs: $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# One model, from its download to its figures; ARGS are options of the script.
MODEL ?= demo
real-run: $(READY) native
	@$(BIN)/python benchmarks/real_run.py $(MODEL) $(ARGS)

bench: $(READY) native
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[dev,bench]"
	$(BIN)/python benchmarks/checkpoints.py bench-data
	$(BIN)/python benchmarks/floor.py bench-data/moe1.7b-zipf1.0 --table
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/decode.py bench-data --out bench-data/decode.jsonl
	$(BIN)/python benchmarks/resident.py bench-data
	$(BIN)/python benchmarks/startup.py

# The figures and tables of docs/papers.md, and those of docs/policies.md and docs/split.md that
# benchmarks/papers/ makes. Tables and figures are written to bench-data/papers.
TRACES ?= ../shared/traces
papers: $(READY) native papers-demo
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[dev,bench]"
	for script in llru_zipf llru_bounds promoe_predictors promoe_latency pre_attention; do \
		$(BIN)/python benchmarks/papers/$$script.py || exit 1; done
	$(BIN)/python benchmarks/papers/llru_zipf.py --split floor
	for script in llru_sweep llru_spread expert_reuse eamc_groups eamc_capacity long_context eamc_cover \
		eamc_shift eamc_layers moe_infinity_systems moepic_lcp moepic moepic_start \
		moepic_motivation moepic_systems moepic_tau promoe_skew promoe_batches prediction consistency \
		task_sets batches replicas hebf learned_state known_routing saved_stalls; do \
		$(BIN)/python benchmarks/papers/$$script.py --traces $(TRACES) || exit 1; done
	$(BIN)/python benchmarks/papers/moepic_lcp.py --traces $(TRACES) --models olmoe-1b-7b --limit 3000 \
		--out bench-data/papers/first-3000
	$(BIN)/python benchmarks/papers/moepic.py --traces $(TRACES) --ratio 4 --out bench-data/papers/ratio-4
	$(BIN)/python benchmarks/papers/task_sets.py --own bench-data/papers/demo/demo.trace
	$(BIN)/python benchmarks/papers/moepic.py --traces $(TRACES) --ratio 4 --out bench-data/papers/ratio-4 \
		--models mixtral-8x7b --capacity 37.5%
	$(BIN)/python benchmarks/papers/moepic_similarity.py --trace $(DEMO_DATA)/demo.trace
	$(BIN)/python benchmarks/similarity.py $(DEMO_DATA)/demo.trace
	$(BIN)/python benchmarks/papers/gap.py --traces $(TRACES) --policies "next-use;llru"
	$(BIN)/python benchmarks/papers/gap.py --traces $(TRACES) --policies next-use --learned --pin none \
		--out bench-data/papers/learned
	$(BIN)/python benchmarks/papers/gap.py --traces $(TRACES) --policies next-use --trained --pin none \
		--out bench-data/papers/trained
	$(BIN)/python benchmarks/papers/gap.py --traces $(TRACES) \
		--policies "next-use;s3fifo;llru;arc;marking;lcp;fifo;random;lfu;lfuda;sieve;lfu-in-cache" \
		--models olmoe-1b-7b --orders 1 --pin none --out bench-data/papers/classical
	$(BIN)/python benchmarks/papers/gap.py --traces $(TRACES) \
		--policies "moe-infinity;hobbit;hybrimoe;fate;fate:bias=0;fate:bias=0.5;next-use" \
		--orders 1 --pin none --out bench-data/papers/proposed
	for figure in $$(grep -o 'figures/[a-z-]*\.svg' docs/papers.md); do \
		cp bench-data/papers/$${figure##*/} docs/$$figure || exit 1; done

# The demo model's recording, for EASY-EP's score and similarities of hidden states: 84 prompts with
# labels, norms of outputs, gate inputs and next-gate's predictions.
SUBJECTS := lighthouse railway bread garden ship winter bridge teacher river music market clock
PROMPTS := "story|Once upon a time there was a %s" "history|The history of the %s" \
	"code|def count_%s(items):" "question|Question: what is a %s?" "letter|A letter about the %s" \
	"year|In the year 1850 the %s" "how-to|How to build a %s:"
DEMO_DATA := bench-data/papers/demo
papers-demo: export GREENROOM_LEARNED = off
papers-demo: $(READY) native
	mkdir -p $(DEMO_DATA)
	for s in $(SUBJECTS); do for f in $(PROMPTS); do \
		printf "{\"label\": \"$${f%%|*}\", \"prompt\": \"$${f#*|}\"}\n" $$s; done; done \
		> $(DEMO_DATA)/tasks.jsonl
	OMP_NUM_THREADS=1 $(BIN)/greenroom trace record demo --prompts $(DEMO_DATA)/tasks.jsonl \
		-o $(DEMO_DATA)/demo.trace --max-new-tokens 160 --cache 100% --weights --output-norms \
		--gate-inputs 1 --predict next-gate --temperature 0.8 --seed 7

# ProMoE's predictors, trained on the demo model, and the recordings that their figures replay. Both
# are in the repository, so that `make papers` trains nothing and has the same figures everywhere.
papers-train: $(READY) native
	$(BIN)/python benchmarks/papers/promoe_train.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
