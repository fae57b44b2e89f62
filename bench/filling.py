"""Many tasks at once, made in SQL: the rows of one task are copied under new ids.

Where the store keeps a task of this state is found out by looking, so that a change of the tables
needs none here.
"""

from typing import Any, NamedTuple

import psycopg

from bench.servers import Server

CHUNK = 500_000  # rows of one transaction

FIND_COLUMNS = """
SELECT c.relname, a.attname
FROM pg_class c
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
WHERE c.relnamespace = 'windlass'::regnamespace AND c.relkind IN ('r', 'p')
    AND NOT c.relispartition AND a.atttypid = 'uuid'::regtype
"""
FIND_OTHERS = """
SELECT a.attname
FROM pg_attribute a
WHERE a.attrelid = %s::regclass AND a.attnum > 0 AND NOT a.attisdropped
    AND a.attidentity = '' AND a.attgenerated = '' AND a.attname <> %s
"""


class Place(NamedTuple):
    """A table with a row of the task, and the column that holds its id."""

    table: str
    column: str


def fill(server: Server, database: str, number: int) -> None:
    """Make so many copies of the only task of a database."""
    with server.connect(database) as connection:
        sample = connection.execute("SELECT id FROM windlass.tasks").fetchone()
        if sample is None:
            raise LookupError(f"there is no task in '{database}' to copy")
        places = _places(connection, sample[0])
        for start in range(0, number, CHUNK):
            with connection.transaction():
                _copy(connection, sample[0], places, min(CHUNK, number - start))
        connection.execute("VACUUM ANALYZE")


def _places(connection: psycopg.Connection[tuple[Any, ...]], task_id: object) -> list[Place]:
    found = []
    for table, column in connection.execute(FIND_COLUMNS).fetchall():
        query = f"SELECT FROM windlass.{table} WHERE {column} = %s"
        if connection.execute(query, [task_id]).rowcount:
            found.append(Place(f"windlass.{table}", column))
    return found


def _copy(
    connection: psycopg.Connection[tuple[Any, ...]],
    task_id: object,
    places: list[Place],
    number: int,
) -> None:
    connection.execute(
        f"CREATE TEMP TABLE new ON COMMIT DROP AS "
        f"SELECT windlass.new_task_id() AS id FROM generate_series(1, {number})"
    )
    for place in places:
        others = [row[0] for row in connection.execute(FIND_OTHERS, place).fetchall()]
        listed = ", ".join([place.column, *others])
        taken = ", ".join(["new.id", *(f"old.{name}" for name in others)])
        connection.execute(
            f"INSERT INTO {place.table} ({listed}) SELECT {taken} "
            f"FROM new CROSS JOIN {place.table} old WHERE old.{place.column} = %s",
            [task_id],
        )
