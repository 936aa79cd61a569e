"""Run the notebooks with papermill, strictly.

papermill alone accepts misspelt parameters, takes the kernel that a notebook names, and leaves half a notebook behind
when a cell fails. Here unknown names and wrong types are refused before anything runs, the kernel is always this
environment's ``python3``, and an executed copy appears under ``data/runs/<profile>/`` whole or not at all.
:func:`run_notebooks` runs two at a time, which share the cores.

    python -m residualquant.repro.notebooks list
    python -m residualquant.repro.notebooks run 10_table2 -p profile smoke
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from residualquant.errors import ResidualQuantError
from residualquant.repro import paths
from residualquant.repro.profiles import profile_of
from residualquant.repro.provenance import cores

if TYPE_CHECKING:
    from tqdm import tqdm

KERNEL = "python3"
QUIET = "--IPKernelApp.log_level=40"  # errors only
SHOWN_LINES = 12  # of a failing cell and of its traceback
AT_ONCE = 2  # notebooks, on a machine with as many cores
ALONE = ("30_serving",)  # it measures speed
PATIENCE = 10  # seconds in which an interrupted kernel may end by itself


def notebook_names() -> list[str]:
    """Names of all notebooks, in order: "00_method", "01_storage" …"""
    return [path.stem for path in sorted(paths.notebooks_dir().glob("[0-9][0-9]_*.ipynb"))]


def notebook_path(name: str) -> Path:
    """The file of a notebook given as "10_table2" or "10_table2.ipynb".

    Raises:
        ValueError: no such notebook.
    """
    stem = name.removesuffix(".ipynb")
    if stem not in notebook_names():
        raise ValueError(f"no notebook {name!r}; known notebooks: {', '.join(notebook_names())}")
    return paths.notebooks_dir() / f"{stem}.ipynb"


def parameters_of(path: Path) -> dict[str, Any]:
    """{name: default} of a notebook's parameters cell: plain ``name = literal`` lines.

    Raises:
        ResidualQuantError: the notebook is damaged, has no such cell, or the cell holds anything else.
    """
    import nbformat

    try:
        paths.parse_json(path.read_bytes())
        cells = nbformat.read(path, as_version=4).cells
    except (ValueError, nbformat.ValidationError, OSError) as error:
        raise ResidualQuantError(f"{paths.show(path)} is not a readable notebook: {error}") from error
    tagged = [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        raise ResidualQuantError(f"{paths.show(path)} must have one cell tagged 'parameters', it has {len(tagged)}")
    try:
        lines = [(s.targets, ast.literal_eval(s.value)) for s in ast.parse(tagged[0].source).body]
        return {target.id: value for (target,), value in lines}
    except (SyntaxError, ValueError, AttributeError, TypeError) as error:
        raise ResidualQuantError(f"{paths.show(path)}: its parameters cell may only hold name = literal") from error


def check_parameters(path: Path, given: Mapping[str, Any]) -> None:
    """Refuse what papermill would let pass.

    Raises:
        ValueError: a name that the notebook does not have, a value of another type than its default, or an unknown
            profile (it names a folder too).
    """
    known = parameters_of(path)
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"{path.stem} has no parameter {name!r}; known parameters: {', '.join(known)}")
        if not _fits(value, known[name]):
            kind = type(known[name]).__name__
            raise ValueError(f"parameter {name!r} of {path.stem} must be of type {kind}, got {value!r}")
        if name == "profile":
            profile_of(value)


def _fits(value: Any, default: Any) -> bool:
    if default is None or value is None:
        return True
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return True
    return type(value) is type(default)


def run_notebook(name: str, parameters: Mapping[str, Any] | None = None) -> Path:
    """Execute one notebook and return its executed copy, ``data/runs/<profile>/<name>.ipynb``.

    Args:
        name: as for :func:`notebook_path`.
        parameters: values for names of its parameters cell, ``profile`` among them.

    Raises:
        ValueError: an unknown notebook, parameter or type.
        ResidualQuantError: a cell failed, the kernel died, or the copy could not be written; nothing is left behind.
    """
    try:
        return _run(name, parameters or {}, progress_bar={"desc": name})
    except ResidualQuantError as error:
        _explain(error)
        raise


def _run(name: str, parameters: Mapping[str, Any], **options) -> Path:
    """:func:`run_notebook` that shows nothing; ``options`` are papermill's."""
    source = notebook_path(name)
    check_parameters(source, parameters)
    folder = paths.runs_dir({**parameters_of(source), **parameters}.get("profile", "mini"))
    target, temporary = folder / source.name, folder / f".{source.stem}.running.ipynb"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            _execute(source, temporary, dict(parameters), **options)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ResidualQuantError(f"{paths.show(target)} could not be written ({error.strerror or error})") from error
    return target


def _execute(source: Path, target: Path, parameters: dict[str, Any], **options) -> None:
    import logging

    import papermill
    from jupyter_client.kernelspec import NoSuchKernel
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    logging.getLogger("papermill").setLevel(logging.ERROR)  # its guesses at parameters; they are checked above
    where = {"metadata": {"path": str(paths.workspace())}}  # its own cwd would be that of all threads
    try:
        papermill.execute_notebook(
            str(source), str(target), parameters=parameters, kernel_name=KERNEL, language="python",
            resources=where, extra_arguments=[QUIET], **options,
        )  # fmt: skip
    except PapermillExecutionError as error:
        raise ResidualQuantError(f"{source.stem}, cell {error.cell_index + 1}: {_headline(error)}") from error
    except DeadKernelError as error:
        raise ResidualQuantError(f"{source.stem}: its Python process died (out of memory, or killed)") from error
    except NoSuchKernel as error:
        raise ResidualQuantError(f"{source.stem}: no Jupyter kernel {KERNEL!r}: reinstall ipykernel") from error


