"""Draw docs/assets/concept.svg, the figure of the README: python docs/make_concept.py (make docs).

The picture is a true example in small: 16 x 16 pixels, cells that read 4 x 4 of them with stride 2, a patch of 3 x 3,
evidence from 0 to 3 for two classes, and the theorem of `ClippedSum`, checked here for every window.
"""

from pathlib import Path

FIGURE = Path(__file__).with_name("assets") / "concept.svg"
PICTURE = """\
................
..c........c....
..cc......cc....
..ccc....ccc....
..cccccccccc....
.cccccccccccc...
.ccceeccceecc...
.ccceeccceecc...
.cccccnnccccc...
.ccwcccccccwc...
..cccwwwccccc.c.
...cccccccc..cc.
..cccccccccc..c.
..cccccccccc.cc.
..cc.cccc.cccc..
................""".splitlines()
COLORS = {".": "#bfe3ea", "c": "#8d6b52", "e": "#20303a", "n": "#e79aa5", "w": "#f3e9df"}
PATCH_COLORS = ("#f97316", "#facc15", "#e11d48", "#7c3aed", "#22c55e", "#f59e0b", "#fb7185", "#0ea5e9", "#f43f5e")
CAT = ["1222210", "2333321", "2323321", "2332321", "1323211", "1232221", "0122211"]
DOG = ["0100101", "1010010", "0101011", "1010101", "0101110", "1010011", "1001010"]
SIDE, HIGH, STRIDE, READS = 3, 3, 2, 4  # patch in pixels, largest evidence, and the cells' stride and field
TOP, LEFT = 9, 10  # where the patch lies
INK, MUTED, ATTACK, SAFE = "#16302d", "#5b6f6c", "#ea580c", "#0f766e"


def cells_touched(first: int) -> range:
    """Return the cells along one axis that read some pixel of [first, first + SIDE)."""
    touched = [i for i in range(len(CAT)) if i * STRIDE < first + SIDE and first < i * STRIDE + READS]
    return range(touched[0], touched[-1] + 1)


def outside(evidence: list[str], rows: range, columns: range) -> int:
    """Return the sum of the evidence outside a window."""
    return sum(
        int(value)
        for i, line in enumerate(evidence)
        for j, value in enumerate(line)
        if i not in rows or j not in columns
    )


def margin(rows: range, columns: range) -> int:
    """Return by how much the cat leads whatever the window holds: the theorem of `ClippedSum`."""
    return outside(CAT, rows, columns) - outside(DOG, rows, columns) - HIGH * len(rows) * len(columns)


def square(x: float, y: float, side: float, fill: str, **more: object) -> str:
    """Return one square."""
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    return f'<rect x="{x:g}" y="{y:g}" width="{side:g}" height="{side:g}" fill="{fill}"{extra}/>'


def words(
    x: float, y: float, text: str, size: int = 17, fill: str = INK, weight: int = 400, anchor: str = "middle"
) -> str:
    """Return one line of text."""
    style = f'font-size="{size}" fill="{fill}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{text}</text>'


def draw_image(x: float, y: float, pixel: float) -> str:
    """Return the image with its patch."""
    parts = [
        square(x + j * pixel, y + i * pixel, pixel + 0.4, COLORS[each])
        for i, line in enumerate(PICTURE)
        for j, each in enumerate(line)
    ]
    for number, color in enumerate(PATCH_COLORS):
        row, column = divmod(number, SIDE)
        parts.append(square(x + (LEFT + column) * pixel, y + (TOP + row) * pixel, pixel + 0.4, color))
    outline = {"stroke": ATTACK, "stroke_width": 3}
    parts.append(square(x + LEFT * pixel, y + TOP * pixel, SIDE * pixel, "none", **outline))
    return f'<g shape-rendering="crispEdges">{"".join(parts)}</g>'


def draw_cells(x: float, y: float, cell: float) -> str:
    """Return the grid of cells with the window that the patch touches."""
    rows, columns = cells_touched(TOP), cells_touched(LEFT)
    parts = []
    for i in range(len(CAT)):
        for j in range(len(CAT)):
            hit = i in rows and j in columns
            fill = "#fed7aa" if hit else "#e6f2f0"
            parts.append(square(x + j * cell, y + i * cell, cell - 3, fill, rx=4))
    width = len(columns) * cell
    parts.append(
        square(
            x + columns[0] * cell - 2, y + rows[0] * cell - 2, width + 1, "none", stroke=ATTACK, stroke_width=3, rx=6
        )
    )
    return "".join(parts)


