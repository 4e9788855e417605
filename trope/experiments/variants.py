"""Which models to train: presets by name, two named variants, and variants that a command line defines."""

from __future__ import annotations

from collections.abc import Sequence

from trope.config import PRESETS, Config
from trope.experiments.pool import Variant
from trope.settings import preset

_ATTENTION = ("rotary.readout=0",)
_PRINTED = (*_ATTENTION, "rotary.phase=fp32", "rotary.conditioning=paper", "model.gate_floor=none")
NAMED = {
    # T-RoPE in attention alone, as in the paper; the second also has the paper's arithmetic and coefficients
    # (docs/method.md).
    "hstu-trope-attention": Variant("hstu-trope-attention", "hstu-trope", _ATTENTION),
    "hstu-trope-paper": Variant("hstu-trope-paper", "hstu-trope", _PRINTED),
}
"""Variants that `--models` accepts besides the presets."""
_MODELS = (*PRESETS, *NAMED)


def choose(models: Sequence[str], own: Sequence[str] = (), common: Sequence[str] = ()) -> list[Variant]:
    """The variants of `--models`, then those of `--variant NAME=MODEL,group.field=value,…`.

    common: settings of all; a variant's own come after them. A wrong name or value is refused before any training.
    """
    asked = [_named(name.strip()) for name in models if name.strip()] + [_parse(text) for text in own]
    variants = [Variant(each.name, each.model, (*common, *each.settings)) for each in asked]
    for variant in variants:
        preset(variant.model, variant.settings)
    return variants


def configure(model: str, settings: Sequence[str]) -> Config:
    """The config of a preset or of a named variant; `settings` override both."""
    variant = _named(model)
    return preset(variant.model, [*variant.settings, *settings])


def _named(name: str) -> Variant:
    if name not in _MODELS:
        raise ValueError(f"unknown model {name!r}; choose one of {', '.join(_MODELS)}")
    return NAMED.get(name) or Variant(name, name)


def _parse(text: str) -> Variant:
    name, equals, rest = text.partition("=")
    model, *settings = (part.strip() for part in rest.split(","))
    if not (equals and name.strip() and model in _MODELS) or "/" in name:
        raise ValueError(
            f"a variant is NAME=MODEL,group.field=value,… with a model of {', '.join(_MODELS)}, got {text!r}"
        )
    base = _named(model)
    return Variant(name.strip(), base.model, (*base.settings, *settings))
