"""Stacks of a thread as a drawing: outermost call on top, width by samples, colour by what the thread did there.

    flame_graph(title, stacks) -> a static inline drawing that scrolls inside its own box, and its leaves in words
    kinds(categories) -> the key of the colours

Every branch ends in a cell that names its category, so that nothing is told by colour alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from paceline.report.attach_text import CATEGORIES, category_name, share_text, shortened
from paceline.report.page import Html, Record, is_number, items_of, join, tag

WIDTH = 1080
"""Of a drawing, in pixels: a wide page's text; narrower windows scroll it."""

ROW = 19
MIN_WIDTH = 2.0
"""Cells narrower than this, in pixels, are left out: they could be neither seen nor hit."""

MAX_CELLS = 600
"""Cells of a drawing; the widest are kept."""

MAX_DEPTH = 72
"""Calls of a stack; deeper ones are drawn as one cell above the leaf."""

MIN_TRUNK = 3
"""So many calls that all samples share are drawn as one cell."""

MAX_NAME = 140
"""Characters of a name; those of C++ templates go into thousands."""

LETTER = 6.7
"""Width of a letter, in pixels."""

DOMINANT = 2 / 3
"""A cell has the colour of a category with more than this of its samples, else none."""

NUM_LEAVES = 5

WAITING = {"sync", "queue_wait", "lock", "gil_wait", "sleep", "io", "launch_queue_full"}
"""Categories that are hatched, and have hues of blue: the thread gets nothing done by itself."""

_HUES = {
    "launch": 8, "dispatch": 28, "python": 50, "autograd": 82, "compute": 130, "gc": 64, "compile": 100,
    "async_copy": 340, "allocator_churn": 312, "collective": 285, "sync": 215, "queue_wait": 195, "lock": 232,
    "gil_wait": 252, "sleep": 180, "io": 168, "launch_queue_full": 222,
}  # fmt: skip

STYLE = (
    """
:root { --fill-s: 62%; --fill-l: 80%; --hatch: rgb(0 0 0 / 16%); }
@media screen and (prefers-color-scheme: dark) {
  :root { --fill-s: 38%; --fill-l: 27%; --hatch: rgb(255 255 255 / 10%); }
}
.k { --k: hsl(var(--h, 0) var(--fill-s) var(--fill-l)); }
.k-other, .k-mixed { --k: var(--tile); }
"""
    + "".join(f".k-{name} {{ --h: {hue}; }}\n" for name, hue in _HUES.items())
    + """
.flame { display: block; width: 1080px; max-width: none; }
.flame rect { fill: var(--k); stroke: var(--paper); stroke-width: 1; }
.flame g.wait rect { stroke: var(--c0); stroke-dasharray: 3 2; }
.flame g:hover rect { stroke: var(--ink); stroke-dasharray: none; }
.flame text { fill: var(--ink); font: 11px ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace;
  pointer-events: none; }
.flame .says { font-weight: 700; }
.kinds { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: 0; margin: 0 0 1rem;
  font-size: .875rem; max-width: none; }
.kinds li { display: flex; align-items: center; gap: .5em; }
.kinds i { flex: none; width: 1.3em; height: 1em; }
.fill { background-color: var(--k); box-shadow: inset 0 0 0 1px var(--c4); }
.fill.wait { background-image: repeating-linear-gradient(135deg, transparent 0 4px, var(--hatch) 4px 6px); }
"""
)


@dataclass
class _Cell:
    """A call and all that was called from it.

    Attributes:
        says: Category that it names; empty: a call.
    """

    name: str
    count: int = 0
    is_native: bool = False
    says: str = ""
    categories: dict[str, int] = field(default_factory=dict)
    children: dict[tuple[object, ...], _Cell] = field(default_factory=dict)

    def child(self, key: tuple[object, ...], name: str, is_native: bool = False, says: str = "") -> _Cell:
        found = self.children.get(key)
        if found is None:
            found = self.children[key] = _Cell(name, is_native=is_native, says=says)
        return found

    def add(self, count: int, category: str) -> None:
        self.count += count
        self.categories[category] = self.categories.get(category, 0) + count

    @property
    def kind(self) -> str:
        """Category of most of its samples, or ``mixed``."""
        if not self.categories:
            return "mixed"
        category, most = max(self.categories.items(), key=lambda each: each[1])
        return category if most >= DOMINANT * self.count else "mixed"


