"""`veilstream model`: fetch a released model from a server, and look at it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from veilstream.cli.options import Json

if TYPE_CHECKING:
    from veilstream.runs.released_model import ReleasedModel


app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""Fetch a released model from a server's model API, and look at it.

    The file is NumPy's .npz with the parameters, the plan and the guarantee. In Python:
    `numpy.load("model.npz")["model"]`.
    """,
)


@app.command("fetch")
def fetch_command(
    url: Annotated[str, typer.Argument(help="https://HOST:PORT of the model API; /model/ROUND for an older model.")],
    ca: Annotated[
        Path | None, typer.Option(help="Authority to trust: ca.pem of its keys.", show_default="the system's")
    ] = None,
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
    from veilstream.federation.http.model_download import check_plan, fetch_model
    from veilstream.plans.plan import Plan
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
    _show(model, out, json)


@app.command("show")
def show_command(
    file: Annotated[Path, typer.Argument(help="A model that was fetched.", show_default=False)], json: Json = False
) -> None:
    """Show what a model's file holds.

    Example: `veilstream model show model.npz`
    """
    from veilstream.runs.released_model import ReleasedModel

    _show(ReleasedModel.load(file), file, json)


def _show(model: ReleasedModel, path: Path, json: bool) -> None:
    import numpy as np

    from veilstream.cli.tables import print_json
    from veilstream.runs.released_model import plan_digest
    from veilstream.wording import shown

    norm, digest, promise = float(np.linalg.norm(model.model)), plan_digest(model.plan), model.guarantee
    if json:
        facts: dict[str, Any] = {
            "file": str(path),
            "run": model.run,
            "round": model.round,
            "rounds": model.rounds,
            "dim": len(model.model),
            "norm": norm,
            "plan": digest,
            "guarantee": promise,
        }
        print_json(facts)
        return
    typer.echo(
        f"Model      {shown(path)}: {len(model.model)} parameters, norm {norm:.6g}\n"
        f"Run        {shown(model.run)}, after {model.round} of {model.rounds} rounds\n"
        f"Plan       {shown(model.plan.name)}, digest {digest[:16]}…\n"
        f"Guarantee  epsilon {shown(promise.get('epsilon'))}, delta {shown(promise.get('delta'))}, "
        "as the server states it"
    )
