"""Under which a lost worker is noticed soon: what the run promises follows from these."""

from typing import Any

LEASE = 5.0
HEARTBEAT = 1.0
SWEEP = 1.0
TERM = 3.0
LONG = 5.0  # seconds, of a long task
AGAIN = 3 * SWEEP  # seconds more, for one that runs a second time
SETTINGS: dict[str, Any] = {
    "lease": LEASE,
    "heartbeat": HEARTBEAT,
    "sweep": SWEEP,
    "leader_term": TERM,
    "concurrency": 8,
    "buffer": 8,
}
