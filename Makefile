# Every target works on a machine where nothing was installed: it makes .venv first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test check bench clean

# `make train ARGS="--run.dir runs/mine --data.source 'books/*.txt'"` passes flags on.
train: .venv/installed
	$(BIN)/python train.py configs/quick.toml $(ARGS)

test: .venv/installed-test
	$(BIN)/python -m pytest -n 2 $(ARGS)

check: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# One script of benchmarks/ by its name, or all of them, one after the other; some fetch their data from the network:
#   make bench BENCH=attention ARGS="-o attention.png"
BENCH ?= attention step_speed time_to_loss sampling startup data probes
bench: .venv/installed-test
	for name in $(BENCH); do $(BIN)/python benchmarks/$$name.py $(ARGS) || exit 1; done

clean:
	rm -rf .venv build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "glassgpt needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

.venv/installed-test: pyproject.toml | .venv/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	touch $@ .venv/installed
