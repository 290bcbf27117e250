"""Where progress is shown: redrawn in place on a terminal and in a Jupyter notebook, plain lines elsewhere."""

from __future__ import annotations

import io
import sys
from collections import deque
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.terminal_theme import TerminalTheme

_WIDTH = 100  # of a notebook's output, in characters
_MAX_LINES = 200  # above the panel in a notebook; older ones are dropped
_HTML = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:normal;'
    "font-family:Menlo,'DejaVu Sans Mono',consolas,'Courier New',monospace\">{code}</pre>"
)
_BLUE, _MAGENTA, _GREEN, _CYAN = (66, 133, 244), (176, 80, 200), (46, 150, 80), (0, 150, 165)
_RED, _YELLOW, _GREY = (215, 65, 55), (185, 125, 0), (128, 128, 128)
_COLOURS = [_GREY, _RED, _GREEN, _YELLOW, _BLUE, _MAGENTA, _CYAN, _GREY]
_THEME = TerminalTheme((255, 255, 255), (0, 0, 0), _COLOURS)  # readable on white and on black


class LiveView(Protocol):
    """A panel that is redrawn in place."""

    @property
    def is_started(self) -> bool:
        """Whether it is on show."""

    def start(self) -> None:
        """Show it from now on."""

    def update(self, renderable: RenderableType, *, refresh: bool) -> None:
        """Redraw it."""

    def stop(self) -> None:
        """Leave it as it is."""


class NotebookConsole(Console):
    """A console whose output is one output of a notebook cell: what was printed, and a panel below it.

    It is updated in place. Rich would make an output of every line, and needs ipywidgets for a panel.
    """

    def __init__(self) -> None:
        super().__init__(file=io.StringIO(), force_jupyter=False, width=_WIDTH, highlight=False)
        self._lines: deque[RenderableType] = deque(maxlen=_MAX_LINES)
        self._panel: RenderableType | None = None
        self._output: Any = None  # IPython's handle of the output

    def print(self, *objects: Any, **options: Any) -> None:
        """Add a line for each of `objects` above the panel."""
        self._lines.extend(objects or ("",))
        self._show()

    def show_panel(self, panel: RenderableType) -> None:
        """Show `panel` below the lines, in place of the one before."""
        self._panel = panel
        self._show()

    def _show(self) -> None:
        from IPython.display import display

        content = Group(*self._lines, *([] if self._panel is None else [self._panel]))
        drawn = Console(file=io.StringIO(), force_jupyter=False, width=_WIDTH, highlight=False, record=True)
        drawn.print(content, soft_wrap=True)
        text = drawn.export_text(clear=False)
        page = drawn.export_html(theme=_THEME, inline_styles=True, code_format=_HTML)
        bundle = {"text/plain": text, "text/html": page}
        if self._output is None:
            self._output = display(bundle, raw=True, display_id=True)
        else:
            self._output.update(bundle, raw=True)


class NotebookView:
    """The panel of a `NotebookConsole`."""

    def __init__(self, console: NotebookConsole) -> None:
        self._console = console
        self.is_started = False

    def start(self) -> None:
        """Show it from now on."""
        self.is_started = True

    def update(self, renderable: RenderableType, *, refresh: bool) -> None:
        """Redraw it."""
        self._console.show_panel(renderable)

    def stop(self) -> None:
        """Leave it as it is."""
        self.is_started = False


def progress_console() -> Console:
    """Return the console for progress: of the notebook, or of standard error."""
    console = Console(stderr=True, highlight=False)
    return NotebookConsole() if console.is_jupyter else console


def live_view(console: Console) -> LiveView | None:
    """Return a panel on `console`; None where nothing can be redrawn in place."""
    if isinstance(console, NotebookConsole):
        return NotebookView(console)
    # FORCE_COLOR, often set in CI, makes rich assume a terminal, so check the file itself.
    if not (console.is_interactive and console.file.isatty()):
        return None
    redirect = sys.stdout.isatty()  # output to a pipe must reach the pipe
    return Live(console=console, auto_refresh=False, redirect_stdout=redirect, vertical_overflow="crop")
