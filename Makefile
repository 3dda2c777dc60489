# make demo   train, register, explain and look at a small model     make test       the default test suite
# make check  ruff and mypy                                         make test-slow  the long tests
# make mutants  how many changed operators the tests notice
# make lock   requirements.lock from constraints.txt                make sbom       what is installed, as CycloneDX JSON
# make docs   the site of docs/, in site/                        make release  wheel and sources in dist/, checked
# make pip-audit  known vulnerabilities of the locked packages    make results    docs/results.md from stored results
# Packages come from requirements.lock, checked against their hashes; `make setup LOCKED=0` takes the versions of
# constraints.txt without hashes, for a Python, a system or an index that the lock does not know.
PYTHON ?= python3
BIN := .venv/bin
# Workers of the test suite; each takes about 2 GB.
JOBS ?= 2
export PIP_DISABLE_PIP_VERSION_CHECK := 1

LOCKED ?= 1
PIP := $(BIN)/python -m pip --quiet install

.PHONY: results pictures setup demo test test-slow mutants check clean lock sbom pip-audit docs release types
setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt requirements.lock
	$(PYTHON) -m venv .venv
ifeq ($(LOCKED),1)
	$(PIP) --require-hashes --no-deps --requirement requirements.lock || { echo "the locked packages cannot be installed here (above); make setup LOCKED=0 takes constraints.txt without hashes" >&2; exit 1; }
	$(PIP) --no-deps --no-build-isolation --editable .
	$(BIN)/python -m pip --quiet check
else
	$(PIP) --upgrade --constraint constraints.txt pip setuptools
	$(PIP) --constraint constraints.txt --editable '.[serve,onnx,oidc,auth,sign,s3,cluster,dev]'
endif
	touch $@

lock: setup
	$(BIN)/python -m tests.locking

sbom: setup
	$(BIN)/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml --output-file sbom.json $(BIN)/python

pip-audit: setup
	$(BIN)/pip-audit --requirement requirements.lock --require-hashes --disable-pip --strict || { echo "pip-audit: a package above has a known vulnerability, or the database of them could not be asked: it needs the network" >&2; exit 1; }

demo: setup
	$(BIN)/auditor demo --dir demo

test: setup
	$(BIN)/python -m pytest -q -m "not slow" -n $(JOBS) --dist loadfile

test-slow: setup
	$(BIN)/python -m pytest -q -m slow

# options: make mutants ARGS='--modules kernels/admm --n 40'
mutants: setup
	$(BIN)/python -m tests.mutants $(ARGS)

# The folders under their import names, for programs that read the sources without importing them.
types:
	rm -rf .types && mkdir -p .types/auditor && ln -s $(CURDIR)/auditor/* .types/auditor/
	for part in kernels plugins service; do if [ -d $$part ]; then ln -s $(CURDIR)/$$part .types/auditor/$$part; fi; done

check: setup types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd .types && ../$(BIN)/mypy --cache-dir ../.mypy_cache --config-file ../pyproject.toml -p auditor

# Needs no network: the notebooks run on pictures that they draw.
docs: setup types
	PYTHONPATH=$(CURDIR) $(BIN)/python -m mkdocs build --quiet

# docs/results.md from what the benchmarks stored.
results: setup
	$(BIN)/python -m tests.benchmarks.results_page

# What README and the pages show of the demo: its picture, its terminal, a sheet per kind.
pictures: setup
	$(BIN)/python docs/record.py

# Builds from the sources, and the wheel from these; a warning is an error. tests.release looks at what is in them.
release: setup
	rm -rf dist build *.egg-info
	$(BIN)/python -m tests.release

clean:
	rm -rf .venv .types demo site dist sbom.json build *.egg-info .pytest_cache .mypy_cache .ruff_cache .mutants.json
