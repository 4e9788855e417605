"""Pretrained models from the hub: a repository's name instead of a folder's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from trope.models.pretrained import PATTERNS, find_folder
from trope.models.recommender import SequentialRecommender
from trope.settings import preset

SIZES = ("model.width=8", "model.heads=1", "model.head_dim=8", "model.blocks=1")


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What was asked of the hub, which has one repository, acme/groceries."""
    model = SequentialRecommender(preset("hstu-trope", SIZES), 20, (1_500_000_000, 1_600_000_000))
    model.save_pretrained(tmp_path / "snapshot")
    calls: list[dict[str, Any]] = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        calls.append({"repo_id": repo_id, **options})
        if repo_id != "acme/groceries":
            raise LocalEntryNotFoundError("Cannot find the requested files\nand so on")
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_a_repository_is_fetched_and_read(asked: list[dict[str, Any]], tmp_path: Path) -> None:
    found = SequentialRecommender.from_pretrained("acme/groceries", revision="v2")
    here = SequentialRecommender.from_pretrained(tmp_path / "snapshot")
    assert asked == [{"repo_id": "acme/groceries", "revision": "v2", "allow_patterns": list(PATTERNS)}]
    for ours, theirs in zip(found.parameters(), here.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_folder_here_comes_first(
    asked: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme" / "groceries").mkdir(parents=True)
    assert find_folder("acme/groceries") == Path("acme/groceries") and not asked
    with pytest.raises(ValueError, match="a revision belongs to a repository"):
        find_folder("acme/groceries", revision="v2")


def test_what_is_nowhere_is_said_in_one_line(asked: list[dict[str, Any]]) -> None:
    with pytest.raises(
        FileNotFoundError, match="no folder acme/nothing, and the hub does not give it: Cannot find"
    ) as e:
        SequentialRecommender.from_pretrained("acme/nothing")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("source", ["runs", "../up/there", "a/b/c", "/no/where", "."])
def test_paths_are_never_taken_for_repositories(source: str, asked: list[dict[str, Any]]) -> None:
    assert find_folder(source) == Path(source) and not asked


def test_unsafe_files_of_a_repository_are_not_even_fetched() -> None:
    from huggingface_hub.utils import filter_repo_objects

    files = ["model.safetensors", "config.json", "README.md", "evil.py", "pytorch_model.bin", "weights.pkl"]
    assert list(filter_repo_objects(files, allow_patterns=list(PATTERNS))) == files[:3]
