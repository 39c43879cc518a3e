# Everything sets itself up: the first target that needs it makes .venv, with what serving needs from cluster/image, and
# for tests with what requirements.lock adds. WHEELS names a folder with a wheel of llama.cpp, which is not compiled then.
PYTHON ?= python3
CONFIG ?= serve_config.yaml
PORT ?=
RAY_PORT ?=
DASHBOARD_PORT ?=
WHEELS ?=
BIN := .venv/bin
READY := .venv/.ready
DEV := .venv/.dev
LOAD := .venv/.load
DOCS := .venv-docs
CLIENTS := .venv-clients
RELEASE := .venv-release

# Whether llama.cpp gets its AMX kernels: where the CPU has them. `make clean`, then `make serve AMX=`, leaves them out.
AMX ?= $(shell grep -m1 -o amx_int8 /proc/cpuinfo)
# Old compilers need help with them, which tiles.h explains. Hiding the macro leaves them out.
ifneq ($(AMX),)
export CMAKE_ARGS := -DCMAKE_CXX_FLAGS='-include $(CURDIR)/cluster/llama_cpp/tiles.h'
else
export CMAKE_ARGS := -DCMAKE_C_FLAGS=-U__AMX_INT8__ -DCMAKE_CXX_FLAGS=-U__AMX_INT8__
endif
# The compilers that CC and CXX name, if they do (`CC=clang-19 CXX=clang++-19 make serve`); cmake reads both.
COMPILER := $(foreach name,CC CXX,$(if $(filter-out default undefined,$(origin $(name))),$(notdir $($(name)))))
SPACE := $(subst ,, )
# pip's cache does not tell builds by their flags, so each kind has its own.
CACHE := $(HOME)/.cache/corral/pip-$(if $(AMX),with,without)-amx$(subst $(SPACE),-,$(addprefix -,$(strip $(COMPILER))))
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
PIP := $(BIN)/pip --quiet --disable-pip-version-check --cache-dir $(CACHE)

# No call home.
export RAY_USAGE_STATS_ENABLED := 0

# Tests start hundreds of processes, which would all compile our modules again without a cache.
test test-long: export PYTHONDONTWRITEBYTECODE :=

.PHONY: serve install install-load cluster-up cluster-down test test-ui test-long test-peers test-clients test-amx test-real test-guides findings fuzz docs reference sbom dist wheels lint format lock clean

serve: $(READY)  ## Serve CONFIG until Ctrl-C, at PORT if one is given.
	@exec $(BIN)/corral serve --config $(CONFIG) $(if $(PORT),--port $(PORT))

install: $(READY)  ## What serving needs, in .venv; the command is .venv/bin/corral.

install-load: $(LOAD)  ## What load tests need, in .venv: Locust, and clients of HTTP.

cluster-up: $(READY)  ## An autoscaled cluster of several nodes on this machine; returns when it serves.
	@$(BIN)/python -m cluster.local.cluster up $(if $(PORT),--port $(PORT)) $(if $(RAY_PORT),--ray-port $(RAY_PORT)) \
		$(if $(DASHBOARD_PORT),--dashboard-port $(DASHBOARD_PORT))

cluster-down: $(READY)  ## Stop all of it.
	@$(BIN)/python -m cluster.local.cluster down

test: $(DEV)  ## Tests: unit, integration, end to end, and of the page if there is a browser; some minutes.
	$(BIN)/pytest -m "not long" -n 3 --dist loadfile --no-loadscope-reorder tests/integration tests/unit
	$(BIN)/pytest -m "not long" -n 3 --dist loadfile --no-loadscope-reorder tests/e2e
	@if command -v chromium > /dev/null && $(BIN)/python -c "import playwright" 2> /dev/null; then \
		$(BIN)/pytest tests/ui; \
	else \
		echo "tests/ui left out: no browser and Playwright here (make test-ui installs them)"; \
	fi

