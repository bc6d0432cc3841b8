# Every target does its own set-up in .venv; nothing needs to be installed first but Python 3.11.

SHELL := /usr/bin/env bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

RUN := scripts/run
SEEDS ?=
FIRST ?= $(shell date +%s)000
MINUTES ?= 10
WORKLOAD ?= append-batch
SEED ?=
ROUNDS ?=
ARGS ?=
# No browser where there is no display; root, as in a container, must be allowed by name.
LAB ?= $(if $(DISPLAY)$(WAYLAND_DISPLAY)$(filter Darwin,$(shell uname)),,--no-browser) \
    $(if $(filter 0,$(shell id -u)),--allow-root) --log-level=WARN

# Folders in the order in which they run, fast first; one that holds no tests yet is left out.
present = $(foreach name,$(1),$(if $(shell find tests/$(name) -name 'test_*.py' 2>/dev/null),tests/$(name)))
QUICK = $(call present,tidy unit golden fuzz)
SIMULATED = $(call present,property sim crash)
# The longest files first: a worker takes the next one when it has finished one.
REAL = $(call present,chaos fault integration)
SPARK = $(call present,notebooks spark)
SITE = $(call present,site)
# The PySparks that `make spark-versions` tests, oldest first. `make test` tests the one in .venv and,
# with the tests that are marked `core`, the oldest one.
SPARKS ?= 4.0.0 4.1.4 4.2.1 4.3.0
OLDEST_SPARK = $(firstword $(SPARKS))
# Tests that share a cluster run in one worker (`tests/conftest.py`), and tests start in the order in
# which they are named. Three Sparks keep two cores busy; of tests with daemons, which often wait,
# five do.
IN_ORDER = --dist loadgroup --no-loadscope-reorder
THREE = -n 3 $(IN_ORDER)
FIVE = -n 5 $(IN_ORDER)
# A stream's Python process has 10 s to start, which Spark does not let anyone change; on a machine
# with many other processes it needs longer. Nothing else is tried twice.
SPARK_AGAIN = --reruns 5 --only-rerun 'Python worker failed to connect back'
# Than cores: of the quick tests, too, some wait.
ONE_MORE := $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)

.PHONY: help demo test test-core test-spark spark-versions check sim fuzz chaos bench notebook docs site local format

help: ## Show this list
	@printf 'make TARGET\n\n'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | while IFS=$$'\t' read -r name text; do \
	    printf '  %-14s %s\n' "$$name" "$$text"; done
	@printf '\nNeeds Python 3.11 or newer; everything else goes into .venv by itself.\n'

demo: ## 336,776 flights through Spark into three replicas and back, then a conflict of dispatchers
	@scripts/bootstrap run
	@$(RUN) python examples/demo.py $(ARGS)

test: check ## The simulator, the site, real daemons, faults, Spark, notebooks, after `check`
	@$(RUN) python -m tests.java_classes
	@scripts/bootstrap site
	@scripts/spark_version $(OLDEST_SPARK)
	@$(MAKE) test-core test-spark

# On two cores one after the other; with more cores, `make -j 2 test` runs both at the same time.
# Tests that compute or sync all the time would delay the daemons of others, so they have a run.
# The tests of the site share one build of it, so one worker runs them, and starts first.
test-core:
	@$(RUN) python -m pytest -n auto $(IN_ORDER) $(SITE) $(SIMULATED) $(ARGS)
	@$(RUN) python -m pytest $(FIVE) -m 'not slow' $(REAL) $(ARGS)

# With the oldest Spark, the file with most tests starts first: it takes longest.
test-spark:
	@$(RUN) python -m pytest $(THREE) $(SPARK_AGAIN) -m 'not versions and not slow' $(SPARK) $(ARGS)
	@PYSPARK_VERSION=$(OLDEST_SPARK) $(RUN) python -m tests.java_classes
	@PYSPARK_VERSION=$(OLDEST_SPARK) $(RUN) python -m tests.table_libraries
	@PYSPARK_VERSION=$(OLDEST_SPARK) $(RUN) python -m pytest -n 2 --dist loadgroup $(SPARK_AGAIN) \
	    -m 'core and not versions and not slow' tests/spark $(ARGS)

