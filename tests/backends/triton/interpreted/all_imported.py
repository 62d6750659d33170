"""Imports what these tests import, torch and transformers above all: of what forks from here, each has it."""

import gc
from pathlib import Path

import pytest

pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--collect-only", str(Path(__file__).parent)])
gc.freeze()
