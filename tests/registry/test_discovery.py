"""What the scan of dist-info directories finds, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from cudnn_core._discovery import locate, scan
from tests.zoo._make import GROUP, manifest, to_toml, write_dist, write_many, write_plugin

ROOT = Path(__file__).resolve().parents[2]


def names(discovery):
    return [found.plugin for found in discovery.plugins]


def python(code, *, cwd=None, path=()):
    """Run ``code`` in a fresh interpreter that sees the core; its stdout."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *map(str, path)])}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=cwd, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("fmt", ["toml", "json"])
def test_a_plugin_is_found_with_its_manifest_and_not_imported(site, fmt):
    origin = write_plugin(site, "alpha", dist="acme-alpha", version="2.1", fmt=fmt)
    (found,) = scan([str(site)]).plugins
    assert (found.plugin, found.dist, found.version, found.origin) == ("alpha", "acme-alpha", "2.1", str(origin))
    assert found.value == f"alpha:cudnn_plugin.{fmt}"
    assert found.manifest_path == str(site / "alpha" / f"cudnn_plugin.{fmt}")
    assert found.problem is None
    assert "alpha" not in sys.modules


def test_versions_of_everything_installed_are_known_by_normalised_name(site):
    write_dist(site, "Some.Other_Thing", "4.7.1")
    (site / "legacy.egg-info").mkdir()
    (site / "legacy.egg-info" / "PKG-INFO").write_text("Name: legacy\nVersion: 0.3\n")
    (site / "single-1.5-py3.9.egg-info").write_text("Name: single\nVersion: 1.5\n")
    assert scan([str(site)]).dists == {"some-other-thing": "4.7.1", "legacy": "0.3", "single": "1.5"}


def test_an_egg_info_directory_registers(site):
    write_plugin(site, "old_style").rename(site / "acme_old_style.egg-info")
    (site / "acme_old_style.egg-info" / "METADATA").rename(site / "acme_old_style.egg-info" / "PKG-INFO")
    (found,) = scan([str(site)]).plugins
    assert (found.plugin, found.dist, found.version) == ("old_style", "acme-old-style", "1.0")


def test_comments_other_groups_and_executors_are_told_apart(site):
    text = f"""
        # a comment
        [console_scripts]
        alpha = alpha:main
        [{GROUP}]
        ; another
        alpha = alpha:cudnn_plugin.toml
        [cudnn_core.executors]
        emulator = alpha.run:Executor
    """
    write_plugin(site, "alpha", entry_points=textwrap.dedent(text))
    found = scan([str(site)])
    assert names(found) == ["alpha"]
    assert [(point.name, point.value) for point in found.executors] == [("emulator", "alpha.run:Executor")]


