"""Whole or absent: nothing half-written ever has its final name."""

from pathlib import Path

import pytest

from trope.atomic import atomic_file, atomic_folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "deep" / "a.txt") as partial:
        partial.write_text("new")
        assert names(tmp_path / "deep") == [partial.name]
    assert names(tmp_path / "deep") == ["a.txt"]
    assert (tmp_path / "deep" / "a.txt").stat().st_mode & 0o777 == 0o644


def test_a_file_that_failed_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")
    with pytest.raises(NotADirectoryError), atomic_file(tmp_path / "a.txt") as partial:
        (partial / "below").write_text("half")
    assert names(tmp_path) == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


def test_a_folder_is_replaced_at_the_very_end(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "old").touch()
    with atomic_folder(tmp_path / "a") as partial:
        (partial / "new").touch()
        assert names(tmp_path / "a") == ["old"]
    assert names(tmp_path) == ["a"]
    assert names(tmp_path / "a") == ["new"]


def test_a_folder_that_failed_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "old").touch()
    with pytest.raises(FileNotFoundError), atomic_folder(tmp_path / "a") as partial:
        (partial / "missing" / "half").touch()
    assert names(tmp_path) == ["a"]
    assert names(tmp_path / "a") == ["old"]
