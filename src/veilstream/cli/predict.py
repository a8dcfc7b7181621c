"""`veilstream predict`: a model's predictions for a file of records, as CSV."""

from __future__ import annotations

import csv
import io
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from veilstream.cli.model import Authority, MethodName, ModelArgument, TrustedPlan
from veilstream.cli.options import Json

if TYPE_CHECKING:
    from veilstream.runs.model import Model, Predictions

_STDIN = "-"
_SHOWN = 5


def predict_command(
    model: ModelArgument,
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="Records: CSV, JSON lines, Parquet; - reads CSV from stdin.", show_default=False
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="CSV to write.", show_default="stdout")] = None,
    ca: Authority = None,
    method: MethodName = None,
    plan: TrustedPlan = None,
    json: Json = False,
) -> None:
    """Predict the label of every record in a file, on this machine.

    The CSV has a line for each row of the file: its number, what names it (the plan's columns client, learner and
    time, where the file has them), the prediction, the probability of each label, and why a row could not be used
    (then its prediction is empty). Where the file has the label's column, quality figures follow on stderr, or on
    stdout with `--out`.

    Example: `veilstream predict runs/air new.csv --out predicted.csv`
    """
    from veilstream.cli.tables import json_text
    from veilstream.errors import InputError
    from veilstream.files import write_file
    from veilstream.runs.load import load
    from veilstream.runs.model_score import score

    loaded = load(model, ca=ca, method=method, plan=plan)
    found = _predicted(loaded, file)
    if not len(found):
        raise InputError("FILE", file, "at least one row below its header", "give a file with records")
    text = _csv(loaded, found)
    quality = score(loaded, found)
    if out is not None:
        write_file(out, text)
    if json:
        sys.stdout.write(json_text(_facts(loaded, found, quality, file, out)))
    elif out is None:
        sys.stdout.write(text)
    if not json:
        _tell(loaded, found, quality, file, out)


def _predicted(model: Model, file: str) -> Predictions:
    if file != _STDIN:
        return model.predictions(Path(file))
    with tempfile.TemporaryDirectory() as folder:  # this account alone can read it
        copy = Path(folder) / "stdin.csv"
        with copy.open("wb") as kept:
            shutil.copyfileobj(sys.stdin.buffer, kept)
        return model.predictions(copy)


def _csv(model: Model, found: Predictions) -> str:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    names = list(dict.fromkeys(name for row in found.rows.named for name in row))
    labels = [f"probability {label}" for label in model.classes or ()] if found.probabilities is not None else []
    taken = {"row", "prediction", *labels, "unusable"}
    shown = [f"{name} (record)" if name in taken else name for name in names]
    rows.writerow(["row", *shown, "prediction", *labels, "unusable"])
    for place, value in enumerate(found.values):
        about = found.rows.named[place] if found.rows.named else {}
        refused = found.refused.get(place)
        cells: list[Any] = [""] * (1 + len(labels))
        if refused is None:
            shares = [] if found.probabilities is None else [f"{p:.9g}" for p in found.probabilities[place]]
            cells = [value if model.classes is not None else f"{value:.9g}", *shares]
        rows.writerow(
            [place + 1, *(about.get(n, "") for n in names), *cells, "" if refused is None else model.why(refused)]
        )
    return text.getvalue()


def _facts(
    model: Model, found: Predictions, quality: dict[str, Any] | None, file: str, out: Path | None
) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "model": {"source": model.source, "run": model.run, "round": model.round, "sha256": model.sha256},
        "file": file,
        "rows": len(found),
        "unusable": {str(row + 1): model.why(why) for row, why in found.refused.items()},
        "clamped": dict(found.clamped),
        "quality": quality,
        "out": None if out is None else str(out),
    }
    if out is None:
        shares = found.probabilities
        facts["predictions"] = [
            {
                "row": place + 1,
                **{name: str(cell) for name, cell in (found.rows.named[place] if found.rows.named else {}).items()},
                "prediction": None if place in found.refused else value,
                "probabilities": None
                if shares is None or place in found.refused
                else dict(zip(model.classes or (), shares[place].tolist(), strict=True)),
            }
            for place, value in enumerate(found.values.tolist())
        ]
    return facts


def _tell(model: Model, found: Predictions, quality: dict[str, Any] | None, file: str, out: Path | None) -> None:
    """What was done, on stderr where stdout has the predictions."""
    from veilstream.wording import counted, shown

    def say(text: str) -> None:
        typer.echo(text, err=out is None)

    of = "" if model.method is None else f", method {shown(model.method)}"
    say(f"Model      {shown(model.source)}{of}, round {model.round} of {model.rounds}, hash {model.sha256[:16]}…")
    say(f"Rows       {len(found)} in {shown(file)}; {counted(len(found) - len(found.refused), 'prediction')}")
    if found.refused:
        first = [f"row {row + 1}: {shown(model.why(why))}" for row, why in list(found.refused.items())[:_SHOWN]]
        more = f"; and {len(found.refused) - _SHOWN} more" if len(found.refused) > _SHOWN else ""
        say(f"Unusable   {counted(len(found.refused), 'row')} without a prediction. {'; '.join(first)}{more}")
    if found.clamped:
        per = ", ".join(f"{shown(column)} {count}" for column, count in found.clamped.most_common())
        say(f"Clamped    cells outside the plan's range or vocabulary: {per}")
    if quality is not None:
        for line in _quality_lines(quality):
            say(line)
    if out is not None:
        say(f"Saved: {out}")


def _quality_lines(quality: dict[str, Any]) -> list[str]:
    from veilstream.wording import shown

    baseline, label = quality["baseline"], shown(quality["label"])
    if "rmse" in quality:
        r2 = "" if quality["r2"] is None else f", R² {quality['r2']:.4f}"
        return [
            f"Quality    {label}: RMSE {quality['rmse']:.6g}{r2}, on {quality['rows']} rows with the label",
            f"Baseline   always the mean, {baseline['mean']:.6g}: RMSE {baseline['rmse']:.6g}",
        ]
    more = "".join(
        f", {name} {quality[key]:.4f}"
        for key, name in (("auc", "AUC"), ("log_loss", "calibrated log loss"))
        if quality[key] is not None
    )
    recall = ", ".join(
        f"{shown(name)} {'-' if share is None else f'{share:.4f}'}" for name, share in quality["recall"].items()
    )
    return [
        f"Quality    {label}: accuracy {quality['accuracy']:.4f}, balanced {quality['balanced_accuracy']:.4f}{more}, "
        f"on {quality['rows']} rows with the label",
        f"Recall     {recall}",
        f"Baseline   always {shown(baseline['label'])!r}: accuracy {baseline['accuracy']:.4f}, "
        f"balanced {baseline['balanced_accuracy']:.4f}",
    ]
