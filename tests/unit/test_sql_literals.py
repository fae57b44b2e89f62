"""No SQL of ours reads otherwise in a session whose standard_conforming_strings is off."""

import re
from pathlib import Path

import pytest

import windlass

POSTGRES = Path(windlass.__file__).parent / "store" / "postgres"
FILES = [POSTGRES / "schema.sql", *sorted(POSTGRES.glob("*/*.sql"))]
PIECE = re.compile(
    r"""--[^\n]* | /\*.*?\*/ | "[^"]*" | \bE'(?:[^'\\]|\\.|'')*' | (?P<plain>'(?:[^']|'')*')""",
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)


def plain_with_backslash(text: str) -> list[str]:
    """Every literal that means something else when backslashes in it are escapes."""
    found = (piece["plain"] or "" for piece in PIECE.finditer(text))
    return [literal for literal in found if "\\" in literal]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_plain_literal_holds_a_backslash(file: Path) -> None:
    assert plain_with_backslash(file.read_text(encoding="utf-8")) == []


def test_a_plain_literal_with_a_backslash_would_be_found() -> None:
    text = r"""
    -- it's a \d
    SELECT E'\'\d', "a'\", 'it''s', '\d', E'\\', 'a' || 'b\' /* don't \ */, $$'\w'$$
    """

    assert plain_with_backslash(text) == [r"'\d'", "'b\\'", r"'\w'"]
