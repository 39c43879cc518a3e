# Everything sets itself up: the first target that needs it makes .venv from requirements.lock.
PYTHON ?= python3
CONFIG ?= serve_config.yaml
BIN := .venv/bin
READY := .venv/.ready

# No call home, and replicas at normal priority (Ray's default is nice 15).
export RAY_USAGE_STATS_ENABLED := 0
export RAY_worker_niceness := 0

.PHONY: serve test lint format lock clean

serve: $(READY)  ## Serve CONFIG until Ctrl-C.
	@$(BIN)/python -m serve_app.config $(CONFIG)
	@exec $(BIN)/serve run $(CONFIG)

test: $(READY)  ## All tests: unit, integration, end to end.
	$(BIN)/pytest tests/unit tests/integration tests/e2e

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): requirements.lock pyproject.toml
	@echo "Setting up .venv (the first time, llama.cpp is compiled: some minutes) ..."
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

lock:  ## Resolve pyproject.toml's dependencies anew.
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet uv
	$(BIN)/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 \
		--generate-hashes --no-header --no-annotate --no-emit-index-url --upgrade -q -o requirements.lock

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
