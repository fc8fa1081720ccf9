"""The command line. Results go to stdout, progress and errors to stderr.

Exit codes: 0 done; 1 a check failed or a kernel could not run; 2 the request cannot be met (nothing was written); 130 interrupted.
"""

from __future__ import annotations

import atexit
import errno
import io
import os
import sys
import threading
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import click

from flashgen import __version__
from flashgen.errors import (
    CompileError,
    EmulationFault,
    FlashgenError,
    LaunchError,
    WorkerLost,
)

DONE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130
COMPILING = "flashgen-compile"
"""How threads that compile are named."""

FAILURES = (CompileError, LaunchError, EmulationFault, WorkerLost)
"""Errors of work that was well asked for; every other flashgen error means that the request cannot be met."""

COMMANDS = {
    "tune": "Search the fastest exact variant per problem and store it in the table.",
    "certify": "Prove one kernel exact, or show where it is not.",
    "show": "Print a source, a table entry, a search space or the cubin store.",
    "explore": "Show which tiles fit which shared memory, where the bytes go and what binds.",
    "table": "List, check, compare, merge, refresh and export tuned tables.",
    "bundle": "Write kernels of a table to be launched where there is no compiler.",
    "bench": "Time table entries beside other libraries, interleaved.",
    "doctor": "Print every path and version in use, and what is wrong with them.",
}


class LazyGroup(click.Group):
    """A group whose commands are imported when called, so that `--help` stays quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name."""
        if cmd_name not in COMMANDS:
            return None
        command = getattr(import_module(f"flashgen.cli.{cmd_name}"), cmd_name)
        return command if isinstance(command, click.Command) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


EPILOG = """\
\b
Exit codes:
  0    done
  1    a check failed: a kernel is not exact, does not compile or does not run
  2    the request cannot be met: wrong values, something not installed, a place that cannot be written
  130  interrupted; finished trials are kept, and the same command goes on from there
"""


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="flashgen")
def cli() -> None:
    """Generate, tune and certify exact attention kernels.

    `flashgen tune --head-dim 128` is the main job. Without a GPU it works for a named one, and marks every time as predicted.
    """


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    _prepare_streams()
    code = run(arguments)
    if any(each.name.startswith(COMPILING) for each in threading.enumerate()):
        _leave(code)
    sys.exit(code)


def _prepare_streams() -> None:
    """Let nothing fail on what a stream's encoding lacks, which is shown as ?, nor on a stream that the caller closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _leave(code: int) -> None:
    """Exit at once, without the compiler's own cleaning up: a compilation that still runs, after Ctrl-C say, would crash on that."""
    from flashgen.compiler import UNDER_WAY

    atexit.unregister(UNDER_WAY.end)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def run(arguments: list[str] | None = None) -> int:
    """Run the command line; its exit code. Errors raised on purpose are told in words on stderr, bugs keep their traceback."""
    with warnings.catch_warnings():
        warnings.showwarning = _tell_warning
        return _guarded(lambda: cli.main(arguments, prog_name="flashgen", standalone_mode=False))


def _tell_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    if issubclass(category, UserWarning):
        click.echo(f"{click.style('Warning:', fg='yellow', bold=True)} {message}", err=True)


def _guarded(command: Callable[[], Any]) -> int:
    try:
        result = command()
        sys.stdout.flush()
        return result if isinstance(result, int) else DONE
    except click.exceptions.Exit as ending:
        return int(ending.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        return INTERRUPTED
    except click.ClickException as problem:
        problem.show()
        return REFUSED
    except (BrokenPipeError, SystemExit):  # the reader, such as `head`, has seen enough; click leaves then by itself
        _discard_output()
        return DONE
    except FlashgenError as problem:
        click.echo(f"{click.style('Error:', fg='red', bold=True)} {problem}", err=True)
        return FAILED if isinstance(problem, FAILURES) else REFUSED
    except OSError as problem:
        if problem.errno != errno.ENOSPC:
            raise
        _discard_output()
        where = problem.filename or "the place that the output goes to"
        click.echo(f"{click.style('Error:', fg='red', bold=True)} No space is left in {where}. Free some, or choose another.", err=True)
        return REFUSED


def _discard_output() -> None:
    """What is still buffered for stdout goes nowhere instead of failing again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
