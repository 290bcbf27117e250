"""`unidle completion`: a script with which the shell completes commands, flags and some values."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from unidle.cli.flags import Result, parse
from unidle.config.presets import preset_names
from unidle.config.settings import RECIPES

_SCRIPT = """_unidle() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} choices= start=0 i
  for ((i = 1; i < COMP_CWORD; i++)); do
    if [ "${{COMP_WORDS[i]}}" = -- ]; then start=$((i + 1)); fi
  done
  if [ "$start" -gt 0 ] && [ "${{COMP_WORDS[start]}}" != unidle ]; then
    :
  elif [ "$COMP_CWORD" = $((start + 1)) ] || [ "$before" = help ]; then
    choices="{commands}"
  elif [ "$before" = --algo ]; then
    choices="{algos}"
  elif [ "$before" = --preset ]; then
    choices="{presets}"
  elif [ "${{word#-}}" != "$word" ]; then
    case ${{COMP_WORDS[start + 1]}} in
{flags}
    esac
  fi
  COMPREPLY=($(compgen -W "$choices" -- "$word"))
}}
complete -o default -F _unidle unidle"""
_WITH_ALGORITHMS = ("train", "sweep", "tune", "diagnose")
_SWITCH = re.compile(r"--([a-z-]+) \| --no-…")
_FLAG = re.compile(r"--[a-z][a-z-]*")
_BEFORE = {"bash": "", "zsh": "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"}


@dataclass(frozen=True)
class _CompletionFlags:
    """Print a script with which the shell completes commands, flags, algorithms and presets.

    For bash, add this line to ~/.bashrc: eval "$(unidle completion bash)"
    """

    shell: Annotated[Literal["bash", "zsh"], tyro.conf.Positional]
    """The shell."""


def completion_command(argv: list[str]) -> Result:
    """`unidle completion`"""
    from unidle.cli.main import COMMANDS, command_function

    shell = parse(_CompletionFlags, argv, "completion").shell
    flags = {name: _flags(command_function(name), algos=name in _WITH_ALGORITHMS) for name in COMMANDS}
    cases = "\n".join(f'      {name}) choices="{" ".join(words)}" ;;' for name, words in flags.items())
    script = _SCRIPT.format(
        commands=" ".join([*COMMANDS, "help"]), algos=" ".join(RECIPES), presets=" ".join(preset_names()), flags=cases
    )
    print(_BEFORE[shell] + script)
    return None


def _flags(command: Callable[[list[str]], object], algos: bool) -> list[str]:
    """The flags that the help of a command lists; for a command with algorithms, those of all of them."""
    found: dict[str, None] = {}
    for algo in RECIPES if algos else [None]:
        help_text = io.StringIO()
        with contextlib.redirect_stdout(help_text), contextlib.suppress(SystemExit):
            command([*(["--algo", algo] if algo else []), "--help-all"])
        _, first, options = help_text.getvalue().rpartition("-h, --help")  # before: a text with flags of other commands
        found |= dict.fromkeys(_FLAG.findall(_SWITCH.sub(r"--\1 --no-\1", first + options)))
    return list(found)
