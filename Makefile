# Each target makes its own environment in .venv on first use; later runs start at once.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
MAPPED := protocol kernels sim cli

.PHONY: demo test check fmt types bench fuzz soak netns sim-results sim-hunt clean

demo: $(READY)
	$(BIN)/kvcomm demo

test: $(READY)
	@$(BIN)/kvcomm model pull smollm2-135m \
		|| echo "The default model could not be fetched: tests marked 'model' will be skipped."
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --no-print-directory types

fmt: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy knows nothing of setuptools' package mapping: it gets a tree of links in which every package is at its place.
types: $(READY)
	rm -rf .types && mkdir .types
	cp -rs $(CURDIR)/kvcomm_p2p .types/kvcomm_p2p
	for folder in $(MAPPED); do cp -rs $(CURDIR)/$$folder .types/kvcomm_p2p/$$folder; done
	cd .types && ../$(BIN)/mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache -p kvcomm_p2p

bench: $(READY)
	$(BIN)/kvcomm bench ttft
	$(BIN)/kvcomm bench pull
	$(BIN)/kvcomm bench quality --prompts 6

# Long checks of the protocol; their results lie in benchmarks/results.
fuzz: $(READY)
	$(BIN)/python tests/protocol/wire_fuzz.py --minutes 10

soak: $(READY)
	$(BIN)/python benchmarks/soak.py --minutes 30 --write benchmarks/results/soak.json

netns: $(READY)
	$(BIN)/python benchmarks/netns.py --write benchmarks/results/netns.json

# Simulated time does not depend on how busy the machine is: these take hours of one core, after everything else.
SIM_RESULTS := benchmarks/results
sim-results: $(READY)
	for name in $$($(BIN)/kvcomm sim ls --json | $(BIN)/python -c \
		'import json, sys; print(*(each["name"] for each in json.load(sys.stdin)["scenarios"]))'); do \
		nice -n 10 $(BIN)/kvcomm sim run $$name --save $(SIM_RESULTS)/sim-$$name.json >/dev/null || exit 1; \
	done

# Random small scenarios with everything that can go wrong; stops at the first that breaks an invariant.
SIM_HUNT_RUNS ?= 1000
SIM_HUNT_SEED ?= 0
sim-hunt: $(READY)
	nice -n 10 $(BIN)/kvcomm sim hunt --runs $(SIM_HUNT_RUNS) --seed $(SIM_HUNT_SEED)

# When is one central pool the bottleneck, and how news spread. Runs that are there already (build/sim) are not run again.
SIM_SWEEP = nice -n 10 $(BIN)/kvcomm sim sweep
CORES_WAN = growing-cores --set network.inside=wan
POOL = --fabric own --fabric central
sim-sweeps: $(READY)
	$(SIM_SWEEP) $(CORES_WAN) --over agents=8,16,32,64 --repeats 2 $(POOL) --into build/sim --save $(SIM_RESULTS)/sim-sweep-wan.json
	$(SIM_SWEEP) growing-cores --over agents=64,128,192,256 $(POOL) --into build/sim --save $(SIM_RESULTS)/sim-sweep-lan.json
	$(SIM_SWEEP) thousand --over agents=16,128 --over network.loss=0,0.1 --set duration_s=10 --into build/sim \
		--save $(SIM_RESULTS)/sim-sweep-news.json
	$(SIM_SWEEP) growing --over agents=16,32,64,128,192,256 $(POOL) --into build/sim --save $(SIM_RESULTS)/sim-sweep-gpu.json
	$(SIM_SWEEP) $(CORES_WAN) --over agents=64 --over central.interfaces=2,4 $(POOL) --into build/sim \
		--save $(SIM_RESULTS)/sim-sweep-wan-interfaces.json
	$(SIM_SWEEP) $(CORES_WAN) --over agents=32 --over central.lock_s=0.00005,0.001 $(POOL) --into build/sim \
		--save $(SIM_RESULTS)/sim-sweep-wan-lock.json
	$(SIM_SWEEP) $(CORES_WAN) --over agents=32 --over workload.tasks_per_agent_s=0.03,0.09 $(POOL) --into build/sim \
		--save $(SIM_RESULTS)/sim-sweep-wan-rate.json
	$(SIM_SWEEP) $(CORES_WAN) --over agents=32 --over workload.documents=20,160 $(POOL) --into build/sim \
		--save $(SIM_RESULTS)/sim-sweep-wan-documents.json

clean:
	rm -rf .venv .types .mypy_cache .pytest_cache .ruff_cache build dist

# torch first and alone: the pinned version is then there, and nothing that follows brings another.
$(READY): pyproject.toml constraints.txt
	@echo "Making the environment in .venv: this downloads some GB, takes minutes and prints little meanwhile."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(shell grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,eval]'
	touch $@
