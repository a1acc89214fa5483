"""``cudnn-core plugin lint``: what can be told of a plugin without running its code. Exit 1 if there is an error.

Checks, by the name that a finding has: entry-point, manifest, api, factory, wheel, requires, version, changelog, codes,
imports, private, typed, source.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from ._lint_source import HEAVY, Finding, Package
from ._lint_subject import Subject, subject_of
from ._output import emit_json, note

if TYPE_CHECKING:
    from .._manifest import Manifest

__all__ = ["findings", "lint"]

_VALUE = re.compile(r"([A-Za-z_]\w*):([A-Za-z0-9_][A-Za-z0-9_.]*\.(toml|json))\Z")


def lint(options: Any) -> int:
    subject = subject_of(options.subject, build=not options.no_build)
    found = findings(subject)
    errors = sum(finding.severity == "error" for finding in found)
    if options.json:
        emit_json(
            {
                "schema": 1,
                "subject": subject.where,
                "dist": subject.dist,
                "version": subject.version,
                "plugins": list(subject.points),
                "errors": errors,
                "findings": [finding._asdict() for finding in found],
                "notes": subject.notes,
            }
        )
        return 1 if errors else 0
    for text in subject.notes:
        note(text)
    for finding in found:
        print(finding)
    what = f"{subject.dist} {subject.version}".strip()
    print(f"{what}: {errors} errors, {len(found) - errors} warnings" if found else f"{what}: ok")
    return 1 if errors else 0


class _Plugin(NamedTuple):
    """One entry point of the subject, with its manifest."""

    subject: Subject
    name: str
    where: str
    manifest: Manifest
    package: Package


def findings(subject: Subject) -> list[Finding]:
    """Every finding, in the order of the checks."""
    found = [*_distribution(subject)]
    for name, value in subject.points.items():
        match = _VALUE.match(value)
        if match is None:
            found.append(_error("entry-point", f"{name} = {value}", "must be PACKAGE:FILE.toml (or .json)"))
            continue
        package = Package(match[1], {path: text for path, text in subject.files.items() if _is_module(path, match[1])})
        found += package.broken
        path = f"{match[1]}/{match[2]}"
        if path not in subject.files:
            what = "the wheel does not contain it" if subject.packed else "there is no such file"
            found.append(_error("wheel" if subject.packed else "manifest", path, what))
            continue
        manifest = _manifest(subject, name, path, found)
        if manifest is not None:
            plugin = _Plugin(subject, name, path, manifest, package)
            for check in _CHECKS:
                found += check(plugin)
    return found


def _error(check: str, where: str, message: str) -> Finding:
    return Finding("error", check, where, message)


def _warning(check: str, where: str, message: str) -> Finding:
    return Finding("warning", check, where, message)


def _is_module(path: str, package: str) -> bool:
    return path.endswith(".py") and path.startswith(f"{package}/")


def _distribution(subject: Subject) -> Iterator[Finding]:
    """The metadata: entry points, version, requirement on the core, changelog."""
    if not subject.points:
        yield _error("entry-point", subject.where, "no entry point in the group cudnn_core.engines")
    yield from _version(subject)
    yield from _requirement(subject)
    if subject.changelog == "":
        yield _error("changelog", subject.where, "no CHANGELOG file")
    elif subject.changelog and subject.version and subject.version not in subject.changelog:
        yield _warning("changelog", subject.where, f"does not mention version {subject.version}")


def _version(subject: Subject) -> Iterator[Finding]:
    from packaging.version import InvalidVersion, Version

    if not subject.version:
        if subject.packed:
            yield _error("version", subject.where, "the distribution has no version")
        return
    try:
        Version(subject.version)
    except InvalidVersion:
        yield _error("version", subject.where, f"{subject.version!r} is not a version (PEP 440)")


def _requirement(subject: Subject) -> Iterator[Finding]:
    from packaging.requirements import InvalidRequirement, Requirement

    from .._versions import normalise

    ours = []
    for text in subject.requires:
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            yield _error("requires", text, str(error).splitlines()[0])
            continue
        if normalise(requirement.name) == "cudnn-core" and "extra" not in str(requirement.marker or ""):
            ours.append(requirement)
    if not ours:
        yield _error("requires", subject.where, 'no requirement on cudnn-core: add "cudnn-core>=X,<next major"')
        return
    operators = {item.operator for requirement in ours for item in requirement.specifier}
    if not operators & {">=", ">", "==", "~=", "==="}:
        yield _error("requires", str(ours[0]), "no lower bound: the first version that it was tested with")
    if not operators & {"<", "<=", "==", "~=", "==="}:
        yield _error("requires", str(ours[0]), "no upper bound: the next major version may change the engine API")


def _manifest(subject: Subject, name: str, path: str, found: list[Finding]) -> Manifest | None:
    """The valid manifest, or None after an error in ``found``."""
    from .._errors import ManifestError
    from .._manifest import api_decline, from_document, load

    try:
        document = load(subject.files[path], path.rpartition(".")[2])
        refused = api_decline(document)
        if refused is not None:
            found.append(_error("api", path, str(refused)))
            return None
        manifest = from_document(document)
    except ManifestError as error:
        found.append(_error("manifest", path, str(error)))
        return None
    if manifest.plugin != name:
        found.append(_error("entry-point", f"{name} = ...", f"the manifest's plugin is {manifest.plugin!r}"))
    if not (manifest.engines or manifest.ops or manifest.hooks or manifest.provides):
        found.append(_error("manifest", path, "declares nothing: no engine, op, hook or service"))
    return manifest


# --- checks of one plugin
def _factories(plugin: _Plugin) -> Iterator[Finding]:
    manifest = plugin.manifest
    named = [(f"engine {spec.name}", spec.factory) for spec in manifest.engines]
    named += [(f"op {name}", factory) for name, factory in manifest.ops.items()]
    named += [("hooks", module) for module in manifest.hooks]
    named += [(f"provides.{name}", module) for name, module in manifest.provides.items()]
    for what, path in named:
        problem = plugin.package.defines(path)
        if problem:
            yield _error("factory", f"{plugin.where}: {what}", f"{path}: {problem}")


def _names(plugin: _Plugin) -> Iterator[Finding]:
    """Op names and notes that the core does not know: legal, and more often a slip."""
    from .._errors import nearest
    from .._ops._table import in_tree

    rows = in_tree()
    known = {*rows, *(row.group for row in rows.values() if row.group), *plugin.manifest.ops, "*"}
    for spec in plugin.manifest.engines:
        for op in dict.fromkeys((*spec.ops, *spec.anchors)):
            if op not in known:
                text = f"{op!r} is neither an op or group of the core nor of this plugin{nearest(op, known)}"
                yield _warning("manifest", f"{plugin.where}: engine {spec.name}", text)


def _imports(plugin: _Plugin) -> Iterator[Finding]:
    """What asking an engine imports: its factory's module, and what that imports within the package."""
    seen: set[str] = set()
    modules = [spec.factory.partition(":")[0] for spec in plugin.manifest.engines]
    modules += [factory.partition(":")[0] for factory in plugin.manifest.ops.values()]
    for module in modules:
        for reached, imports in plugin.package.import_time(module).items():
            for name, line in imports:
                where = f"{plugin.package.files[reached]}:{line}"
                if name in HEAVY and where not in seen:
                    seen.add(where)
                    yield _error("imports", where, f"imports {name} when an engine is asked; import it in build_plan")