def _headline(error: Any) -> str:
    text = str(error.evalue).strip().splitlines()
    return (text[0] if text else "") if error.ename == "ResidualQuantError" else f"{error.ename}: {' '.join(text)}"


def _explain(failure: ResidualQuantError) -> None:
    """Show the failing cell, if it was one that failed."""
    if hasattr(failure.__cause__, "traceback"):
        print(describe_failure(failure.__cause__), file=sys.stderr)


def describe_failure(error: Any) -> str:
    """A failing cell in short: its first lines and the end of its traceback, without colours."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback)).splitlines()
    source = [f"    {line}" for line in str(error.source).strip().splitlines()[:SHOWN_LINES]]
    return "\n".join(["the failing cell:", *source, "the end of its traceback:", *plain[-SHOWN_LINES:]])


# ------------------------------------------------------------------------------------------------ all of them


def run_notebooks(profile: str, compute: bool = False) -> list[Path]:
    """Execute all notebooks for one profile; returns the executed copies, in order.

    Each gets ``profile`` and ``compute`` where its parameters cell has them: with ``compute`` missing answers are
    computed, without it records are read and no model runs. Two run at a time where there are two cores, so that what
    several of them would compute has to be there already. A notebook that measures speed runs when the others are done.

    Raises:
        ResidualQuantError: notebooks failed, whose names are given; no other is begun then, and those that are done
            or running are kept.
        KeyboardInterrupt: after all kernels have ended.
    """
    from tqdm.auto import tqdm

    offered = {"profile": profile, "compute": compute}
    given = {
        name: {k: v for k, v in offered.items() if k in parameters_of(notebook_path(name))} for name in notebook_names()
    }
    alone = [name for name in given if name in ALONE]
    with tqdm(total=len(given), desc="notebooks", unit="notebook") as bar:
        done = _run_together({name: given[name] for name in given if name not in alone}, AT_ONCE, bar)
        for name in alone:
            done |= _run_together({name: given[name]}, 1, bar)
    return [done[name] for name in given]


def _run_together(given: Mapping[str, Mapping[str, Any]], at_once: int, bar: tqdm) -> dict[str, Path]:
    """{name: executed copy} of the notebooks {name: parameters}, ``at_once`` at a time if there are as many cores."""
    at_once, kernels, is_over = min(at_once, cores()), [], Event()
    kernel_class = _kernel_class(kernels, cores() // at_once)

    with ThreadPoolExecutor(at_once) as pool:

        def run(name: str, parameters: Mapping[str, Any]) -> Path | None:
            if is_over.is_set():
                return None
            try:
                path = _run(name, parameters, progress_bar=False, kernel_manager_class=kernel_class)
            except BaseException:
                is_over.set()
                raise
            bar.update()
            return path

        running = {name: pool.submit(run, name, parameters) for name, parameters in given.items()}
        try:
            wait(running.values())
        except BaseException:
            is_over.set()
            _stop(kernels, running.values())
            raise
    failures = [error for future in running.values() if (error := future.exception())]
    for error in failures:
        if not isinstance(error, ResidualQuantError):
            raise error
        _explain(error)
    if failures:
        raise ResidualQuantError("; ".join(map(str, failures))) from failures[0]
    return {name: future.result() for name, future in running.items()}


def _kernel_class(kernels: list, threads: int) -> type:
    """Managers of kernels that compute with so many threads, unless the user names another number.

    Each is added to ``kernels`` when it has started.
    """
    from jupyter_client import AsyncKernelManager

    class Kernel(AsyncKernelManager):
        async def start_kernel(self, **options) -> None:
            await super().start_kernel(**options, env={"OMP_NUM_THREADS": str(threads)} | os.environ)
            kernels.append(self)

    return Kernel


def _stop(kernels: Sequence[Any], running: Collection[Future]) -> None:
    """Interrupt what ``kernels`` run until the notebooks have ended; kill the kernels of those that do not."""
    try:
        for _ in range(PATIENCE):
            _send(kernels, signal.SIGINT)
            if not wait(running, timeout=1).not_done:
                break
    finally:
        _send(kernels, signal.SIGKILL)


def _send(kernels: Sequence[Any], signum: int) -> None:
    for kernel in tuple(kernels):
        with contextlib.suppress(RuntimeError):  # it has ended
            asyncio.run(kernel.signal_kernel(signum))


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of this module; returns the exit status (2 for what the user can mend)."""
    parser = argparse.ArgumentParser(prog="python -m residualquant.repro.notebooks", description="Run the notebooks.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="every notebook and its parameters")
    run = commands.add_parser("run", help="execute one notebook into data/runs/<profile>/")
    run.add_argument("name", help="such as 10_table2")
    run.add_argument("-p", "--parameter", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"))
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "list":
            for name in notebook_names():
                values = parameters_of(notebook_path(name)).items()
                print(f"{name:18}" + ", ".join(f"{k} = {v!r}" for k, v in values))
        else:
            print(paths.show(run_notebook(chosen.name, {k: _literal(v) for k, v in chosen.parameter})))
    except (ResidualQuantError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
