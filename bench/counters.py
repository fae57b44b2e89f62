"""What PostgreSQL did between two moments, by its own counters."""

from dataclasses import dataclass

from bench import processes
from bench.ratios import Values
from bench.servers import Server

BY_STATEMENTS = """
SELECT
    pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0'),
    coalesce(sum(s.calls), 0),
    coalesce(sum(s.shared_blks_hit + s.shared_blks_read), 0)
FROM pg_stat_statements s
JOIN pg_database d ON d.oid = s.dbid
WHERE d.datname = %s
"""
BY_DATABASE = """
SELECT
    pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0'),
    d.xact_commit + d.xact_rollback,
    d.blks_hit + d.blks_read
FROM pg_stat_database d
WHERE d.datname = %s
"""


@dataclass(frozen=True)
class Counted:
    """Up to a moment, of one database; WAL and CPU are those of the whole server."""

    wal_bytes: float
    statements: float
    buffers: float
    cpu_seconds: float

    def since(self, before: "Counted") -> "Counted":
        """Return what was added."""
        return Counted(
            self.wal_bytes - before.wal_bytes,
            self.statements - before.statements,
            self.buffers - before.buffers,
            self.cpu_seconds - before.cpu_seconds,
        )

    def each(self, tasks: int) -> Values:
        """Return what it was for each task."""
        return {
            "postgres_us": self.cpu_seconds / tasks * 1e6,
            "statements": self.statements / tasks,
            "wal": self.wal_bytes / tasks,
            "buffers": self.buffers / tasks,
        }


class Counters:
    """The counters of one server, read without being counted."""

    def __init__(self, server: Server) -> None:
        self._postmaster = server.postmaster()
        self._connection = server.connect()
        self.by_statements = server.counts_statements()

    def read(self, database: str) -> Counted:
        """Return what was counted so far."""
        query = BY_STATEMENTS if self.by_statements else BY_DATABASE
        row = self._connection.execute(query, [database]).fetchone()
        wal, statements, buffers = (float(str(value)) for value in row or (0, 0, 0))
        return Counted(wal, statements, buffers, self._cpu())

    def how(self) -> str:
        """Say what is counted as a statement."""
        if self.by_statements:
            return "statements and buffers by pg_stat_statements"
        return "transactions instead of statements, and buffers, by pg_stat_database"

    def close(self) -> None:
        """Give back the connection."""
        self._connection.close()

    def _cpu(self) -> float:
        if self._postmaster is None:
            return float("nan")
        return processes.cpu_seconds(self._postmaster)