test-ui: $(DEV)  ## Tests of the page in a real browser: Debian's Chromium, installed if it is not there.
	@command -v chromium > /dev/null || { $(SUDO) apt-get update -q && $(SUDO) apt-get install -qy chromium; }
	$(PIP) install -e ".[ui]"
	$(BIN)/pytest tests/ui

test-long: $(DEV)  ## What `test` leaves out, as it takes longer.
	$(BIN)/pytest -m long tests/integration tests/unit
	$(BIN)/pytest -m "not long" --hypothesis-profile=explore tests/unit/channel tests/unit/engine tests/unit/prompt
	$(BIN)/pytest -m long tests/e2e
	$(BIN)/pytest -m "not long" --without-ray tests/e2e/clients tests/e2e/server

test-peers: $(DEV)  ## The same requests to llama-server, which is built at the first run, and to Corral: the answers must agree.
	$(BIN)/pytest tests/peers

test-clients: $(DEV) $(CLIENTS)/.ready  ## Clients of all protocols, as their users run them, in an environment of its own.
	$(BIN)/pytest tests/clients

test-amx: $(DEV)  ## llama.cpp's AMX kernels, on any CPU with AVX-512: compiled at the first run, with AMX emulated.
	$(BIN)/pytest tests/amx

test-real: $(DEV) build/real/.ready  ## Real models from packages: their text, chats and vocabularies, against llama.cpp's own programs.
	@command -v espeak-ng > /dev/null || { $(SUDO) apt-get update -q && $(SUDO) apt-get install -qy espeak-ng; }
	$(BIN)/pytest tests/real

test-guides: $(DEV)  ## The guide of a single server, on a Debian of its own that systemd boots; as root, ten minutes.
	$(BIN)/pytest tests/guides

findings:  ## What other software does unexpectedly, run without Corral; says what has changed. NEWEST=1: newest releases.
	@changed=0; for script in findings/*.sh; do \
		output=$$(NEWEST=$(NEWEST) timeout 300 $$script 2>&1); code=$$?; \
		case $$code in \
			0) echo "same: $$script";; \
			2) echo "could not install: $$script";; \
			124) echo "took too long: $$script";; \
			*) changed=1; echo "CHANGED: $$script"; echo "$$output" | sed 's/^/    /';; \
		esac; \
	done; exit $$changed

build/real/.ready: tests/real/requirements.txt requirements.lock | $(DEV)
	$(PIP) install --no-deps --upgrade --target build/real -r $<
	$(BIN)/python -m tests.real.models
	@touch $@

fuzz: $(DEV)  ## 10,000 odd requests; FUZZ="--seed N" repeats a run.
	$(BIN)/python -m tests.fuzz $(FUZZ)

docs: $(DOCS)/.ready $(READY)  ## The site of docs/ with the API's description, in build/docs; a warning is an error.
	@mkdir -p build
	@$(BIN)/python -c 'import json; from tests.doubles.api import build_api as b; print(json.dumps(b({}).openapi()))' > build/openapi.json
	$(DOCS)/bin/properdocs build --strict -f docs/.site/mkdocs.yml

reference: $(DEV)  ## The tables of docs/ that are made from the code.
	$(BIN)/python -m tests.documents

sbom: $(RELEASE)/.ready  ## What the image installs from Python's package index, as CycloneDX, in build/sbom.json.
	@mkdir -p build
	$(RELEASE)/bin/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible \
		--of JSON -o build/sbom.json cluster/image/requirements.lock

dist: $(RELEASE)/.ready  ## Corral's wheel and source package, in dist.
	$(RELEASE)/bin/python -m build --outdir dist

wheels: dist $(READY)  ## Those, and llama.cpp's wheel for machines with a processor like this one: they compile nothing.
	$(PIP) wheel --no-deps --wheel-dir dist "$$(grep -o '^llama-cpp-python==[^ ]*' requirements.lock)"

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): cluster/image/requirements.lock pyproject.toml
	@sh cluster/preflight.sh $(PYTHON) . $(WHEELS)
	@$(PYTHON) -m venv .venv
	@awk '/^[^ #]/ {is_llama = /^llama-cpp-python==/} is_llama' $< > .venv/llama.txt
	@$(if $(WHEELS),,echo "1 of 3: llama.cpp is compiled for this processor. That took 4 minutes on two cores; pip keeps the result ...")
	@$(PIP) install --no-deps $(if $(WHEELS),$(WHEELS)/llama_cpp_python-*.whl,--require-hashes -r .venv/llama.txt)
	@echo "2 of 3: about 100 packages are downloaded and installed. That took half a minute ..."
	@$(PIP) install --require-hashes -r $<
	@echo "3 of 3: Corral is installed. That takes seconds ..."
	@$(PIP) install --no-deps -e .
	@if [ -n "$(AMX)" ] && ! $(BIN)/python -m cluster.llama_cpp.probe; then \
		echo "llama.cpp's AMX kernels do not work here: it is compiled again without them."; \
		$(PIP) uninstall --yes llama-cpp-python && $(MAKE) AMX= --always-make $@; \
	fi
	@touch $@

$(DEV): $(READY) requirements.lock
	@$(PIP) install --require-hashes -r requirements.lock
	@touch $@

$(LOAD): $(READY) requirements.lock
	@echo "Installing Locust: half a minute ..."
	@sed -n 's/^\([^ ]*==[^ ]*\).*/\1/p' requirements.lock > .venv/constraints.txt
	@$(PIP) install --constraint .venv/constraints.txt locust httpx aiohttp
	@touch $@

