"""`veilstream model`: fetch a released model from a server, look at one, and write it for other programs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from veilstream.cli.options import Json

if TYPE_CHECKING:
    from veilstream.runs.model import Model


app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Fetch a released model from a server's model API, look at one, write it for other programs.

    A model is the folder of a run, a model's file, or the URL of a server. The file is NumPy's .npz with the
    parameters, the plan and the guarantee. In Python: `veilstream.load("model.npz")`.
    """,
)

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A run's folder, a model's file (.npz), or a server's URL.", show_default=False
    ),
]
Authority = Annotated[
    Path | None, typer.Option("--ca", help="Authority to trust: ca.pem of its keys.", show_default="the system's")
]
MethodName = Annotated[
    str | None, typer.Option("--method", help="Which method of a simulation.", show_default="its main method")
]
TrustedPlan = Annotated[
    Path | None,
    typer.Option(
        "--plan", help="Refuse a model of another plan; code of your own that it names may run.", show_default=False
    ),
]


@app.command("fetch")
def fetch_command(
    url: Annotated[str, typer.Argument(help="https://HOST:PORT of the model API; /model/ROUND for an older model.")],
    ca: Authority = None,
    out: Annotated[Path, typer.Option(help="File to write the model to.")] = Path("model.npz"),
    expect_plan: Annotated[
        Path | None, typer.Option(help="Refuse a model of another plan, or with another guarantee.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Fetch a model over a verified connection and write it, whole or not at all.

    A file that already holds the newest model is left as it is.

    Example: `veilstream model fetch https://fl.example.org:8480 --ca keys/server/ca.pem`
    """
    from veilstream.errors import InputError
    from veilstream.federation.http.model_check import check_plan
    from veilstream.plans.plan import Plan
    from veilstream.runs.model import Model
    from veilstream.runs.model_download import fetch_model
    from veilstream.runs.released_model import ReleasedModel

    plan = None if expect_plan is None else Plan.load(expect_plan)
    known = None
    if out.exists():
        try:
            known = ReleasedModel.load(out)
        except InputError as error:
            raise InputError("--out", str(out), "a new file, or a model's", "name another") from error
    model = fetch_model(url, ca=ca, known=known)
    if plan is not None:
        check_plan(model, plan)
    if model is not known:
        model.save(out)
    _show(Model(model, source=url), str(out), json)


@app.command("show")
def show_command(
    model: ModelArgument, ca: Authority = None, method: MethodName = None, plan: TrustedPlan = None, json: Json = False
) -> None:
    """Show what a model predicts, from which columns, and under which guarantee.

    Example: `veilstream model show runs/air`
    """
    from veilstream.runs.load import load

    _show(load(model, ca=ca, method=method, plan=plan), model, json)


class Format(StrEnum):
    """What a model is written as."""

    JSON = "json"
    ONNX = "onnx"
    SAFETENSORS = "safetensors"
    NPZ = "npz"
    MLFLOW = "mlflow"


@app.command("export")
def export_command(
    model: ModelArgument,
    to: Annotated[Format, typer.Option("--to", help="What to write.")],
    out: Annotated[
        str | None,
        typer.Option(
            help="File to write; for mlflow a tracking store.", show_default="model.FORMAT; sqlite:///mlflow.db"
        ),
    ] = None,
    ca: Authority = None,
    method: MethodName = None,
    plan: TrustedPlan = None,
    json: Json = False,
) -> None:
    """Write a model for other programs.

    * `json`: coefficients by name, and how columns are encoded
    * `onnx`: a graph from columns to predictions (linear models and the CNN)
    * `safetensors`: the numbers, with names and plan as metadata
    * `npz`: a model's file, which every command takes
    * `mlflow`: a new version in a model registry, as a pyfunc that takes data frames

    For scikit-learn: `veilstream.load("MODEL").as_sklearn()`. Needs the extra `export` (onnx, safetensors) or `mlflow`.

    Example: `veilstream model export runs/air --to onnx --out air.onnx`
    """
    from veilstream.cli.tables import print_json
    from veilstream.runs.load import load
    from veilstream.runs.model_export import export
    from veilstream.wording import shown

    loaded = load(model, ca=ca, method=method, plan=plan)
    facts = {"model": model, "sha256": loaded.sha256, "to": to.value}
    if to is Format.MLFLOW:
        from veilstream.runs.mlflow_model import to_registry

        uri = out or "sqlite:///mlflow.db"
        name, version = to_registry(loaded, uri)
        facts |= {"out": uri, "name": name, "version": version}
        text = f"Registered {shown(name)}, version {version}, in {shown(uri)}"
    else:
        path = Path(out or f"model.{to.value}")
        export(loaded, to.value, path)
        facts["out"] = str(path)
        text = f"Saved: {path}"
    if json:
        print_json(facts)
    else:
        typer.echo(text)


def _show(model: Model, where: str, json: bool) -> None:
    import numpy as np

    from veilstream.cli.tables import print_json
    from veilstream.runs.released_model import plan_digest
    from veilstream.wording import shown

    norm, digest, promise = float(np.linalg.norm(model.parameters)), plan_digest(model.plan), model.guarantee
    named = model.needs_code is None
    if json:
        facts: dict[str, Any] = {
            "file": where,
            "run": model.run,
            "round": model.round,
            "rounds": model.rounds,
            "dim": len(model.parameters),
            "norm": norm,
            "sha256": model.sha256,
            "plan": digest,
            "guarantee": model.released.guarantee,
            "simulated": model.simulated,
            "method": model.method,
            "task": model.plan.learning.task,
            "classes": model.classes if named else None,
            "coefficients": model.coefficients if named and model.linear else None,
            "coefficients_per_unit": model.coefficients_per_unit if named else None,
        }
        print_json(facts)
        return
    method = "" if model.method is None else f", method {shown(model.method)}"
    typer.echo(
        f"Model      {shown(where)}: {len(model.parameters)} parameters, norm {norm:.6g}, hash {model.sha256[:16]}…\n"
        f"Run        {shown(model.run)}{method}, after {model.round} of {model.rounds} rounds\n"
        f"Plan       {shown(model.plan.name)}, digest {digest[:16]}…\n"
        f"Predicts   {_predicts(model)}"
    )
    if promise is None:
        typer.echo("Guarantee  none: this method protects no one")
    elif model.simulated:
        typer.echo(
            f"Guarantee  {promise.in_short} where it is deployed; this is a simulation, "
            "whose noise comes from a seed and protects no one"
        )
    else:
        typer.echo(f"Guarantee  {promise.in_short}, as the server states it")
    if named and model.linear:
        _show_coefficients(model)


def _predicts(model: Model) -> str:
    from veilstream.wording import shown

    if model.needs_code is not None:
        return f"what {shown(model.needs_code)} says: --plan names the plan whose code may run"
    schema = model.schema
    column = "a label" if schema is None else shown(schema.label.name)
    if model.classes is not None:
        words = ", ".join(shown(word) for word in model.classes[:12])
        more = f" and {len(model.classes) - 12} more" if len(model.classes) > 12 else ""
        return f"{column}: {words}{more}"
    if schema is None:
        return "a number"
    return f"{column}, a number from {schema.label.low:g} to {schema.label.high:g}"


_MOST_COEFFICIENTS = 40


def _show_coefficients(model: Model) -> None:
    from veilstream.wording import shown

    own = model.coefficients_per_unit
    found = model.coefficients if own is None else own
    by_label = found if any(isinstance(value, dict) for value in found.values()) else {"": found}
    unit = "for -1 to 1 over each range" if own is None else "a unit of the column"
    typer.echo(f"\nCoefficients ({unit})")
    width = min(40, max(len(shown(name)) for row in by_label.values() for name in row))
    for label, row in by_label.items():
        if label:
            typer.echo(f"  {shown(label)}")
        for name, value in list(row.items())[:_MOST_COEFFICIENTS]:
            typer.echo(f"  {shown(name):{width}}  {value:+.6g}")
        if len(row) > _MOST_COEFFICIENTS:
            typer.echo(f"  ... {len(row) - _MOST_COEFFICIENTS} more: --json has all")
