"""What `python -m fattn faults` prints: a bar while it works, a row for every fault and innocent, and the counts."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fattn.conformance import judge
from fattn.conformance.faults import FAULTS
from fattn.conformance.innocents import INNOCENTS
from fattn.conformance.judge import Verdict


def with_progress(console: Console) -> tuple[list[Verdict], list[Verdict]]:
    """The verdicts on all faults and innocents, under a live bar."""
    columns = (TextColumn("{task.description:42}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=len(FAULTS) + len(INNOCENTS))
        return judge.run(lambda name: bar.update(task, advance=1, description=name))


def show(console: Console, faults: list[Verdict], innocents: list[Verdict]):
    """Prints the rows, `killed K of N`, and how many innocents were accused."""
    broken = _table("faults", "kind", "killed by")
    for verdict in sorted(faults, key=lambda each: (each.accused, each.operation)):
        said = f"[green]{verdict.check}[/]" if verdict.accused else "[bold red]survived[/]"
        broken.add_row(verdict.operation, verdict.name, verdict.kind, said, str(verdict.examples), f"{verdict.seconds:.2f}")
    correct = _table(f"innocents, {judge.SEEDS} seeds each", "freedom", "accused by")
    for verdict in innocents:
        said = f"[bold red]{verdict.check}[/]" if verdict.accused else "[green]nothing[/]"
        correct.add_row(verdict.operation, verdict.name, verdict.kind, said, str(verdict.examples), f"{verdict.seconds:.2f}")
    console.print(broken)
    console.print(correct)
    for verdict in innocents:
        if verdict.accused:
            console.print(f"{verdict.name}: {verdict.check}: {verdict.reason}", style="red", markup=False)
    killed, accused = (sum(verdict.accused for verdict in verdicts) for verdicts in (faults, innocents))
    kinds = len({verdict.kind for verdict in faults})
    console.print(f"killed {killed} of {len(faults)} faults of {kinds} kinds", style="bold", highlight=False)
    console.print(f"accused {accused} of {len(innocents)} innocents", style="bold", highlight=False)


def _table(title, kind, said) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in ("operation", "name", kind, said):
        table.add_column(name, no_wrap=True)
    for name in ("examples", "seconds"):
        table.add_column(name, justify="right")
    return table
