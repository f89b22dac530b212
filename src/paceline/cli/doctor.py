"""`paceline doctor`: what this machine computes with, and what that means for drafting."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from paceline.cli import options as opt


def doctor(
    model: Annotated[str | None, typer.Option("--model", "-m", help="Measure this model's step too.")] = None,
    precision: opt.Precision = "auto",
    threads: opt.Threads = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
) -> None:
    """Show the processor, the kernels in use and the memory's speed; with a model, what its steps cost by rows."""
    from paceline.device import set_threads

    report = _machine(set_threads(threads))
    if model is not None:
        report |= _model(model, precision)
    if as_json:
        print(json.dumps(report))
    else:
        _print(report)


def _machine(threads: int) -> dict[str, Any]:
    import torch

    from paceline.bench.bandwidth import read_bandwidth
    from paceline.bench.provenance import processor_model
    from paceline.device import has_bf16_dot, has_int8_dot
    from paceline.native.interface import backend, backends
    from paceline.native.library import library, why_missing

    there = library() is not None
    return {
        "processor": processor_model(),
        "threads": threads,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "int8_dot": has_int8_dot(),
        "bf16_dot": has_bf16_dot(),
        "kernels": backend() if there else None,
        "kernels_available": backends() if there else [],
        "kernels_missing": why_missing(),
        "read_bytes_per_second": read_bandwidth(),
    }


def _model(name: str, precision: str) -> dict[str, Any]:
    from paceline.bench.step_curve import advise, step_curve
    from paceline.device import leave_threads_to_kernels
    from paceline.weights.load import load_model

    model = load_model(name, precision=precision, progress=True)
    if model.backend.native:
        leave_threads_to_kernels()
    curve = step_curve(model)
    return {
        "model": name,
        "precision": model.backend.precision,
        "native": model.backend.native,
        "row_invariant": model.backend.row_invariant,
        "step_seconds": {str(rows): seconds for rows, seconds in curve.items()},
        "advice": [asdict(each) for each in advise(curve)],
    }


def _print(report: dict[str, Any]) -> None:
    yes_no = {True: "yes", False: "no"}
    kernels = report["kernels"] or f"none: {report['kernels_missing']}"
    others = [name for name in report["kernels_available"] if name != report["kernels"]]
    print(f"processor   {report['processor']}, {report['threads']} threads")
    print(f"features    int8 dot products: {yes_no[report['int8_dot']]}, bf16: {yes_no[report['bf16_dot']]}")
    print(f"kernels     {kernels}" + (f" (also built: {', '.join(others)})" if others else ""))
    print(f"PyTorch     {report['torch']}, GPU: {report['gpu'] or 'none'}")
    print(f"memory      {report['read_bytes_per_second'] / 1e9:.1f} GB/s read")
    if "model" in report:
        _print_model(report)


def _print_model(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    where = "native kernels" if report["native"] else "PyTorch"
    bits = "a row's bits are its own" if report["row_invariant"] else "a row's bits depend on its company"
    print(f"model       {report['model']}, {report['precision']} by {where}; {bits}\n")
    one = report["step_seconds"]["1"]
    table = Table("rows", "ms a step", "x one row", title="Cost of a step at position 200")
    for rows, seconds in report["step_seconds"].items():
        table.add_row(rows, f"{seconds * 1e3:.2f}", f"{seconds / one:.2f}")
    console = Console(highlight=False)
    console.print(table)
    best = Table(
        "accepted", "draft length", "speed-up", title="What drafts that cost nothing (n-gram, suffix) would gain"
    )
    for advice in report["advice"]:
        best.add_row(f"{advice['acceptance']:.0%}", str(advice["length"]), f"{advice['speedup']:.2f}x")
    console.print(best)
