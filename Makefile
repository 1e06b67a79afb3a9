# Lockstep's commands; `make` lists them. Two variables matter:
#   PYTHON  the interpreter that environments are made with   make test PYTHON=python3.12
#   ARGS    handed on to the program                          make test ARGS="-k sync"
#                                       one file at a time    make test ARGS="-n 0"
# Packages are installed by uv where it is on the PATH and PYTHON is not named, else by pip; with
# UV= pip installs them in any case.
# and for two commands a third:
#   BENCH   which of benchmarks/, all by default              make bench BENCH=collect
#   SEEDS   how many stories                                  make chaos-virtual SEEDS=500

PYTHON ?= python3
UV ?= $(if $(filter file,$(origin PYTHON)),$(shell command -v uv))
ARGS ?=
BENCH ?= sync_latency collect train
SEEDS ?= 500

# One stamp per interpreter, written last: changing PYTHON makes the environment anew.
READY := .venv/.ready-$(subst /,_,$(PYTHON))
PEERS := .venv-peers/.ready-$(subst /,_,$(PYTHON))
TRL := .venv-trl/.ready-$(subst /,_,$(PYTHON))
CONTROLLERS := .venv-controllers/.ready-$(subst /,_,$(PYTHON))
DOCS := .venv-docs/.ready-$(subst /,_,$(PYTHON))
BIN := .venv/bin
# Three files at a time, since tests wait as often as they work, in their order: the many short ones
# of tests/sync come last and fill the gaps.
SIDE_BY_SIDE := -n 3 --dist loadfile --no-loadscope-reorder

# Tests start hundreds of interpreters: without bytecode, each would compile the packages anew.
test rest repeated slow costs coverage: export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help

.PHONY: help run test rest repeated slow costs mutants mutants-random coverage check chaos chaos-virtual soak load conformance controllers bench gpu report reproduce browser docs publish peers trl clean

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

run: $(READY) ## run an experiment; PPO on CartPole unless ARGS says else
	@$(BIN)/python run.py $(or $(ARGS),experiment=ppo_cartpole)
	@$(if $(ARGS),,printf '%s\n' \
		'sweep:   $(BIN)/python run.py -m experiment=ppo_cartpole total_frames=40_000 collector=single sync.lag=0,8,32 seed=1,2,3 sweep=mine' \
		'then:    $(BIN)/python run.py report outputs/mine')

test: $(READY) ## run the tests: all but dear ones that no change of tests/mutants needs, 6 minutes
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

rest: $(READY) ## run the tests that a plain `make test` leaves out
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) --rest $(ARGS)

repeated: $(READY) ## run the slow tests that repeat, resume and replay whole runs, but not Ray's
	$(BIN)/python -m pytest -n 3 -m slow -k "not ray" tests/harness/test_every_algorithm.py \
		tests/harness/test_repeated_runs.py tests/harness/test_replayed_runs.py $(ARGS)

slow: $(READY) ## run the slow tests: whole runs that learn or measure, and repetitions
	$(BIN)/python -m pytest -m slow $(ARGS)

costs: $(READY) ## measure each test's processor time, and list the dear ones in tests/dear.txt
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) --all --costs outputs/costs.json $(ARGS)
	@$(BIN)/python -m tests.costs outputs/costs.json

mutants: $(READY) ## check that each small change of tests/mutants is noticed: ARGS="board ppo"
	@$(BIN)/python -m tests.mutants $(ARGS)

mutants-random: $(READY) ## run the tests against changes drawn at random: ARGS="--seed 7 --draw 300"
	@$(BIN)/python -m tests.mutants.random_changes $(ARGS)

# A process that is killed cannot say what it went through: branches that only such ones take count
# as untested here.
coverage: $(READY) ## name the branches of sync/ and collectors/ that no test takes
	@rm -rf outputs/coverage && mkdir -p outputs/coverage
	-$(BIN)/python -m coverage run -m pytest $(SIDE_BY_SIDE) tests/sync tests/collectors tests/promises $(ARGS)
	@$(BIN)/python -m coverage combine -q && $(BIN)/python -m coverage report

check: $(READY) ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

chaos: $(READY) ## strike whole runs with random faults: ARGS="--faults 500 --seed 7"
	@$(BIN)/python -m benchmarks.chaos $(ARGS)

chaos-virtual: $(READY) ## strike pools, workers and schemes in virtual time: SEEDS=500
	@$(BIN)/python -m tests.virtual --seeds $(SEEDS) $(ARGS)

soak: $(READY) ## train for hours while workers are killed: ARGS="--minutes 60"
	@$(BIN)/python benchmarks/soak.py $(ARGS)

load: $(READY) ## many workers and environments, a large policy, a flood of versions
	@$(BIN)/python benchmarks/load.py $(ARGS)