# The longest tests: further faults, databases and pages of the documentation.
.PHONY: test-slow
test-slow: ## The tests that `make test` leaves out, because each takes long; before a release
	@scripts/bootstrap dev
	@$(RUN) python -m tests.java_classes
	@scripts/spark_version $(OLDEST_SPARK)
	@$(RUN) python -m pytest $(FIVE) -m slow $(REAL) $(ARGS)
	@$(RUN) python -m pytest $(THREE) $(SPARK_AGAIN) -m 'slow and not versions' $(SPARK) $(ARGS)
	@PYSPARK_VERSION=$(OLDEST_SPARK) $(RUN) python -m tests.java_classes
	@PYSPARK_VERSION=$(OLDEST_SPARK) $(RUN) python -m tests.table_libraries
	@PYSPARK_VERSION=$(OLDEST_SPARK) $(RUN) python -m pytest -n 2 --dist loadgroup $(SPARK_AGAIN) \
	    -m 'core and slow and not versions' tests/spark $(ARGS)

spark-versions: ## The tests of waltz_spark with each PySpark: make spark-versions SPARKS='4.0.5 4.2.0'
	@scripts/bootstrap dev
	@for version in $(SPARKS); do \
	    scripts/spark_version $$version; export PYSPARK_VERSION=$$version; echo "PySpark $$version"; \
	    $(RUN) python -m tests.java_classes; \
	    $(RUN) python -m tests.table_libraries; \
	    $(RUN) python -m pytest -n $(ONE_MORE) tests/unit/spark $(ARGS); \
	    $(RUN) python -m pytest $(THREE) $(SPARK_AGAIN) tests/spark $(ARGS); done

check: ## Style, spelling, types, layers, and the quick tests; under a minute
	@scripts/bootstrap dev
	@$(RUN) ruff format --check --quiet . || { echo 'not formatted: run make format'; exit 1; }
	@$(RUN) ruff check --quiet .
	@$(RUN) typos --format brief
	@$(RUN) python -m mypy
	@$(RUN) lint-imports | sed -n "/^Contracts/,\$$p"
	@$(RUN) python -m pytest -n $(ONE_MORE) --dist loadgroup $(QUICK) $(ARGS)

# Each tool has an environment of its own, of some hundred megabytes, so `make test` leaves them out.
.PHONY: test-tools
test-tools: ## The examples for Airflow and dbt, each with an installation of the tool in build/tools
	@scripts/bootstrap dev
	@for tool in airflow dbt; do scripts/tool_environment $$tool; done
	@$(RUN) python -m pytest tests/tools $(ARGS)

.PHONY: wheel test-wheel
wheel: ## Build the wheels and the source distribution into build/dist
	@scripts/bootstrap release
	@$(RUN) scripts/build_wheel

test-wheel: wheel ## Install the wheel outside of the checkout, and run the quick tests with it
	@$(RUN) scripts/test_wheel $(ARGS)

format: ## Put the sources into the one format
	@scripts/bootstrap dev
	@$(RUN) ruff check --quiet --fix . ; $(RUN) ruff format .

sim: ## The simulator on all cores with new seeds: make sim MINUTES=60, make sim SEEDS=20000
	@scripts/bootstrap run
	@$(RUN) python -m waltz_sim $(if $(SEEDS),--seeds $(SEEDS) --first $(FIRST),--minutes $(MINUTES)) \
	    --report build/sim-report.md $(ARGS)

fuzz: ## New bytes for all decoders, after the kept ones: make fuzz MINUTES=10
	@scripts/bootstrap dev
	@$(RUN) python -m tests.fuzz --seconds $$(($(MINUTES) * 60)) $(ARGS)

chaos: ## Real daemons, cut off, frozen and killed by seeds: make chaos MINUTES=5, make chaos SEED=17 ROUNDS=1
	@scripts/bootstrap dev
	@$(RUN) python -m tests.chaos --minutes $(if $(filter file,$(origin MINUTES)),5,$(MINUTES)) \
	    $(if $(SEED),--seed $(SEED)) $(if $(ROUNDS),--rounds $(ROUNDS)) $(ARGS)

bench: ## Measure a local cluster: make bench WORKLOAD=replay ARGS='--seconds 10'
	@scripts/bootstrap bench
	@$(RUN) waltz-core bench $(WORKLOAD) --json $(ARGS)

notebook: ## Open the notebooks in JupyterLab; without a display it prints the URL; ctrl-C ends it
	@scripts/bootstrap notebook
	@$(RUN) jupyter lab $(LAB) $(ARGS) examples/notebooks

docs: ## Write the generated files again: the samples in conf/ and the tables in docs/
	@scripts/bootstrap dev
	@$(RUN) python -m scripts.generate_docs

site: ## The documentation as a website with search and API reference, in build/site/
	@scripts/bootstrap site
	@rm -rf build/site
	@$(RUN) python -m sphinx -q -W --keep-going -E -d build/site-doctrees -c docs/site . build/site $(ARGS)
	@echo 'site: open build/site/index.html'

local: ## A whole cluster on this machine: ZooKeeper, three storages, two servers
	@scripts/bootstrap run
	@$(RUN) waltz-core local up $(ARGS)
