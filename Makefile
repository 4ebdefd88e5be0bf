# make demo   export a real model and ask it something (PROMPT="…" asks something else)
# make test   the whole test suite
# make tokenizers   more published vocabularies for the tests (155 MB), once; the tests skip what is not there
# make lint   ruff and mypy
# Everything is installed into .venv, and made again only when its sources changed.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
NATIVE := $(shell find plugins -name '*.cc' -o -name '*.h' -o -name '*.inc' -o -name CMakeLists.txt)

# As it was given: a dollar sign in a prompt is not a variable.
override export PROMPT := $(value PROMPT)

.PHONY: demo test tokenizers lint clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	@$(BIN)/python -m pagelet.tools.demo --prompt "$$PROMPT"

test: $(VENV)/.test
	@$(BIN)/python tests/fetch_vocabularies.py llama.cpp mistral_common
	$(BIN)/python -m pytest

tokenizers: $(VENV)/.test
	@$(BIN)/python tests/fetch_vocabularies.py

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "pagelet needs Python 3.10 or newer; say which with: make PYTHON=python3.12 …"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "Python has no venv module; on Debian or Ubuntu: apt install python3-venv"; exit 1; }

# One stamp for each set of extras; all of them (re)build the op library when its sources are newer.
$(VENV)/.demo: pyproject.toml $(NATIVE) | $(VENV)/bin/pip
	@echo "setting up $(VENV): dependencies and the native ops, about two minutes, once"
	@$(BIN)/pip install --quiet --editable '.[export]'
	@touch $@

$(VENV)/.test: pyproject.toml $(NATIVE) | $(VENV)/bin/pip
	@echo "setting up $(VENV) for the tests: some minutes, once"
	@$(BIN)/pip install --quiet --editable '.[test]'
	@touch $@

$(VENV)/.lint: pyproject.toml $(NATIVE) | $(VENV)/bin/pip
	$(BIN)/pip install --quiet --editable '.[test,lint]'
	@touch $@

clean:
	rm -rf $(VENV) build
