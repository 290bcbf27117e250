"""Terminal messages: similar ones are rate-limited and counted, the others are all shown."""

from __future__ import annotations

import pytest

from unidle.report.terminal.messages import Messages

TEXT = """Environment {env} failed in episode {episode}, step 3: ValueError: at 0x{at:x}
Traceback (most recent call last):
  File "robot.py", line 5, in step
ValueError: at 0x{at:x}
"""


def failure(number: int) -> str:
    return TEXT.format(env=number % 4, episode=number, at=number + 0xABC)


class Screen:
    """Shown messages, and a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.shown: list[str] = []
        self.styles: list[str] = []
        self.messages = Messages(self.show, lambda: self.now)

    def show(self, text: str, style: str) -> None:
        self.shown.append(text)
        self.styles.append(style)


@pytest.fixture
def screen() -> Screen:
    return Screen()


def test_different_messages_are_shown_unchanged(screen: Screen) -> None:
    texts = ["Stopping.", "Target return [bold] reached.", "Environment 1 returned a NaN."]
    for text in texts:
        screen.messages.show(text)
    screen.messages.close()
    assert screen.shown == texts


def test_details_are_indented_below_first_line(screen: Screen) -> None:
    screen.messages.show(failure(1))
    assert screen.shown == [
        "Environment 1 failed in episode 1, step 3: ValueError: at 0xabd",
        '  Traceback (most recent call last):\n    File "robot.py", line 5, in step\n  ValueError: at 0xabd',
    ]
    assert screen.styles == ["", "dim"]


def test_similar_messages_are_shown_every_ten_seconds_and_counted(screen: Screen) -> None:
    for number in range(1000):  # 50 seconds
        screen.now = number / 20
        screen.messages.show(failure(number))
    screen.messages.close()
    heads = [text for text in screen.shown if "failed" in text]
    assert [text.partition(" (")[2] for text in heads] == ["", *["199 similar messages not shown)"] * 4, ""]
    assert heads[1].startswith("Environment 0 failed in episode 200, step 3: ValueError: at 0xb84")
    assert heads[-1] == "199 similar messages not shown: Environment … failed in episode …, step …: ValueError: at …"
    assert sum("Traceback" in text for text in screen.shown) == 1


def test_different_failure_in_between_shows_its_own_traceback(screen: Screen) -> None:
    screen.messages.show(failure(1))
    screen.messages.show(failure(2).replace("ValueError", "KeyError"))
    screen.messages.show(failure(3))
    assert sum("Traceback" in text for text in screen.shown) == 2


def test_long_message_is_truncated_but_keeps_end_of_traceback(screen: Screen) -> None:
    lines = "\n".join(f"line {n}" for n in range(500))
    screen.messages.show("x" * 3_000_000 + "\n" + lines)
    head, details = screen.shown
    assert len(head) < 1100
    assert details.splitlines()[0] == "  …"
    assert details.splitlines()[-1] == "  line 499"
    assert len(details.splitlines()) < 40


def test_closing_twice_shows_count_once(screen: Screen) -> None:
    for number in range(3):
        screen.messages.show(failure(number))
    screen.messages.close()
    screen.messages.close()
    assert sum("similar messages" in text for text in screen.shown) == 1
