"""Settings under which a lost worker is noticed within a test's patience."""

from typing import Any

QUICK: dict[str, Any] = {"lease": 2, "heartbeat": 0.5, "sweep": 0.2, "leader_term": 1.5}
