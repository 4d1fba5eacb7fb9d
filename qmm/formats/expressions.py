r"""Regular expressions of configs, matched in time linear in the text: a file is not trusted, and ``re`` can be made to
take years.

What configs use: text, ``.``, ``\d \w \s`` and escaped marks, ``[...]``, groups, ``|``, ``* + ?`` and ``{m,n}``, ``^``
and ``$``. Whatever looks around, refers back or sets flags is refused.

An expression becomes a graph of states (Thompson's construction). The set of states after each character is looked up,
or made once: at most (length of the text) * (states) steps, whatever the expression.
"""

from __future__ import annotations

import string
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from qmm.errors import WeightFormatError

LONGEST, MOST_STATES, DEEPEST, MOST_REPEATS = 1000, 2000, 20, 64
_KEPT = 50_000  # numbers of states, in the steps that an expression remembers
_CLASSES = {
    "d": frozenset(string.digits),
    "w": frozenset(string.ascii_letters + string.digits + "_"),
    "s": frozenset(string.whitespace),
}
_REPEATS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


@dataclass(frozen=True)
class Test:
    """What one character must be: among (or, negated, not among) ``chars``."""

    chars: frozenset[str]
    negated: bool = False

    def __call__(self, c: str) -> bool:
        """Whether ``c`` passes."""
        return (c in self.chars) != self.negated


_ANY = Test(frozenset("\n"), negated=True)


@lru_cache(maxsize=128)
def expression(pattern: str) -> Expression:
    """The compiled expression.

    Raises:
        WeightFormatError: it is none, or uses what is not supported.
    """
    if len(pattern) > LONGEST:
        raise WeightFormatError(f"expression: must have at most {LONGEST} characters; got {len(pattern)}")
    parser = _Parser(pattern)
    tree = parser.alternatives(0)
    if parser.at < len(pattern):
        parser.fail("a ')' without its '('")
    return Expression(tree)


class Expression:
    """A graph of states: which follow without a character (always, at the start, at the end), and which by one."""

    def __init__(self, tree: Any) -> None:
        self._free: list[list[tuple[str, int]]] = []
        self._by: list[tuple[Test, int] | None] = []
        self._end = self._state()
        self._start = self._add(tree, self._end)
        self._steps: dict[tuple[frozenset[int], str], frozenset[int]] = {}
        self._kept = 0

    def match(self, text: str) -> bool:
        """Whether the beginning of ``text`` matches, as ``re.match`` has it."""
        here = self._closure({self._start}, "^" if text else "^$")
        for c in text:
            if self._end in here:
                return True
            here = self._step(here, c)
            if not here:
                return False
        return self._end in self._closure(set(here), "$" if text else "^$")

    def _step(self, here: frozenset[int], c: str) -> frozenset[int]:
        found = self._steps.get((here, c))
        if found is None:
            moves = (self._by[s] for s in here)
            found = self._closure({move[1] for move in moves if move is not None and move[0](c)}, "")
            self._kept += len(here) + len(found)
            if self._kept > _KEPT:
                self._steps.clear()
                self._kept = 0
            self._steps[here, c] = found
        return found

    def _closure(self, states: set[int], where: str) -> frozenset[int]:
        open_ = list(states)
        while open_:
            for condition, target in self._free[open_.pop()]:
                if condition in where and target not in states:  # "" is in every string
                    states.add(target)
                    open_.append(target)
        return frozenset(states)

    def _state(self) -> int:
        if len(self._free) >= MOST_STATES:
            raise WeightFormatError(f"expression: must need at most {MOST_STATES} states; got more")
        self._free.append([])
        self._by.append(None)
        return len(self._free) - 1

    def _add(self, tree: Any, then: int) -> int:
        """States for ``tree``, followed by ``then``; returns the first."""
        kind, value = tree[0], tree[1]
        if kind == "all":
            for part in reversed(value):
                then = self._add(part, then)
            return then
        first = self._state()
        if kind == "one":
            self._by[first] = value, then
        elif kind == "at":
            self._free[first] = [(value, then)]
        elif kind == "any of":
            self._free[first] = [("", self._add(part, then)) for part in value]
        else:
            _, inner, low, high = tree
            if high is None:  # one more, again and again
                self._free[first] = [("", self._add(inner, first)), ("", then)]
                then = first
            else:
                for _ in range(high - low):
                    skip = self._state()
                    self._free[skip] = [("", self._add(inner, then)), ("", then)]
                    then = skip
            for _ in range(low):
                then = self._add(inner, then)
            return then
        return first