def test_the_first_distribution_of_a_name_on_the_path_wins_and_the_other_is_reported(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    write_dist(first, "Acme.Alpha", "2.0")  # the newer one has no plugin any more
    shadowed = write_plugin(second, "alpha", dist="acme_alpha")
    found = scan([str(first), str(second)])
    assert found.plugins == ()
    assert found.dists["acme-alpha"] == "2.0"
    assert [item.path for item in found.shadowed] == [str(shadowed)]
    assert names(scan([str(second), str(first)])) == ["alpha"]


def test_a_path_that_occurs_twice_is_read_once(site):
    write_plugin(site, "alpha")
    found = scan([str(site), f"{site}/.", str(site)])
    assert names(found) == ["alpha"]
    assert found.shadowed == ()


@pytest.mark.parametrize("entry", ["", "absolute", "."])
def test_the_current_directory_does_not_register(tmp_path, monkeypatch, entry):
    write_plugin(tmp_path, "planted")
    monkeypatch.chdir(tmp_path)
    found = scan([str(tmp_path) if entry == "absolute" else entry])
    assert found.plugins == ()
    assert [item.dist for item in found.ignored] == ["acme-planted"]


def test_a_site_directory_registers_even_as_the_current_directory(site, monkeypatch):
    write_plugin(site, "alpha")
    monkeypatch.chdir(site)
    assert names(scan([""])) == ["alpha"]


def test_a_package_in_the_current_directory_does_not_lend_its_manifest(tmp_path, site, monkeypatch):
    write_plugin(site, "alpha")
    here = tmp_path / "here"
    (here / "alpha").mkdir(parents=True)
    (here / "alpha" / "__init__.py").write_text("")
    (here / "alpha" / "cudnn_plugin.toml").write_text(to_toml(manifest("alpha")))
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(str(here))
    (found,) = scan([str(site)]).plugins
    assert found.manifest_path == ""
    assert found.problem is not None
    assert "hides" in found.problem.hint
    assert "pip install -e ." in found.problem.hint


SOURCES = {
    "source": lambda here: {"url": here.as_uri(), "dir_info": {"editable": True}},
    "parent": lambda here: {"url": here.parent.as_uri(), "dir_info": {"editable": True}},
    "elsewhere": lambda here: {"url": (here.parent / "elsewhere").as_uri(), "dir_info": {"editable": True}},
    "same prefix": lambda here: {"url": here.as_uri()[:-1], "dir_info": {"editable": True}},
    "not editable": lambda here: {"url": here.as_uri(), "dir_info": {}},
    "not true": lambda here: {"url": here.as_uri(), "dir_info": {"editable": 1}},
    "not a file": lambda here: {"url": f"https://example.org{here}", "dir_info": {"editable": True}},
    "no path": lambda here: {"url": "file:", "dir_info": {"editable": True}},
    "no text": lambda here: {"url": 5, "dir_info": {"editable": True}},
    "nothing": lambda here: [],
    "nonsense": lambda here: None,
}


@pytest.mark.parametrize("url", SOURCES)
def test_only_the_source_folder_of_an_editable_install_may_stand_in_for_it(tmp_path, site, monkeypatch, url):
    info = write_plugin(site, "alpha")
    here = tmp_path / "a folder"
    (here / "alpha").mkdir(parents=True)
    (here / "alpha" / "__init__.py").write_text("")
    (here / "alpha" / "cudnn_plugin.toml").write_text(to_toml(manifest("alpha")))
    document = SOURCES[url](here)
    (info / "direct_url.json").write_text("{" if document is None else json.dumps(document))
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(str(here))
    (found,) = scan([str(site)]).plugins
    if url in ("source", "parent"):
        assert found.problem is None
        assert found.manifest_path == str(here / "alpha" / "cudnn_plugin.toml")
    else:
        assert "hides" in found.problem.hint


def shadow(folder, *, info=None, **options):
    """A package ``alpha`` in ``folder`` whose import leaves a trace; ``info`` is the name of a dist that claims it."""
    written = write_plugin(
        folder, "alpha", dist=info or "unused", code="raise SystemExit('the stranger ran')", **options
    )
    if info is None:
        for file in written.iterdir():
            file.unlink()
        written.rmdir()


@pytest.mark.parametrize("info", [None, "evil"])
def test_a_package_earlier_on_the_path_does_not_lend_its_manifest(tmp_path, site, monkeypatch, info):
    write_plugin(site, "alpha")
    other = tmp_path / "other"
    shadow(other, info=info)
    monkeypatch.syspath_prepend(str(other))
    found = {item.dist: item for item in scan([str(other), str(site)]).plugins}
    problem = found["acme-alpha"].problem
    assert (problem.code, problem.actual) == ("plugin.bad_manifest", str(other / "alpha"))
    assert "acme-alpha 1.0" in problem.expected
    assert problem.origin == found["acme-alpha"].origin
    assert str(other) in problem.hint
    assert found["acme-alpha"].manifest_path == ""
    if info:
        assert found["evil"].problem is None


def test_resolving_to_the_hidden_distribution_does_not_run_the_other(tmp_path, site, monkeypatch, config):
    from cudnn_core import _registry
    from cudnn_core._config import Config

    write_plugin(site, "alpha")
    other = tmp_path / "other"
    shadow(other, info="evil")
    monkeypatch.syspath_prepend(str(other))
    config(Config(resolve={"alpha": "acme-alpha"}))
    with _registry.installed_on([str(other), str(site)]) as registry:
        assert [entry.state for entry in registry.plugins] == ["quarantined", "quarantined"]
        assert {entry.state for entry in registry.engines} == {"quarantined"}
        config(Config())
    with _registry.installed_on([str(other), str(site)]) as registry:
        hints = [reason.hint for entry in registry.plugins for reason in entry.reasons]
        assert not any("evil" in hint for hint in hints)
    assert "alpha" not in sys.modules


def test_what_a_record_lists_elsewhere_belongs_to_the_distribution(tmp_path, site, monkeypatch):
    info = write_plugin(site, "alpha")
    inner = site / "acme_libs" / "python"
    inner.mkdir(parents=True)
    (site / "alpha").rename(inner / "alpha")
    monkeypatch.syspath_prepend(str(inner))
    (found,) = scan([str(site)]).plugins
    assert found.problem is not None
    (info / "RECORD").write_text("acme_libs/python/alpha/cudnn_plugin.toml,sha256=x,1\n")
    (found,) = scan([str(site)]).plugins
    assert found.problem is None
    assert found.manifest_path == str(inner / "alpha" / "cudnn_plugin.toml")


def test_of_two_distributions_in_one_folder_the_record_says_whose_the_manifest_is(site):
    info = write_plugin(site, "alpha")
    (info / "RECORD").write_text("alpha/__init__.py,,\nalpha/cudnn_plugin.toml,,\n")
    write_dist(site, "evil", entry_points=f"[{GROUP}]\nalpha = alpha:cudnn_plugin.toml\n")
    found = {item.dist: item for item in scan([str(site)]).plugins}
    assert found["acme-alpha"].problem is None
    assert "acme-alpha 1.0" in found["evil"].problem.actual
    (info / "RECORD").write_text("")  # nobody can tell: the registry's conflict remains
    assert [item.problem for item in scan([str(site)]).plugins] == [None, None]


def test_parts_of_a_namespace_package_elsewhere_are_passed_over(tmp_path, site, monkeypatch):
    write_plugin(site, "alpha")
    (site / "alpha" / "__init__.py").unlink()
    (tmp_path / "other" / "alpha").mkdir(parents=True)
    (tmp_path / "other" / "alpha" / "cudnn_plugin.toml").write_text("schema = 99")
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    (found,) = scan([str(site)]).plugins
    assert (found.problem, found.manifest_path) == (None, str(site / "alpha" / "cudnn_plugin.toml"))


def test_a_link_to_the_site_directory_is_the_site_directory(tmp_path, site, monkeypatch):
    write_plugin(site, "alpha")
    (tmp_path / "link").symlink_to(site)
    monkeypatch.syspath_prepend(str(tmp_path / "link"))
    (found,) = scan([str(site)]).plugins
    assert found.problem is None


def test_the_development_site_of_the_tools_registers(tmp_path):
    python(
        f"import runpy, sys; sys.argv[1:] = [{str(tmp_path / 'dev')!r}]; runpy.run_path('tools/dev_site.py', run_name='__main__')",
        cwd=ROOT,
    )
    code = """
        from cudnn_core._discovery import scan
        print(sorted((p.plugin, p.problem and str(p.problem)) for p in scan().plugins if "/dev/" in p.origin))
    """
    out = python(code, cwd=tmp_path, path=[tmp_path / "dev"])
    assert "('torch_reference', None)" in out
    assert "bad_manifest" not in out


@pytest.mark.parametrize("file", ["METADATA", "entry_points.txt", "RECORD", "direct_url.json", "cudnn_plugin.toml"])
@pytest.mark.parametrize("thorough", [False, True])
def test_a_fifo_is_never_opened(tmp_path, site, file, thorough):
    info = write_plugin(site, "alpha")
    write_plugin(site, "sound")
    target = site / "alpha" / file if file == "cudnn_plugin.toml" else info / file
    target.unlink(missing_ok=True)
    os.mkfifo(target)
    pipe = tmp_path / "pipe.whl"
    os.mkfifo(pipe)
    code = f"""
        import sys
        sys.path[:0] = [{str(site)!r}, {str(pipe)!r}]
        from cudnn_core._discovery import scan
        from cudnn_core._metadata import differences
        found = scan(thorough={thorough})
        print([p.plugin for p in found.plugins if p.problem is None and p.dist.startswith("acme-")])
        print([str(p.problem) for p in found.plugins if p.problem is not None], [b.reason for b in found.broken])
        print(differences(found))
    """
    usable, reasons, differing = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    ).stdout.splitlines()
    harmless = file in ("RECORD", "direct_url.json")
    assert usable == ("['alpha', 'sound']" if harmless else "['sound']")
    assert ("not a regular file" in reasons) is not harmless
    assert differing == "[]"