def _codes(plugin: _Plugin) -> Iterator[Finding]:
    from .._declines import check_code
    from .._errors import CudnnCoreError

    for code, where in plugin.package.decline_codes():
        if "." not in code and code != "not_implemented":
            continue  # `require` of something else
        try:
            check_code(code)
        except CudnnCoreError as error:
            yield _error("codes", where, str(error))
            continue
        if code.startswith("x.") and code.split(".")[1] != plugin.name:
            yield _error("codes", where, f"{code}: a plugin's own codes begin with x.{plugin.name}.")


def _private(plugin: _Plugin) -> Iterator[Finding]:
    for name, where in plugin.package.private_imports():
        yield _error("private", where, f"imports {name}, which is private to cudnn-core")


def _shipping(plugin: _Plugin) -> Iterator[Finding]:
    package, subject = plugin.package, plugin.subject
    if f"{package.name}/py.typed" not in subject.files:
        yield _warning("typed", package.name, "no py.typed: type checkers ignore the package's annotations")
    version = package.version()
    if version and subject.version and version != subject.version:
        text = f"__version__ is {version!r}, the distribution's version {subject.version!r}"
        yield _error("version", package.name, text)


_CHECKS: tuple[Callable[[_Plugin], Iterator[Finding]], ...] = (
    _factories,
    _names,
    _imports,
    _codes,
    _private,
    _shipping,
)
