"""The ``raypipe`` command: verbs only, no logic.

A verb is a function of that name, whose parameters Typer reads, in the module that ``VERBS`` says. Only the requested
verb's module is imported, and it imports heavy modules inside its functions, so that ``raypipe schedule --list`` is
fast. It may define ``prepare_VERB(argv) -> argv``.
"""

from __future__ import annotations

import gc
import importlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import typer

from raypipe import __version__
from raypipe.errors import InterruptionError, RaypipeError, TerminationError, nearest
from raypipe.files import short
from raypipe.signals import Terminated, end_on_signals

__all__ = ["VERBS", "main", "run", "verb_function"]
VERBS = {
    **dict.fromkeys(("quickstart", "init", "train", "submit"), "train"),
    "serve": "serve",
    "autoconfigure": "autoconfigure",
    **dict.fromkeys(("schedule", "emulate"), "schedule"),
    **dict.fromkeys(("profile", "partition", "regions", "graph", "place"), "models"),
    **dict.fromkeys(("epochs", "hybrid"), "batches"),
    **dict.fromkeys(("explain", "report", "watch", "sample", "export", "dashboards"), "runs"),
}
"""Verb -> its module."""

INTERRUPTED, TERMINATED = InterruptionError.exit_status, TerminationError.exit_status
COLLECTED_AFTER = 50_000
"""Allocations between two garbage collections. Python's 700 make importing torch and Ray a fifth slower: their classes
are searched again and again, and nothing is found."""


def main() -> NoReturn:
    """Run the command line of this process and exit with its status."""
    _use_utf8()
    gc.set_threshold(COLLECTED_AFTER)
    with end_on_signals():
        status = run(sys.argv[1:])
    if status in (INTERRUPTED, TERMINATED):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ray shuts down at exit; a second Ctrl-C would interrupt that
    _end_results()
    sys.exit(status)


def _use_utf8() -> None:
    """Use UTF-8 for files and names in any locale; what the terminal cannot show is replaced.

    In a locale of ASCII alone, Python encodes names and files so too, and the processes of Ray do as well. That is
    decided before any code runs, so the same command is started in this one's place with another setting.
    """
    if sys.getfilesystemencoding() == "ascii" and not sys.flags.utf8_mode and not sys.flags.ignore_environment:
        shown = f"{sys.stdout.encoding}:replace" if sys.stdout is not None else "ascii:replace"
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "PYTHONUTF8": "1", "PYTHONIOENCODING": shown})
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _end_results() -> None:
    """Let what is still written to standard output go to standard error: Ray's core logs as it shuts down."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def verb_function(verb: str) -> Callable[..., None]:
    """Import a verb and return it."""
    result: Callable[..., None] = getattr(importlib.import_module(f"{__name__}.{VERBS[verb]}"), verb)
    return result


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit status.

    0: done; 1: it failed while running; 2: the request is wrong; 130: interrupted; 143: terminated.
    """
    try:
        with end_on_signals():
            return _run(list(argv))
    except RaypipeError as error:
        return _complain(str(error), error.exit_status)
    except BrokenPipeError:  # the reader closed the pipe, as in `raypipe schedule 1f1b | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Terminated as error:
        return _complain(error.message, TERMINATED)
    except KeyboardInterrupt:
        return _complain("interrupted", INTERRUPTED)
    except OSError as error:
        if error.filename is None:
            raise
        return _complain(*_refused(error, argv))
    except Exception as error:
        # Depending on its version, Typer raises click's errors or its own copies; both have these attributes.
        if not (hasattr(error, "format_message") and hasattr(error, "exit_code")):
            raise
        return _complain(_usage(error, verb_of(argv)), int(error.exit_code))


def _run(argv: list[str]) -> int:
    known, verb = sorted(VERBS), verb_of(argv)
    if verb is not None and verb not in known:
        return _complain(f'raypipe: there is no verb "{verb}"\n  fix: {nearest(verb, known)}', 2)
    app = typer.Typer(
        help="Plan, run and explain pipeline-parallel training on Ray.", add_completion=False, rich_markup_mode=None
    )
    app.callback(invoke_without_command=True)(_top)
    for name in known if verb is None else [verb]:
        function = verb_function(name)
        app.command(name)(function)
        prepare = getattr(sys.modules[function.__module__], f"prepare_{name}", None)
        if name == verb and prepare is not None:
            argv = prepare(argv)
    command: Any = typer.main.get_command(app)
    status = command.main(args=argv, prog_name="raypipe", standalone_mode=False)
    if status == INTERRUPTED:  # Typer's answer to Ctrl-C
        return _complain("interrupted", INTERRUPTED)
    return status if isinstance(status, int) else 0


def _top(
    context: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version and stop.")
) -> None:
    if version:
        typer.echo(f"raypipe {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def verb_of(argv: Sequence[str]) -> str | None:
    """Return the first argument that is not an option."""
    return next((word for word in argv if not word.startswith("-")), None)


def _usage(error: Any, verb: str | None) -> str:
    """Format an error of the command-line parser: where, why, what to do."""
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else " ".join(["raypipe", *([verb] if verb else [])])
    fix = f"see {where} --help"
    option = getattr(error, "option_name", None)
    if option and hasattr(error, "possibilities") and context is not None:
        options = [opt for param in context.command.params for opt in param.opts if opt.startswith("--")]
        fix = nearest(option, options).replace("known: ", "options: ")
        return f"{where}: there is no option {option}\n  fix: {fix}"
    return f"{where}: {error.format_message()}\n  fix: {fix}"


def _refused(error: OSError, argv: Sequence[str]) -> tuple[str, int]:
    """Return the message and the status for a path that the system refuses: 2 if the command line names it."""
    path = str(error.filename)
    given = any(word and path.startswith(word.partition("=")[2] or word) for word in argv)
    return f"{short(path)}: {error.strerror}\n  fix: check the path and your rights", 2 if given else 1


def _complain(message: str, status: int) -> int:
    sys.stdout.flush()
    print(message, file=sys.stderr)
    return status
