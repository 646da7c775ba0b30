"""`patchguard predict`: labels for images, and with a patch also whether they are proved."""

import json
from typing import Annotated, Any

import typer

from patchguard.cli.common import (
    DEFENSES,
    BatchSize,
    Device,
    Masks,
    Model,
    Root,
    TrustCode,
    describe_classes,
    screen,
    shown,
)


def predict(
    images: Annotated[list[str], typer.Argument(help="Image files, folders or 'patterns'.", metavar="IMAGE...")],
    model: Model = "cifar10",
    trust_code: TrustCode = False,
    root: Root = None,
    patch: Annotated[
        list[str] | None,
        typer.Option(help="Also say whether a patch of 5, 24x88 or 2% could change the label; may be repeated."),
    ] = None,
    defense: Annotated[str, typer.Option(help=f"Use another defense: {DEFENSES}.")] = "",
    masks: Masks = None,
    batch_size: BatchSize = None,
    device: Device = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print one JSON object per image, as it is done.")
    ] = False,
) -> None:
    """Label images. With --patch, also say whether the label is certified: no such patch can change it.

    Exit status 0: at least one image can be labeled. 1: none can.
    """
    from patchguard.runs.certify import predict as predict_all
    from patchguard.runs.engine import describe_cost
    from patchguard.runs.images import open_sources
    from patchguard.runs.job import prepare

    source = open_sources(images, root, labeled=False)
    job = prepare(
        source=source,
        data=images[0],
        model=model,
        patches=patch or (),
        defense=defense,
        masks=masks,
        curve=False,
        trust_code=trust_code,
    )
    typer.echo(f"model: {shown(str(job.file))}", err=True)
    if note := describe_classes(job.guard.class_names, labeled=False):
        typer.echo(shown(note), err=True)
    if patch and (cost := describe_cost(job, device)):
        typer.echo(cost, err=True)
    keys = [written.key for written in job.patches] if patch else []
    answers = []
    for record in predict_all(job, proofs=bool(keys), device=device, batch_size=batch_size):
        answer = _answer(record, job.class_names, keys)
        answers.append((record["index"], answer))
        if as_json:
            typer.echo(json.dumps(answer))
    if not as_json:
        _print([answer for _, answer in sorted(answers, key=lambda pair: pair[0])], keys)
    if all("error" in answer for _, answer in answers):
        raise typer.Exit(1)


def _answer(record: dict[str, Any], class_names: tuple[str, ...], keys: list[str]) -> dict[str, Any]:
    if "error" in record:
        return {"name": record["name"], "error": record["error"]}
    answer = {"name": record["name"], "label": record["label"], "class": class_names[record["label"]]}
    if keys:
        answer["patches"] = {
            key: {
                "class": class_names[record["patches"][key]["label"]],
                **{name: record["patches"][key][name] for name in ("label", "certified", "margin", "masks")},
            }
            for key in keys
        }
    return answer


def _print(answers: list[dict[str, Any]], keys: list[str]) -> None:
    from rich.table import Table

    table = Table("image", "label", *keys, box=None, pad_edge=False)
    for answer in answers:
        if "error" in answer:
            table.add_row(shown(answer["name"]), f"error: {shown(answer['error'])}")
            continue
        words = []
        for key in keys:
            entry = answer["patches"][key]
            # Masks made for another patch are another rule, which may answer with another class.
            other = "" if entry["label"] == answer["label"] else f" as {shown(entry['class'])}"
            words.append(("certified" if entry["certified"] else "not certified") + other)
        table.add_row(shown(answer["name"]), shown(answer["class"]), *words)
    screen().print(table)
