"""Runs of a case take turns, round by round, so that what else happens befalls all of them."""

import os
import subprocess
import sys
import time
from collections.abc import Callable

import psycopg

from bench import processes
from bench.cases.case import Case, Run
from bench.ratios import Measured, Values
from bench.report import OTHERS, QUANTITIES
from bench.stage import Failed


def measure(case: Case, rounds: int, tell: Callable[[Measured], None]) -> list[Measured]:
    """Measure a case; a run that fails is left out from then on."""
    measured: list[Measured] = []
    runs = list(case.runs)
    for number in range(1, rounds + 1):
        for run in tuple(runs):
            try:
                one = Measured(case.name, run.label, number, _with_others(run))
            except (Failed, psycopg.Error, subprocess.TimeoutExpired) as error:
                print(f"{case.name}, {run.label}: left out: {error}", file=sys.stderr, flush=True)
                runs.remove(run)
                continue
            measured.append(one)
            tell(one)
            say(case, one, rounds)
    return measured


def _with_others(run: Run) -> Values:
    """Measure, and add what part of the machine others had meanwhile."""
    busy, own, began = processes.busy_seconds(), _own_seconds(), time.monotonic()
    values = run.measure()
    others = processes.busy_seconds() - busy - (_own_seconds() - own)
    available = (time.monotonic() - began) * (os.cpu_count() or 1)
    return values | {OTHERS: max(0.0, 100 * others / available)}


def _own_seconds() -> float:
    return processes.cpu_seconds(os.getpid())


def say(case: Case, one: Measured, rounds: int) -> None:
    """Tell whoever waits how far it is."""
    name = case.shown[0]
    quantity = QUANTITIES[name]
    value = f"{one.values[name]:{quantity.form}} {quantity.title}" if name in one.values else ""
    print(f"{case.name} {one.round}/{rounds} {one.label}: {value}", file=sys.stderr, flush=True)