def flame_graph(title: str, stacks: Iterable[Record], *, max_cells: int = MAX_CELLS) -> Html:
    """One drawing of all these stacks, and the calls that most of them end in.

    Args:
        title: For those who do not see it.
        stacks: `evidence.Stack` as JSON.
        max_cells: How many cells are drawn at most.
    """
    stacks = list(stacks)
    root = _tree(stacks)
    if not root.count:
        return tag("p", "No stacks.")
    root = _without_trunk(root)
    per_sample = WIDTH / root.count
    placed = _placed(root, per_sample, max_cells)
    height = ROW * (1 + max(row for _, row, _ in placed))
    cells = (_drawn(cell, row, x, per_sample, root.count) for cell, row, x in placed)
    drawing = tag(
        "svg",
        tag("title", f"{title}: {root.count} samples"),
        *cells,
        role="img",
        class_="flame",
        width=WIDTH,
        height=height,
        viewBox=f"0 0 {WIDTH} {height}",
    )
    left_out = _num_cells(root) - len(placed)
    remark = f"{left_out:,} cells too narrow to be seen are left out." if left_out > 0 else ""
    return join([tag("div", drawing, class_="scroll", tabindex="0"), _leaves(stacks, root.count, remark)])


def kinds(categories: Iterable[str], figures: dict[str, str] | None = None) -> Html:
    """The key of the colours, with a text behind each name."""
    items = []
    for category in categories:
        behind = f" {figures[category]}" if figures and category in figures else ""
        items.append(tag("li", tag("i", class_=fill(category)), f"{category_name(category)}{behind}"))
    return tag("ul", *items, class_="kinds") if items else Html()


def fill(category: str) -> str:
    """Class of a shape that stands for a category."""
    kind = category if category in CATEGORIES else "other"
    return f"fill k k-{kind}" + " wait" * (kind in WAITING)


def count_of(stack: Record) -> int:
    """Samples of a stack."""
    count = stack.get("count", 1)
    return int(count) if is_number(count) and count > 0 else 0


def category_of(stack: Record) -> str:
    """Category of a stack; what is not known is ``other``."""
    category = stack.get("category") or "other"
    return category if category in CATEGORIES else "other"


def _tree(stacks: Sequence[Record]) -> _Cell:
    root = _Cell("all")
    for stack in stacks:
        count, category = count_of(stack), category_of(stack)
        if not count:
            continue
        root.add(count, category)
        cell = root
        for key, name, is_native in _calls(items_of(stack, "frames")):
            cell = cell.child(key, name, is_native)
            cell.add(count, category)
        end = cell.child(("says", category), category_name(category), says=category)
        end.add(count, category)
    return root


def _calls(frames: Sequence[Record]) -> Iterator[tuple[tuple[object, ...], str, bool]]:
    """Key, name and kind of each call; the middle of what is too deep is one cell."""
    if len(frames) > MAX_DEPTH:
        left_out = len(frames) - MAX_DEPTH + 1
        yield from map(_call, frames[: MAX_DEPTH - 1])
        yield ("deeper",), f"… {left_out} more calls …" if left_out > 1 else "…", False
        yield _call(frames[-1])
    else:
        yield from map(_call, frames)


def _call(frame: Record) -> tuple[tuple[object, ...], str, bool]:
    name, file = str(frame.get("name", "")), str(frame.get("file") or "")
    is_native = bool(frame.get("is_native"))
    return (name, file, is_native), call_text(name, file), is_native


