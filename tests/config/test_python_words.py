"""Messages that name flags name arguments in Python."""

from __future__ import annotations

import pytest

import unidle
from unidle.config.python_words import in_python_words
from unidle.errors import UsageError


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("use 32, --batch-size auto, or 2 as --n-envs.", 'use 32, `batch_size="auto"`, or 2 as `n_envs`.'),
        ("or --no-normalize-advantage.", "or `normalize_advantage=False`."),
        ("set --buffer-size to at most 2,000.", "set `buffer_size` to at most 2,000."),
        ("use --workers 1,024.", "use `workers=1_024`."),
        ("is `--device cuda`", 'is `device="cuda"`'),
        ("(--wrapper module:callable)", '(`wrappers="module:callable"`)'),
        ("continue: unidle train --resume runs/a", "continue: unidle train --resume runs/a"),
        ("--no-such-flag stays", "--no-such-flag stays"),
    ],
)
def test_flags_become_arguments(message: str, expected: str) -> None:
    assert in_python_words(message) == expected


def test_train_names_the_argument() -> None:
    with pytest.raises(UsageError, match='use 2 or 4, `batch_size="auto"`, or a multiple of 3 as `n_envs`'):
        unidle.train("CartPole-v1", preset="classic", n_envs=1, n_steps=4, batch_size=3, quiet=True)
