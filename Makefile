# `make conform` and `make test` set everything up in .venv on a machine with Python >= 3.11, gcc, make and git.
PYTHON ?= python3
RUN := .venv/bin/python

.PHONY: conform test thorough
.DELETE_ON_ERROR:

conform: .venv/installed
	$(RUN) -m fattn conform npu
	$(RUN) -m examples.smollm2 --layer npu --prompt "The capital of France is"

test: .venv/installed
	$(RUN) -m pytest

# Everything that takes longer than a newcomer waits: whole conformance of both layers, and all faults.
thorough: .venv/installed
	$(RUN) -m pytest
	$(RUN) -m fattn conform fattn
	$(RUN) -m fattn conform npu --examples 200
	$(RUN) -m fattn faults

# torch first: with it installed, nothing else asks for another build of it
.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet torch==2.13.0
	$(RUN) -m pip install --quiet -e '.[jax,npu,test]'
	touch $@
