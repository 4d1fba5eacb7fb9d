"""``bench`` is no installed package: it is imported from this checkout, behind what is installed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))
