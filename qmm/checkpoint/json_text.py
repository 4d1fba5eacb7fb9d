"""JSON from files that nobody vouches for: bounded size, depth and numbers, no key twice."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qmm.errors import WeightFormatError

MAX_BYTES = 100_000_000  # the limit of the safetensors library for its header
_MAX_DIGITS = 20  # 2**64 has 20; the time of int() grows with the square of the digits


def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """The JSON object that ``raw`` holds.

    Args:
        raw: UTF-8 text.
        where: names the file (and the part of it) in messages.

    Raises:
        WeightFormatError: not UTF-8, not JSON, not an object, a key twice, nested too deep, or an integer of more
            than 20 digits.
    """
    if len(raw) > MAX_BYTES:
        raise WeightFormatError(f"{where}: JSON must have at most {MAX_BYTES} bytes; got {len(raw)}")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise WeightFormatError(f"{where}: must be UTF-8; got byte {raw[error.start]:#04x}") from None

    def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise WeightFormatError(f"{where}: keys must differ; got {key[:100]!r} twice")
            found[key] = value
        return found

    def whole(digits: str) -> int:
        if len(digits) > _MAX_DIGITS:
            raise WeightFormatError(
                f"{where}: integers must have at most {_MAX_DIGITS} digits; got {len(digits)}"
            )
        return int(digits)

    try:
        value = json.loads(text, object_pairs_hook=unique, parse_int=whole)
    except json.JSONDecodeError as error:
        raise WeightFormatError(
            f"{where}: must be JSON; got {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except RecursionError:
        raise WeightFormatError(f"{where}: JSON must not nest hundreds of levels deep; got more") from None
    if not isinstance(value, dict):
        raise WeightFormatError(f"{where}: must be a JSON object; got {type(value).__name__}")
    if "\\u" in text:  # half of a surrogate pair passes the parser and then fails wherever it is printed
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise WeightFormatError(f"{where}: must be UTF-8; got half of a surrogate pair") from None
    return value


def read_object(path: Path) -> dict[str, Any]:
    """:func:`parse_object` of a file.

    Raises:
        OSError: the file cannot be read.
        WeightFormatError: as :func:`parse_object`.
    """
    with path.open("rb") as file:
        return parse_object(file.read(MAX_BYTES + 1), str(path))
