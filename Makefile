# `make demo` and `make test` are all a newcomer needs. Both make their own environment in .venv.
PYTHON ?= python3
BIN := .venv/bin
OUT ?= out/bert

.PHONY: demo test typed forks fuzz gpu-dry lint docs clean

demo: .venv/demo
	$(BIN)/effcompile optimize examples/bert.py --max-error 0.031 -o $(OUT)

# Forks by thousands, which takes a process without torch a third of the time, and of one late in the suite
# far less.
FORKS := tests/fuzz/test_saves_fuzz.py

# Of every import of every process that the tests start, Python would compile what it may not keep.
test: export PYTHONDONTWRITEBYTECODE =

# Examples of a page share their names, so that a page is run by one process. worksteal: tests of a file,
# which share what they capture, stay in one process where they can.
test: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory -j 2 typed forks
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile docs
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal tests --ignore $(FORKS)

# Side by side: two processes of mypy take as long as one beside these tests.
typed: .venv/dev
	$(BIN)/mypy
	$(BIN)/mypy tests/test_overloads.py

# mypy takes longer: meanwhile Python compiles all tests of a fresh clone once, which else both processes below
# do, each for itself, 14 s long.
forks: .venv/dev
	OMP_NUM_THREADS=1 $(BIN)/pytest $(FORKS)
	OMP_NUM_THREADS=1 $(BIN)/pytest --collect-only -q tests > /dev/null

# Takes hours: about as many random cases of training and of inference (2,000 of files), drawn anew at every
# run; the suite runs a few fixed ones. tests/fuzz/soak.py runs one kind of them from a seed, goes on after a
# failure, and writes down how to make it again.
# First the families of models of which the suite has one of each kind, all of them.
CASES ?= 5000
EVERY := $(addprefix tests/,capture/test_known_values.py compiler/test_training_feasible.py \
	compiler/test_training_microbatch.py parallel/test_data_parallel_ranks.py parallel/test_split_ranks.py \
	sites/attention/mask/test_recover.py sites/attention/find/test_match_families.py \
	sites/attention/test_forms_of_attention.py compiler/generation backends/triton/test_interpreted.py \
	passes/test_pointwise.py)
fuzz: .venv/dev
	EFFCOMPILE_EVERY=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 $(EVERY)
	EFFCOMPILE_FUZZ_CASES=$(CASES) OMP_NUM_THREADS=1 $(BIN)/pytest tests/fuzz -n 2

# What can be shown of the GPU's path without one, with the two tritons that its kernels are made for; some
# thirty minutes.
OTHER_TRITON ?= 3.6.0
gpu-dry: .venv/dev
	$(BIN)/pip install -qq --no-deps --upgrade --target .venv/triton-$(OTHER_TRITON) triton==$(OTHER_TRITON)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 tests/backends/triton
	PYTHONPATH=.venv/triton-$(OTHER_TRITON) OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 tests/backends/triton
	EFFCOMPILE_EVERY_GPU=1 OMP_NUM_THREADS=1 $(BIN)/pytest tests/backends/triton/test_amd.py \
		tests/backends/triton/test_gpu_benchmark.py tests/backends/triton/test_triton_aot.py
	EFFCOMPILE_FAKE_GPU_SCHEDULES=40 OMP_NUM_THREADS=1 $(BIN)/pytest tests/schedules/test_reserved.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/gpu.py --dry
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/gpu_model.py

docs: .venv/docs
	$(BIN)/mkdocs build -q
	@echo "out/site/index.html"

lint: .venv/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(MAKE) --no-print-directory typed

# The stamps install again when the dependencies change. -qq keeps pip's remarks about its own configuration
# off the screen.
.venv/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "effcompile needs Python 3.11 or newer: make PYTHON=python3.11 ..."; exit 2; }
	$(PYTHON) -m venv .venv

.venv/demo: .venv/bin/pip pyproject.toml constraints.txt
	@echo "Installing torch, ONNX Runtime and transformers into .venv (one to two minutes, once) ..."
	@$(BIN)/pip install -qq -c constraints.txt -e '.[hf,torchao]'
	@touch $@

.venv/dev: .venv/bin/pip pyproject.toml constraints.txt
	@echo "Installing effcompile and its test tools into .venv (one to two minutes, once) ..."
	@$(BIN)/pip install -qq -c constraints.txt -e '.[dev]'
	@touch $@ .venv/demo

.venv/docs: .venv/dev
	@$(BIN)/pip install -qq -c constraints.txt -e '.[docs]'
	@touch $@

clean:
	rm -rf .venv out build dist .pytest_cache .mypy_cache .ruff_cache