@pytest.mark.parametrize("metadata", ["", "\n", "\x00\x01\udcff\udcfe", "Metadata-Version: 2.1\n"])
def test_metadata_without_a_name_is_reported_and_the_second_opinion_survives_it(site, monkeypatch, metadata):
    from cudnn_core._metadata import differences

    info = write_plugin(site, "alpha")
    (info / "METADATA").write_bytes(metadata.encode("utf-8", "surrogateescape"))
    write_plugin(site, "sound")
    monkeypatch.setattr(sys, "path", [str(site)])
    found = scan(thorough=True)
    assert names(found) == ["sound"]
    assert [item.path for item in found.broken] == [str(info)]
    assert differences(found) == []


@pytest.mark.parametrize(
    "text", ["[[[", "[cudnn_core.engines\n", "[[cudnn_core.engines]]\nx = x:p.toml\n", "\x00\x01", "[a]\nno value\n"]
)
def test_nonsense_in_entry_points_is_reported_once(site, text):
    info = write_dist(site, "garbage", entry_points=text)
    (item,) = scan([str(site)], thorough=True).broken
    assert item.path == str(info)
    assert item.reason.startswith("entry_points.txt:")
    assert len(scan([str(site)]).broken) == ("cudnn_core." in text)


def test_broken_metadata_is_skipped_and_reported(site):
    write_plugin(site, "sound")
    engines = f"[{GROUP}]\nx = x:cudnn_plugin.toml\n"
    nameless = write_dist(site, "nameless", entry_points=engines, metadata="Metadata-Version: 2.1\n")
    headless = write_dist(site, "headless", entry_points=engines, metadata="")
    undecodable = write_dist(site, "undecodable", entry_points=engines.encode() + b"\xff\xfe = \xff\n")
    malformed = write_dist(site, "malformed", entry_points=f"[{GROUP}]\nno equals sign\n")
    removed = site / "~alf-1.0.dist-info"
    removed.mkdir()
    found = scan([str(site)])
    assert names(found) == ["sound"]
    assert {item.path for item in found.broken} == {
        str(path) for path in (nameless, headless, undecodable, malformed, removed)
    }


