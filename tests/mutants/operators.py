"""Small mistakes, made one at a time in the syntax tree of a module."""

import ast
import builtins
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS = {
    ast.Lt: (ast.LtE, ast.GtE), ast.LtE: (ast.Lt, ast.Gt), ast.Gt: (ast.GtE, ast.LtE), ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,), ast.NotEq: (ast.Eq,), ast.Is: (ast.IsNot,), ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,), ast.NotIn: (ast.In,),
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
PAIRS = ["min max", "minimum maximum", "amin amax", "argmin argmax", "any all", "lower upper", "low high", "floor ceil"]
PAIRS += ["rows columns", "height width", "top bottom", "left right", "start stop", "starts stops", "first last"]
SWAPS = {a: b for pair in PAIRS for a, b in (pair.split(), pair.split()[::-1])}
SYMMETRIC = {"max", "min", "maximum", "minimum", "isinstance", "array_equal", "equal", "zip", "getattr"}
# Methods whose numbers name axes or shapes: a wrong one fails at once, and says nothing about the tests.
SHAPES = {"sum", "amax", "amin", "argmax", "argmin", "any", "all", "unsqueeze", "squeeze", "flatten", "permute", "view"}
SHAPES |= {
    "reshape",
    "expand",
    "movedim",
    "transpose",
    "softmax",
    "topk",
    "sort",
    "scatter",
    "gather",
    "unbind",
    "repeat",
}
SHAPES |= {
    "index_select",
    "narrow",
    "cumsum",
    "take",
    "take_along_axis",
    "astype",
    "new_full",
    "new_zeros",
    "new_empty",
}


TELLING = (ast.expr, ast.keyword, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return)


@dataclass(frozen=True)
class Mutant:
    """One mistake: where it is, the expression before and after, and the whole module with it."""

    module: str
    function: str
    before: str
    after: str
    source: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.module, self.function, self.before, self.after

    def __str__(self) -> str:
        return f"{self.function}: `{self.before}` -> `{self.after}`"


