"""SQL lives in files: statements by name, migrations in order, both put into the chosen schema."""

import re
from dataclasses import dataclass
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
        self._root = files(package)
        self._statements: dict[str, str] = {}

    def in_schema(self, sql: str) -> str:
        """Point SQL that is written for the schema `windlass` at ours."""
        return _QUALIFIER.sub(f"{self.schema}.", sql.replace("SCHEMA_NAME", self.schema))

    def statement(self, name: str) -> str:
        """Return the text of `queries/<name>.sql`."""
        text = self._statements.get(name)
        if text is None:
            text = (self._root / "queries" / f"{name}.sql").read_text(encoding="utf-8")
            self._statements[name] = text = self.in_schema(text)
        return text

    def migrations(self) -> list[Migration]:
        """Return every migration, in order."""
        found = []
        for file in (self._root / "migrations").iterdir():
            match = re.fullmatch(r"(\d{4})_(\w+)\.sql", file.name)
            if match:
                sql = self.in_schema(file.read_text(encoding="utf-8"))
                found.append(Migration(int(match[1]), match[2], sql))
        return sorted(found, key=lambda migration: migration.number)
