"""What a run of chaos came to: the figures, and every promise that was broken."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

from chaos.settings import HEARTBEAT, LEASE, SWEEP, TERM
from chaos.world import World
from windlass.store.clock_watch import PROMPTLY
from windlass.testing.history_check import (
    History,
    Quiet,
    Recovery,
    check,
    check_liveness,
    recoveries,
)
from windlass.testing.history_check.events import Claimed, Ended, Led, Pulsed, Registered, Returned

MOST_SHOWN = 20
REPLACED_WITHIN = (
    TERM + TERM / 3 + 3
)  # seconds: a term, one interval, and some for faults that meet


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run left behind."""

    world: World
    history: History
    quiet: Quiet
    recover_within: float
    left: list[str]
    log: str


def tell(outcome: Outcome, troubles: list[str], seed: int) -> int:
    """Print the report; return the exit code."""
    world, history = outcome.world, outcome.history
    for name, count in sorted(world.counts.items()):
        print(f"{name:<28}{count}")
    ended = [event for event in history.events if isinstance(event, Ended)]
    rescued = [event for event in history.events if isinstance(event, Returned) and not event.token]
    terms = {event.term for event in history.events if isinstance(event, Led)}
    print(f"{'tasks ended':<28}{len(ended)}")
    print(f"{'handlers called':<28}{len(history.runs)}")
    print(f"{'tasks rescued':<28}{len(rescued)}")
    print(f"{'terms of leaders':<28}{len(terms)}")
    deaths, leaderless = lost(outcome)
    # What was cut off may have been a sweep of the leader, which is made again when the next one is due.
    unswept = [(at, at + SWEEP) for at in world.cuts]
    measured = recoveries(
        history,
        deaths,
        lease=LEASE,
        within=outcome.recover_within,
        outages=[*world.server.outages, *leaderless, *unswept],
    )
    _tell_times("granted again after", [one.seconds for one in measured])
    _tell_times("taken back too late by", [max(0.0, one.overdue) for one in measured])
    _tell_times("database away", [end - begin for begin, end in world.server.outages])
    _tell_silences(outcome)
    for violation in [*check(history), *check_liveness(history, outcome.quiet)][:MOST_SHOWN]:
        troubles.append(str(violation))
    troubles += late(measured, outcome.recover_within)
    for trouble in troubles:
        print(f"BROKEN  {trouble}")
    if troubles:
        print("\n".join(outcome.log.splitlines()[-40:]))
    print(f"{'broken' if troubles else 'all promises were kept'}, seed {seed}")
    return 1 if troubles else 0


def late(measured: list[Recovery], within: float) -> list[str]:
    return [
        f"task {one.task} of lost worker {one.worker} was taken back {one.overdue:.1f} s after that "
        f"was possible, not within {within:.1f}; it was granted again after {one.seconds:.1f}"
        for one in measured
        if one.overdue > within
    ][:MOST_SHOWN]


def lost(outcome: Outcome) -> tuple[dict[str, float], list[tuple[float, float]]]:
    """When each killed worker died, and from when to when there was no leader because of a fault."""
    fleet = outcome.world.fleet
    entered = [e for e in outcome.history.events if isinstance(e, Registered) and e.is_there]
    deaths: dict[str, float] = {}
    for death in fleet.deaths:
        own = [e.worker for e in entered if e.pid == death.pid and e.at < death.at]
        deaths.update(dict.fromkeys(own[-1:], death.at))
    faults = [(one.pid, one.at) for one in [*fleet.deaths, *fleet.stops]]
    led = [event for event in outcome.history.events if isinstance(event, Led)]
    leaderless = []
    for pid, at in faults:
        own_ids = {e.worker for e in entered if e.pid == pid and e.at < at}
        before = [event for event in led if event.at <= at]
        if before and before[-1].holder in own_ids:
            after = [e.at for e in led if e.at > at]  # it may go on leading itself
            leaderless.append((at, min([*after, _replaced_by(at, outcome.world.server.outages)])))
    began = {event.worker: event.at for event in reversed(entered)}
    for event in led:  # one that has just begun to watch the clock does not rescue yet
        trusts_clock_at = began.get(event.holder, 0.0) + HEARTBEAT + PROMPTLY
        if event.at < trusts_clock_at:
            leaderless.append((event.at, trusts_clock_at))
    return deaths, leaderless


def _replaced_by(lost_at: float, outages: list[tuple[float, float]]) -> float:
    """When there is a leader again at the latest; nobody is elected while the database is away."""
    latest = lost_at + REPLACED_WITHIN
    for begin, end in sorted(outages):
        if begin < latest and end > lost_at:
            latest += end - max(begin, lost_at) + TERM / 3
    return latest


def _tell_times(name: str, seconds: list[float]) -> None:
    times = sorted(seconds)
    if times:
        middle, most = times[len(times) // 2], times[min(len(times) - 1, len(times) * 95 // 100)]
        print(
            f"{name:<28}{len(times)}, median {middle:.1f} s, 95 of 100 within {most:.1f} s, "
            f"longest {times[-1]:.1f} s"
        )


def _tell_silences(outcome: Outcome) -> None:
    """The longest time that each worker which lived to the end was not heard of."""
    heard: dict[str, list[float]] = defaultdict(list)
    for event in outcome.history.events:
        if isinstance(event, Pulsed | Claimed):
            heard[event.worker].append(event.at)
    for worker in sorted(outcome.quiet.workers):
        times = sorted(heard[worker])
        longest = max((b - a for a, b in pairwise(times)), default=0.0)
        print(f"{'worker ' + worker[-12:]:<28}not heard of for {longest:.1f} s at most")
