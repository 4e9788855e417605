# `make quick` while you work, `make test` before you push. Every target sets up .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The kernels run on a CPU in Triton's interpreter; the variable must be set before they are imported.
export TRITON_INTERPRET ?= 1
# Two processes; a file's tests stay in one process, because they share fixtures.
PARALLEL := -n 2 --dist loadfile
# The tests of `make quick`: the maths, its modules and kernel, the models, the loss, the store, the pages.
QUICK := $(patsubst %,tests/test_%.py,rotation theory phases query_times modules readout models loss data_sequences \
  data_protocols atomic docs) --deselect 'tests/test_phases.py::test_circular_phase_error_against_rationals[triton]' \
  --deselect tests/test_modules.py::test_compile_fullgraph

.PHONY: setup demo reproduce quick test lint unit test-spark test-serve test-compile test-export test-ranks fuzz clean
.DEFAULT_GOAL := test

setup: $(VENV)/.installed

# torch goes first and exactly pinned: an open range would pull several GB of CUDA packages on a CPU machine.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "trope needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,data,demo,spark,figures,serve,redis,ann,export,abtest]'
	touch $@

# A year of real groceries, two small models and what they recommend over the year; a second run skips what is done.
demo: setup
	$(BIN)/python -m trope demo

# A recipe of configs/, from raw events to report: make reproduce DATA=globo-news SOURCE=clicks.parquet JOBS=3
# (docs/reproduce.md). TRITON_INTERPRET is for tests; on a GPU the kernels must be compiled.
reproduce: setup
	env -u TRITON_INTERPRET $(BIN)/python -m trope reproduce $(DATA) $(if $(SOURCE),--source $(SOURCE)) \
	  $(if $(JOBS),--jobs $(JOBS)) $(if $(SEEDS),--seeds $(SEEDS)) $(foreach setting,$(SET),--set $(setting))

# Under a minute on two idle cores.
quick: lint
	$(BIN)/python -m pytest $(PARALLEL) --durations=3 $(QUICK)

# About eight minutes on two idle cores.
test: lint unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: setup
	$(BIN)/python -m pytest $(PARALLEL)

# The same preparation on Spark in local mode; needs Java 17.
test-spark: setup
	$(BIN)/python -m pytest -m spark

# Servers that are started, killed and loaded; the tests of Redis need redis-server.
test-serve: setup
	$(BIN)/python -m pytest -m serve

# Every kernel compiled for a GPU, without one: by the oldest Triton of pyproject.toml, which refuses what newer ones take,
# and by the NVRTC of the CUDA build of that torch.
OLDEST_TRITON := 3.6.0
NVRTC := 13.0.88
test-compile: setup build/triton-$(OLDEST_TRITON) build/nvrtc-$(NVRTC)
	PYTHONPATH=build/triton-$(OLDEST_TRITON) TROPE_NVRTC=build/nvrtc-$(NVRTC) $(BIN)/python -m pytest -m compile

build/nvrtc-$(NVRTC): | setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ nvidia-cuda-nvrtc==$(NVRTC)

build/triton-$(OLDEST_TRITON): | setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $@ triton==$(OLDEST_TRITON)

# Several processes under torchrun, one of them killed. As root also several machines (network namespaces), killed and cut off.
test-ranks: setup
	$(BIN)/python -m pytest -m ranks

# Six models in three formats; needs a C++ compiler, and minutes for each model.
test-export: setup
	$(BIN)/python -m pytest -m export

# Random logs against an oracle, damaged folders, kills (SECURITY.md): make fuzz SECONDS=60 SEED=0
SECONDS ?= 60
SEED ?= 0
fuzz: setup
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) --seed $(SEED)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build dist
