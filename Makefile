# Each target sets up what it needs in .venv; a machine with Python 3.10 or newer, pip and make is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DEMO_DOCUMENT := examples/harbour_audit.txt
DEMO_CACHE := $(VENV)/harbour_audit.kv

# Each worker computes on one thread, for which tiny models are large enough.
WORKERS ?= -n 2 --dist loadfile

RESULTS := results
RESULTS_STRATEGIES := attention_matching,high_attn,two_pass,kvzip,streaming_llm
RESULTS_OPTIONS := --lengths 1000 --documents 4 --ratios 4,8,16 --strategies $(RESULTS_STRATEGIES) --output $(RESULTS)
EVAL_MODEL ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint format bench results clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(INSTALLED) ## Compact a shipped document with the embedded model and answer questions from it
	$(BIN)/agentcompact compact $(DEMO_DOCUMENT) -o $(DEMO_CACHE) --force --ratio 8
	$(BIN)/agentcompact ask $(DEMO_CACHE) < examples/harbour_audit.questions.txt

test: $(INSTALLED) ## Run the test suite
	$(BIN)/python -m pytest $(WORKERS)

test-all: $(INSTALLED) ## Run the test suite with the slow tests
	$(BIN)/python -m pytest $(WORKERS) -m "slow or not slow"

lint: $(INSTALLED) ## Check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED) ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED) ## Measure prefill, compaction, decoding and loading, as ratios
	$(BIN)/python benchmarks/run.py

results: $(INSTALLED) ## Measure the strategies for docs/results.md (about an hour); EVAL_MODEL=FOLDER adds a second model
	$(BIN)/agentcompact eval --task needles,records $(RESULTS_OPTIONS)
	test -z "$(EVAL_MODEL)" || $(BIN)/agentcompact eval --task phonebook,needles,records --model $(EVAL_MODEL) $(RESULTS_OPTIONS)
	$(BIN)/agentcompact report $(RESULTS) --markdown docs/results.md

clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
