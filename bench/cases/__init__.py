"""What can be measured: each case a few runs that take turns, and which of them are compared."""

from bench.cases.case import Case, Contest, Sizes
from bench.cases.computing import computing_cases
from bench.cases.depth import depth_cases
from bench.cases.enqueueing import enqueue_cases
from bench.cases.failing import failing_cases
from bench.cases.throughput import throughput_cases
from bench.cases.waiting import waiting_cases

__all__ = ["DEFAULT", "Case", "Contest", "Sizes", "all_cases", "chosen"]

DEFAULT = ("drain-1", "drain-2", "bulk", "single", "concurrent", "latency")


def all_cases(contest: Contest) -> list[Case]:
    """Return every case, in the order in which they are run."""
    return [
        *throughput_cases(contest),
        *enqueue_cases(contest),
        *computing_cases(contest),
        *failing_cases(contest),
        *waiting_cases(contest),
        *depth_cases(contest),
    ]


def chosen(cases: list[Case], names: list[str]) -> list[Case]:
    """Those that are named, in full or by their first word; `all` names all."""
    if "all" in names:
        return cases
    found = [case for case in cases if {case.name, case.name.partition("-")[0]} & set(names)]
    known = {name for case in cases for name in (case.name, case.name.partition("-")[0])}
    unknown = sorted(set(names) - known)
    if unknown:
        raise SystemExit(
            f"no case is called {', '.join(unknown)}; cases are: "
            f"{', '.join(case.name for case in cases)}"
        )
    return found
