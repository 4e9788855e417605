"""A model's files: weights as safetensors, config as JSON, a model card; in a folder here or on the Hugging Face hub.

Everything is checked on the way in, and nothing is ever executed or unpickled.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import safetensors
from safetensors.torch import load_file, save_file
from torch import Tensor

from trope.atomic import atomic_folder
from trope.config import Config
from trope.environment import __version__
from trope.runs import BEST, CARD, CATALOGUE, CONFIG, MODEL_CONFIG, WEIGHTS
from trope.settings import from_dict, migrate, to_dict

FORMAT = "trope-model-2"
OLDER_FORMATS = ("trope-model-1",)  # whose configs had settings that are gone, see `trope.settings.migrate`
# What a model or a run folder consists of; a repository's other files are not fetched.
PATTERNS = ("*.safetensors", "*.json", CARD, CONFIG, f"{BEST}/*", f"{CATALOGUE}/*")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


class Model(Protocol):
    """What is saved; `trope.models.recommender.SequentialRecommender` is one."""

    config: Config
    time_span: tuple[int, int]

    @property
    def num_items(self) -> int:
        """Items in the catalogue."""

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors by name."""

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> Any:
        """Take tensors over."""


class SavedConfig(NamedTuple):
    """What a model is made from, before its weights."""

    config: Config
    num_items: int
    time_span: tuple[int, int]


def save(model: Model, folder: Path) -> None:
    """Write weights, config and a model card; the folder appears, or is replaced, only when whole."""
    with atomic_folder(folder) as partial:
        save_file({name: x.detach().cpu().contiguous() for name, x in _state(model).items()}, partial / WEIGHTS)
        described = {
            "format": FORMAT, "trope": __version__, "num_items": model.num_items,
            "time_span": list(model.time_span), "config": to_dict(model.config),
        }  # fmt: skip
        (partial / MODEL_CONFIG).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
        (partial / CARD).write_text(_card(described), encoding="utf-8")


def read_config(folder: Path) -> SavedConfig:
    """config.json, checked: it may come from anywhere, and from an older version."""
    path = folder / MODEL_CONFIG
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{folder} holds no {MODEL_CONFIG}; is it the folder of a trained model?") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; copy the checkpoint again") from None
    if not isinstance(described, dict) or described.get("format") not in (FORMAT, *OLDER_FORMATS):
        raise ValueError(f"{path} is not of format {FORMAT}; it is no trope model, or of another version")
    items, span, config = described.get("num_items"), described.get("time_span"), described.get("config")
    if not isinstance(items, int) or items < 1 or not isinstance(config, dict):
        raise ValueError(f"{path} is damaged: num_items {items!r}; copy the checkpoint again")
    if not (isinstance(span, list) and len(span) == 2 and all(isinstance(t, int) for t in span)):
        raise ValueError(f"{path} is damaged: time_span {span!r}; copy the checkpoint again")
    try:
        return SavedConfig(from_dict(migrate(config)), items, (span[0], span[1]))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def fill(model: Model, folder: Path) -> None:
    """Read the weights of a folder into a model made from its config."""
    try:
        weights = load_file(folder / WEIGHTS)
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"cannot read the weights {folder / WEIGHTS}: {error}; copy the checkpoint again") from None
    expected = {name: x.shape for name, x in _state(model).items()}
    found = {name: x.shape for name, x in weights.items()}
    if expected != found:
        wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        raise ValueError(f"the weights in {folder} do not fit its config: {', '.join(wrong[:5])}; foreign or damaged")
    model.load_state_dict(weights, strict=False)


def find_folder(source: str | Path, revision: str | None = None) -> Path:
    """A local folder for `source`, fetched if it names a repository ("owner/name") and no folder here.

    revision: a branch, tag or commit of the repository.
    """
    folder = Path(source)
    if folder.exists() or not (isinstance(source, str) and _REPOSITORY.fullmatch(source)):
        if revision is not None:
            raise ValueError(f"a revision belongs to a repository on the hub, got {revision!r} for the folder {source}")
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=list(PATTERNS)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise FileNotFoundError(f"there is no folder {source}, and the hub does not give it: {reason}") from None


def _state(model: Model) -> dict[str, Tensor]:
    """The state without the names under which shared tables appear again (TiSASRec's blocks share theirs)."""
    seen: set[int] = set()
    return {
        name: x
        for name, x in model.state_dict().items()
        if not (x.data_ptr() in seen or seen.add(x.data_ptr()))  # type: ignore[func-returns-value]
    }


def _card(described: dict[str, Any]) -> str:
    model, rotary = described["config"]["model"], described["config"]["rotary"]
    return (
        "---\nlibrary_name: trope\ntags: [recommendation, sequential-recommendation]\n---\n\n"
        f"# {model['block']} with {rotary['kind']} rotary encoding\n\n"
        f"A sequential recommender made with trope {described['trope']}: {described['num_items']:,} items, "
        f"{model['blocks']} blocks of width {model['width']}, histories of up to {model['max_len']} events.\n\n"
        "```python\nfrom trope import SequentialRecommender\n"
        'model = SequentialRecommender.from_pretrained("this folder")\n```\n'
    )
