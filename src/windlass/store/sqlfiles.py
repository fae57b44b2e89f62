"""SQL lives in files: statements by name, migrations in order, both put into the chosen schema."""

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from windlass.model.errors import ConfigurationError
from windlass.model.limits import shown

# Of the 63 bytes that PostgreSQL gives a channel, '.wake' takes five.
_LONGEST_SCHEMA = 58
_SCHEMA_NAME = re.compile(rf"(?!pg_)[a-z_][a-z0-9_]{{0,{_LONGEST_SCHEMA - 1}}}")
_QUALIFIER = re.compile(r"\bwindlass\.")


@dataclass(frozen=True, slots=True)
class Migration:
    """One step of the schema; released ones are never edited."""

    number: int
    name: str
    sql: str

    def __str__(self) -> str:
        return f"{self.number:04d}_{self.name}"


def checked_schema(name: str) -> str:
    """Return a name that needs no quotes, or raise."""
    if not _SCHEMA_NAME.fullmatch(name):
        raise ConfigurationError(
            f"schema {shown(name)}: use lower case letters, digits and underscores, at most "
            f"{_LONGEST_SCHEMA}, and not pg_ at the beginning"
        )
    return name


class SqlFiles:
    """The statements and migrations of one adapter, for one schema."""

    def __init__(self, package: str, schema: str) -> None:
        self.schema = checked_schema(schema)
        self._package = package
        self._statements: dict[str, str] = {}

    def in_schema(self, sql: str) -> str:
        """Point SQL that is written for the schema `windlass` at ours."""
        return _in_schema(self.schema, sql)

    def statement(self, name: str) -> str:
        """Return the text of `queries/<name>.sql`."""
        text = self._statements.get(name)
        if text is None:
            self._statements[name] = text = _statement(self._package, self.schema, name)
        return text

    def migrations(self) -> list[Migration]:
        """Return every migration, in order."""
        return list(_migrations(self._package, self.schema))


def _in_schema(schema: str, sql: str) -> str:
    return _QUALIFIER.sub(f"{schema}.", sql.replace("SCHEMA_NAME", schema))


# Read once in a process: they are part of the package, and every store that opens asks for them.
@cache
def _statement(package: str, schema: str, name: str) -> str:
    file = files(package) / "queries" / f"{name}.sql"
    return _in_schema(schema, file.read_text(encoding="utf-8"))


@cache
def _migrations(package: str, schema: str) -> tuple[Migration, ...]:
    found = []
    for file in (files(package) / "migrations").iterdir():
        match = re.fullmatch(r"(\d{4})_(\w+)\.sql", file.name)
        if match:
            sql = _in_schema(schema, file.read_text(encoding="utf-8"))
            found.append(Migration(int(match[1]), match[2], sql))
    return tuple(sorted(found, key=lambda migration: migration.number))
