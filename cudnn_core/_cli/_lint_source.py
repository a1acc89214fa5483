"""What ``cudnn-core plugin lint`` reads out of a plugin's source, by parsing it: nothing of it runs.

``Package`` holds the modules of a plugin's top-level package. Imported by ``_lint``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import NamedTuple

__all__ = ["HEAVY", "Finding", "Package"]

# What check_support's side may not import: a toolchain, a framework, a driver.
HEAVY = ("torch", "numpy", "cutlass", "triton", "cuda", "cupy", "jax", "tensorflow")


class Finding(NamedTuple):
    """``severity`` is "error" or "warning"; ``check`` names the rule; ``where`` is a file and line, a key or a dist."""

    severity: str
    check: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.check}: {self.where}: {self.message}"


class Package:
    """The parsed modules of one package: dotted name -> tree. ``broken``: what can't be parsed."""

    def __init__(self, name: str, sources: Mapping[str, str]) -> None:
        self.name = name
        self.files: dict[str, str] = {}
        self.trees: dict[str, ast.Module] = {}
        self.broken: list[Finding] = []
        for path, text in sorted(sources.items()):
            module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            self.files[module] = path
            try:
                self.trees[module] = ast.parse(text, path)
            except (SyntaxError, ValueError) as error:
                line = getattr(error, "lineno", 0) or 0
                self.broken.append(Finding("error", "source", f"{path}:{line}", f"can't be parsed: {error}"))

    def defines(self, path: str) -> str:
        """Why ``module:name`` of this package names nothing, or ""."""
        module, _, attribute = path.partition(":")
        tree = self.trees.get(module)
        if tree is None and module in self.files:
            return ""  # it can't be parsed, which is a finding of its own
        if tree is None:
            if module.partition(".")[0] != self.name:
                return f"module {module} is not in the package {self.name}"
            return f"there is no module {module}"
        names = set(_top_names(tree.body))
        if not attribute or attribute.partition(".")[0] in names or "__getattr__" in names or "*" in names:
            return ""
        return f"module {module} has no {attribute}"

    def import_time(self, start: str) -> dict[str, list[tuple[str, int]]]:
        """What importing module ``start`` imports: module of this package -> its (top-level package, line) imports."""
        reached: dict[str, list[tuple[str, int]]] = {}
        todo = [start]
        while todo:
            module = todo.pop()
            parts = module.split(".")
            todo += [
                name for name in (".".join(parts[:count]) for count in range(1, len(parts))) if name not in reached
            ]
            if module in reached or module not in self.trees:
                continue
            reached[module] = []
            for target, line in self._imports(module):
                if target.partition(".")[0] == self.name:
                    todo.append(target)
                else:
                    reached[module].append((target.partition(".")[0], line))
        return reached

    def decline_codes(self) -> Iterator[tuple[str, str]]:
        """(code, file:line) of every literal code given to ``Decline`` or ``require``."""
        for module, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Call):
                    code = _code_argument(node)
                    if code is not None:
                        yield code, f"{self.files[module]}:{node.lineno}"

    def private_imports(self) -> Iterator[tuple[str, str]]:
        """(name, file:line) of every private module of the core that is imported anywhere."""
        for module, tree in self.trees.items():
            for node in ast.walk(tree):
                for name in _imported(node):
                    parts = name.split(".")
                    if parts[0] == "cudnn_core" and any(part.startswith("_") for part in parts[1:]):
                        yield name, f"{self.files[module]}:{getattr(node, 'lineno', 0)}"

    def version(self) -> str | None:
        """The literal ``__version__`` of the package."""
        for node in getattr(self.trees.get(self.name), "body", ()):
            if isinstance(node, ast.Assign) and any(getattr(item, "id", "") == "__version__" for item in node.targets):
                value = node.value
                return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None
        return None

    def _imports(self, module: str) -> Iterator[tuple[str, int]]:
        """Absolute names that the import of ``module`` imports; functions and TYPE_CHECKING blocks left out."""
        is_package = self.files[module].endswith("__init__.py")
        for node in _executed(self.trees[module].body):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, node.lineno
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parts = module.split(".")
                    parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
                    base = ".".join([*parts, *([base] if base else [])])
                yield base, node.lineno
                for alias in node.names:  # `from . import plan` imports the module
                    if f"{base}.{alias.name}" in self.trees:
                        yield f"{base}.{alias.name}", node.lineno


def _executed(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module is imported."""
    for node in body:
        yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            yield from _executed(node.orelse)
            continue
        for field in ("body", "orelse", "finalbody"):
            inner = getattr(node, field, None)
            if isinstance(inner, list):
                yield from _executed(inner)
        for handler in getattr(node, "handlers", ()):
            yield from _executed(handler.body)


def _is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")
    return name == "TYPE_CHECKING"


def _top_names(body: list[ast.stmt]) -> Iterator[str]:
    for node in _executed(body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)


def _code_argument(call: ast.Call) -> str | None:
    """The literal decline code of ``Decline(code, ...)`` or ``checks.require(condition, code, ...)``."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    place = {"Decline": 0, "require": 1}.get(name)
    if place is None:
        return None
    value: ast.expr | None = call.args[place] if len(call.args) > place else None
    value = next((item.value for item in call.keywords if item.arg == "code"), value)
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level and node.module:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []
