"""The type of a numpy array of any shape and dtype; this module imports numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
