"""The command that looks at everything and says what to do."""

import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from windlass.app import App
from windlass.cli.loading import app_option, json_option, load_lasting_app
from windlass.cli.printing import legible, print_json
from windlass.cli.running import run

if TYPE_CHECKING:
    from windlass.model.examination import Finding


@click.command()
@app_option
@json_option
def doctor(application: str | None, as_json: bool) -> None:
    """Check the database, the schema, the workers and the tasks; say what to do. Changes nothing."""
    from windlass.model.examination import Level  # noqa: PLC0415 - slow, and only needed here

    findings = run(_examine(load_lasting_app(application)))
    if as_json:
        print_json(findings)
    else:
        _print(findings)
    sys.exit(1 if any(finding.level is Level.ERROR for finding in findings) else 0)


async def _examine(app: App) -> "list[Finding]":
    try:
        return await app.diagnosis()
    finally:
        await app.close()


def _print(findings: "Sequence[Finding]") -> None:
    """One line for each, and below it what to do."""
    from windlass.model.examination import Level  # noqa: PLC0415 - slow, and only needed here

    levels = max(len(level) for level in Level)
    checks = max(len(finding.check) for finding in findings)
    for finding in findings:
        found = legible(finding.found)
        click.echo(f"{finding.level:<{levels}}  {finding.check:<{checks}}  {found}")
        if finding.advice is not None:
            click.echo(f"{'':<{levels}}  {'':<{checks}}  → {legible(finding.advice)}")
    counts = Counter(finding.level for finding in findings)
    click.echo(", ".join(f"{level} {counts[level]}" for level in Level if counts[level]))
