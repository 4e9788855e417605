"""Where a pretrained model is: a folder here, or a repository on the Hugging Face hub.

Only weights, JSON, the model card and the catalogue are fetched, and only these are read: nothing from a repository is
executed or unpickled.
"""

from __future__ import annotations

import re
from pathlib import Path

from trope.runs import BEST, CARD, CATALOGUE, CONFIG

# What a model or a run folder consists of; a repository's other files stay where they are.
PATTERNS = ("*.safetensors", "*.json", CARD, CONFIG, f"{BEST}/*", f"{CATALOGUE}/*")
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


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
