"""The command line of `npu`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
console = Console()
wide = Console(width=None if Console().is_terminal else 220)  # tables go whole into files and pipes
_RUNS = ("emulated", "found")


@app.callback()
def main():
    """torch_npu here: what runs, and on what evidence."""


@app.command()
def doctor(
    soc: Annotated[Literal["a2", "a3"], typer.Option(help="The chip that an emulation declares.")] = "a2",
    cann: Annotated[str, typer.Option(help="The CANN release that an emulation declares.")] = "9.1.0",
):
    """Says what runs the operators here, a device or the emulation; exits 1 where something that `npu` needs is missing."""
    from npu import emulator

    problem = None
    try:
        runs = emulator.install(soc, cann)
    except (RuntimeError, ImportError, OSError) as error:
        runs, problem = "nothing", str(error)
    _print_facts(runs, cann)
    if problem:
        console.print(f"[red]problem[/red] {problem}", highlight=False, soft_wrap=True)
        raise typer.Exit(1)
    if not _print_operators(on_cpu=runs.startswith("emulated")):
        raise typer.Exit(1)


@app.command()
def support(
    soc: Annotated[str, typer.Option(help="The chip: a2, a3 or 950.")] = "a2",
    cann: Annotated[str, typer.Option(help="The CANN release, as 9.1.0 or 8.3.")] = "9.1.0",
    md: Annotated[bool, typer.Option("--md", help="Print Markdown.")] = False,
):
    """Says what of attention runs on a chip and a CANN release, what is refused and what would work, and on what evidence."""
    from npu import support as supported
    from npu.releases import SOCS, release

    try:
        rows, one = supported.table(soc, cann), release(cann)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--soc" if str(error).startswith("soc") else "--cann") from error
    title = f"{SOCS[soc]}, CANN {one.cann} (torch_npu {', '.join(one.torch_npu)})"
    if md:
        print(f"# {title}\n\n{_markdown(supported.Row._fields, rows)}\n\n{_markdown(*_conflicts())}")
        return
    for heading, columns, cells in ((title, supported.Row._fields, rows), ("Where sources disagree", *_conflicts())):
        table = Table(*columns, title=heading, title_justify="left", header_style="bold")
        for row in cells:
            table.add_row(*row, style="dim" if row[3] == supported.ABSENT else "yellow" if row[3] == supported.REFUSED else None)
        wide.print(table, highlight=False)


@app.command()
def probe(
    json_file: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the answers as JSON: what to send back.")] = None,
    soc: Annotated[Literal["a2", "a3"], typer.Option(help="The chip that an emulation declares.")] = "a2",
    cann: Annotated[str, typer.Option(help="The CANN release that an emulation declares.")] = "9.1.0",
    only: Annotated[list[str] | None, typer.Option(help="Ask only this limit or assumption; may be repeated.")] = None,
):
    """Asks the operators of this host whether the limits and the emulator's assumptions hold; takes one device, for seconds.

    Exit 0: the questions were asked, whatever the answers; 1: nothing runs here; 2: bad usage.
    """
    # an operator's error comes from the call that made it, not from a later one
    os.environ.setdefault("ASCEND_LAUNCH_BLOCKING", "1")
    from npu import probe as probed
    from npu.probe import here

    try:
        provider, device, chip, release = here.install(soc, cann)
    except (RuntimeError, ImportError, OSError) as error:
        console.print(f"[red]problem[/red] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    emulated, answers = provider.startswith("emulated"), []

    def noted(answer):
        _show_answer(answer)
        answers.append(answer)
        if json_file is not None:  # each time: a device may end the process
            probed.write(json_file, probed.Report(provider, emulated, chip, release, _version("torch_npu"), tuple(answers)))

    try:
        probed.ask(device, only or (), noted, soc=chip)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--only") from error
    source = "of the emulation: they test the probe, and say nothing about a device" if emulated else f"of {provider}"
    console.print(f"{probed.summary(answers)}; answers {source}", style="bold", highlight=False, soft_wrap=True)


def _show_answer(answer):
    style = {"holds": "green", "differs": "red", "refused": "yellow"}.get(answer.answer, "dim")
    said = answer.message if len(answer.message) < 100 else answer.message[:97] + "..."
    console.print(f"[{style}]{answer.answer:9}[/] {answer.kind:10} {answer.id:24} {escape(said)}", highlight=False, soft_wrap=True)


def _conflicts():
    """Columns and rows of what sources say differently."""
    from npu.evidence import CONFLICTS

    cells = [
        (c.question, "; ".join(f"{claim.evidence}: {claim.says}" for claim in c.claims), c.ours, ", ".join(c.asked_as)) for c in CONFLICTS
    ]
    return ("question", "sources", "npu", "probed as"), cells


def _markdown(columns, rows):
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _print_facts(runs, cann):
    from npu.emulator import stubs, wheel
    from npu.emulator.target import target

    emulated, real = runs.startswith("emulated"), stubs.real_cann()
    device, chip = (
        ("an NPU of this host", runs) if not emulated else ("none; the operators run on CPU tensors", f"{target().chip}, declared")
    )
    if runs == "nothing":
        device, chip = "none", "none"
    installed, gcc = wheel.installed(), shutil.which("gcc")
    facts = {
        "runs": runs,
        "device": device,
        "SoC": chip,
        "CANN": "installed" if real else f"none; stand-ins that compute nothing, {cann} declared" if emulated else "none",
        "Python": f"{platform.python_version()} on {platform.machine()}",
        "torch": _version("torch"),
        "torch_npu": f"{runs.split()[-1]} in {installed}" if emulated else str(installed or "none"),
        "npu:0": _host_memory(emulated),
        "gcc": _output(gcc, "--version") if gcc else "none",
        "cache": str(wheel.cache_folder()),
    }
    table = Table(title="torch_npu on this host", show_header=False, title_justify="left")
    for name, value in facts.items():
        table.add_row(name, value)
    console.print(table)


def _host_memory(emulated):
    """What npu:0 tensors would be."""
    from npu.emulator import hostdev

    if not emulated:
        return "this host's own"
    return hostdev.problem() or "install(device='npu') makes it, in host memory, behind the wheel's C++ layer (ATB's operators apart)"


def _print_operators(on_cpu):
    """Prints the operators with their arguments; whether all are there."""
    from npu.emulator import behind, schemas

    console.print("operators that npu calls", style="italic")
    states = {name: _state(name, on_cpu) for name in schemas.OPERATORS}
    for name, state in states.items():
        console.print(f"[{'green' if state in _RUNS else 'red'}]{state:9}[/] [bold]{name}[/bold]", highlight=False)
        if state != "missing":
            names = [argument.name for argument in behind.operator(name)._schema.arguments]
            base, _, overload = name.partition(".")
            if overload:
                shared = {argument.name for argument in behind.operator(base)._schema.arguments}
                names = ["the same", *(argument for argument in names if argument not in shared)]
            console.print(Padding(", ".join(names), (0, 0, 0, 10)), style="dim", highlight=False)
    return all(state in _RUNS for state in states.values())


def _state(name, on_cpu):
    from npu.emulator import behind

    try:
        behind.operator(name)
    except AttributeError:
        return "missing"
    if not behind.has_kernel(name, "CPU" if on_cpu else "PrivateUse1"):
        return "no kernel"
    return "emulated" if on_cpu else "found"


def _version(distribution):
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _output(*command):
    return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()[0]


if __name__ == "__main__":
    app()
