PYTHON ?= python3
BIN := .venv/bin

.PHONY: test check bench format clean

# constraints.txt keeps torch at a release whose CPU build is small; drop it to install a CUDA build.
.venv/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# One thread: the tests are many small tensors, and threads that wait for each other slow them down.
test: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

check: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: .venv/installed
	$(BIN)/python benchmarks/certify_speed.py

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