$(DOCS)/.ready: docs/.site/requirements.lock
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --disable-pip-version-check --require-hashes -r $<
	@touch $@

$(RELEASE)/.ready: .github/release/requirements.lock
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/pip install --quiet --disable-pip-version-check --require-hashes -r $<
	@touch $@

$(CLIENTS)/.ready: tests/clients/requirements.txt tests/clients/package.json $(wildcard tests/clients/apart/*.txt)
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check -r $<
	@for file in tests/clients/apart/*.txt; do \
		own=$(CLIENTS)/$$(basename $$file .txt); python=$$(sed -n '1s/^# //p' $$file); python=$${python:-$(PYTHON)}; \
		if ! $$python -c "" 2> /dev/null; then echo "no $$python here: the client of $$file is left out"; continue; fi; \
		$$python -m venv $$own && $$own/bin/pip install --quiet --disable-pip-version-check -r $$file || exit 1; \
	done
	@mkdir -p $(CLIENTS)/node && cp tests/clients/package.json $(CLIENTS)/node
	@if command -v npm > /dev/null; then \
		npm install --prefix $(CLIENTS)/node --silent --no-fund --no-audit; \
	else \
		echo "no npm here: clients in JavaScript are left out"; \
	fi
	@touch $@

lock:  ## Resolve pyproject.toml's dependencies anew; the image's lock takes its versions from requirements.lock.
	@$(PYTHON) -m venv .venv
	$(PIP) install uv
	$(BIN)/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 \
		--generate-hashes --no-header --no-annotate --no-emit-index-url --upgrade -q -o requirements.lock
	$(BIN)/uv pip compile pyproject.toml --extra openvino --constraint requirements.lock --universal --python-version 3.11 \
		--generate-hashes --no-header --no-annotate --no-emit-index-url -q -o cluster/image/requirements.lock
	cd docs/.site && ../../$(BIN)/uv pip compile requirements.in --universal --python-version 3.11 \
		--generate-hashes --no-header --no-annotate --no-emit-index-url --upgrade -q -o requirements.lock
	cd .github/release && ../../$(BIN)/uv pip compile requirements.in --universal --python-version 3.11 \
		--generate-hashes --no-header --no-annotate --no-emit-index-url --upgrade -q -o requirements.lock

clean:
	rm -rf .venv $(DOCS) $(CLIENTS) $(RELEASE) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
