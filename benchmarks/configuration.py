"""Write docs/configuration.md from the docstrings of `trope.config`:

    python benchmarks/configuration.py           # rewrite the page
    python benchmarks/configuration.py --check   # exit 1 if the page is out of date (tests do this)

A field's text is the entry "name: text" or "a, b: text" of its class docstring.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any

from trope.config import PRESETS, Config

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
INTRO = """# Configuration

For everyone who trains a model: every setting, its default and its meaning. After reading you can set any of them with
`--set group.field=value` or in a TOML file. `python benchmarks/configuration.py` writes this page; do not edit it.

```
trope train data/clicks --model trope --out runs/a --set train.epochs=20 --set model.width=128
trope train data/clicks --model trope --config mine.toml --out runs/b
```

```toml
# mine.toml: a group is a table; fields that are left out keep the model's own value
[model]
width = 128
[train]
epochs = 20
```

`--model` gives the base, the file overrides it, and `--set` overrides both. Without `--model`, fields that are left out
keep the defaults below. These are the settings of `hstu-time`: no rotary encoding and no pulse. A file that states
`model.block`, `model.pulse` or `[rotary]` is a model of its own and takes no `--model`.

A bad value is refused before anything is trained. A setting that the chosen model does not read is named on the screen.
A run folder holds the resolved settings in `config.toml`.
"""


def entries(group: type) -> dict[str, str]:
    """Text by field name, from the class docstring. Raises ValueError for a field without one."""
    names = [each.name for each in dataclasses.fields(group)]
    text = " ".join(inspect.cleandoc(group.__doc__ or "").partition("\n\n")[2].split())
    one = "|".join(sorted(names, key=len, reverse=True))
    # An entry begins the text, or follows the end of the entry before it.
    begin = re.compile(rf"(?:^|(?<=[.;] ))((?:{one})(?:, (?:{one}))*): ")
    found = list(begin.finditer(text))
    ends = [match.start() for match in found[1:]] + [len(text)]
    meaning = {}
    for match, end in zip(found, ends, strict=True):
        said = text[match.end() : end].strip().rstrip(";")
        meaning.update(dict.fromkeys(match[1].split(", "), said))
    missing = [name for name in names if name not in meaning]
    if missing:
        raise ValueError(f"{group.__name__}'s docstring has no entry for {', '.join(missing)}; write 'name: text.'")
    return meaning


def kind_of(hint: Any) -> str:
    """A field's type in words: the choices, or what may be written."""
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(kind_of(option) for option in typing.get_args(hint))
    return {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "`none`"}[hint]


def written(value: Any) -> str:
    """A value as one would write it after `--set`."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def group_section(name: str, group: type) -> str:
    """Heading, the class's first sentence, and one row for each field."""
    meaning, hints = entries(group), typing.get_type_hints(group)
    lines = ["| field | value | default | meaning |", "|---|---|---|---|"]
    for each in dataclasses.fields(group):
        cells = (f"`{name}.{each.name}`", kind_of(hints[each.name]), f"`{written(each.default)}`", meaning[each.name])
        lines.append(f"| {' | '.join(map(cell, cells))} |")
    first = " ".join(inspect.cleandoc(group.__doc__ or "").partition("\n\n")[0].split())
    return "\n".join([f"## `{name}`", "", first, "", *lines])


def changed(config: Config) -> str:
    """Settings of a preset that are not the default."""
    default, own = dataclasses.asdict(Config()), dataclasses.asdict(config)
    return ", ".join(
        f"`{group}.{name}={written(value)}`"
        for group, values in own.items()
        for name, value in values.items()
        if value != default[group][name]
    )


def page() -> str:
    """The whole page."""
    groups = typing.get_type_hints(Config)
    sections = [group_section(each.name, groups[each.name]) for each in dataclasses.fields(Config)]
    rows = [f"| `{name}` | {changed(config) or 'the defaults above'} |" for name, config in PRESETS.items()]
    presets = ["## Presets", "", "`--model NAME` begins with these settings; `--set` changes them.", ""]
    presets += ["| model | settings other than the default |", "|---|---|", *rows]
    return "\n\n".join([INTRO.strip(), *sections, "\n".join(presets)]) + "\n"


def main() -> None:
    if "--check" not in sys.argv:
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        sys.exit(f"docs/{PAGE.name} is out of date: run python benchmarks/configuration.py")


if __name__ == "__main__":
    main()
