"""Docstrings as the pages' tool reads them: roles of Sphinx as plain code, ``Example:`` as a section of code."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:py:)?(?:attr|class|data|func|meth|mod):`~?([^`]+)`")
EXAMPLE = re.compile(r"^Example:$", re.M)  # griffe knows the plural


class Docstrings(griffe.Extension):
    """Reads every docstring once it is loaded."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """See griffe.Extension."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub("Examples:", ROLE.sub(r"`\1`", obj.docstring.value))
