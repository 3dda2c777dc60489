# make demo   train, register, explain and look at a small model     make test       the default test suite
# make check  ruff and mypy                                         make test-slow  the long tests
# make mutants  how many changed operators the tests notice
# make lock   requirements.lock from constraints.txt                make sbom       what is installed, as CycloneDX JSON
# make pip-audit  known vulnerabilities of the locked packages
# Packages come from requirements.lock, checked against their hashes; `make setup LOCKED=0` takes the versions of
# constraints.txt without hashes, for a Python, a system or an index that the lock does not know.
PYTHON ?= python3
BIN := .venv/bin
# Workers of the test suite; each takes about 2 GB.
JOBS ?= 2
export PIP_DISABLE_PIP_VERSION_CHECK := 1

LOCKED ?= 1
PIP := $(BIN)/python -m pip --quiet install

.PHONY: setup demo test test-slow mutants check clean lock sbom pip-audit
setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt requirements.lock
	$(PYTHON) -m venv .venv
ifeq ($(LOCKED),1)
	$(PIP) --require-hashes --no-deps --requirement requirements.lock || { echo "the locked packages cannot be installed here (above); make setup LOCKED=0 takes constraints.txt without hashes" >&2; exit 1; }
	$(PIP) --no-deps --no-build-isolation --editable .
	$(BIN)/python -m pip --quiet check
else
	$(PIP) --upgrade --constraint constraints.txt pip setuptools
	$(PIP) --constraint constraints.txt --editable '.[serve,onnx,oidc,auth,sign,dev]'
endif
	touch $@

lock: setup
	$(BIN)/python -m tests.locking

sbom: setup
	$(BIN)/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml --output-file sbom.json $(BIN)/python

pip-audit: setup
	$(BIN)/pip-audit --requirement requirements.lock --require-hashes --disable-pip --strict

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
	rm -rf .venv .types demo sbom.json build *.egg-info .pytest_cache .mypy_cache .ruff_cache .mutants.json
