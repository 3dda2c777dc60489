# make demo   train, register, explain and look at a small model     make test       the default test suite
# make check  ruff and mypy                                         make test-slow  the long tests
# make mutants  how many changed operators the tests notice
PYTHON ?= python3
BIN := .venv/bin
# Workers of the test suite; each takes about 2 GB.
JOBS ?= 2
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: setup demo test test-slow mutants check clean
setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade --constraint constraints.txt pip setuptools
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[serve,onnx,dev]'
	touch $@

demo: setup
	$(BIN)/auditor demo --dir demo

test: setup
	$(BIN)/python -m pytest -q -m "not slow" -n $(JOBS) --dist loadfile

test-slow: setup
	$(BIN)/python -m pytest -q -m slow

# options: make mutants ARGS='--modules kernels/admm --n 40'
mutants: setup
	$(BIN)/python -m tests.mutants $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf .types && mkdir -p .types/auditor && ln -s $(CURDIR)/auditor/* .types/auditor/
	for part in kernels plugins service; do if [ -d $$part ]; then ln -s $(CURDIR)/$$part .types/auditor/$$part; fi; done
	cd .types && ../$(BIN)/mypy --cache-dir ../.mypy_cache --config-file ../pyproject.toml -p auditor

clean:
	rm -rf .venv .types demo build *.egg-info .pytest_cache .mypy_cache .ruff_cache .mutants.json
