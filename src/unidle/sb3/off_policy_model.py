"""What SAC, TD3 and DQN have in common beyond other models: a replay buffer."""

from __future__ import annotations

from unidle.config.settings import OffPolicyRecipe
from unidle.sb3.errors import argument_errors
from unidle.sb3.model import Model
from unidle.sb3.replay_file import ReplayBufferView, read_replay, view_of, write_replay
from unidle.sb3.zip_file import File


class OffPolicyModel(Model):
    """A model with a replay buffer, which a second `learn` continues with."""

    @property
    def replay_buffer(self) -> ReplayBufferView:
        """How much the replay buffer holds."""
        recipe = self.config.recipe
        assert isinstance(recipe, OffPolicyRecipe)
        return view_of(self._state()["algo"].get("experience", {}), recipe.buffer_size, self.device)

    @argument_errors()
    def save_replay_buffer(self, path: File) -> None:
        """Save the replay buffer, which `save` leaves out."""
        write_replay(path, self.algo, self._state()["algo"]["experience"])

    @argument_errors()
    def load_replay_buffer(self, path: File, truncate_last_traj: bool = True) -> None:
        """Continue with a replay buffer that `save_replay_buffer` wrote; its open episodes are truncated."""
        self._refuse_while_learning("load_replay_buffer")
        self._replace_state({**self._state()["algo"], "experience": read_replay(path, self.algo)})