def test_the_thorough_scan_also_reports_what_has_nothing_to_do_with_us(site):
    empty = site / "removed-1.0.dist-info"
    empty.mkdir()
    assert scan([str(site)]).broken == ()
    assert [item.path for item in scan([str(site)], thorough=True).broken] == [str(empty)]


def test_missing_unreadable_and_odd_path_entries_are_survived(site, tmp_path):
    write_plugin(site, "alpha")
    odd = tmp_path / "file.txt"
    odd.write_text("no archive")
    placeholder = "__editable__.x-1.0.finder.__path_hook__"
    assert names(scan([str(tmp_path / "absent"), placeholder, str(odd), str(site)])) == ["alpha"]


def test_a_wheel_on_the_path_is_read_without_unpacking(tmp_path, monkeypatch):
    source, wheel = tmp_path / "source", tmp_path / "acme_zipped-1.0-py3-none-any.whl"
    write_plugin(source, "zipped")
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in source.rglob("*"):
            archive.write(file, file.relative_to(source))
    monkeypatch.syspath_prepend(str(wheel))
    (found,) = scan([str(wheel)]).plugins
    assert (found.plugin, found.dist, found.problem) == ("zipped", "acme-zipped", None)
    assert found.manifest == (source / "zipped" / "cudnn_plugin.toml").read_bytes()


