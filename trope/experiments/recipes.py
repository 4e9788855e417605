"""Recipes: one file takes a dataset from raw events to report (`trope reproduce NAME`).

A recipe is a config file (configs/NAME.toml) with a `[recipe]` table: how to make the data, and what to compare.

    [[recipe.prepare]]          # one for each dataset NAME; the first has the name of the file
    name = "globo-news"         # data/NAME is prepared, runs/NAME holds the runs and the report
    protocol = "loo-strict"
    source = "SOURCE"           # of `trope prepare`; the word SOURCE stands for what --source says
    arguments = []              # more words for `trope prepare`

    [[recipe.generate]]         # instead of a source: data/NAME.parquet, made by `trope generate`
    name = "calendar-shop"      # a prepare table refers to it with generated = "calendar-shop"
    arguments = ["--users", "60000"]

    [recipe.compare]
    models = ["hstu-time", "hstu-trope"]    # the first is the reference
    seeds = 3
    variants = ["two=hstu-trope,model.blocks=2"]    # as for --variant; may be left out

    [recipe.settings]           # more settings under one protocol
    holdout = ["train.refit=true"]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from trope.experiments.config_file import read_tables, settings_of_file
from trope.settings import check_type

SOURCE = "SOURCE"
OWN = Path("configs")
"""Recipes in the working directory; they come before those of the package."""
SHIPPED = Path(__file__).parent / "recipes_data"
"""Where a wheel holds configs/ (see pyproject.toml)."""
CHECKOUT = Path(__file__).parents[2] / "configs"
_Table = TypeVar("_Table")


@dataclass(frozen=True)
class Prepare:
    """A dataset of a recipe: data/NAME, prepared from a source or from generated events."""

    name: str
    protocol: str
    source: str = ""
    generated: str = ""
    arguments: list[str] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        """The command that prepares it, without the leading `trope`."""
        source = f"data/{self.generated}.parquet" if self.generated else self.source
        return ["prepare", source, *self.arguments, "--protocol", self.protocol, "--out", f"data/{self.name}"]


@dataclass(frozen=True)
class Generate:
    """Events of the calendar shop: data/NAME.parquet."""

    name: str
    arguments: list[str] = field(default_factory=list)

    @property
    def words(self) -> list[str]:
        """The command that generates it, without the leading `trope`."""
        return ["generate", *self.arguments, "--out", f"data/{self.name}.parquet"]


@dataclass(frozen=True)
class Compare:
    """What is trained: models, the first being the reference, and variants, as `--variant` has them; so many seeds."""

    models: list[str]
    seeds: int
    variants: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Recipe:
    """A recipe as it stands in its file.

    prepare: its datasets. generate: events that are made up for them. protocol_settings: more settings, by protocol.
    """

    file: Path
    prepare: list[Prepare]
    generate: list[Generate]
    compare: Compare
    protocol_settings: dict[str, list[str]]

    @classmethod
    def read(cls, file: Path) -> Recipe:
        """Read a recipe; unknown names, wrong types and references to nothing are refused."""
        _, tables = read_tables(file)
        if tables is None:
            raise ValueError(f"{file} has no [recipe] table; see `trope.experiments.recipes` for what belongs there")
        where = f"{file}: recipe"
        _check_names(tables, {"prepare", "generate", "compare", "settings"}, where)
        recipe = cls(
            file,
            [_table(Prepare, each, f"{where}.prepare") for each in _tables(tables, "prepare", where)],
            [_table(Generate, each, f"{where}.generate") for each in _tables(tables, "generate", where)],
            _table(Compare, tables.get("compare", {}), f"{where}.compare"),
            tables.get("settings", {}),
        )
        recipe._check(where)
        return recipe

    def _check(self, where: str) -> None:
        made = {each.name for each in self.generate}
        for each in self.prepare:
            if bool(each.source) == bool(each.generated):
                raise ValueError(f"{where}.prepare {each.name!r} needs either a source or generated, and not both")
            if each.generated and each.generated not in made:
                raise ValueError(f"{where}.prepare {each.name!r}: there is no generate table named {each.generated!r}")
        if not self.prepare:
            raise ValueError(f"{where} prepares nothing; it needs a [[recipe.prepare]] table")
        protocols = {each.protocol for each in self.prepare}
        _check_names(self.protocol_settings, protocols, f"{where}.settings")
        for protocol, settings in self.protocol_settings.items():
            check_type(settings, list[str], f"{where}.settings.{protocol}")

    @property
    def targets(self) -> list[str]:
        """Names of the datasets that it prepares."""
        return [each.name for each in self.prepare]

    def dataset(self, target: str) -> Prepare:
        """The dataset of this name."""
        return next(each for each in self.prepare if each.name == target)

    def commands_for_data(self, target: str, source: str | None) -> list[list[str]]:
        """The commands that make data/TARGET; source: where its raw events are, for a recipe that needs them."""
        wanted = self.dataset(target)
        found = [each.words for each in self.generate if each.name == wanted.generated] + [wanted.words]
        if source is None and SOURCE in wanted.words:
            raise ValueError(
                f"data/{target} is not there; name its raw events with --source (SOURCE=… with make), for: "
                f"{' '.join(['trope', *wanted.words])}"
            )
        return [[source or "" if word == SOURCE else word for word in words] for words in found]

    def comparison_command(self, target: str, more: Sequence[str] = (), seeds: int | None = None) -> list[str]:
        """The comparison on data/TARGET, into runs/TARGET; settings in `more` come last and override the recipe's.

        seeds: instead of the recipe's.
        """
        words = [
            "compare", f"data/{target}", "--config", str(self.file), "--models", ",".join(self.compare.models),
            "--seeds", str(self.compare.seeds if seeds is None else seeds), "--out", f"runs/{target}",
        ]  # fmt: skip
        variants = [part for variant in self.compare.variants for part in ("--variant", variant)]
        own = [part for setting in self._own_settings(target) for part in ("--set", setting)]
        return [*words, *variants, *own, *more]

    def settings(self, target: str) -> list[str]:
        """What every model of the comparison on data/TARGET is trained with."""
        return [*settings_of_file(self.file), *self._own_settings(target)]

    def _own_settings(self, target: str) -> list[str]:
        return self.protocol_settings.get(self.dataset(target).protocol, [])


def recipe_files(folder: Path | None = None) -> list[Path]:
    """All recipes of a folder; without one, those in ./configs, then those that come with trope."""
    folders = [folder] if folder is not None else [OWN, SHIPPED if SHIPPED.is_dir() else CHECKOUT]
    found: dict[Path, Path] = {}
    for file in (file for each in folders for file in sorted(each.glob("*.toml"))):
        found.setdefault(file.resolve(), file)  # in a checkout both folders are the same
    return list(found.values())


def find(target: str, folder: Path | None = None) -> Recipe:
    """The recipe that prepares a dataset of this name."""
    names = []
    for file in recipe_files(folder):
        if folder is None and read_tables(file)[1] is None:
            continue  # ./configs may hold configs of one's own that are no recipes
        recipe = Recipe.read(file)
        if target in recipe.targets:
            return recipe
        names += recipe.targets
    where = f"in {folder}" if folder is not None else "in ./configs or in the package"
    raise ValueError(f"no recipe {where} prepares {target!r}; there are {', '.join(dict.fromkeys(names)) or 'none'}")


def _tables(tables: dict[str, Any], name: str, where: str) -> list[Any]:
    found = tables.get(name, [])
    if not isinstance(found, list):
        raise ValueError(f"{where}.{name} must be an array of tables; write [[recipe.{name}]]")
    return found


def _table(kind: type[_Table], values: Any, where: str) -> _Table:
    """A dataclass from a TOML table."""
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    types = get_type_hints(kind)
    _check_names(values, set(known), where)
    for name, value in values.items():
        check_type(value, types[name], f"{where}.{name}")
    needed = {name for name, each in known.items() if each.default is MISSING and each.default_factory is MISSING}
    if missing := sorted(needed - set(values)):
        raise ValueError(f"{where} needs {', '.join(missing)}, got {', '.join(values) or 'nothing'}")
    return kind(**values)


def _check_names(values: Any, known: set[str], where: str) -> None:
    if not isinstance(values, dict):
        raise ValueError(f"{where} must be a table, got {values!r}")
    if unknown := sorted(set(values) - known):
        raise ValueError(f"{where} has unknown names: {', '.join(unknown)}; it may have {', '.join(sorted(known))}")
