"""The limit: pgbench runs the statements by which our store claims and settles, and nothing else.

Their text is that of the package. What depends on their parameters is in `claim` and `settle` here:
adapt those when the parameters change.
"""

import re
import shutil
import subprocess
from pathlib import Path
from uuid import uuid4

from bench.contenders import Contender
from bench.drains import drain_in
from bench.ratios import Values
from bench.stage import Failed, Stage, Workload
from windlass.store.postgres.parts import PACKAGE
from windlass.store.sqlfiles import SqlFiles

LIMIT_WITHIN = 900.0  # seconds

# All that the worker is sent of a batch, in one row: pgbench keeps no more.
TAKE = """
WITH asked AS MATERIALIZED (SELECT gen_random_uuid() AS token)
SELECT
    asked.token,
    coalesce(max(c.ids), '{{}}') AS ids,
    max(c.payloads) AS payloads,
    max(c.read_lanes) AS lanes,
    max(c.last_x) AS from_x,
    max(c.last_n) AS from_n
FROM asked
CROSS JOIN LATERAL ({claim}) c
GROUP BY asked.token
\\gset
"""


def claim(batch: int) -> str:
    """Claim a batch and keep what was read, as the store does."""
    return TAKE.format(
        claim=_filled(
            "claim_tasks",
            ":worker",
            "asked.token",
            "'{note}'",  # types
            "NULL",  # queues
            str(batch),
            "interval '30 seconds'",  # lease
            "interval '6 seconds'",  # ageing
            "false",  # alone
            ":lanes",
            ":from_x",
            ":from_n",
            "'{}'",  # late
            "NULL",  # at most
            "NULL",  # other than
        )
    )


def settle() -> str:
    """Complete everything that the claim before has granted."""
    each = "array_fill({}, ARRAY[cardinality(CAST(:ids AS uuid[]))])"
    text = _filled(
        "settle_tasks",
        "ARRAY[CAST(:token AS uuid)]",
        "NULL",  # which of them
        ":ids",
        "NULL",  # generations
        each.format("0.0::float8"),  # started after
        *["NULL"] * 5,  # outcomes, results, delays, errors, reported
        "interval '7 days'",
        "interval '30 days'",
        "interval '7 days'",
        "interval '1 second'",  # patience
    )
    return f"{text};\n"


def limit(stage: Stage, ours: Contender, workload: Workload, batch: int, clients: int) -> Values:
    """Measure how fast pgbench drains, claiming and settling batches in turn on each connection."""
    turns = max(1, workload.tasks // (batch * clients))
    tasks = turns * batch * clients
    with stage.database(ours) as database:
        stage.ask(ours, database, "bulk", 1)
        drain_in(stage, ours, database, Workload(1))  # a worker makes what tasks rest in
        stage.ask(ours, database, "bulk", tasks, workload)
        stage.settle_down(database)
        script = stage.folder / "limit.sql"
        script.write_text(claim(batch) + settle())
        before = stage.counters.read(database)
        said = _pgbench(stage, database, script, clients, turns)
        counted = stage.counters.read(database).since(before)
        with stage.server.connect(database) as connection:
            if connection.execute(ours.unfinished).fetchone() != (False,):
                raise Failed("pgbench has left tasks behind: its batches were not full")
    (turns_per_second,) = re.findall(r"tps = ([\d.]+)", said)
    return {"rate": float(turns_per_second) * batch, **counted.each(tasks)}


def _pgbench(stage: Stage, database: str, script: Path, clients: int, turns: int) -> str:
    variables = {"worker": str(uuid4()), "lanes": "{}", "from_x": "{}", "from_n": "{}"}
    done = subprocess.run(
        [
            *(_program(stage), "--no-vacuum", "--protocol=prepared", f"--file={script}"),
            *(f"--client={clients}", f"--jobs={clients}", f"--transactions={turns}"),
            *(f"--define={name}={value}" for name, value in variables.items()),
            stage.server.on(database),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_WITHIN,
    )
    if done.returncode != 0:
        raise Failed(f"pgbench: {done.stderr[:1500]}")
    return done.stdout


def _program(stage: Stage) -> str:
    beside = None if stage.server.binaries is None else stage.server.binaries / "pgbench"
    if beside is not None and beside.exists():
        return str(beside)
    found = shutil.which("pgbench")
    if found is None:
        raise Failed("pgbench is neither beside the programs of the server nor on the PATH")
    return found


def _filled(name: str, *arguments: str) -> str:
    """Return a statement of the store on one line, with these arguments."""
    text = re.sub(r"--.*", "", SqlFiles(PACKAGE, "windlass").statement(name))
    wanted = {int(number) for number in re.findall(r"\$(\d+)", text)}
    if wanted != set(range(1, len(arguments) + 1)):
        raise Failed(f"{name} has parameters {sorted(wanted)}; bench/limit.py is to be adapted")
    filled = re.sub(r"\$(\d+)", lambda found: arguments[int(found[1]) - 1], text)
    return " ".join(filled.split())
