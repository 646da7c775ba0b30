PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow test-all coverage check mutants bench docs site format clean

# The embedded model on the embedded 500 images: a table here, and runs/cifar10-sample-5x5/report.html.
demo: .venv/package
	$(BIN)/patchguard certify --patch 5 --patch 2

# constraints.txt keeps torch at a release whose CPU build is small; drop it to install a CUDA build.
.venv/package: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

.venv/installed: .venv/package
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# Two processes of one thread: the tests are many small tensors, and threads that wait for each other slow them down.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

# The same examples in every run.
test: .venv/installed
	$(PYTEST) --hypothesis-profile=ci -m "not slow"

test-slow: .venv/installed
	$(PYTEST) --hypothesis-profile=ci -m slow

# Everything, with examples that nobody has tried before.
test-all: .venv/installed
	$(PYTEST) --hypothesis-profile=random

# Lines that tests reach: make coverage TESTS=tests/training
TESTS ?= tests
coverage: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m coverage run -m pytest -m "not slow" $(TESTS)
	$(BIN)/python -m coverage report --show-missing --skip-covered

check: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Mistakes planted one at a time in the code that decides proofs: 12 per module, the same ones every time.
# `make mutants MUTANTS="--sample 40 --module defenses/evidence.py"` looks closer; tests/MUTANTS.md explains survivors.
mutants: .venv/installed
	$(BIN)/python tests/mutants/run.py $(MUTANTS)

bench: .venv/installed
	$(BIN)/python benchmarks/certify_speed.py

docs: .venv/installed
	$(BIN)/python docs/make_cli.py
	$(BIN)/python docs/make_recipe_settings.py
	$(BIN)/python docs/make_reproduction.py
	$(BIN)/python docs/make_concept.py

# The documentation site, build/site/index.html: it needs no network to be read. Warnings stop the build.
site: .venv/site
	$(BIN)/python docs/make_site.py
	$(BIN)/zensical build --strict --clean

.venv/site: .venv/package
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage
