PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEVELOPED := $(VENV)/.developed

PROMPT ?= Repeat this text word for word: The lighthouse stands on a cliff above the sea. Every evening the keeper \
climbs the stairs and lights the lamp. Ships far out at sea see the light and keep away from the rocks below the cliff.

.PHONY: demo test check bench gpu-check clean

demo: $(INSTALLED)
	$(BIN)/paceline generate "$(PROMPT)" --compare --max-tokens 160

# Tests with tiny models use one thread each and run side by side; a real model takes every core, so those run alone.
test: $(DEVELOPED)
	$(BIN)/pytest -n logical -m 'not real_model'
	$(BIN)/pytest -m real_model

check: $(DEVELOPED)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy

bench: $(INSTALLED)
	$(BIN)/paceline bench

gpu-check: $(DEVELOPED)
	$(BIN)/python benchmarks/gpu_check.py

# pip rather than a faster installer: torch's CPU build is found through pip's own configuration.
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(DEVELOPED): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist src/*.egg-info
