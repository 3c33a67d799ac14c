"""The command line: `python -m fattn conform PACKAGE`, `replay FILE...`, `faults`, `bench plan`."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)

bench = typer.Typer(no_args_is_help=True)
app.add_typer(bench, name="bench", help="Measures what things cost here; --check exits 1 above what they may.")


def _console() -> Console:
    """As wide as the terminal, and wide enough for the tables where there is none."""
    return Console(width=None if Console().is_terminal else 160)


@app.callback()
def _commands():
    """Attention for large language models as pure functions: hold an implementation to the definitions."""


@app.command()
def conform(
    package: Annotated[str, typer.Argument(metavar="PACKAGE", help="fattn, npu, or one of your own with the same names")],
    op: Annotated[list[str] | None, typer.Option(help="a module or module.function; may be repeated")] = None,
    examples: Annotated[int, typer.Option(min=1, help="decisive examples an operation")] = 100,
    seed: Annotated[int, typer.Option(help="what all cases follow from")] = 0,
    device: Annotated[str, typer.Option(help="where npu runs: cpu, or npu for a device")] = "cpu",
    assume: Annotated[str | None, typer.Option(metavar="FILE", help="let npu's emulator answer as python -m npu probe did")] = None,
    json_file: Annotated[typer.FileTextWrite | None, typer.Option("--json", lazy=False, help="write the results as JSON")] = None,
):
    """Holds PACKAGE to the oracle and the laws: a row per operation and check. Exit 0: nothing failed, 1: something did, 2: bad usage."""
    # many small products: threads cost more than they bring
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from fattn.conformance import kit, report, results, targets
    from fattn.conformance.operations import OPERATIONS

    console = _console()
    names = [name for name in OPERATIONS if not op or name in op or name.split(".")[0] in op]
    for wanted in op or []:
        if not any(wanted in (name, name.split(".")[0]) for name in OPERATIONS):
            raise typer.BadParameter(f"{wanted!r} is no operation; one of {', '.join(OPERATIONS)}, or a module of them", param_hint="--op")
    if device not in ("cpu", "npu"):
        raise typer.BadParameter(f"{device!r} is not cpu or npu", param_hint="--device")
    try:
        target = targets.target_of(package, device=device, assume=assume)
    # RuntimeError: the emulation lacks a compiler or a wheel, and its message names what to install
    except (OSError, ModuleNotFoundError, RuntimeError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="PACKAGE") from error
    work = lambda name, advance: kit.check(name, target, examples=examples, seed=seed, progress=advance)
    found = report.with_progress(console, names, examples, work, threads=2 if target.arrays.compiles else 1)
    report.show(console, f"{target.name} on {target.provider}, seed {seed}", found)
    for note in target.notes:
        console.print(note, style="dim", markup=False, highlight=False)
    if json_file is not None:
        content = results.as_json(target.name, target.provider, seed, found)
        json.dump(content | {"notes": list(target.notes)}, json_file, indent=1)
    raise typer.Exit(1 if any(result.status == "failed" for result in found) else 0)


@app.command()
def replay(files: Annotated[list[str], typer.Argument(help="files that a failed check wrote")]):
    """Runs saved failures again and prints what differs. Exit 1 where one still fails."""
    from fattn.conformance import kit, targets
    from fattn.conformance import replay as saved

    console = _console()
    failing = 0
    for path in files:
        try:
            failure = saved.load(path)
            target = targets.target_of(failure.target)
        except (OSError, ModuleNotFoundError, RuntimeError, ValueError) as error:
            raise typer.BadParameter(str(error), param_hint="FILE") from error
        said = kit.fails(failure.check, failure.case, target)
        failing += bool(said)
        console.print(f"{path}: {failure.target} {failure.check}: {failure.case}", markup=False)
        console.print(f"  {said or 'holds now'}", style="red" if said else "green", markup=False)
    raise typer.Exit(1 if failing else 0)


@app.command()
def faults(json_file: Annotated[typer.FileTextWrite | None, typer.Option("--json", lazy=False, help="write the verdicts as JSON")] = None):
    """Holds the kit itself to account: broken implementations that it must catch, correct ones that it must not accuse.

    Exit 0: every fault was killed and no innocent accused, else 1.
    """
    # before NumPy loads, here and in the processes that do the work
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from fattn.conformance import judge, judge_report

    console = _console()
    broken, correct = judge_report.with_progress(console)
    judge_report.show(console, broken, correct)
    if json_file is not None:
        json.dump(judge.as_json(broken, correct), json_file, indent=1)
    survived = any(not verdict.accused for verdict in broken)
    raise typer.Exit(1 if survived or any(verdict.accused for verdict in correct) else 0)


@bench.command()
def plan(
    json_file: Annotated[typer.FileTextWrite | None, typer.Option("--json", lazy=False, help="write the results as JSON")] = None,
    quick: Annotated[bool, typer.Option(help="fewer rounds and sizes")] = False,
    check: Annotated[bool, typer.Option(help="exit 1 where something costs more than it may")] = False,
):
    """The host's time for a step: planning, and the Python of each npu layer with operators that do nothing, beside the original's."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from fattn.benchmarks import plan as benchmark

    result = benchmark.run(quick=quick)
    benchmark.show(_console(), result)
    if json_file is not None:
        json.dump(benchmark.as_json(result), json_file, indent=1)
    raise typer.Exit(int(check and not all(must.holds for must in result["musts"])))


if __name__ == "__main__":
    app(prog_name="python -m fattn")
