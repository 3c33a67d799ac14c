# `make conform` and `make test` set everything up in .venv on a machine with Python >= 3.11, gcc, make and git.
PYTHON ?= python3
RUN := .venv/bin/python

.PHONY: conform test thorough bench
.DELETE_ON_ERROR:

# The main job: npu held to the definitions, then a real model that writes through it.
conform: .venv/installed
	$(RUN) -m fattn conform npu
	$(RUN) -m examples.smollm2 --layer npu --prompt "The capital of France is"

# One process a core: most tests wait for a compiler or an interpreter of their own.
test: .venv/installed
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist loadfile

# What takes longer than a newcomer waits: both layers at length, and every known fault.
thorough: .venv/installed
	$(RUN) -m fattn conform fattn --examples 200
	$(RUN) -m fattn conform npu --examples 200
	$(RUN) -m fattn faults

# What the host costs a step, beside what it may.
bench: .venv/installed
	$(RUN) -m fattn bench plan --check

# torch comes first and by its exact version: nothing after it may ask for another build
.venv/installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fattn needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv
	$(RUN) -m pip install --quiet torch==2.13.0
	$(RUN) -m pip install --quiet -e '.[jax,npu,test]'
	touch $@
