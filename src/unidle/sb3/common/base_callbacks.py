"""The interface of callbacks, and those that call others.

A model calls `on_step` for every step of the environments, but not while they step: once an iteration is complete, for
all of its steps one after the other. `locals` has the `rewards`, `dones` and `infos` of the step; the model is as the
iteration left it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any


class BaseCallback(ABC):
    """Override `_on_step`, which ends training by returning False, and any of the other methods with an underscore."""

    model: Any
    parent: Any = None

    def __init__(self, verbose: int = 0) -> None:
        self.verbose = verbose
        self.n_calls = self.num_timesteps = 0
        self.locals: dict[str, Any] = {}
        self.globals: dict[str, Any] = {}

    @property
    def training_env(self) -> Any:
        """The model's environments."""
        return self.model.get_env()

    @property
    def logger(self) -> Any:
        """The model's logger."""
        return self.model.logger

    def init_callback(self, model: Any) -> None:
        """Called by the model before training."""
        self.model = model
        self._init_callback()

    def on_training_start(self, locals_: dict[str, Any], globals_: dict[str, Any]) -> None:
        """Called when training starts."""
        self.locals, self.globals = locals_, globals_
        self.num_timesteps = self.model.num_timesteps
        self._on_training_start()

    def on_rollout_start(self) -> None:
        """Called before the steps of an iteration."""
        self._on_rollout_start()

    def on_step(self) -> bool:
        """Called for a step of all environments; False ends training."""
        self.n_calls += 1
        self.num_timesteps = self.model.num_timesteps
        return self._on_step()

    def on_rollout_end(self) -> None:
        """Called after the steps of an iteration."""
        self._on_rollout_end()

    def on_training_end(self) -> None:
        """Called when training ends."""
        self._on_training_end()

    def update_locals(self, locals_: dict[str, Any]) -> None:
        """Called before `on_step` with what happened in the step."""
        self.locals.update(locals_)
        self.update_child_locals(locals_)

    def update_child_locals(self, locals_: dict[str, Any]) -> None:  # noqa: B027
        """Pass `locals_` on to callbacks that this one calls."""

    def _init_callback(self) -> None:  # noqa: B027
        """`self.model` is set."""

    def _on_training_start(self) -> None:  # noqa: B027
        """Training starts."""

    def _on_rollout_start(self) -> None:  # noqa: B027
        """An iteration starts."""

    @abstractmethod
    def _on_step(self) -> bool:
        """A step of all environments; False ends training."""

    def _on_rollout_end(self) -> None:  # noqa: B027
        """An iteration is over."""

    def _on_training_end(self) -> None:  # noqa: B027
        """Training is over."""


class CallbackList(BaseCallback):
    """Several callbacks, in order."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        super().__init__()
        self.callbacks = list(callbacks)

    def _init_callback(self) -> None:
        for callback in self.callbacks:
            callback.init_callback(self.model)
            callback.parent = self.parent

    def _on_training_start(self) -> None:
        for callback in self.callbacks:
            callback.on_training_start(self.locals, self.globals)

    def _on_rollout_start(self) -> None:
        for callback in self.callbacks:
            callback.on_rollout_start()

    def _on_step(self) -> bool:
        go_on = [callback.on_step() for callback in self.callbacks]  # call all of them
        return all(go_on)

    def _on_rollout_end(self) -> None:
        for callback in self.callbacks:
            callback.on_rollout_end()

    def _on_training_end(self) -> None:
        for callback in self.callbacks:
            callback.on_training_end()

    def update_child_locals(self, locals_: dict[str, Any]) -> None:
        """Pass them to all callbacks."""
        for callback in self.callbacks:
            callback.update_locals(locals_)


class ConvertCallback(BaseCallback):
    """A function of `locals` and `globals`; False ends training."""

    def __init__(self, callback: Callable[[dict[str, Any], dict[str, Any]], Any], verbose: int = 0) -> None:
        super().__init__(verbose)
        self._function = callback

    def _on_step(self) -> bool:
        return self._function(self.locals, self.globals) is not False


class EventCallback(BaseCallback):
    """Calls another callback when something happens."""

    def __init__(self, callback: Any = None, verbose: int = 0) -> None:
        super().__init__(verbose)
        self.callback = callback
        if callback is not None:
            callback.parent = self

    def _init_callback(self) -> None:
        if self.callback is not None:
            self.callback.init_callback(self.model)

    def _on_training_start(self) -> None:
        if self.callback is not None:
            self.callback.on_training_start(self.locals, self.globals)

    def _on_step(self) -> bool:
        return True

    def _on_event(self) -> bool:
        return True if self.callback is None else bool(self.callback.on_step())

    def update_child_locals(self, locals_: dict[str, Any]) -> None:
        """Pass them to the callback."""
        if self.callback is not None:
            self.callback.update_locals(locals_)
