"""Files of a run folder: written whole or not at all, and never through links."""

from __future__ import annotations

from pathlib import Path

import pytest

from unidle.errors import UsageError
from unidle.writing import open_to_append, refuse_link, remove_link, replacing, write_atomically


def test_atomic_write_replaces_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    write_atomically(path, b"old")
    assert write_atomically(path, "nëw") == path
    assert path.read_text(encoding="utf-8") == "nëw"
    assert list(tmp_path.iterdir()) == [path]


def test_failed_write_keeps_old_file_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_text("old")

    def fail() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_link_is_replaced_and_its_target_untouched(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "report.html"
    target.write_text("mine")
    link.symlink_to(target)
    write_atomically(link, "page")
    assert (link.is_symlink(), link.read_text(), target.read_text()) == (False, "page", "mine")


def test_file_is_not_appended_through_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "changes.jsonl"
    link.symlink_to(target)
    with pytest.raises(UsageError, match=r"changes\.jsonl is a link, .*; remove the link\.$"):
        open_to_append(link)
    assert not target.exists()
    link.unlink()
    with open_to_append(link) as file:
        file.write("a line\n")
    assert link.read_text() == "a line\n"


def test_only_links_are_refused_or_removed(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("mine")
    link.symlink_to(tmp_path / "nowhere")
    refuse_link(file)
    assert [remove_link(path) for path in (file, link)] == [file, link]
    assert list(tmp_path.iterdir()) == [file]