def call_text(name: str, file: str = "") -> str:
    """A call and its file, the name shortened."""
    name = name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 1]}…"
    return f"{name} ({file[-60:]})" if file else name


def _without_trunk(root: _Cell) -> _Cell:
    """The calls that all samples share become one cell."""
    trunk, cell = [], root
    while len(cell.children) == 1 and not (only := next(iter(cell.children.values()))).says:
        trunk.append(only)
        cell = only
    if len(trunk) <= MIN_TRUNK:
        return root
    kept = trunk[-1]
    names = [each.name.split(" (")[0] for each in trunk[:-1]]
    shown = " › ".join(names) if len(names) <= 4 else f"{names[0]} › … {len(names) - 2} calls … › {names[-1]}"
    joined = _Cell(shown, root.count, categories=root.categories, children={("kept",): kept})
    return _Cell("all", root.count, categories=root.categories, children={("trunk",): joined})


def _placed(root: _Cell, per_sample: float, max_cells: int) -> list[tuple[_Cell, int, float]]:
    """Cells with row and left end, the widest first; whatever is kept has all its callers."""
    placed: list[tuple[_Cell, int, float]] = []
    row = [(root, 0.0)]
    number = 0
    while row:
        below = []
        for cell, x in row:
            for child in sorted(cell.children.values(), key=lambda each: (-each.count, each.name)):
                if child.count * per_sample >= MIN_WIDTH:
                    placed.append((child, number, x))
                    below.append((child, x))
                x += child.count * per_sample
        row, number = below, number + 1
    placed.sort(key=lambda each: (-each[0].count, each[1]))  # a caller is never narrower than what it calls
    return placed[:max_cells]


def _drawn(cell: _Cell, row: int, x: float, per_sample: float, total: int) -> Html:
    width, kind = cell.count * per_sample, cell.kind
    what = f"category {cell.name}" if cell.says else cell.name
    native = ", native" if cell.is_native else ""
    mainly = "" if cell.says else f", {category_name(kind) if kind != 'mixed' else 'of several categories'}"
    samples = f"{cell.count:,} sample{'s' if cell.count != 1 else ''}"
    told = f"{what}: {samples}, {share_text(cell.count / total)}{mainly}{native}"
    letters, text = int((width - 6) / LETTER), Html()
    if letters >= 2:
        shown, says = shortened(cell.name, letters), "says" if cell.says else None
        text = tag("text", shown, x=f"{x + 4:.1f}", y=row * ROW + 13, class_=says)
    shape = tag("rect", x=f"{x:.1f}", y=row * ROW, width=f"{width:.1f}", height=ROW - 1, rx=1)
    return tag("g", tag("title", told), shape, text, class_=f"k k-{kind}" + " wait" * (kind in WAITING))


def _num_cells(root: _Cell) -> int:
    number, cells = 0, [root]
    while cells:
        cell = cells.pop()
        number += len(cell.children)
        cells += cell.children.values()
    return number


def _leaves(stacks: Sequence[Record], total: int, remark: str) -> Html:
    """Where most samples ended, for those who cannot hover."""
    ends: dict[tuple[str, str, str], int] = {}
    for stack in stacks:
        frames = items_of(stack, "frames")
        leaf = _call(frames[-1])[1] if frames else "no frames"
        key = leaf, category_of(stack), str(stack.get("rule") or "")
        ends[key] = ends.get(key, 0) + count_of(stack)
    found = sorted(ends.items(), key=lambda each: -each[1])[:NUM_LEAVES]
    items = []
    for (leaf, category, rule), count in found:
        by = f", rule {rule}" if rule else ""
        items.append(tag("li", tag("code", leaf), f": {share_text(count / total)}, {category_name(category)}{by}"))
    below = tag("p", tag("small", remark)) if remark else Html()
    return join([tag("p", tag("small", "Most samples end in")), tag("ul", *items, class_="leaves"), below])
