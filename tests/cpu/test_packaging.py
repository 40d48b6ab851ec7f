"""The wheel and the editable install hold the right modules, and the pins lie inside the ranges."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = {"mla_cute": ROOT / "mla_cute", "mla_cute/kernels": ROOT / "kernels"}  # path in the wheel: folder here
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")


def installed_files() -> set[str]:
    """Every module of this checkout, by its path in the wheel."""
    return {
        f"{prefix}/{path.relative_to(folder).as_posix()}"
        for prefix, folder in SOURCES.items()
        for path in folder.rglob("*.py")
    }


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree as a release has it, elsewhere: setuptools leaves its build folder beside the sources."""
    copy = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("mla_cute", "kernels"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def test_package_list_is_the_folders() -> None:
    folders = {str(Path(name).parent).replace("/", ".") for name in installed_files()}
    assert sorted(PYPROJECT["tool"]["setuptools"]["packages"]) == sorted(folders)


def test_wheel(copy: Path, tmp_path: Path) -> None:
    subprocess.run([*PIP, "wheel", str(copy), "--no-deps", "--no-build-isolation", "-w", str(tmp_path)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if name.endswith(".py")} == installed_files()
    assert {"mla_cute/py.typed", "mla_cute/bench/anchors.json"} <= set(names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"mla_cute"}  # it and its dist-info, no `kernels`
    assert any(name.endswith("licenses/LICENSE") for name in names)

    site = tmp_path / "site"
    subprocess.run([*PIP, "install", str(wheel), "--no-deps", "--target", str(site)], check=True)
    assert imported_from(site) == site / "mla_cute" / "kernels" / "sm90" / "config.py"


def test_editable_install(copy: Path, tmp_path: Path) -> None:
    command = [*PIP, "install", "--no-deps", "--no-build-isolation", "--target", str(tmp_path), "--editable", str(copy)]
    subprocess.run(command, check=True)
    assert imported_from(tmp_path) == copy / "kernels" / "sm90" / "config.py"


def imported_from(site: Path) -> Path:
    """Where mla_cute.kernels.sm90.config comes from in an interpreter whose site folder is `site`."""
    # -S: no .pth file of this environment, where mla_cute is installed too; its other packages stay importable
    code = f"""if True:
        import site, sys
        site.addsitedir({str(site)!r})
        sys.path.append({sysconfig.get_paths()["purelib"]!r})
        import mla_cute.kernels.sm90.config as config
        print(config.__file__)
        try:
            import kernels
        except ImportError:
            pass
        else:
            raise SystemExit(f"a top-level package kernels: {{kernels.__file__}}")"""
    run = subprocess.run([sys.executable, "-S", "-c", code], cwd=site, check=True, capture_output=True, text=True)
    return Path(run.stdout.strip())


def test_constraints_pin_every_dependency_within_its_range() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {pin.name: pin for pin in map(Requirement, filter(lambda line: line and line[0] != "#", lines))}
    project = PYPROJECT["project"]
    for text in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        wanted = Requirement(text)
        (pin,) = pins[wanted.name].specifier
        assert wanted.specifier.contains(pin.version, prereleases=True), f"{pin} is outside {text}"


def test_changelog_names_the_version() -> None:
    assert f"## {PYPROJECT['project']['version']}" in (ROOT / "CHANGELOG.md").read_text()
