# `make quickstart` and `make test` work from a fresh clone: each makes .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SMOLLM2 := models/smollm2-135m-instruct

.PHONY: install install-launch quickstart test lint kernels bench clean

install: $(STAMP)

$(STAMP): pyproject.toml setup.py requirements-cpu.txt tools/install.sh
	PYTHON=$(PYTHON) bash tools/install.sh $(VENV)
	touch $@

# NeMo-Run conflicts with vLLM's requirements: `trace-megatron launch` has an environment of its own.
install-launch: .venv-launch/.installed

.venv-launch/.installed: pyproject.toml tools/install_launch.sh
	PYTHON=$(PYTHON) bash tools/install_launch.sh .venv-launch
	touch $@

$(SMOLLM2): $(STAMP)
	$(BIN)/python tools/fetch_smollm2.py $@

quickstart: $(STAMP) $(SMOLLM2)
	$(BIN)/trace-megatron train -c configs/quickstart.yaml

test: $(STAMP) $(SMOLLM2)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --durations 15

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

kernels: $(STAMP)
	$(BIN)/python tools/compile_kernels.py

clean:
	rm -rf build *.egg-info .pytest_cache .ruff_cache .hypothesis
