"""A served model as a folder, and on the Hugging Face hub: weights, config, catalogue and a model card."""

from __future__ import annotations

import tempfile
from pathlib import Path

from trope.atomic import atomic_folder
from trope.data.catalogue import Catalogue
from trope.models import pretrained
from trope.models.recommender import SequentialRecommender
from trope.runs import CARD, CATALOGUE, MODEL_CONFIG, WEIGHTS
from trope.times import say_minute

_OURS = {WEIGHTS, MODEL_CONFIG, CARD, CATALOGUE}


def save(model: SequentialRecommender, catalogue: Catalogue, folder: Path) -> None:
    """Write what `Recommender.from_pretrained` reads; the folder appears, or is replaced, only when whole."""
    _check_ours(folder)
    with atomic_folder(folder, _check_ours) as partial:
        _write(model, catalogue, partial, str(folder.name))


def push(
    model: SequentialRecommender,
    catalogue: Catalogue,
    repo: str,
    private: bool,
    revision: str | None,
    message: str,
    token: str | None,
) -> str:
    """Upload the same; returns the address of the commit. Arguments as in `Recommender.push_to_hub`."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    name = repo.removeprefix(pretrained.HUB)
    named = pretrained.REPOSITORY.fullmatch(name)
    if named is None or named[2] is not None:
        raise ValueError(f"a repository on the hub is owner/name, got {repo!r}; a branch is given as revision=")
    api = HfApi(token=token)
    with tempfile.TemporaryDirectory(prefix="trope-") as folder:
        _write(model, catalogue, Path(folder), f"{pretrained.HUB}{name}")
        try:
            api.create_repo(name, private=private, exist_ok=True)
            if revision is not None:
                api.create_branch(name, branch=revision, exist_ok=True)
            commit = api.upload_folder(repo_id=name, folder_path=folder, revision=revision, commit_message=message)
        except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
            reason = str(error).strip().split("\n")[0]
            raise OSError(
                f"the hub does not take {name}: {reason}; log in with `hf auth login`, or pass token="
            ) from None
    return str(commit.commit_url)


def _write(model: SequentialRecommender, catalogue: Catalogue, folder: Path, source: str) -> None:
    first, last = (say_minute(moment) for moment in model.time_span)
    use = (
        "from trope import Recommender\n"
        f"# trained on events from {first} to {last}\n"
        f"recommender = Recommender.from_pretrained({source!r})\n"
        'recommender.recommend(events, t_now="2017-12-20T18:00:00Z", k=10)  # user_id, item_id, timestamp\n'
    )
    pretrained.write(model, folder, use)
    catalogue.save(folder / CATALOGUE)


def _check_ours(folder: Path) -> None:
    """Refuse to replace a folder with anything in it that `save` does not write, such as a run."""
    if not folder.is_dir():
        return
    foreign = sorted(path.name for path in folder.iterdir() if path.name not in _OURS)
    if foreign:
        raise FileExistsError(
            f"{folder} holds {foreign[0]!r}, which save_pretrained does not write, so the folder is not replaced; "
            "choose another"
        )
