# make train      prepare a corpus and watch a small GPT-2 learn it
# make test       the tests; JOBS=3 of them at a time
# make test-dist  those of several ranks alone
# make test-gpu   the tests that need a CUDA device, kernels compiled for it
# make gpu-check  those tests, every kernel, training steps and torch.compile beside them, as one report
# make bench      a training step against plain PyTorch, time and memory
# make lint       ruff: names that nobody defines or uses, and the form of every file
#
# Everything is installed into .venv. With an NVIDIA GPU pip takes the newest torch; without one a fixed version, so that an index
# or folder of CPU wheels that pip knows of is used. make TORCH=... decides otherwise.

PYTHON ?= python3
VENV   ?= .venv
JOBS   ?= 3
TORCH  ?= $(if $(wildcard /dev/nvidiactl /usr/lib/wsl/lib/libcuda.so.1),torch>=2.11,torch==2.13.0)

python := $(VENV)/bin/python
# pip compiles to bytecode on one core what Python does on all; a package may hold a file for another Python, which does not
pip     := $(python) -m pip install --quiet --disable-pip-version-check --no-compile
compile := $(python) -m compileall -qq -j 0 $(VENV)/lib || true
data   := dev/data/stdlib
# what shows most in under three minutes on two cores with bf16: many small steps, and a rate that suits them (tried on the same
# sizes with a vocabulary of 256, one run each: training loss 2.13 at 2.5e-4, 2.05 at 5e-4, 2.15 at 1e-3, 2.40 at 2e-3)
demo   := -e d6 -b 8 -t 64 -x 700 -l 5e-4 -u 30 -q 0.1 -c 0.1 -v 100 -m 20 -s 350 -g 256 -n 700

# tests that start ranks, or are about nothing else
ranks  := async_checkpoint failure group parts_program place ranks remainder rendezvous tensor_parallel traffic watch zero

.PHONY: train test test-dist test-gpu lint gpu-check bench clean

train: $(VENV)/installed $(data)/stdlib_train.bin
	$(python) train_gpt2.py -i $(data)/stdlib_train.bin -j $(data)/stdlib_val.bin $(demo) -o log_demo

# one thread each, and one process more than two cores, as some only wait for ranks; every file in one process: some files start ranks
# that share what a fixture made. In the order of tests/conftest.py, long files first; pytest-xdist's own is by the number of tests
workers := -n $(JOBS) --dist loadfile --no-loadscope-reorder

test: $(VENV)/installed-test
	OMP_NUM_THREADS=1 $(python) -m pytest $(workers)

test-dist: $(VENV)/installed-test
	OMP_NUM_THREADS=1 $(python) -m pytest $(workers) $(ranks:%=tests/test_%.py)

test-gpu: $(VENV)/installed-test
	$(python) -m pytest -m "gpu or kernels"

lint: $(VENV)/installed-lint
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check

# with whatever torch, triton, numpy and pytest there is: a GPU machine may have no package index
gpu-check:
	$(or $(wildcard $(python)),$(PYTHON)) scripts/gpu_check.py

bench: $(VENV)/installed
	$(python) scripts/bench.py --sweep
	$(python) scripts/bench.py -e d12 -b 4 -t 64
	$(python) scripts/bench.py -e d12 -b 8 -t 256 -r 2 --memory

$(data)/stdlib_train.bin: | $(VENV)/installed
	$(python) scripts/prepare_stdlib.py --output $(data)

# torch first and alone: asked for together with the rest, pip might weigh other versions against it
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(pip) "$(TORCH)"
	$(pip) numpy tiktoken tqdm
	$(pip) numba || echo "no numba for this Python: training on a CPU is slower"
	$(compile)
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(pip) pytest "pytest-xdist>=3.7" transformers safetensors pyarrow matplotlib "triton>=3.6"
	$(compile)
	touch $@

# of one minor version: the next may want other forms
$(VENV)/installed-lint: $(VENV)/installed
	$(pip) "ruff==0.17.*"
	touch $@

clean:
	rm -rf $(VENV) dev/data/stdlib log_demo
