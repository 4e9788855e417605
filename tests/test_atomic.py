"""Whole or absent: nothing half-written ever has its final name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trope import atomic
from trope.atomic import atomic_file, atomic_folder

# Replaces `a` again and again. Each time a child is killed one line of atomic.py later than the time before, until one
# is not killed. The file is loaded by its path, because importing the package would load torch.
KILLED_AT_EVERY_LINE = """
import importlib.util, os, signal, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("atomic", sys.argv[1])
atomic = importlib.util.module_from_spec(spec)
spec.loader.exec_module(atomic)
os.fsync = lambda descriptor: None  # no power cut is tested, and it takes most of the time
target = Path(sys.argv[2])

def replace(line):
    def trace(frame, event, argument):
        nonlocal line
        if frame.f_code.co_filename != sys.argv[1]:
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
    found = {path.name: path.read_text() for path in target.iterdir()} if target.is_dir() else None
    assert found in ({"one": text, "two": text} for text in ("old", "new")), f"killed at step {line}: {found}"
    if status == 0:
        print(f"killed {line} times")
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
def test_a_kill_at_any_line_leaves_the_old_or_the_new_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name in ("one", "two"):
        (tmp_path / "a" / name).touch()
    command = [sys.executable, "-c", KILLED_AT_EVERY_LINE, atomic.__file__, str(tmp_path / "a")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) > 10


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
