"""Whole or absent: nothing half-written ever has its final name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trope import atomic
from trope.atomic import atomic_file, atomic_folder

# Replaces `a` again and again. Each time a child is killed one line of atomic.py, or of shutil.py, later than the time
# before, until one is not killed. The file is loaded by its path, because importing the package would load torch.
KILLED_AT_EVERY_LINE = """
import importlib.util, os, shutil, signal, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("atomic", sys.argv[1])
atomic = importlib.util.module_from_spec(spec)
spec.loader.exec_module(atomic)
os.fsync = lambda descriptor: None  # no power cut is tested, and it takes most of the time
target = Path(sys.argv[2])
if in_two_steps := sys.argv[3] == "two steps":
    atomic._exchange = lambda one, other: False  # as on NFS
lost = 0

def replace(line):
    def trace(frame, event, argument):
        nonlocal line
        if frame.f_code.co_filename not in (sys.argv[1], shutil.__file__):
            return None
        if event == "line":
            line -= 1
            if line < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)
    with atomic.atomic_folder(target) as partial:
        for name in ("one", "two"):
            (partial / name).write_text("new")
    os._exit(0)

for line in range(1_000):
    for inner in target.iterdir():
        inner.write_text("old")
    child = os.fork()
    if not child:
        replace(line)
    status = os.waitpid(child, 0)[1]
    assert target.is_dir() or in_two_steps, f"killed at step {line}"
    lost += not target.is_dir()
    atomic.recover(target)
    assert os.listdir(target.parent) == [target.name], f"killed at step {line}"
    found = {path.name: path.read_text() for path in target.iterdir()}
    assert found in ({"one": text, "two": text} for text in ("old", "new")), f"killed at step {line}: {found}"
    if status == 0:
        print(line, lost)
        break
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    with atomic_file(tmp_path / "deep" / "a.txt") as partial:
        partial.write_text("new")
        assert names(tmp_path / "deep") == [partial.name]
    assert names(tmp_path / "deep") == ["a.txt"]


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


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux exchanges two names in one step")
@pytest.mark.parametrize("how", ["one step", "two steps"])
def test_a_kill_at_any_line_leaves_the_old_or_the_new_folder(tmp_path: Path, how: str) -> None:
    """In two steps a kill may leave it under another name; `recover` brings it back and removes all leftovers."""
    (tmp_path / "a").mkdir()
    for name in ("one", "two"):
        (tmp_path / "a" / name).touch()
    command = [sys.executable, "-c", KILLED_AT_EVERY_LINE, atomic.__file__, str(tmp_path / "a"), how]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kills, lost = map(int, done.stdout.split())
    assert kills > 10
    assert (lost > 0) == (how == "two steps")


def left(path: Path, word: str, text: str, written: int) -> None:
    """A folder with a file, as a killed process leaves it."""
    folder = atomic._beside(path, word)
    folder.mkdir(parents=True)
    (folder / "file").write_text(text)
    os.utime(folder, (written, written))


def test_of_several_old_folders_the_latest_comes_back(tmp_path: Path) -> None:
    """A kill right after the second rename leaves one, and nobody need have recovered before the next kill."""
    path = tmp_path / "a[b]*"
    for text, written in (("older", 1), ("latest", 3), ("oldest", 0)):
        left(path, "old", text, written)
    left(path, "partial", "half", 4)
    atomic.recover(path)
    assert names(tmp_path) == [path.name]
    assert (path / "file").read_text() == "latest"


def test_old_folders_that_vanish_meanwhile_are_nobodys_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A living writer takes its own away, or makes the folder right before it would be brought back."""
    path = tmp_path / "a"
    left(path, "old", "old", 1)
    listed = atomic._left

    def with_a_gone_one(of: Path, word: str) -> list[Path]:
        return [*listed(of, word), of.with_name(f".{of.name}.{word}-00000000")]

    monkeypatch.setattr(atomic, "_left", with_a_gone_one)
    atomic.recover(path)
    assert names(tmp_path) == ["a"] and (path / "file").read_text() == "old"

    left(tmp_path / "b", "old", "old", 1)

    def written_before_the_rename(old: Path, target: Path) -> None:
        target.mkdir()
        (target / "file").write_text("new")
        raise OSError("Directory not empty")

    monkeypatch.setattr(Path, "rename", written_before_the_rename)
    atomic.recover(tmp_path / "b")
    assert (tmp_path / "b" / "file").read_text() == "new"


def test_a_folder_that_is_there_is_not_replaced_by_an_old_one(tmp_path: Path) -> None:
    (tmp_path / "disk" / "a").mkdir(parents=True)
    (tmp_path / "a").symlink_to(tmp_path / "disk" / "a")
    left(tmp_path / "disk" / "a", "old", "old", 1)
    atomic.recover(tmp_path / "a")
    assert names(tmp_path / "disk") == ["a"]
    assert names(tmp_path / "disk" / "a") == []


def test_all_folders_of_one_are_recovered_and_nothing_else_is_touched(tmp_path: Path) -> None:
    left(tmp_path / "a", "old", "a", 1)
    left(tmp_path / "b", "partial", "half", 1)
    (tmp_path / ".mine.old-notes").mkdir()
    (tmp_path / ".hidden").touch()
    atomic.recover_all(tmp_path)
    assert names(tmp_path) == [".hidden", ".mine.old-notes", "a"]
    atomic.recover_all(tmp_path / "missing")


def test_without_an_exchange_the_folder_is_replaced_in_two_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    test_a_folder_is_replaced_at_the_very_end(tmp_path)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o027, 0o002])
def test_files_and_folders_get_the_mode_of_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with atomic_file(tmp_path / "deep" / "a.txt") as partial:
            partial.write_text("new")
            partial.chmod(0o600)  # as safetensors does
        for _ in range(2):  # made, then replaced
            with atomic_folder(tmp_path / "deep" / "b") as partial:
                (partial / "inner").touch(0o600)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "deep").rglob("*")}
    assert modes == {"a.txt": 0o666 & ~umask, "b": 0o777 & ~umask, "inner": 0o666 & ~umask}


def test_a_folder_that_appeared_meanwhile_is_asked_about_before_it_is_replaced(tmp_path: Path) -> None:
    def refuse(path: Path) -> None:
        raise FileExistsError(f"{path.name} appeared")

    with pytest.raises(FileExistsError, match="a appeared"), atomic_folder(tmp_path / "a", may_replace=refuse):
        (tmp_path / "a" / "theirs").mkdir(parents=True)
    assert names(tmp_path) == ["a"]
    assert names(tmp_path / "a") == ["theirs"]


def test_a_file_is_no_folder_to_replace(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(NotADirectoryError, match="a is a file; name a folder"), atomic_folder(tmp_path / "a"):
        pass
    assert names(tmp_path) == ["a"]


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk" / "data").mkdir(parents=True)
    (tmp_path / "disk" / "data" / "old").touch()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "data")
    with atomic_folder(tmp_path / "link") as partial:
        (partial / "new").touch()
    assert (tmp_path / "link").is_symlink()
    assert names(tmp_path / "disk" / "data") == ["new"]
    assert names(tmp_path) == ["disk", "link"]
