"""Pretrained models from the hub: "hf://owner/name" instead of a folder's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from trope.models.pretrained import PATTERNS, find_folder
from trope.models.recommender import SequentialRecommender
from trope.serve.recommender import Recommender
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
    found = SequentialRecommender.from_pretrained("hf://acme/groceries", revision="v2")
    SequentialRecommender.from_pretrained("hf://acme/groceries@refs/pr/1")
    here = SequentialRecommender.from_pretrained(tmp_path / "snapshot")
    call = {"repo_id": "acme/groceries", "allow_patterns": list(PATTERNS)}
    assert asked == [{**call, "revision": "v2"}, {**call, "revision": "refs/pr/1"}]
    for ours, theirs in zip(found.parameters(), here.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_folder_here_is_itself(asked: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme" / "groceries").mkdir(parents=True)
    assert find_folder("acme/groceries") == Path("acme/groceries") and not asked
    with pytest.raises(ValueError, match="a revision belongs to a repository"):
        find_folder("acme/groceries", revision="v2")


def test_what_is_nowhere_is_said_in_one_line(asked: list[dict[str, Any]]) -> None:
    with pytest.raises(FileNotFoundError, match="the hub does not give hf://acme/nothing: Cannot find") as e:
        SequentialRecommender.from_pretrained("hf://acme/nothing")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("source", ["runs/clicks", "acme/groceries", "nowhere", "../up/there", "a/b/c", "/no/where"])
def test_a_mistyped_path_never_asks_the_hub(source: str, asked: list[dict[str, Any]]) -> None:
    for load in (find_folder, SequentialRecommender.from_pretrained, Recommender.from_pretrained):
        with pytest.raises(FileNotFoundError, match=f"there is no folder {source}; .*is written .hf://owner/name"):
            load(source)
    assert not asked


@pytest.mark.parametrize("source", ["hf://", "hf://acme", "hf://acme/a/b", "hf://../..", "hf://acme/groceries@"])
def test_a_malformed_repository_is_refused(source: str, asked: list[dict[str, Any]]) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match="hf://") as e:
        find_folder(source)
    assert "\n" not in str(e.value) and [call["repo_id"] for call in asked] in ([], ["../.."])


def test_two_revisions_are_one_too_many(asked: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="names a revision already, got 'v3'"):
        find_folder("hf://acme/groceries@v2", revision="v3")
    assert not asked


def test_unsafe_files_of_a_repository_are_not_even_fetched() -> None:
    from huggingface_hub.utils import filter_repo_objects

    files = ["model.safetensors", "config.json", "README.md", "evil.py", "pytorch_model.bin", "weights.pkl"]
    assert list(filter_repo_objects(files, allow_patterns=list(PATTERNS))) == files[:3]
