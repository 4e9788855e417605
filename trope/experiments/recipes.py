"""One recipe from raw events to report (`make reproduce DATA=…`): what stands at the top of a file in configs/, run.

A recipe is a config whose comment lines hold its commands: `# trope prepare … --out data/NAME`, several where there are
several protocols, `# trope generate …` before them where the data are made up, and one `# trope compare …`. SOURCE is
where the raw events are. What is documented is what is run, since it is read from there.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from trope.experiments.variants import settings_of_file
from trope.settings import read_toml

CONFIGS = Path("configs")
SOURCE = "SOURCE"


@dataclass(frozen=True)
class Recipe:
    """A config file with its commands, each a list of words without the leading `trope`."""

    file: Path
    commands: list[list[str]]

    @classmethod
    def read(cls, file: Path) -> Recipe:
        """From the comment lines of a config."""
        text = file.read_text(encoding="utf-8").replace("\\\n#", "")  # a line may go on, as in a shell
        found = (line for line in text.splitlines() if line.startswith("# trope "))
        return cls(file, [shlex.split(line)[2:] for line in found])

    @property
    def targets(self) -> list[str]:
        """Names of the datasets it prepares: the config's own first, then other protocols."""
        return [Path(option(words, "--out")).name for words in self.commands if words[0] == "prepare"]

    def making(self, target: str, source: str | None) -> list[list[str]]:
        """The commands that make data/TARGET: its preparation, and before it what generates the events, if anything."""
        out = f"data/{target}"
        (prepare,) = (words for words in self.commands if words[0] == "prepare" and option(words, "--out") == out)
        generates = (words for words in self.commands if words[0] == "generate")
        found = [*(words for words in generates if option(words, "--out") == prepare[1]), prepare]
        if source is None and any(SOURCE in words for words in found):
            raise ValueError(
                f"data/{target} is not there; say with SOURCE=… where its raw events are, for: "
                f"{' '.join(['trope', *found[-1]])}"
            )
        return [[source or "" if word == SOURCE else word for word in words] for words in found]

    def _protocol(self, target: str) -> str:
        prepares = (words for words in self.commands if words[0] == "prepare")
        return next(option(words, "--protocol") for words in prepares if Path(option(words, "--out")).name == target)

    def comparing(self, target: str, more: Sequence[str] = ()) -> list[str]:
        """The comparison on data/TARGET, into runs/TARGET; options in `more` come last, and so have the last word.

        On a holdout models are trained anew through the validation window, as they would be before they are deployed.
        Leave-one-out takes a basket's last line out and asks for it: there the next event is predicted, and with one
        positive a user recall and hit rate are the same.
        """
        (words,) = (words for words in self.commands if words[0] == "compare")
        at = words.index("--out")
        changed = ["compare", f"data/{target}", *words[2:at], "--out", f"runs/{target}", *words[at + 2 :]]
        if self._protocol(target) == "holdout":
            changed += ["--set", "train.refit=true"]
        elif self._protocol(target).startswith("loo") and read_toml(self.file).model.predicts == "next-moment":
            changed += ["--set", "model.predicts=next-event", "--set", "train.criterion=HR@10"]
        return [str(self.file) if word == f"configs/{self.file.name}" else word for word in changed] + list(more)

    def settings(self, target: str) -> list[str]:
        """What every model of the comparison on data/TARGET is trained with."""
        words = self.comparing(target)
        return [*settings_of_file(self.file), *(words[i + 1] for i, word in enumerate(words) if word == "--set")]


def option(words: Sequence[str], name: str) -> str:
    """The value behind an option."""
    return words[words.index(name) + 1]


def find(target: str, configs: Path = CONFIGS) -> Recipe:
    """The recipe that prepares a dataset of this name."""
    recipes = [Recipe.read(file) for file in sorted(configs.glob("*.toml"))]
    for recipe in recipes:
        if target in recipe.targets:
            return recipe
    names = [name for recipe in recipes for name in recipe.targets]
    raise ValueError(f"no recipe in {configs} makes {target!r}; there are {', '.join(names)}")


def main(
    target: Annotated[str, typer.Argument(help="Such as ml-1m or globo-news-holdout.", metavar="DATA")],
    source: Annotated[str | None, typer.Option(help="Raw events, where the dataset is not prepared yet.")] = None,
    jobs: Annotated[int, typer.Option(help="Trainings at a time; several fit on one large GPU.")] = 1,
    seeds: Annotated[int | None, typer.Option(help="Default: the recipe's.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="group.field=value, to try a part.")] = None,
    configs: Annotated[Path, typer.Option(help="Folder of the recipes.")] = CONFIGS,
    dry: Annotated[bool, typer.Option("--dry", help="Only print the commands.")] = False,
) -> None:
    """Prepare a dataset if it is not there, then train, compare and report, as its recipe in configs/ says."""
    recipe = find(target, configs)
    made = [] if Path(f"data/{target}").is_dir() else recipe.making(target, source or None)
    commands = [words for words in made if not Path(option(words, "--out")).exists()]
    more = ["--jobs", str(jobs), *(["--seeds", str(seeds)] if seeds is not None else [])]
    more += [part for setting in settings or [] for part in ("--set", setting)]
    for words in [*commands, recipe.comparing(target, more)]:
        typer.echo(f"$ trope {shlex.join(words)}")
        if not dry and (code := subprocess.run([sys.executable, "-m", "trope", *words]).returncode):
            raise typer.Exit(code)


if __name__ == "__main__":
    try:
        typer.run(main)
    except ValueError as error:
        typer.secho(f"trope: {error}", fg=typer.colors.RED, err=True)
        sys.exit(2)
