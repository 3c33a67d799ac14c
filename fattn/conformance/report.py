"""What a run prints: a bar while it works, then a row per operation and check, and a headline."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fattn.conformance.results import Result, headline

STYLES = {"passed": "green", "refused": "yellow", "failed": "bold red", "absent": "dim", "unreached": "dim"}


Work = Callable[[str, Callable[[], None]], list[Result]]


def with_progress(console: Console, names: list[str], examples: int, work: Work, *, threads: int = 1) -> list[Result]:
    """work(name, advance) for every name, under a live bar of operations and decisive examples.

    Several threads serve a target that compiles, which needs no interpreter.
    """
    columns = (TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar, ThreadPoolExecutor(threads) as pool:
        operations = bar.add_task("operations", total=len(names))

        def one(name):
            current = bar.add_task(name, total=examples)
            found = work(name, lambda: bar.advance(current))
            bar.remove_task(current)
            bar.advance(operations)
            return found

        return [result for found in pool.map(one, names) for result in found]


def show(console: Console, title: str, results: list[Result]):
    """Prints the rows and the headline. Features that passed are one row an operation; refused and failed ones have their own.

    Operations that the target lacks are named in one line.
    """
    table = Table(title=title, title_justify="left", header_style="bold", expand=False)
    for name in ("operation", "check", "status"):
        table.add_column(name, no_wrap=True)
    for name in ("examples", "decisive", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("why", overflow="fold")
    absent = [result.operation for result in results if result.reason.endswith(f" has no {result.operation}")]
    for operation in dict.fromkeys(result.operation for result in results if result.operation not in absent):
        own = [result for result in results if result.operation == operation]
        features = [result for result in own if "=" in result.check and result.status == "passed" and not result.reason]
        for result in own:
            if result not in features:
                _row(table, result)
        if features:
            _features(table, operation, features)
        table.add_section()
    console.print(table)
    if absent:
        console.print(f"no function: {', '.join(absent)}", style="dim", highlight=False)
    console.print(headline(results), style="bold")


def _row(table, result):
    style = STYLES[result.status]
    counts = (str(result.examples), str(result.decisive), f"{result.seconds:.2f}") if result.examples else ("", "", "")
    table.add_row(result.operation, result.check, f"[{style}]{result.status}[/]", *counts, result.reason.replace("[", r"\["))


def _features(table, operation, features):
    core = sum(feature.core for feature in features)
    optional = f", {len(features) - core} optional" if core < len(features) else ""
    least = min(feature.decisive for feature in features)
    said = f"{core} required{optional}; each in at least {least} decisive examples"
    table.add_row(operation, "features", "[green]passed[/]", "", "", "", said)
