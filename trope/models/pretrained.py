"""A model's files: weights as safetensors, config as JSON, a model card; in a folder here or on the Hugging Face hub.

Everything is checked on the way in, and nothing is ever executed or unpickled. config.json holds the SHA-256 of the
weights and of its own content.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import safetensors
from torch import Tensor

from trope.atomic import atomic_folder
from trope.config import Config
from trope.environment import __version__
from trope.models.tensors import read_tensors, shapes_in, write_tensors
from trope.rotary.checks import LATEST_TIME
from trope.runs import BEST, CARD, CATALOGUE, CONFIG, MODEL_CONFIG, WEIGHTS, check_kinds, read_json, seal, write_json
from trope.settings import from_dict, migrate, to_dict

FORMAT = "trope-model-2"
# Without checksums, and with settings in their configs that are gone, see `trope.settings.migrate`.
OLDER_FORMATS = ("trope-model-1",)
MOST_ITEMS = 2**31 - 1  # dense ids are int32
HUB = "hf://"
# What a model or a run folder consists of; a repository's other files are not fetched.
PATTERNS = ("*.safetensors", "*.json", CARD, CONFIG, f"{BEST}/*", f"{CATALOGUE}/*")
REPOSITORY = re.compile(r"([\w.-]+/[\w.-]+)(?:@(\S+))?")
_KINDS: dict[str, Any] = {"num_items": int, "time_span": list[int], "config": dict}
_AGAIN = "copy the checkpoint again"
_USE = (
    "from trope import SequentialRecommender\n"
    'model = SequentialRecommender.from_pretrained("this folder")  # on the hub: "hf://owner/name"\n'
)


class Model(Protocol):
    """What is saved; `trope.models.recommender.SequentialRecommender` is one."""

    config: Config
    time_span: tuple[int, int]
    age_from: int

    @property
    def num_items(self) -> int:
        """Items in the catalogue."""

    def state_dict(self) -> dict[str, Tensor]:
        """All tensors by name."""

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Each parameter once, by its first name."""

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Each buffer once, by its first name."""

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> Any:
        """Take tensors over."""


class SavedConfig(NamedTuple):
    """What a model is made from, before its weights; sha256: of the weights, None where an older version saved them."""

    config: Config
    num_items: int
    time_span: tuple[int, int]
    sha256: str | None
    age_from: int


def save(model: Model, folder: Path) -> None:
    """Write weights, config and a model card; the folder appears, or is replaced, only when whole."""
    with atomic_folder(folder) as partial:
        write(model, partial)


def write(model: Model, folder: Path, use: str = _USE) -> None:
    """Write weights, config and a model card into a folder that exists; use: Python lines for the card."""
    sha256 = write_tensors(_state(model), folder / WEIGHTS)
    described = {
        "format": FORMAT, "trope": __version__, "num_items": model.num_items,
        "time_span": list(model.time_span), "age_from": model.age_from, "config": to_dict(model.config),
        "files": {WEIGHTS: sha256},
    }  # fmt: skip
    write_json(folder / MODEL_CONFIG, seal(described))
    (folder / CARD).write_text(_card(described, use), encoding="utf-8")


def read_config(folder: Path) -> SavedConfig:
    """config.json, checked: it may come from anywhere, and from an older version."""
    path = folder / MODEL_CONFIG
    try:
        described = read_json(path, {}, _AGAIN)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{folder} holds no {MODEL_CONFIG}; is it the folder of a trained model?") from None
    if described.get("format") not in (FORMAT, *OLDER_FORMATS):
        raise ValueError(f"{path} is not of format {FORMAT}; it is no trope model, or of another version")
    is_older = described["format"] in OLDER_FORMATS
    check_kinds(path, described, _KINDS if is_older else {**_KINDS, "files": dict[str, str]}, _AGAIN)
    items, span, files = described["num_items"], described["time_span"], described.get("files", {})
    if not 1 <= items <= MOST_ITEMS:
        raise ValueError(f"{path} is damaged: num_items {items}; {_AGAIN}")
    if len(span) != 2 or not 0 <= span[0] <= span[1] <= LATEST_TIME:
        raise ValueError(f"{path} is damaged: time_span {span}; {_AGAIN}")
    age_from = described.get("age_from", span[1])  # older models have none: theirs began at the end
    if type(age_from) is not int or not 0 <= age_from <= LATEST_TIME:
        raise ValueError(f"{path} is damaged: age_from {age_from!r}; {_AGAIN}")
    if not is_older and WEIGHTS not in files:
        raise ValueError(f"{path} has no SHA-256 of {WEIGHTS}; {_AGAIN}")
    try:
        config = from_dict(migrate(described["config"]))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return SavedConfig(config, items, (span[0], span[1]), files.get(WEIGHTS), age_from)


def check_shapes(model: Model, folder: Path, leave_out: frozenset[str] = frozenset()) -> None:
    """Refuse weights that do not fit a model, by their file's header; the model may be on the meta device.

    leave_out: names of tensors that may have any shape, or be missing.
    """
    try:
        found = shapes_in(folder / WEIGHTS)
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"cannot read the weights {folder / WEIGHTS}: {error}; {_AGAIN}") from None
    expected = {name: x.shape for name, x in _state(model).items()}
    expected, found = ({n: s for n, s in each.items() if n not in leave_out} for each in (expected, found))
    if expected != found:
        wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        raise ValueError(f"the weights in {folder} do not fit its config: {', '.join(wrong[:5])}; foreign or damaged")


def fill(model: Model, folder: Path, sha256: str | None, leave_out: frozenset[str] = frozenset()) -> None:
    """Read the weights of a folder into a model that they fit (`check_shapes`).

    sha256: of the file; None does not compare it. Numbers that are not finite are always refused. leave_out: names of
    tensors that are not read.
    """
    try:
        weights = read_tensors(folder / WEIGHTS, sha256, leave_out)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(f"cannot read the weights {folder / WEIGHTS}: {error}; {_AGAIN}, or train again") from None
    for name, x in _state(model).items():
        if name not in leave_out and weights[name].dtype != x.dtype:
            raise ValueError(
                f"the weights in {folder} do not fit its config: {name} is {weights[name].dtype}; {_AGAIN}"
            )
    model.load_state_dict(weights, strict=False)


class WithTable:
    """A model whose item table is spread over processes, with another tensor in its place, or without it.

    table: all rows, or None.
    """

    def __init__(self, model: Model, name: str, table: Tensor | None) -> None:
        self.config, self.num_items = model.config, model.num_items
        self.time_span, self.age_from = model.time_span, model.age_from
        self._model, self._name, self._table = model, name, table

    def state_dict(self) -> dict[str, Tensor]:
        state = {name: x for name, x in self._model.state_dict().items() if name != self._name}
        return state if self._table is None else {**state, self._name: self._table}

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        return self._model.named_parameters()

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        return self._model.named_buffers()

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> Any:
        return self._model.load_state_dict(state_dict, strict)

    def save_pretrained(self, folder: str | Path) -> None:
        """As `SequentialRecommender.save_pretrained`."""
        save(self, Path(folder))


def find_folder(source: str | Path, revision: str | None = None) -> Path:
    """A local folder for `source`: itself, or what the hub gives for "hf://owner/name" or "hf://owner/name@revision".

    revision: a branch, tag or commit of the repository, instead of "@revision".
    """
    if isinstance(source, str) and source.startswith(HUB):
        return _from_hub(source, revision)
    if not Path(source).exists():
        hint = f'; a repository on the Hugging Face hub is written "{HUB}owner/name"' if isinstance(source, str) else ""
        raise FileNotFoundError(f"there is no folder {source}{hint}")
    if revision is not None:
        raise ValueError(f"a revision belongs to a repository on the hub, got {revision!r} for the folder {source}")
    return Path(source)


def _from_hub(source: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    named = REPOSITORY.fullmatch(source.removeprefix(HUB))
    if named is None:
        raise ValueError(f"a repository on the hub is {HUB}owner/name or {HUB}owner/name@revision, got {source!r}")
    if named[2] is not None and revision not in (None, named[2]):
        raise ValueError(f"{source} names a revision already, got {revision!r} as well; give one of them")
    try:
        chosen = named[2] or revision
        return Path(snapshot_download(named[1], revision=chosen, allow_patterns=list(PATTERNS)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().split("\n")[0]
        raise FileNotFoundError(f"the hub does not give {source}: {reason}") from None


def _state(model: Model) -> dict[str, Tensor]:
    """The state without the names under which shared tables appear again (TiSASRec's blocks share theirs)."""
    first = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    return {name: x for name, x in model.state_dict().items() if name in first}


def _card(described: dict[str, Any], use: str) -> str:
    model, rotary = described["config"]["model"], described["config"]["rotary"]
    return (
        "---\nlibrary_name: trope\ntags: [recommendation, sequential-recommendation]\n---\n\n"
        f"# {model['block']} with {rotary['kind']} rotary encoding\n\n"
        f"A sequential recommender made with trope {described['trope']}: {described['num_items']:,} items, "
        f"{model['blocks']} blocks of width {model['width']}, histories of up to {model['max_len']} events.\n\n"
        f"```python\n{use}```\n"
    )