@dataclass
class _Parser:
    pattern: str
    at: int = field(default=0)

    def fail(self, what: str) -> None:
        raise WeightFormatError(f"expression: must not have {what}; got {self.pattern[:100]!r}")

    def peek(self) -> str:
        return self.pattern[self.at : self.at + 1]

    def next(self, what: str = "an end here") -> str:
        c = self.peek()
        if not c:
            self.fail(what)
        self.at += 1
        return c

    def alternatives(self, depth: int) -> Any:
        if depth > DEEPEST:
            self.fail(f"more than {DEEPEST} groups in groups")
        found = [self.sequence(depth)]
        while self.peek() == "|":
            self.at += 1
            found.append(self.sequence(depth))
        return found[0] if len(found) == 1 else ("any of", found)

    def sequence(self, depth: int) -> Any:
        parts = []
        while self.peek() and self.peek() not in "|)":
            parts.append(self.repeated(self.atom(depth)))
        return "all", parts

    def atom(self, depth: int) -> Any:
        c = self.next()
        if c == "(":
            if self.peek() == "?":
                if self.pattern[self.at : self.at + 2] != "?:":
                    self.fail("a group of the kind (?...) other than (?:...)")
                self.at += 2
            inner = self.alternatives(depth + 1)
            if self.next("a '(' without its ')'") != ")":
                self.fail("a '(' without its ')'")
            return inner
        if c in "*+?":
            self.fail(f"a {c!r} with nothing before it, or more than one")
        if c in "^$":
            return "at", c
        return (
            "one",
            _ANY if c == "." else self.escaped() if c == "\\" else self.one_of() if c == "[" else _just(c),
        )

    def escaped(self) -> Test:
        c = self.next("a backslash at its end")
        if c.lower() in _CLASSES:
            return Test(_CLASSES[c.lower()], negated=c.isupper())
        if c.isalnum():
            self.fail(f"\\{c}")
        return _just(c)

    def one_of(self) -> Test:
        chars: set[str] = set()
        negated = self.peek() == "^"
        self.at += negated
        first = True
        while first or self.peek() != "]":
            first = False
            low = self.member(chars)
            if low is None or self.peek() != "-" or self.pattern[self.at + 1 : self.at + 2] in ("]", ""):
                continue
            self.at += 1
            high = self.member(set())
            if high is None or high < low or ord(high) > 0x7F:
                self.fail("a range in [...] that is none of ASCII, upwards")
            assert high is not None
            chars |= {chr(n) for n in range(ord(low), ord(high) + 1)}
        self.at += 1
        return Test(frozenset(chars), negated)

    def member(self, chars: set[str]) -> str | None:
        """Adds one member of a set; the character, where it is one and no class."""
        c = self.next("a '[' without its ']'")
        if c == "\\":
            test = self.escaped()
            if test.negated:
                self.fail("a class that is negated inside [...]")
            chars |= test.chars
            return next(iter(test.chars)) if len(test.chars) == 1 else None
        chars.add(c)
        return c

    def repeated(self, inner: Any) -> Any:
        bounds = self.bounds()
        if bounds is None:
            return inner
        if inner[0] == "at":
            self.fail("a repeat of '^' or '$'")
        if self.peek() == "?":
            self.at += 1  # as few as possible: whether it matches is the same
        return "repeat", inner, *bounds

    def bounds(self) -> tuple[int, int | None] | None:
        """What ``*``, ``+``, ``?`` or ``{m,n}`` says, read over; None where there is none (a '{' may be text)."""
        c = self.peek()
        if c in _REPEATS:
            self.at += 1
            return _REPEATS[c]
        if c != "{":
            return None
        low, comma, high = self.pattern[self.at + 1 :].partition("}")[0].partition(",")
        if not (low.isdecimal() and (high.isdecimal() or not high)):
            return None
        self.at += 3 + len(low) + len(comma) + len(high) - 1
        least, most = int(low[:4]), int(high[:4]) if high else None if comma else int(low[:4])
        if least > MOST_REPEATS or (most is not None and not least <= most <= MOST_REPEATS):
            self.fail(f"a repeat past {MOST_REPEATS}, or down")
        return least, most


def _just(c: str) -> Test:
    return Test(frozenset(c))