def draw_evidence(x: float, y: float, cell: float, evidence: list[str], color: str) -> str:
    """Return the evidence of one class; what the patch may rewrite is a question mark."""
    rows, columns = cells_touched(TOP), cells_touched(LEFT)
    parts = []
    for i, line in enumerate(evidence):
        for j, value in enumerate(line):
            hit = i in rows and j in columns
            fill = ATTACK if hit else color
            opacity = 0.22 if hit else 0.10 + 0.22 * int(value)
            parts.append(square(x + j * cell, y + i * cell, cell - 2, fill, fill_opacity=f"{opacity:.2f}", rx=3))
            shown, ink = ("?", "#9a3412") if hit else (value, "#ffffff" if int(value) == HIGH else INK)
            parts.append(words(x + j * cell + cell / 2 - 1, y + i * cell + cell / 2 + 4, shown, 12, ink))
    return "".join(parts)


def arrow(x: float, y: float) -> str:
    """Return an arrow to the next panel."""
    return (
        f'<path d="M{x} {y}h22m-7 -7l7 7l-7 7" fill="none" stroke="{MUTED}" stroke-width="2.5" stroke-linecap="round"/>'
    )


def figure() -> str:
    """Return the whole figure."""
    rows, columns = cells_touched(TOP), cells_touched(LEFT)
    cat, dog = outside(CAT, rows, columns), outside(DOG, rows, columns)
    most = HIGH * len(rows) * len(columns)
    starts = range(len(PICTURE) - SIDE + 1)
    worst = min(margin(cells_touched(top), cells_touched(left)) for top in starts for left in starts)
    assert worst > 0, "the figure would show a proof that is none"
    shield = "M0 -46 36 -32 V-4 C36 20 20 38 0 46 C-20 38 -36 20 -36 -4 V-32Z"
    heads = [(112, "source image"), (364, "cells"), (616, "evidence"), (868, "rule"), (1104, "certificate")]
    body = [
        '<rect x="1" y="1" width="1198" height="346" rx="14" fill="#ffffff" stroke="#d5e3e1" stroke-width="2"/>',
        *(words(x, 42, text, 20, INK, 700) for x, text in heads),
        draw_image(24, 64, 11),
        words(112, 290, "a patch shows anything,", 16, MUTED),
        words(112, 312, "anywhere in the image", 16, MUTED),
        arrow(222, 152),
        draw_cells(266, 64, 28),
        words(364, 290, "cells that read the patch:", 16, MUTED),
        words(364, 312, "its <tspan font-weight='700' fill='#ea580c'>window</tspan>", 16, MUTED),
        arrow(484, 152),
        words(520, 80, "cat", 15, INK, 700, "start"),
        draw_evidence(558, 62, 17, CAT, SAFE),
        words(520, 208, "dog", 15, INK, 700, "start"),
        draw_evidence(558, 190, 17, DOG, "#64748b"),
        words(616, 333, "integers per class and cell", 16, MUTED),
        arrow(716, 152),
        words(868, 84, "outside the window", 16, MUTED),
        words(868, 116, f"cat {cat},  dog {dog}", 19, INK, 700),
        words(868, 150, "the window shifts at most", 16, MUTED),
        words(868, 182, f"9 cells × {HIGH} = {most}", 19, ATTACK, 700),
        words(868, 222, f"{cat} − {dog} = {cat - dog} &gt; {most}", 20, SAFE, 700),
        words(868, 290, "checked for every window,", 16, MUTED),
        words(868, 312, f"smallest margin {worst}", 16, MUTED),
        arrow(990, 152),
        f'<g transform="translate(1104 120)"><path d="{shield}" fill="{SAFE}"/>'
        '<path d="M-16 0l11 12l22 -24" fill="none" stroke="#fff" stroke-width="7" stroke-linecap="round"/></g>',
        words(1104, 204, "“cat”, certified", 19, SAFE, 700),
        words(1104, 248, "no 3 × 3 patch,", 16, MUTED),
        words(1104, 269, "wherever it lies and", 16, MUTED),
        words(1104, 290, "whatever it shows,", 16, MUTED),
        words(1104, 312, "changes this label", 16, MUTED),
    ]
    fonts = "system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1200 348" font-family="{fonts}" role="img">'
    title = "<title>From a patch to a certificate</title>"
    return "\n".join([head, title, *body, "</svg>\n"])


if __name__ == "__main__":
    FIGURE.write_text(figure())
