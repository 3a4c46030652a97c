# make book   build the book and say where it is
# make test   unit tests, rules for notebooks, and every notebook run from top to bottom
# make pdf    the book as one PDF, printed by Chromium
# make bench  how fast random networks are sampled, with and without weights (about ten minutes, two cores at rest)
# Each target first makes .venv and installs what it needs; nothing outside this folder is touched.

.DEFAULT_GOAL := book
.PHONY: book pdf test bench site-test lint format clean

PYTHON ?= python3
# Notebooks and test modules run side by side, one process for each core.
JOBS ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
PYTEST_ARGS ?=
BENCH_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
HTML := _build/html/index.html

# A kernel of this environment, whatever kernels the user has installed elsewhere.
export JUPYTER_PREFER_ENV_PATH := 1
# Keeps debugpy, which ipykernel loads, from warning about frozen modules.
export PYDEVD_DISABLE_FILE_VALIDATION := 1

$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "This book needs Python 3.11 or newer. Try: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "$(PYTHON) -m venv failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "Installing into $(VENV) (a few minutes the first time; torch is large)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --progress-bar off -r requirements.txt
	@touch $@

book: $(READY)
	@# After a warning Sphinx would not read that page again and the next build would pass: make it read all of them.
	@$(BIN)/jupyter-book build . -W -n --keep-going || { rm -rf _build/.doctrees; exit 1; }
	@echo "The book: $(CURDIR)/$(HTML)"

# Needs a Chromium or Chrome. The other builders for paper: LaTeX takes gigabytes, pdfhtml a browser of its own.
pdf: $(READY)
	@$(BIN)/jupyter-book build . --builder singlehtml -W -n --keep-going || { rm -rf _build/.doctrees; exit 1; }
	@$(BIN)/python tools/pdf.py _build/singlehtml/intro.html _build/book.pdf

# One thread for each worker: two workers that both take every core are slower than one.
test: $(READY)
	@OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 MKL_NUM_THREADS=1 \
	  $(BIN)/python -m pytest --nbval-lax --nbval-current-env --nbval-cell-timeout 1200 \
	  -n $(JOBS) --dist loadscope --no-loadscope-reorder -m "not site" $(PYTEST_ARGS)

bench: $(READY)
	@$(BIN)/python benchmarks/propagation.py $(BENCH_ARGS)

# Needs a built book and a Chromium or Chrome.
site-test: $(READY)
	@$(BIN)/python -m pytest tests/test_site.py -n $(JOBS) --dist loadgroup $(PYTEST_ARGS)

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(READY)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf _build $(VENV) .pytest_cache .ruff_cache .hypothesis initlib.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
