"""Windows of any kind on small grids, for hypothesis."""

from hypothesis import strategies as st

from patchguard.geometry.windows import Windows


@st.composite
def some_windows(draw, grid=None, wrap=None) -> Windows:
    grid = grid or (draw(st.integers(1, 4)), draw(st.integers(1, 6)))
    wrap = wrap or (draw(st.booleans()), draw(st.booleans()))

    def intervals(axis: int) -> tuple[tuple[int, int], ...]:
        found = []
        for _ in range(draw(st.integers(1, 4))):
            start = draw(st.integers(0, grid[axis] - 1))
            longest = grid[axis] if wrap[axis] else grid[axis] - start
            found.append((start, start + draw(st.integers(1, longest))))
        return tuple(found)

    if draw(st.booleans()):
        return Windows(grid=grid, rows=intervals(0), columns=intervals(1), wrap=wrap)
    boxes = [(*intervals(0)[0], *intervals(1)[0]) for _ in range(draw(st.integers(1, 4)))]
    return Windows.from_boxes(boxes, grid=grid, wrap=wrap)