def replacements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may stand in the place of a node by mistake."""
    if isinstance(node, ast.Compare):
        for place, op in enumerate(node.ops):
            for other in COMPARISONS[type(op)][: 2 if len(node.ops) == 1 else 1]:
                yield ast.Compare(node.left, [*node.ops[:place], other(), *node.ops[place + 1 :]], node.comparators)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield ast.Constant(node.value + 1)
        if isinstance(node.value, int) and node.value > 0:
            yield ast.Constant(node.value - 1)
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        yield ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
    elif isinstance(node, ast.AugAssign):
        if type(node.op) in ARITHMETIC:
            yield ast.AugAssign(node.target, ARITHMETIC[type(node.op)](), node.value)
        yield ast.Pass()
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.UnaryOp):
        yield node.operand
    elif isinstance(node, ast.Name) and node.id in SWAPS and isinstance(node.ctx, ast.Load):
        yield ast.Name(SWAPS[node.id], node.ctx)
    elif isinstance(node, ast.Attribute) and node.attr in SWAPS and isinstance(node.ctx, ast.Load):
        yield ast.Attribute(node.value, SWAPS[node.attr], node.ctx)
    elif isinstance(node, ast.keyword) and node.arg in ("min", "max"):
        yield ast.keyword(SWAPS[node.arg], node.value)
    elif isinstance(node, ast.Call):
        for place in range(len(node.args) - 1 if called(node) not in SYMMETRIC else 0):
            one, two = node.args[place : place + 2]
            same = ast.dump(one) == ast.dump(two)
            if type(one) is type(two) and not same and not isinstance(one, (ast.Starred, ast.Constant)):
                yield ast.Call(node.func, [*node.args[:place], two, one, *node.args[place + 2 :]], node.keywords)
    elif isinstance(node, ast.IfExp):
        yield from (node.body, node.orelse)
    elif isinstance(node, ast.If):
        yield ast.If(ast.Constant(False), node.body, node.orelse)
        if not isinstance(node.body[0], ast.Raise):
            yield ast.If(ast.Constant(True), node.body, node.orelse)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()
    elif isinstance(node, ast.comprehension) and node.ifs:
        yield ast.comprehension(node.target, node.iter, [], node.is_async)


def called(node: ast.AST) -> str:
    """Return the bare name of the function of a call, and nothing for what is no call."""
    function = getattr(node, "func", None)
    return str(getattr(function, "attr", getattr(function, "id", "")))


def names_axes(path: list[ast.AST], node: ast.AST) -> bool:
    """Whether a number is an axis or a shape: of a method, of `dim=` and `axis=`, or of a `shape[...]`."""
    if not isinstance(node, ast.Constant):
        return False
    near = [each for each in path[::-1][:3] if isinstance(each, (ast.Call, ast.keyword, ast.Subscript))][:1]
    outer = near[0] if near else None
    if isinstance(outer, ast.Subscript):
        return getattr(outer.value, "attr", "") == "shape"
    if isinstance(outer, ast.Call):
        return called(outer) in SHAPES
    return getattr(outer, "arg", "") in ("dim", "axis", "keepdim")


def described(path: list[ast.AST], node: ast.AST, other: ast.AST) -> tuple[str, str]:
    """Name a change by its expression, with enough around it to be recognized; `path` leads to the node."""
    if isinstance(node, ast.If):
        return f"if {ast.unparse(node.test)}", f"if {ast.unparse(other.test)}"
    for outer in (*reversed(path), None):
        if not isinstance(outer, TELLING) or len(ast.unparse(node)) >= 16:
            return ast.unparse(node), ast.unparse(other) or "nothing"
        fields = {name: replaced(value, node, other) for name, value in ast.iter_fields(outer)}
        node, other = outer, ast.copy_location(type(outer)(**fields), outer)
    raise AssertionError("an expression lies in a statement")


def replaced(value: object, node: ast.AST, other: ast.AST) -> object:
    if isinstance(value, list):
        return [other if each is node else each for each in value]
    return other if value is node else value


def mutants_of(module: str, source: str) -> list[Mutant]:
    """Return every mutant of a module, in the order of its source."""
    tree = ast.parse(source)
    bound = {each.id for each in ast.walk(tree) if isinstance(each, ast.Name)}
    bound |= {each.arg for each in ast.walk(tree) if isinstance(each, ast.arg)} | set(dir(builtins))
    found: list[Mutant] = []
    seen: Counter[tuple[str, ...]] = Counter()

    def visit(node: ast.AST, path: list[ast.AST], names: tuple[str, ...]) -> None:
        if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr)):
            return
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names = (*names, node.name)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases"):
                continue
            for place, child in enumerate(value if isinstance(value, list) else [value]):
                if not isinstance(child, ast.AST):
                    continue
                skipped = not names or names_axes([*path, node], child)
                for other in () if skipped else replacements(child):
                    if isinstance(other, ast.Name) and other.id not in bound:
                        continue
                    before, after = described([*path, node], child, other)
                    seen[(*names, before, after)] += 1
                    number = seen[(*names, before, after)]
                    after += f"  ({number})" if number > 1 else ""
                    _put(node, name, place, other)
                    found.append(Mutant(module, ".".join(names), before, after, ast.unparse(tree)))
                    _put(node, name, place, child)
                visit(child, [*path, node], names)

    visit(tree, [], ())
    return found


def _put(node: ast.AST, name: str, place: int, child: ast.AST) -> None:
    value = getattr(node, name)
    if isinstance(value, list):
        value[place] = child
    else:
        setattr(node, name, child)


def explained(table: str) -> set[tuple[str, str, str, str]]:
    """Read explained mutants: one heading per module, one row (function, before, after, why) per mutant."""
    keys, module = set(), ""
    for line in table.splitlines():
        if line.startswith("## "):
            module = line[3:].strip().strip("`")
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 4 and all(cell.startswith("`") and cell.endswith("`") for cell in cells[:3]):
            keys.add((module, *(cell[1:-1] for cell in cells[:3])))
    return keys
