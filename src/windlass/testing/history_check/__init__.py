"""Decides from what was recorded in a run whether the engine kept its promises.

Record a run, whatever goes wrong in it, and check it afterwards:

```python
from windlass.testing.history_check import (
    ClientLog, Quiet, check, check_liveness, log_runs, read_history, record
)

await record(connection)  # of asyncpg, on a migrated database: triggers write down every change
app.middleware(log_runs(Path("runs.jsonl")))  # in each worker
client = ClientLog(Path("calls.jsonl"))  # in each client
handle = await client.enqueue(app, "resize", {"image": "a.png"})
...
history = await read_history(connection, calls=[Path("calls.jsonl")], runs=[Path("runs.jsonl")])
assert not check(history)
# What had to happen between the last fault and the moment at which all was to be done:
assert not check_liveness(history, Quiet(since=..., until=..., sweep=5, term=15))
```

What may be compared. An event is written by a trigger in the transaction of the change it tells of,
so it is there exactly if the change is. Its number `n` is drawn before the commit, so numbers of two
transactions follow the order of their commits only where one had to wait for the other, or could not
have begun without it. That is so

- for the changes of one row: the live row of a task (born, changed, returned, ended), the row of an
  ended one (ended, reopened, forgotten), the seat, a claim (granted, extended): whoever changes it
  second has waited for the first to commit, and draws its numbers after that wait;
- for a claim and what it took: the ready row of that generation was committed before;
- for a settlement or a rescue and its claim: a token is known, and an expired claim is seen, only once
  they are committed;
- for a rescue and an election: a rescue holds the seat until it commits.

No rule compares the numbers of other pairs. Where two claims of a task are compared it is by their
generations, and a settlement is judged by the generation it changed and not by who claimed meanwhile.
Times are those of the database, taken after the waits and before the commit, as the engine's own are:
"too early by this time" is then certain, and only such things are decided by times. They need a
server whose clock does not step back.

Leader's writes (I10) are seen as rescues, which no worker may write by itself, and each is recorded with
the term of the seat if its transaction held it. Every other chore of a leader is harmless when it is
done twice or late. Unknown outcomes stay unknown: such an enqueue may exist or not, but once at most.
"""

from windlass.testing.history_check.events import (
    Call,
    Event,
    History,
    Pause,
    Run,
    Violation,
)
from windlass.testing.history_check.liveness import Quiet, Recovery, check_liveness, recoveries
from windlass.testing.history_check.logs import ClientLog, log_runs
from windlass.testing.history_check.reading import read_history, record
from windlass.testing.history_check.safety import check

__all__ = [
    "Call",
    "ClientLog",
    "Event",
    "History",
    "Pause",
    "Quiet",
    "Recovery",
    "Run",
    "Violation",
    "check",
    "check_liveness",
    "log_runs",
    "read_history",
    "record",
    "recoveries",
]
