"""What every results file says of its origin."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from trope import environment


def test_a_commit_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_git(folder: Path, *arguments: str) -> str:
        raise subprocess.CalledProcessError(128, "git")

    monkeypatch.setattr(environment, "_git", no_git)
    monkeypatch.delenv("TROPE_COMMIT", raising=False)
    assert environment.commit() == "unknown"
    monkeypatch.setenv("TROPE_COMMIT", "8b9a7e06e054+")
    assert environment.commit() == "8b9a7e06e054+"
    monkeypatch.setenv("TROPE_COMMIT", "head")
    with pytest.raises(ValueError, match=r"TROPE_COMMIT must be a commit.*'head'"):
        environment.commit()
