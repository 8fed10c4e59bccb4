# `make` lists the targets. Each target creates .venv if needed: with uv if it is installed, else with venv and pip.
# PYTHON=python3.12 selects the interpreter, and UV= uses pip even if uv is installed. STACK=resolvable uses the versions
# that pip resolves to by itself, with any target, in an environment of its own: `make install STACK=resolvable`.

PYTHON ?=
STACK ?= current
UV ?= $(shell command -v uv 2>/dev/null)
PYTHONS := python3.11 python3.12 python3.10 python3.13 python3
EXTRAS := quickstart,dev
VENV := .venv$(if $(filter-out current,$(STACK)),-$(STACK))
CONSTRAINTS := constraints-$(STACK).txt
BIN := $(VENV)/bin
CODE := $(wildcard diffusion tests benchmarks docs/*.py run.py)

RECIPE := yamls/quickstart.yaml
IMAGES := data/openmoji/64px/index.json
LATENTS := data/openmoji-latents/openmoji/index.json
RUN := runs/quickstart

# Tests and quickstart need no model hub. Offline, an accidental download fails immediately instead of succeeding.
OFFLINE := HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1 DO_NOT_TRACK=1

# Three workers on two cores, since a third of the tests' time is waiting; each needs 4 GB. Tests are distributed by
# file, since the tests of a file share training runs.
TEST_WORKERS := 3
PYTEST := $(OFFLINE) CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

# Images of containers often set it. Without bytecode, each of the hundreds of processes of the tests compiles its imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.SUFFIXES:

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-12s %s\n", $$1, $$2}' Makefile

# $(call install,PYTHON,FOLDER,ARGUMENTS): create an environment and install into it. pip would compile all 6 GB of it
# to bytecode, which takes minutes; like uv, it leaves that to the first import of each module.
define install
if [ -n '$(UV)' ]; then \
  '$(UV)' venv --quiet --python $(1) $(2) && '$(UV)' pip install --quiet --python $(2)/bin/python $(3); \
else \
  $(1) -m venv $(2) && $(2)/bin/python -m pip install -qq --disable-pip-version-check --no-compile $(3); \
fi
endef

# The current versions are outside the bounds of mosaicml and mosaicml-streaming: uv can override them, pip can only skip
# them.
ifeq ($(STACK),resolvable)
PACKAGES := -c $(CONSTRAINTS) -e '.[$(EXTRAS)]'
else ifneq ($(STACK),current)
$(error STACK=$(STACK): use current or resolvable)
else ifneq ($(UV),)
PACKAGES := --override overrides-current.txt -c $(CONSTRAINTS) -e '.[$(EXTRAS)]'
else
PACKAGES := --no-deps -r $(CONSTRAINTS) -e .
endif

.PHONY: install
install: $(VENV)/installed ## create .venv, or .venv-resolvable with STACK=resolvable

# Run each candidate instead of looking for it on PATH: a pyenv shim can be there without an interpreter behind it.
$(VENV)/installed: pyproject.toml $(CONSTRAINTS)
	@python=; \
	for candidate in $(or $(PYTHON),$(PYTHONS)); do \
	  if $$candidate -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null; then \
	    python=$$candidate; break; \
	  fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo 'error: none of $(or $(PYTHON),$(PYTHONS)) is a Python from 3.10 to 3.13; install one or set PYTHON=path' >&2; \
	  exit 1; \
	fi; \
	echo "installing into $(VENV) with $$($$python --version) and $(if $(UV),uv,pip): 6 GB, 1 to 10 minutes"; \
	rm -rf $(VENV); \
	$(call install,"$$($$python -c 'import sys; print(sys.executable)')",$(VENV),$(PACKAGES))
	@touch $@

# SkyPilot gets an environment of its own, because it needs other versions of packages that Composer pins. Only slow
# tests use it, to validate rendered jobs.
.venv-skypilot/installed: tests/launch/skypilot-requirements.txt | $(VENV)/installed
	@echo 'installing SkyPilot, which the tests validate jobs with, into .venv-skypilot: 0.5 GB, 1 minute'
	@rm -rf .venv-skypilot
	@$(call install,$(BIN)/python,.venv-skypilot,-r $<)
	@touch $@

.PHONY: quickstart
quickstart: $(RUN)/evaluation.json $(RUN)/export/model_index.json $(RUN)/report.html ## prepare images, train, sample and export on a CPU: 8 minutes
	@echo
	@$(BIN)/python -c "import json; share = json.load(open('$(RUN)/evaluation.json'))['retrieval_top1']; \
	  print(f'Retrieval top-1: {share:.0%} of 100 captions: fraction of generated images whose nearest image')"
	@echo 'out of the 200 real ones, by mean squared difference of pixels, is that of the same caption.'
	@echo 'Results:'
	@echo '  $(RUN)/report.html   page of the run: curves, samples over time, evaluation, recipe'
	@echo '  $(RUN)/samples.png   captions, generated images and real images'
	@echo '  $(RUN)/loss.png      loss curve'
	@echo '  $(RUN)/export        folder for diffusers; its README.md shows how to load it'
	@echo 'To train again from the start: rm -r $(RUN) && make quickstart'

# A step runs if its output is missing; each program writes its last file only after everything else succeeded. The
# order-only prerequisites (|) prevent a new installation or a touched file from training over a finished run.
$(IMAGES): | $(VENV)/installed
	@echo '[1/6] rendering 200 OpenMoji images (seconds)'
	@$(OFFLINE) $(BIN)/diffusion prepare openmoji --out data/openmoji --sizes 64 --limit 200

$(LATENTS): | $(IMAGES)
	@echo '[2/6] encoding the images into latents (1 minute)'
	@$(OFFLINE) $(BIN)/python run.py $(RECIPE) task=precompute

# Checkpoints exist long before training ends, so a stamp file marks its end. After an interruption, training resumes.
$(RUN)/trained: | $(LATENTS)
	@echo '[3/6] training (4 minutes on two cores; after an interruption, run make quickstart again to resume)'
	@$(OFFLINE) $(BIN)/python run.py $(RECIPE)
	@touch $@

$(RUN)/evaluation.json: | $(RUN)/trained
	@echo '[4/6] generating images for 100 captions and finding the nearest real image of each (1 minute)'
	@$(OFFLINE) $(BIN)/python run.py $(RECIPE) task=evaluate

$(RUN)/export/model_index.json: | $(RUN)/trained
	@echo '[5/6] exporting to diffusers'
	@$(OFFLINE) $(BIN)/diffusion export $(RUN)/latest --out $(RUN)/export

$(RUN)/report.html: | $(RUN)/evaluation.json $(RUN)/export/model_index.json
	@echo '[6/6] writing the report of the run (seconds)'
	@$(OFFLINE) $(BIN)/diffusion report $(RUN)

.PHONY: test
test: $(VENV)/installed ## run all tests except slow ones, on CPU, without network: about 6 minutes on two cores
	@echo 'running the tests on CPU, except slow ones (make test-all runs them too)'
	@$(PYTEST) -m 'not slow' $(PYTEST_ARGS)

.PHONY: test-all
test-all: $(VENV)/installed .venv-skypilot/installed ## run all tests: about 30 minutes on two cores
	@echo 'running all tests on CPU'
	@$(PYTEST) $(PYTEST_ARGS)

# After an interruption it continues; GPU_CHECK_ARGS are its arguments. See docs/gpu-check.md.
.PHONY: gpu-check
gpu-check: $(VENV)/installed ## check tests and speed on this machine's GPUs; one file to send in; hours, resumable
	@$(BIN)/python benchmarks/gpu_check.py $(GPU_CHECK_ARGS)

# What depends on the versions most, and a run of 20 batches whose losses must be those of the other environment.
SLICE_MODELS := activation_memory latent_diffusion lora mmdit objective perceptual_losses prx randomness \
  representation_alignment sdxl
SLICE_TRAINING := adamw block_graphs step_overhead initial_weights muon parallelism performance resume
SLICE := tests/compatibility tests/algorithms $(SLICE_TRAINING:%=tests/training/test_%.py) \
  $(SLICE_MODELS:%=tests/models/test_%.py) tests/checkpointing/test_snapshot.py \
  tests/checkpointing/test_checkpointer.py

.PHONY: test-resolvable
test-resolvable: .venv/installed ## run the tests that depend on versions with those that pip resolves to
	@$(MAKE) --no-print-directory STACK=resolvable test-slice

.PHONY: test-slice
test-slice: $(VENV)/installed
	@echo 'running $(SLICE)'
	@OTHER_PYTHON=$(CURDIR)/.venv/bin/python $(PYTEST) -m 'not slow' $(SLICE) $(PYTEST_ARGS)

.PHONY: docs
docs: $(VENV)/installed ## build the documentation into site/: seconds
	@$(BIN)/mkdocs build --strict
	@echo 'read it with search at http://localhost:8000: python3 -m http.server -d site'

.PHONY: lint
lint: $(VENV)/installed ## check style, formatting and types
	@echo 'ruff check'; $(BIN)/ruff check $(CODE)
	@echo 'ruff format --check'; $(BIN)/ruff format --check $(CODE)
	@echo 'hadolint'; $(BIN)/hadolint docker/Dockerfile
	@echo 'pyright (1 minute)'; $(BIN)/pyright --pythonpath $(BIN)/python

.PHONY: format
format: $(VENV)/installed ## format the code and apply ruff's automatic fixes
	@$(BIN)/ruff format $(CODE)
	@$(BIN)/ruff check --fix $(CODE)

# Conditions that hold on each machine that the files are for; uv repeats them in every line.
ALWAYS := (python_full_version < '3\.14'|platform_machine == 'x86_64'|sys_platform == 'linux'|[a-z_]*implementation[a-z_]* != 'PyPy')

# $(call resolve,STACK,ARGUMENTS): resolve the packages for each Python, and replace the lines of the file after its comment.
define resolve
'$(UV)' pip compile --quiet --universal --python-version 3.10 --all-extras --no-annotate --no-header $(2) \
  --output-file constraints-$(1).new pyproject.toml
{ sed '/^[^#]/,$$d' constraints-$(1).txt; \
  sed -E "s/$(ALWAYS) and //g; s/ and $(ALWAYS)//g; s/ ; $(ALWAYS)$$//" constraints-$(1).new; } > constraints-$(1).tmp
mv constraints-$(1).tmp constraints-$(1).txt
rm constraints-$(1).new
endef

.PHONY: constraints
constraints: ## resolve both constraints files with the newest versions; needs uv
	@$(call resolve,current,--override overrides-current.txt)
	@$(call resolve,resolvable)

.PHONY: clean
clean: ## remove .venv, caches and builds, but not data/ and runs/
	rm -rf .venv .venv-resolvable .venv-skypilot build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +
