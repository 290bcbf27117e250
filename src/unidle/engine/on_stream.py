"""Launching on a stream, cheaply enough for every step."""

from __future__ import annotations

import torch


class OnStream:
    """Context manager that launches on this stream; cheaper than torch's, which queries the current stream.

    Afterwards the stream is again the one that was current when this was created.
    """

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        """None: without a GPU."""
        self._stream = stream
        self._before = stream and torch.cuda.current_stream(stream.device)

    def __enter__(self) -> None:
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            torch.cuda.set_stream(self._before)