def test_a_damaged_archive_is_reported(tmp_path):
    wheel = tmp_path / "damaged.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("x-1.0.dist-info/METADATA", "Name: x\nVersion: 1.0\n")
        archive.writestr("x-1.0.dist-info/entry_points.txt", f"[{GROUP}]\nx = x:p.toml\n")
    data = wheel.read_bytes()
    wheel.write_bytes(data.replace(b"[cudnn_core.engines]", b"[cudnn_core.eng\x00nes]", 1))
    found = scan([str(wheel)])
    assert found.plugins == ()
    assert len(found.broken) == 1


def test_a_foreign_metadata_finder_is_asked_and_a_raising_one_survived(tmp_path, monkeypatch):
    from importlib.metadata import Distribution

    write_plugin(tmp_path / "vault", "hidden")
    distribution = Distribution.at(next((tmp_path / "vault").glob("*.dist-info")))

    class Finder:
        find_spec = staticmethod(lambda *arguments: None)
        find_distributions = staticmethod(lambda context: [distribution])

    class Raising(Finder):
        @staticmethod
        def find_distributions(context):
            raise RuntimeError("closed")

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder, Raising])
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "vault" / "nowhere")])
    found = scan()
    assert "hidden" in names(found)
    assert any("Raising" in item.path and "closed" in item.reason for item in found.broken)


def test_an_import_hook_that_raises_costs_only_the_plugin(site, monkeypatch):
    write_plugin(site, "alpha")

    class Finder:
        @staticmethod
        def find_spec(name, path, target=None):
            if name == "alpha":
                raise RuntimeError("hook")

    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    (found,) = scan([str(site)]).plugins
    assert found.problem.code == "plugin.bad_manifest"
    assert "hook" in found.problem.actual


def test_the_doctors_second_opinion_reports_what_only_one_side_finds(site, monkeypatch):
    from cudnn_core._metadata import differences

    write_plugin(site, "alpha")
    write_dist(site, "nameless", entry_points=f"[{GROUP}]\nx = x:p.toml\n", metadata="Metadata-Version: 2.1\n")
    monkeypatch.setattr(sys, "path", [str(site)])
    found = scan()
    assert differences(found) == []
    write_plugin(site, "late")
    assert differences(found) == ["the scan misses late of acme-late"]
    monkeypatch.setattr(sys, "path", [])
    assert differences(found) == ["importlib.metadata does not list alpha of acme-alpha"]


@pytest.mark.parametrize(
    "value",
    ["alpha", "alpha.sub:cudnn_plugin.toml", "alpha:Engine", "alpha:../secret.toml", "alpha:cudnn_plugin.toml [extra]"],
)
def test_an_entry_point_that_does_not_name_a_data_file_is_a_bad_manifest(site, value):
    write_plugin(site, "alpha", entry_points=f"[{GROUP}]\nalpha = {value}\n")
    (found,) = scan([str(site)]).plugins
    assert found.problem.code == "plugin.bad_manifest"
    assert found.problem.actual == value


def test_locate_knows_namespace_packages_and_unknown_ones(site):
    (site / "spaced").mkdir()
    assert locate("spaced")[0] == (str(site / "spaced"),)
    assert locate("a_package_that_nobody_has")[0] == ()


BUILD_SYSTEM = {
    "hatchling": '[build-system]\nrequires=["hatchling"]\nbuild-backend="hatchling.build"\n',
    "setuptools": """
        [build-system]
        requires = ["setuptools"]
        build-backend = "setuptools.build_meta"
        [tool.setuptools]
        packages = ["alpha"]
        [tool.setuptools.package-data]
        alpha = ["*.toml"]
    """,
}


def project(tmp_path, backend, layout):
    """A source tree of plugin ``alpha``; returns it with the build backend's module."""
    pytest.importorskip(backend)
    tree = tmp_path / "project"
    source = tree / layout
    write_plugin(source, "alpha")
    for leftover in source.glob("*.dist-info"):
        for file in leftover.iterdir():
            file.unlink()
        leftover.rmdir()
    text = textwrap.dedent(BUILD_SYSTEM[backend])
    text += (
        '[project]\nname = "acme-alpha"\nversion = "1.0"\n'
        f'[project.entry-points."{GROUP}"]\nalpha = "alpha:cudnn_plugin.toml"\n'
    )
    if backend == "setuptools" and layout != ".":
        text += f'[tool.setuptools.package-dir]\n"" = "{layout}"\n'
    if backend == "hatchling":
        text += f'[tool.hatch.build.targets.wheel]\npackages = ["{Path(layout, "alpha").as_posix()}"]\n'
    (tree / "pyproject.toml").write_text(text)
    return tree, "hatchling.build" if backend == "hatchling" else "setuptools.build_meta"


