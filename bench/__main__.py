"""Measure Windlass beside the peers that are installed, in one run.

    python -m bench [CASE …] [--rounds 5] [--tasks 50000] [--database URL | --server-bin DIR]

Only ratios within one run say something about the code: the rates are those of a machine and a
moment. Without a database a PostgreSQL of its own is started in a temporary folder, with full
durability. What is not installed is left out: BENCH_NODE names a folder whose node_modules has
graphile-worker and pg-boss, BENCH_PYTHON an interpreter that has pgqueuer and procrastinate.
"""

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TextIO

from bench import contenders
from bench.cases import DEFAULT, Contest, Sizes, all_cases, chosen
from bench.contenders import Absent, Contender
from bench.picture import picture
from bench.ratios import Measured
from bench.report import line, table
from bench.rounds import measure
from bench.servers import NoServer, Server, embedded_binaries, given_server, own_server
from bench.stage import Stage


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, measure, and print the tables."""
    asked = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server would be left behind
    try:
        with TemporaryDirectory(prefix="windlass-bench-") as folder, _server(asked) as server:
            stage = Stage(server, Path(folder))
            try:
                _run(asked, stage)
            finally:
                stage.close()
    except NoServer as error:
        sys.exit(str(error))


def _parser() -> argparse.ArgumentParser:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m bench", description=__doc__, formatter_class=shape)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="or a first word, or 'all'")
    parser.add_argument("--list", action="store_true", help="the cases there are")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", metavar="PEER", help="no other; 'none' for none")
    parser.add_argument("--node", type=Path, default=os.environ.get("BENCH_NODE"), metavar="DIR")
    parser.add_argument("--python", default=os.environ.get("BENCH_PYTHON"), metavar="PROGRAM")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--database", metavar="URL", help="makes and drops databases beside it")
    where.add_argument("--server-bin", type=Path, metavar="DIR", help="the programs of PostgreSQL")
    parser.add_argument("--results", type=Path, metavar="FILE", help="append lines of JSON")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw an SVG")
    for field in fields(Sizes):
        name = f"--{field.name.replace('_', '-')}"
        kind = type(field.default)
        parser.add_argument(name, type=kind, default=field.default, metavar="N")
    return parser


def _server(asked: argparse.Namespace) -> AbstractContextManager[Server]:
    if asked.database:
        return given_server(asked.database)
    return own_server(asked.server_bin or embedded_binaries())


def _run(asked: argparse.Namespace, stage: Stage) -> None:
    found = list(contenders.find_peers(asked.python, asked.node, stage.folder))
    contest = Contest(
        stage=stage,
        ours=contenders.ours(),
        yardstick=contenders.yardstick(),
        peers=tuple(_taking_part(found, asked.only)),
        sizes=Sizes(**{field.name: getattr(asked, field.name) for field in fields(Sizes)}),
    )
    heading = [*_heading(contest), *_absences(found)]
    print("\n".join(heading), flush=True)
    cases = all_cases(contest)
    if asked.list:
        print("\n".join(f"{case.name}: {case.about}" for case in cases))
        return
    measured: list[Measured] = []
    with _results(asked.results) as results:
        print(json.dumps({"heading": heading}), file=results, flush=True)
        tell = partial(_tell, results)
        for case in chosen(cases, asked.cases or list(DEFAULT)):
            measured += measure(case, asked.rounds, tell)
            print(f"\n{table(case, measured)}", flush=True)
    if asked.picture:
        asked.picture.write_text(picture(measured), encoding="utf-8")


def _absences(found: Sequence[Contender | Absent]) -> list[str]:
    absent = [one for one in found if isinstance(one, Absent)]
    return [f"- {one.name} is left out: {one.reason}" for one in absent]


def _tell(results: TextIO, one: Measured) -> None:
    print(line(one), file=results, flush=True)


def _taking_part(found: Sequence[Contender | Absent], only: list[str] | None) -> list[Contender]:
    peers = [one for one in found if isinstance(one, Contender)]
    return peers if only is None else [one for one in peers if one.name in only]


def _results(path: Path | None) -> TextIO:
    return (path or Path(os.devnull)).open("a", encoding="utf-8")


def _heading(contest: Contest) -> list[str]:
    stage = contest.stage
    with stage.server.connect() as connection:
        version = connection.info.server_version
        settings = ("fsync", "synchronous_commit", "shared_buffers")
        shown = [connection.execute(f"SHOW {name}").fetchone() or ("?",) for name in settings]
    said = ", ".join(f"{name}={row[0]}" for name, row in zip(settings, shown, strict=True))
    queues = ", ".join(f"{one.name} {one.version}" for one in contest.queues)
    when, cores = time.strftime("%Y-%m-%d %H:%M"), os.cpu_count()
    number = f"{version // 10000}.{version % 10000}"
    flush = f"a write of 8 kB is flushed in {_flush_ms(stage.folder):.2f} ms"
    return [
        f"- {when}, {cores} cores, Python {platform.python_version()}: {queues}",
        f"- PostgreSQL {number}: {said}; {flush}",
        f"- each per task: µs of CPU, {stage.counters.how()}, bytes of WAL; medians of the rounds",
        "- quartile: the worse one of the ratios, the lower for rates and the upper for costs",
    ]


def _flush_ms(folder: Path, times: int = 15) -> float:
    """What the disk takes for its part of a commit; it drifts on shared machines."""
    took = []
    with (folder / "flushed").open("wb", buffering=0) as file:
        for _ in range(times):
            began = time.perf_counter()
            file.write(bytes(8192))
            os.fdatasync(file.fileno())
            took.append(1000 * (time.perf_counter() - began))
    return sorted(took)[times // 2]


if __name__ == "__main__":
    main()
