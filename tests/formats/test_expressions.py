"""Expressions of configs: what ``re.match`` says of them, in time that no config can make long."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qmm import WeightFormatError
from qmm.formats.expressions import expression

ATOMS = [
    "a",
    "b",
    ".",
    r"\.",
    "[ab]",
    "[^a]",
    "[]a]",
    "[a-]",
    "[a-c]",
    r"[\d.]",
    "(a|b)",
    "(?:ab)",
    "(a*)",
    "(a|)",
]
ATOMS += [r"\d", r"\W", "1", "^", "$", "b{2}", "a{1,2}", "a{0,}", "x{", "(ab|a)+", "(a(b|1)?)", r"\-"]
PARTS = st.tuples(st.sampled_from(ATOMS), st.sampled_from(["", "", "*", "+", "?", "*?"])).map("".join)


@settings(max_examples=400, deadline=None)
@given(parts=st.lists(PARTS, min_size=1, max_size=5), text=st.text("ab1.x{]-", max_size=6))
def test_as_re_has_it(parts: list[str], text: str) -> None:
    pattern = "".join(parts)
    try:
        expected = re.match(pattern, text) is not None
    except re.error:
        with pytest.raises(WeightFormatError, match="expression: must not have"):
            expression(pattern)
        return
    if re.search(r"[*+?}]\+", pattern):  # "as much as possible, and no way back": new in 3.11, refused here
        return
    assert expression(pattern).match(text) == expected


@pytest.mark.parametrize(
    "pattern",
    [
        "(a*)*" * 20 + "b",
        "(.*a){20}b",
        ".*a" * 300 + "b",
        "(a|aa)+b",
        "((((a*)*)*)*)*b",
        "[a-z]{1,64}" * 10 + "b",
    ],
    ids=range(6),
)
def test_time_is_linear(pattern: str) -> None:
    """Each of them takes ``re`` longer than anyone waits."""
    started = time.process_time()
    assert not expression(pattern).match("a" * 5000)
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("(?!a)b", "a group of the kind (?...) other than (?:...); got '(?!a)b'"),
        ("(?i)a", "a group of the kind"),
        (r"a\1", r"must not have \1"),
        ("[a", "a '[' without its ']'"),
        ("(a", "a '(' without its ')'"),
        ("a)", "a ')' without its '('"),
        ("*a", "a '*' with nothing before it"),
        ("a**", "or more than one"),
        ("[b-a]", "a range in [...]"),
        ("a{99}", "a repeat past 64"),
        ("((a{64}){64}){64}", "at most 2000 states"),
        ("a\\", "a backslash at its end"),
        ("(" * 30 + ")" * 30, "more than 20 groups in groups"),
        ("a" * 1001, "at most 1000 characters; got 1001"),
    ],
)
def test_what_is_refused(pattern: str, text: str) -> None:
    with pytest.raises(WeightFormatError, match=re.escape(text)):
        expression(pattern)
