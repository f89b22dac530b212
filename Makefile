PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEVELOPED := $(VENV)/.developed

PROMPT ?= Write a Python function that adds the numbers of a list, then the same function for multiplying them, each \
with a docstring and an example.

.PHONY: demo test check check-native bench gpu-check clean

demo: $(INSTALLED)
	$(BIN)/paceline generate "$(PROMPT)" --compare --max-tokens 200

# Tests with tiny models use one thread each and run side by side; a real model takes every core, so those run alone.
test: $(DEVELOPED)
	$(BIN)/pytest -n logical -m 'not real_model'
	$(BIN)/pytest -m real_model

check: $(DEVELOPED)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy

# The kernels' own tests under sanitizers; SANITIZE=thread looks for races instead.
SANITIZE ?= address,undefined
check-native: $(DEVELOPED)
	$(BIN)/cmake -S native -B build/native-tests -DPL_TESTS=ON -DPL_SANITIZE=$(SANITIZE)
	$(BIN)/cmake --build build/native-tests --parallel
	$(BIN)/ctest --test-dir build/native-tests --output-on-failure

bench: $(INSTALLED)
	$(BIN)/paceline bench

gpu-check: $(DEVELOPED)
	$(BIN)/python benchmarks/gpu_check.py

# What the installed kernels are built from; everything else is used in place.
SOURCES := pyproject.toml constraints.txt native/CMakeLists.txt $(shell find native/include native/src -type f)

# pip rather than a faster installer: torch's CPU build is found through pip's own configuration.
define install
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '$(1)'
	@ls $(VENV)/lib/python*/site-packages/paceline/native/libpaceline.so > /dev/null 2>&1 || \
	echo 'note: without the CPU kernels; they need a C++ compiler, and "$(BIN)/pip install -v -e ." shows what failed'
endef

$(INSTALLED): $(SOURCES)
	$(call install,.)
	touch $@

$(DEVELOPED): $(SOURCES)
	$(call install,.[dev])
	touch $@ $(INSTALLED)

clean:
	rm -rf $(VENV) build dist
