"""Mistakes planted in a fresh copy of the checker, as operations on its functions.

A mistake names the function it is in, and either what the function then does to its results, or an operator and the
names it works on. No text is matched: code may be moved, formatted and rewritten around it.
"""

import ast
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from patchguard import verify

SOURCE = Path(verify.__file__).read_text()

WEAKER = {ast.Gt: ast.GtE, ast.Lt: ast.LtE, ast.GtE: ast.Gt, ast.LtE: ast.Lt, ast.Eq: ast.LtE}


def copy(*mistakes: "Once | Around") -> ModuleType:
    """The checker with these mistakes."""
    tree, module = ast.parse(SOURCE), ModuleType("mutant")
    for mistake in mistakes:
        if isinstance(mistake, Once):
            mistake.plant(tree)
    sys.modules["mutant"] = module  # where dataclasses look up their module
    exec(compile(ast.fix_missing_locations(tree), "mutant", "exec"), vars(module))
    for mistake in mistakes:
        if isinstance(mistake, Around):
            mistake.plant(module)
    return module


def function(tree: ast.Module, name: str) -> ast.FunctionDef:
    """The function or method of this name."""
    node: Any = tree
    for part in name.split("."):
        node = next(each for each in node.body if getattr(each, "name", None) == part)
    assert isinstance(node, ast.FunctionDef)
    return node


def names_in(node: ast.AST) -> set[str]:
    """Variables, attributes and strings."""
    found = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    found |= {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    return found | {each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and type(each.value) is str}


@dataclass(frozen=True)
class Once:
    """Changes the one smallest node of a kind, in a function, that works on these names."""

    where: str
    kind: type[ast.AST]
    names: frozenset[str]
    change: Callable[[Any], ast.AST]

    def plant(self, tree: ast.Module) -> None:
        met = 0

        class Visitor(ast.NodeTransformer):
            def generic_visit(visitor, node: ast.AST) -> ast.AST:
                nonlocal met
                before = met
                super().generic_visit(node)
                if met > before or not isinstance(node, self.kind) or not self.names <= names_in(node):
                    return node
                met += 1
                return self.change(node)

        Visitor().visit(function(tree, self.where))
        assert met == 1, f"{self.where} has {met} {self.kind.__name__} of {sorted(self.names)}, not one"


@dataclass(frozen=True)
class Around:
    """Lets `wrapper(module, original, *arguments)` answer in place of a function."""

    where: str
    wrapper: Callable[..., Any]

    def plant(self, module: ModuleType) -> None:
        owner: Any = module
        *parents, last = self.where.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        original = getattr(owner, last)
        setattr(owner, last, lambda *arguments: self.wrapper(module, original, *arguments))


def spoil(where: str, wrapper: Callable[..., Any]) -> Around:
    """`wrapper(module, original, *arguments)` answers in place of the function."""
    return Around(where, wrapper)


def weaken(where: str, *names: str) -> Once:
    """The comparison of these names holds for equals, too; one that asks for equals, for all that is less."""

    def change(node: ast.Compare) -> ast.Compare:
        node.ops[-1] = WEAKER[type(node.ops[-1])]()
        return node

    return Once(where, ast.Compare, frozenset(names), change)


def settle(where: str, *names: str, to: bool) -> Once:
    """The comparison of these names is always true, or always false."""
    return Once(where, ast.Compare, frozenset(names), lambda _: ast.Constant(to))


def exchange(where: str, called: str, other: str, *names: str) -> Once:
    """The call of `called` that works on these names is one of `other`."""

    def change(node: ast.Call) -> ast.Call:
        if isinstance(node.func, ast.Attribute):
            node.func.attr = other
        return node

    return Once(where, ast.Call, frozenset({called, *names}), change)


def drop(where: str, *names: str) -> Once:
    """The sum, difference or product of these names is its left side alone."""
    return Once(where, ast.BinOp, frozenset(names), lambda node: node.left)


def keep_right(where: str, *names: str) -> Once:
    """The sum, difference or product of these names is its right side alone."""
    return Once(where, ast.BinOp, frozenset(names), lambda node: node.right)


def rename(where: str, name: str, other: str, *names: str) -> Once:
    """The assignment to these names reads `other` for `name`."""

    def change(node: ast.Assign) -> ast.Assign:
        for each in ast.walk(node.value):
            if isinstance(each, ast.Name) and each.id == name:
                each.id = other
        return node

    return Once(where, ast.Assign, frozenset({name, *names}), change)


def widen(where: str, *names: str) -> Once:
    """The change in place of these names is made in all columns, not in one."""

    def change(node: ast.AugAssign) -> ast.AugAssign:
        node.target.slice = node.target.slice.elts[0]
        return node

    return Once(where, ast.AugAssign, frozenset(names), change)