def build(tree, module, hook, out):
    out.mkdir(exist_ok=True)
    code = f"import {module} as backend; print(backend.{hook}({str(out)!r}))"
    wheel = out / python(code, cwd=tree).strip().splitlines()[-1]
    site = out / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


SCAN = """
    import json, site, sys
    site.addsitedir({site!r})
    from cudnn_core._discovery import scan
    found = scan()
    print(json.dumps([[p.plugin, p.dist, p.version, p.manifest_path, str(p.problem)]
                      for p in found.plugins if p.plugin == "alpha"]))
    print("alpha" in sys.modules, "importlib.metadata" in sys.modules)
"""


@pytest.mark.parametrize("backend", ["hatchling", "setuptools"])
def test_a_real_wheel_registers(tmp_path, backend):
    tree, module = project(tmp_path, backend, ".")
    site = build(tree, module, "build_wheel", tmp_path / "out")
    found, imported = python(SCAN.format(site=str(site)), cwd=tmp_path).splitlines()
    assert found == f'[["alpha", "acme-alpha", "1.0", "{site}/alpha/cudnn_plugin.toml", "None"]]'
    assert imported == "False False"


@pytest.mark.parametrize("backend", ["hatchling", "setuptools"])
@pytest.mark.parametrize("layout", [".", "src"])
def test_an_editable_install_registers_even_from_its_own_directory(tmp_path, backend, layout):
    if backend == "hatchling":
        pytest.importorskip("editables")
    tree, module = project(tmp_path, backend, layout)
    site = build(tree, module, "build_editable", tmp_path / "out")
    (info,) = site.glob("*.dist-info")
    (info / "direct_url.json").write_text(json.dumps({"url": tree.as_uri(), "dir_info": {"editable": True}}))
    for cwd in (tmp_path, tree):
        found, imported = python(SCAN.format(site=str(site)), cwd=cwd).splitlines()
        assert found == f'[["alpha", "acme-alpha", "1.0", "{tree / layout / "alpha" / "cudnn_plugin.toml"}", "None"]]'
        assert imported.startswith("False")


def test_a_hundred_plugins_among_a_thousand_distributions_are_found_faster_than_the_standard_way(tmp_path):
    site = tmp_path / "site-packages"
    write_many(site)
    ours, theirs = zip(*(time_discovery(site) for _ in range(3)), strict=True)
    # The budget is 80 ms on a quiet machine; the ratio holds on any.
    assert min(ours) < min(theirs), (ours, theirs)


def time_discovery(site):
    """(ms of our scan and 100 checked manifests, ms of entry_points() and 100 parsed ones), in fresh interpreters.

    Reused by ``benchmarks/host_overhead.py``; ``site`` is one of ``write_many``.
    """
    ours = """
        import sys, time; sys.path.insert(0, {site!r})
        import cudnn_core._graph._frozen
        start = time.perf_counter()
        from cudnn_core._discovery import scan
        from cudnn_core._records import record_of
        records = [record_of(found) for found in scan([{site!r}]).plugins]
        stop = time.perf_counter()
        assert len(records) == 100 and not any(record.problem for record in records)
        print((stop - start) * 1e3)
    """
    theirs = """
        import sys, time; sys.path.insert(0, {site!r})
        import cudnn_core._graph._frozen
        start = time.perf_counter()
        import os, tomli
        from importlib.metadata import entry_points
        from importlib.util import find_spec
        found = []
        for point in entry_points(group="cudnn_core.engines"):
            package, _, name = point.value.partition(":")
            with open(os.path.join(find_spec(package).submodule_search_locations[0], name), "rb") as file:
                found.append(tomli.load(file))
        assert len(found) >= 100
        print((time.perf_counter() - start) * 1e3)
    """
    return float(python(ours.format(site=str(site)))), float(python(theirs.format(site=str(site))))
