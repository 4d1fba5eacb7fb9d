"""Every public name has an example in its docstring, and every example in the sources gives what it shows."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import qmm
import qmm.formats
import qmm.nn
import qmm.testing

ROOT = Path(__file__).parents[2]
CONSTANTS = {"CASES", "EXACT_CASES", "LARGE_CASES"}
FORMAT_FUNCTIONS = ("from_tensors", "to_tensors")


def public() -> dict[str, Any]:
    """Dotted name -> object, of all that DESIGN and the pages call public."""
    found: dict[str, Any] = {}
    for module in (qmm, qmm.nn, qmm.testing):
        for name in module.__all__:
            value = getattr(module, name)
            if not inspect.ismodule(value) and name not in CONSTANTS:
                found[f"{module.__name__}.{name}"] = value
    for name in qmm.formats.__all__:
        for function in FORMAT_FUNCTIONS:
            found[f"qmm.formats.{name}.{function}"] = getattr(getattr(qmm.formats, name), function)
    for name, value in vars(qmm.QuantizedWeight).items():
        if not name.startswith("_") and (
            inspect.isroutine(value) or isinstance(value, (classmethod, staticmethod))
        ):
            found[f"qmm.QuantizedWeight.{name}"] = getattr(qmm.QuantizedWeight, name)
    return found


def modules() -> list[str]:
    """Every module whose source has an example; none of the backends' kernels is imported for it."""
    found = []
    for info in pkgutil.walk_packages(qmm.__path__, "qmm."):
        if info.name.startswith("qmm.backends") or info.name.endswith("__main__"):
            continue
        spec = importlib.util.find_spec(info.name)
        if spec is not None and spec.origin is not None:
            with open(spec.origin, encoding="utf-8") as file:
                if ">>> " in file.read():
                    found.append(info.name)
    return found


PUBLIC = public()


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example(name: str) -> None:
    text = inspect.getdoc(PUBLIC[name]) or ""
    assert len(text.split(">>>")[0].split()) >= 3, "no description"
    assert ">>> " in text, "no example"


@pytest.mark.parametrize("name", modules())
def test_examples_give_what_they_show(name: str) -> None:
    if name.startswith(("qmm.integrations", "qmm.nn.transformers")):
        pytest.importorskip("transformers", reason="transformers is not installed")
    module: ModuleType = importlib.import_module(name)
    done = doctest.testmod(module)
    assert done.attempted > 0
    assert done.failed == 0


def test_the_examples_are_those_of_the_public_names() -> None:
    """What is checked above is what is run above."""
    run = {
        test.name
        for name in modules()
        for test in doctest.DocTestFinder().find(importlib.import_module(name))
    }
    for name, value in PUBLIC.items():
        home = f"{value.__module__}.{value.__qualname__}"
        assert home in run, name


def test_every_public_name_stands_on_an_api_page() -> None:
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    shown = set(re.findall(r"^ +heading: (\S+)$", pages, re.M))
    for name in shown:  # a heading is the public name, the line above it where the object lives
        home = re.search(rf"^::: (\S+)\n +options:\n +heading: {re.escape(name)}$", pages, re.M)
        assert home is not None, name
        if name in PUBLIC:
            value = PUBLIC[name]
            assert home[1] == f"{value.__module__}.{value.__qualname__}"
    members = ("qmm.formats.", "qmm.QuantizedWeight.")  # stand under their module and class
    missing = {name for name in PUBLIC if not name.startswith(members)} - shown
    missing |= {f"qmm.formats.{name}" for name in qmm.formats.__all__} - shown
    assert not missing, "docs/api/*.md: give each a '::: module.name' block with 'heading: public name'"
