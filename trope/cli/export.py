"""The command `trope export`: a run's model as programs that run without trope."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(help="A run made by `trope train`, `trope fit` or `trope update`.")],
    out: Annotated[Path, typer.Option(help="The folder to write; it must be new or empty.")],
    format: Annotated[
        str, typer.Option(help="onnx: for ONNX Runtime. aoti: compiled, for this kind of CPU. torch: for PyTorch.")
    ] = "onnx",
) -> None:
    """Export a run's model for other runtimes, and compare the result with the model.

    The folder holds three programs. `encode` gives a vector for each history at one moment. For several moments,
    `remember` encodes histories, and `look` gives a vector for each history at each moment; tisasrec has only `encode`.
    Batch, length and number of moments are free. Beside them are the item table, the catalogue, the pulse's weights,
    and manifest.json: inputs, outputs, config, SHA-256 of every file.

    A score is the dot product of a vector with an item's row of the table, divided by the row's length. With a pulse,
    counts are added: see `trope/serve/export/manifest.py`. ExportedModel in `trope/serve/export/exported.py` shows all
    steps.

    The folder appears only if 512 made-up users get the model's own scores, to 1e-6. Format onnx needs trope's extra
    `export`, aoti a C++ compiler and minutes. Load aoti and torch folders only from sources that you trust: loading
    them can run code.
    """
    from rich.console import Console

    from trope.serve.export.folder import export as export_run

    console = Console(stderr=True, highlight=False)
    with console.status("reading the run") as status:
        parity = export_run(run, format, out, lambda doing: status.update(doing))
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    typer.echo(
        f"wrote {out}: {format}, {size / 1e6:,.1f} MB. {parity.users:,} made-up users: cosines differ from the model's "
        f"by at most {parity.cosines:.1e}, scores of the top 100 by at most {parity.answers:.1e}; "
        f"{100 * parity.same_places:.2f} % of their places hold the same item."
    )
