"""The differential fuzzer, profile ``quick``: a few calls of every kernel here. ``long.py`` is the long one."""

from __future__ import annotations

from typing import Any

import pytest
from fuzz_call import Call, draw_call, draw_variant
from fuzz_check import check
from fuzz_profiles import quick
from hypothesis import given, note
from hypothesis import strategies as st

from qmm.testing import Target, targets


@st.composite
def calls(draw: Any, target: Target) -> Call:
    """Any call of a kernel."""

    def pick(options: Any) -> Any:
        return draw(st.sampled_from(options))

    return draw_call(pick, draw_variant(pick, target, small=True))


@pytest.mark.parametrize("target", targets(), ids=str)
def test_random_calls(target: Target) -> None:
    @quick()
    @given(calls(target))
    def run(call: Call) -> None:
        note(f"python tests/fuzz/long.py --call '{call.to_json()}'")
        check(call)

    run()


def test_a_fault_is_found() -> None:
    """The fuzzer itself: a backend that is one zero point off in its last column is caught."""
    from unittest.mock import patch

    import fuzz_check
    from fuzz_call import Variant

    variant = Variant(
        *(
            "torch",
            "blocks",
            "cpu",
            "float16",
            4,
            32,
            "int",
            "float16",
            None,
            False,
            None,
            False,
            None,
            None,
            True,
        ),
        *((3,), (21,), (70,), "plain", "rows", 0, None),
    )
    call = Call(variant, 3, 21, 70, "normal", 0, 7)
    right = fuzz_check._run
    assert 0 < check(call).ratio <= 1
    assert Call.from_json(call.to_json()) == call

    def off(*args: Any) -> Any:
        result = right(*args)
        result[-1, -1] += 0.01 * float(args[1][-1].float().sum())
        return result

    with patch.object(fuzz_check, "_run", off), pytest.raises(AssertionError, match="bound: error"):
        check(call)
