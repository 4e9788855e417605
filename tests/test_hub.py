"""Pretrained models from the hub, "hf://owner/name" instead of a folder's name, and on their way to it."""

from __future__ import annotations

import shutil
import types
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pandas as pd
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from trope.data.catalogue import Catalogue
from trope.data.folder import Ids
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


@pytest.fixture
def served() -> Recommender:
    """A model with text ids, names and counts in its catalogue."""
    torch.manual_seed(0)
    model = SequentialRecommender(preset("trope", SIZES), 3, (1_500_000_000, 1_600_000_000))
    ids, names = (["a", "bb", "ä"], ["Apple", "", "Ähre"])
    catalogue = Catalogue(text_ids(ids), text_ids(names), np.array([5, 0, 2]))
    return Recommender(model, catalogue, "cpu")


def text_ids(texts: list[str]) -> Ids:
    parts = [text.encode() for text in texts]
    return Ids(np.frombuffer(b"".join(parts), np.uint8), np.cumsum([len(part) for part in parts]))


EVENTS = pd.DataFrame({"user_id": [1, 1], "item_id": ["ä", "a"], "timestamp": [1_590_000_000, 1_590_000_100]})


def test_a_recommender_is_saved_whole_and_read_back(served: Recommender, tmp_path: Path) -> None:
    expected = served.recommend(EVENTS, 1_600_000_000)
    served.save_pretrained(tmp_path / "shop")
    served.save_pretrained(tmp_path / "shop")  # what it made it may replace
    again = Recommender.from_pretrained(tmp_path / "shop", "cpu")
    pd.testing.assert_frame_equal(again.recommend(EVENTS, 1_600_000_000), expected)
    assert again.catalogue.item_counts is not None and again.catalogue.item_counts.tolist() == [5, 0, 2]
    assert [again.catalogue.name_of(item) for item in (1, 2, 3)] == ["Apple", "bb", "Ähre"]
    card = (tmp_path / "shop" / "README.md").read_text()
    assert "Recommender.from_pretrained('shop')" in card and "2017-07-14" in card
    again.save_pretrained(tmp_path / "copy")
    for file in (tmp_path / "shop").rglob("*"):
        if file.is_file() and file.name != "README.md":
            assert (tmp_path / "copy" / file.relative_to(tmp_path / "shop")).read_bytes() == file.read_bytes()


def test_only_a_folder_of_its_own_is_replaced(served: Recommender, tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(FileExistsError, match="holds 'checkpoints', which save_pretrained does not write"):
        served.save_pretrained(tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints").is_dir() and len(list(tmp_path.iterdir())) == 1


class Hub:
    """Takes what is uploaded; stands for huggingface_hub.HfApi."""

    def __init__(self, folder: Path, error: Exception | None = None) -> None:
        self.folder, self.error, self.calls = folder, error, []

    def __call__(self, token: str | None = None) -> Hub:
        self.calls.append(("token", token))
        return self

    def create_repo(self, repo_id: str, **options: Any) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append(("repo", repo_id, options))

    def create_branch(self, repo_id: str, **options: Any) -> None:
        self.calls.append(("branch", repo_id, options))

    def upload_folder(self, *, repo_id: str, folder_path: str, **options: Any) -> Any:
        self.calls.append(("upload", repo_id, options))
        shutil.copytree(folder_path, self.folder)
        return types.SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")


def test_what_is_pushed_is_what_is_fetched(
    served: Recommender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(tmp_path / "repository")
    monkeypatch.setattr(huggingface_hub, "HfApi", hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo_id, **options: str(hub.folder))
    url = served.push_to_hub("hf://acme/shop", revision="v2", token="secret")
    assert url == "https://hub/acme/shop/commit/1"
    assert hub.calls == [
        ("token", "secret"),
        ("repo", "acme/shop", {"private": True, "exist_ok": True}),
        ("branch", "acme/shop", {"branch": "v2", "exist_ok": True}),
        ("upload", "acme/shop", {"revision": "v2", "commit_message": "Model and catalogue by trope"}),
    ]
    from huggingface_hub.utils import filter_repo_objects

    files = sorted(str(path.relative_to(hub.folder)) for path in hub.folder.rglob("*") if path.is_file())
    assert list(filter_repo_objects(files, allow_patterns=list(PATTERNS))) == files  # all of it would be fetched
    again = Recommender.from_pretrained("hf://acme/shop@v2", "cpu")
    pd.testing.assert_frame_equal(again.recommend(EVENTS, 1_600_000_000), served.recommend(EVENTS, 1_600_000_000))


def test_what_the_hub_refuses_is_one_line(served: Recommender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub(tmp_path / "x", OSError("401 Unauthorized\nand so on")))
    with pytest.raises(OSError, match="does not take acme/shop: 401 Unauthorized; log in with") as error:
        served.push_to_hub("acme/shop")
    assert "\n" not in str(error.value)
    for name in ("shop", "acme/shop@v2", "a/b/c"):
        with pytest.raises(ValueError, match="a repository on the hub is owner/name"):
            served.push_to_hub(name)