conformance: $(READY) $(PEERS) ## check what schemes promise, Lockstep's and the peers'
	@$(BIN)/python -m lockstep_conformance lockstep_conformance.lockstep benchmarks.torchrl_adapter@.venv-peers/bin/python $(ARGS)

controllers: $(READY) $(CONTROLLERS) ## measure what frameworks' staleness limits keep: ARGS="--only areal"
	@$(BIN)/python -m docs.max_staleness $(ARGS)

bench: $(READY) $(PEERS) ## measure, and compare with the peers
	@set -e; for name in $(BENCH); do $(BIN)/python benchmarks/$$name.py $(ARGS); done

gpu: $(READY) ## run what needs a GPU, within 10 minutes: the tests of CUDA, and sends from it
	@$(BIN)/python benchmarks/gpu.py $(ARGS)

report: $(READY) ## make a report of runs: ARGS=outputs/sync_ablation
	@$(BIN)/python -m harness.report $(ARGS)

reproduce: $(READY) ## run a run again and compare: ARGS=outputs/2026-01-31/12-00-00-...
	@$(BIN)/python -m harness.reproduce $(ARGS)

browser: $(READY) ## look at a report and the site in Chromium, which must be installed
	$(BIN)/python -m pip install -c requirements.lock -e ".[browser]" --no-build-isolation -q
	$(BIN)/python -m pytest -m browser $(ARGS)

docs: $(READY) $(DOCS) ## compose all commands of the pages, and build the site into site/
	@$(BIN)/python -m pytest -q -m slow tests/docs/test_commands.py
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict $(ARGS)

publish: $(DOCS) ## add the site of this version to the local branch gh-pages, with mike
	@.venv-docs/bin/mike deploy --config-file mkdocs-versions.yml --update-aliases \
		$(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml) latest $(ARGS)
	@.venv-docs/bin/mike set-default --config-file mkdocs-versions.yml latest

trl: $(TRL) ## make the environment of lockstep_trl, .venv-trl, and run its tests
	.venv-trl/bin/python -m pytest tests/trl $(ARGS)

peers: $(PEERS) ## make the environment of the benchmarks' peers, .venv-peers

clean: ## remove the environments and caches; outputs/ stays
	rm -rf .venv .venv-trl .venv-peers .venv-controllers .venv-docs site .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An outdated stamp marks a sound environment, which is updated in place. No stamp: there is no
# environment, or its setup was interrupted, and it is made from nothing.
define prepare
@$(PYTHON) -c 'import sys; sys.exit("Lockstep needs Python 3.11 or newer, for instance: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
@test -e $@ || { echo "making $(@D)"; $(PYTHON) -m venv --clear $(@D); }
@rm -f $@
endef

# pip: torch comes first, exactly as pinned: a build of that version that pip is offered locally (CPU
# only, say) then satisfies whatever follows, and no other is downloaded.
ifeq ($(UV),)
$(READY): pyproject.toml requirements.lock
	$(prepare)
	$(BIN)/python -m pip install -c requirements.lock torch setuptools
	$(BIN)/python -m pip install -c requirements.lock --no-build-isolation -e ".[test]"
	@touch $@
else
$(READY): pyproject.toml requirements.lock
	@test -e $@ || { echo "making $(@D)"; $(UV) venv --seed --clear $(@D); }
	@rm -f $@
	$(UV) pip install --python $(BIN)/python -c requirements.lock torch setuptools
	$(UV) pip install --python $(BIN)/python -c requirements.lock --no-build-isolation -e ".[test]"
	@touch $@
endif

$(PEERS): requirements-peers.lock
	$(prepare)
	.venv-peers/bin/python -m pip install -c requirements-peers.lock torch
	.venv-peers/bin/python -m pip install -r requirements-peers.lock
	@touch $@

# Single modules of these packages are loaded, so what they depend on, and the Python that they ask
# for, is left out.
$(CONTROLLERS): requirements-controllers.lock docs/max_staleness/repositories.txt
	$(prepare)
	.venv-controllers/bin/python -m pip install --no-deps --ignore-requires-python \
		-r requirements-controllers.lock
	@rm -rf .venv-controllers/repositories && mkdir .venv-controllers/repositories
	@grep -v '^#' docs/max_staleness/repositories.txt | while read name url commit; do \
		echo "fetching $$url"; \
		git clone -q --filter=blob:none --no-checkout $$url .venv-controllers/repositories/$$name && \
		git -C .venv-controllers/repositories/$$name checkout -q $$commit || exit 1; done
	@touch $@

$(TRL): requirements-trl.lock pyproject.toml
	$(prepare)
	.venv-trl/bin/python -m pip install -c requirements-trl.lock torch
	.venv-trl/bin/python -m pip install -r requirements-trl.lock
	.venv-trl/bin/python -m pip install --no-deps --no-build-isolation -e .
	@touch $@

$(DOCS): requirements-docs.lock
	$(prepare)
	.venv-docs/bin/python -m pip install -r requirements-docs.lock
	@touch $@
