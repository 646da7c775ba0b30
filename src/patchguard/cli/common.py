"""What commands share: options, the screen, and how sizes are written."""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from patchguard.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from patchguard.patch import Patch
    from patchguard.runs.summary import Proportion

STOPPED = 130  # the exit status that a shell expects of a command that Ctrl-C ended

# -- options that mean the same in every command -----------------------------------------------------------------------

# Panels of the help.
IMAGES, RULE, RUN, OUTPUT = "Images and patch", "Model and rule", "The run", "Output"

DEFENSES = (
    "RobustMasking, DoubleMasking, ClippedSum, MajorityVote, CellMasking, Median, TrimmedMean, PixelMasks, Undefended, "
    "or one that you installed"
)

Model = Annotated[
    str,
    typer.Option(
        help="A checkpoint that `patchguard models` lists, a file, or a network of yours: my_net.py:make_model.",
        rich_help_panel=RULE,
    ),
]
TrustCode = Annotated[
    bool,
    typer.Option(
        "--trust-code", metavar="", help="Run the code that --model, or the model file, names.", rich_help_panel=RULE
    ),
]
Data = Annotated[
    str,
    typer.Option(
        help="sample, a known dataset, a folder of class folders, or a folder or 'pattern' of images.",
        rich_help_panel=IMAGES,
    ),
]
Unlabeled = Annotated[
    bool,
    typer.Option(
        "--unlabeled", metavar="", help="Do not take the names of folders for true classes.", rich_help_panel=IMAGES
    ),
]
Root = Annotated[
    Path | None,
    typer.Option(
        help="Folder of datasets. Default: $PATCHGUARD_DATA, or ~/.cache/patchguard/data.",
        show_default=False,
        rich_help_panel=IMAGES,
    ),
]
PatchSpace = Annotated[
    str,
    typer.Option(
        help="Where the patch lies: in the source image, or in the network's input after resize and crop.",
        rich_help_panel=IMAGES,
    ),
]
Evidence = Annotated[
    str,
    typer.Option(
        help="Use another kind of evidence: logits, confidence, vote, prediction or tanh.", rich_help_panel=RULE
    ),
]
Threshold = Annotated[
    str, typer.Option(help="Detection threshold T of RobustMasking, such as 0.2 or 1/5.", rich_help_panel=RULE)
]
Tau = Annotated[
    float | None,
    typer.Option(
        help="Lead, in units of evidence, that DoubleMasking asks of a mask that overrules the majority. "
        "Default: the model's, or 0 with another rule or evidence.",
        show_default=False,
        rich_help_panel=RULE,
    ),
]
Masks = Annotated[
    int | None,
    typer.Option(
        help="Masks along each axis for PixelMasks, 2 to 6: more prove more and cost more. Default: 6.",
        show_default=False,
        rich_help_panel=RULE,
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(help="Use only this many evenly spaced images.", show_default=False, rich_help_panel=IMAGES),
]
BatchSize = Annotated[
    int | None,
    typer.Option(help="Images per batch. Default: 16 on a CPU, 512 on a GPU.", show_default=False, rich_help_panel=RUN),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, or cuda:1 and so on.", rich_help_panel=RUN)]
MixVersions = Annotated[
    bool,
    typer.Option(
        "--mix-versions",
        metavar="",
        help="Resume a run that another version of patchguard or torch began.",
        rich_help_panel=RUN,
    ),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force", metavar="", help="Remove the run that is in the folder, and start over.", rich_help_panel=RUN
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", metavar="", help="Print summary.json instead of the table.", rich_help_panel=OUTPUT)
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", metavar="", help="Print the path of the report and nothing else.", rich_help_panel=OUTPUT
    ),
]


# -- the screen --------------------------------------------------------------------------------------------------------


def screen() -> "Console":
    """Return stdout; into a pipe or file, rows are not folded to the width of a terminal."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=160)


def shown(text: str) -> str:
    """Return text that a terminal can show as it is: names of files may hold anything."""
    from rich.markup import escape

    return escape("".join(letter if letter.isprintable() else "?" for letter in text))


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """End with the exit status of Ctrl-C, and say how to resume the run, where it is pressed inside."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"stopped; run the same command again to resume {folder}", err=True)
        raise typer.Exit(STOPPED) from None


def percent(proportion: "Proportion") -> str:
    """Return a fraction with its interval: 86.2 % (82.9 to 88.9)."""
    if proportion.fraction is None:
        return "none"
    return f"{100 * proportion.fraction:.1f} % ({100 * proportion.low:.1f} to {100 * proportion.high:.1f})"


def describe_classes(class_names: Sequence[str], *, labeled: bool) -> str:
    """Return a warning for images whose true classes nobody gave: they may show something the model does not know."""
    if labeled or not class_names:
        return ""
    some = ", ".join(class_names[:10]) + (" and others" if len(class_names) > 10 else "")
    return (
        f"note: this model knows only {len(class_names)} classes ({some}) and gives every image one of them, whatever "
        "the image shows; a certificate does not say that the label is correct"
    )


# -- words -------------------------------------------------------------------------------------------------------------


def plain_name(text: str) -> str:
    """Return a name that every file system accepts."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "images"


def name_run(*parts: str) -> Path:
    """Return the default folder of a run: what it is about, in words that every file system accepts."""
    return Path("runs") / "-".join(plain_name(part.replace("%", "percent")) for part in parts if part)


def write_options(words: dict[str, Any]) -> list[str]:
    """Return options as they are typed; those that are empty or off are left out."""
    parts: list[str] = []
    for name, value in words.items():
        if value not in (None, "", False):
            parts += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return parts


def sides(size: str) -> tuple[int, int]:
    """Read 224 as (224, 224) and 224x300 as (224, 300)."""
    match = re.fullmatch(r"(\d{1,5})(?:x(\d{1,5}))?", size)
    if match is None:
        raise InputError(f"`--size` must be a side such as 224, or height x width such as 224x300; got {size!r}.")
    return int(match[1]), int(match[2] or match[1])


def common_patches(height: int, width: int) -> list["Patch"]:
    """Return 1, 2 and 3 % of a large image, or squares of 2, 5 and 8 pixels in a small one."""
    from patchguard.patch import Patch

    if min(height, width) >= 100:
        return [Patch.of_area(share, height=height, width=width) for share in (0.01, 0.02, 0.03)]
    return [Patch(side) for side in (2, 5, 8) if side <= min(height, width)]
