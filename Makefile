# `make quickstart` and `make test` work from a fresh clone: each makes .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SMOLLM2 := models/smollm2-135m-instruct

# The newer Megatron-Core wants Python 3.12: what touches Megatron or vLLM is tested there too.
PYTHON312 ?= python3.12
TESTS312 := tests/policy tests/weight_sync tests/predictor tests/algorithm tests/ops tests/rollout/test_vllm_engine.py \
	tests/rollout/test_pool.py

.PHONY: install install-launch install-py312 quickstart test test-py312 lint kernels bench clean

install: $(STAMP)

$(STAMP): pyproject.toml setup.py requirements-cpu.txt tools/install.sh locks/cpu-py311.txt
	PYTHON=$(PYTHON) bash tools/install.sh $(VENV)
	touch $@

# NeMo-Run conflicts with vLLM's requirements: `trace-megatron launch` has an environment of its own.
install-launch: .venv-launch/.installed

.venv-launch/.installed: pyproject.toml tools/install_launch.sh locks/launch.txt
	PYTHON=$(PYTHON) bash tools/install_launch.sh .venv-launch
	touch $@

install-py312: .venv-py312/.installed

.venv-py312/.installed: pyproject.toml setup.py tools/install.sh locks/cpu-py312.txt
	PYTHON=$(PYTHON312) bash tools/install.sh .venv-py312
	touch $@

$(SMOLLM2): $(STAMP)
	$(BIN)/python tools/fetch_smollm2.py $@

quickstart: $(STAMP) $(SMOLLM2)
	$(BIN)/trace-megatron train -c configs/quickstart.yaml

test: $(STAMP) $(SMOLLM2)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 15

test-py312: .venv-py312/.installed
	OMP_NUM_THREADS=1 .venv-py312/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 15 $(TESTS312)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

kernels: $(STAMP)
	$(BIN)/python tools/compile_kernels.py

clean:
	rm -rf build *.egg-info .pytest_cache .ruff_cache .hypothesis
