"""Runs a command, and turns errors into one sentence and an exit code.

The codes are 0 for success, 2 for a usage error, 128 + n if signal n stopped the command, and 1 for anything else;
`unidle watch` and `unidle pack` pass on those of the commands that they run.

Heavy imports are made only by the commands that need them, so that `unidle --help` is instant.
"""

from __future__ import annotations

import difflib
import errno
import gc
import json
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from importlib import import_module
from typing import Any

from unidle.cli.early_stop import stop_while_importing
from unidle.cli.flags import wants_help
from unidle.cli.results import WithCode
from unidle.config.machine import limit_threads
from unidle.config.settings import RECIPES
from unidle.errors import AgreedError, LostRankError, TrainingError, UsageError
from unidle.output import guard_output

COMMANDS = {
    "demo": "train, evaluate and report something small: a minute at most",
    "train": "train a policy, or resume a run (--resume)",
    "sweep": "search for the best settings, several trials at a time",
    "eval": "evaluate a trained policy",
    "presets": "list the presets, and which of them fit this machine",
    "check-env": "check an environment for mistakes before training on it",
    "export": "export the policy as ONNX",
    "scaling": "compare critics of several widths on Meta-World",
    "report": "write the report of a run (report.html)",
    "dashboard": "show runs in a browser, live",
    "diagnose": "explain what limits a training job, and what to change",
    "monitor": "show live GPU and CPU readings",
    "watch": "run any command, and report what its GPU waited for",
    "tune": "find faster engine settings for a job by measuring",
    "pack": "run several commands side by side on one GPU",
    "slurm": "submit training to SLURM; without arguments, list the named jobs",
    "doctor": "check this machine and this installation",
    "completion": "print a script for the completion of your shell (bash, zsh)",
}

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)

_HELP = f"""usage: unidle COMMAND [OPTIONS]

Train RL policies faster on the hardware you have, and see what your GPU waits for.

commands:
{chr(10).join(f"  {name:<11} {text}" for name, text in COMMANDS.items())}

examples:
  unidle demo
  unidle train --env CartPole-v1 --timesteps 100000 --run-name my-run
  unidle train --resume runs/my-run
  unidle eval runs/my-run --episodes 20

`unidle help COMMAND` shows the options of a command, `unidle train --algo sac --help` the settings of an algorithm
({", ".join(RECIPES)}), `unidle train --help-all` everything. Commands that print a result take --json."""


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit."""
    guard_output()
    code = run(sys.argv[1:] if argv is None else argv)
    gc.freeze()  # else garbage collection at exit traverses all of torch, which takes a second
    sys.exit(code)


def command_function(name: str) -> Callable[[list[str]], dict[str, Any] | WithCode | None]:
    """The function of a command, which takes its arguments."""
    module = name.replace("-", "_")
    function: Callable[[list[str]], dict[str, Any] | WithCode | None] = getattr(
        import_module(f"unidle.cli.{module}"), f"{module}_command"
    )
    return function


def run(argv: list[str]) -> int:
    """Run one command; returns its exit code."""
    if argv[:1] != ["watch"]:  # which must not change the environment of its command
        limit_threads()
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    if not argv or argv[0] in ("-h", "--help"):
        print(_HELP)
        return 0
    if argv[0] in ("-V", "--version"):
        from unidle import __version__

        print(__version__)
        return 0
    name, rest = argv[0], argv[1:]
    flags = rest[: rest.index("--")] if "--" in rest else rest  # after `--`: other commands
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, [*COMMANDS, "help"], n=1)
        hint = f"did you mean `{near[0]}`?" if near else f"choose one of {', '.join(COMMANDS)}."
        return _report_error(f"There is no command `{name}`; {hint}", flags, 2)
    try:
        with stop_while_importing(lambda: _report_stop("before it finished", flags)):
            command = command_function(name)
            # Environments may print; with --json, standard output is only for the result.
            with redirect_stdout(sys.stderr) if "--json" in flags else nullcontext():
                result = command(rest)
    except UsageError as error:
        return _report_error(str(error), flags, 2)
    except TrainingError as error:
        return _report_error(str(error), flags, 1)
    except AgreedError:
        return 1  # rank 0 has reported it
    except LostRankError as error:
        return _report_error(str(error), flags, 1)
    except KeyboardInterrupt as stop:
        return _report_stop(f"immediately; {stop}" if str(stop) else "before it finished", flags)
    except SystemExit as end:
        if name == "watch" or wants_help(flags):
            raise
        return _report_error(
            f"The environment, or other code of yours, called sys.exit({end.code}); remove that.", flags, 1
        )
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            return _report_defect(error, flags)
        what = f"{error.filename} ({error.strerror})" if error.filename else f"a file ({error.strerror})"
        return _report_error(f"Cannot write {what}; free some disk space, or use another folder.", flags, 1)
    except Exception as error:
        return _report_defect(error, flags)
    code = 0
    if isinstance(result, WithCode):
        code, result = result.code, result.result
    if result is not None:
        print(json.dumps(result))
    return code


def _report_defect(error: Exception, argv: list[str]) -> int:
    traceback.print_exception(error)
    if "--json" in argv:
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
    return 1


def _report_stop(state: str, argv: list[str]) -> int:
    return _report_error(f"Stopped {state}.", argv, 128 + signal.SIGINT)


def _report_error(sentence: str, argv: list[str], code: int) -> int:
    print(f"unidle: {sentence}", file=sys.stderr)
    if "--json" in argv:
        print(json.dumps({"error": sentence}))
    return code
