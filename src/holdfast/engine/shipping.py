"""Brings the user's code to the executors: modules beside the pipeline's file, and the file itself by value.

The file that defines the pipeline is not imported on executors, where its top level would run again: its
functions and classes travel with the program. Everything beside it can be imported there as here.
"""

from __future__ import annotations

import hashlib
import os
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.errors import PipelineError

if TYPE_CHECKING:
    from pyspark import SparkContext

    from holdfast.pipeline import Pipeline

_SKIPPED = {"__pycache__", "node_modules", "site-packages", "spark-warehouse"}
_LIMIT_BYTES = 64 << 20
_shipped: set[tuple[str, str]] = set()


def ship(sc: SparkContext, pipeline: Pipeline, directory: Path) -> None:
    """Make the user's code importable, or carried, on every executor. What is sent is kept in the pipeline's directory."""
    from pyspark import cloudpickle

    module = sys.modules.get(pipeline.module)
    if module is not None and pipeline.module != "__main__" and not pipeline.module.startswith("holdfast."):
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    file = getattr(module, "__file__", None) or getattr(sys.modules.get("__main__"), "__file__", None)
    folder = Path(file).resolve().parent if file else None
    if folder is None or not _is_users(folder):
        return
    found = _modules(folder)
    digest = _digest(found)
    if found and (str(sc.applicationId), digest) not in _shipped:
        sc.addPyFile(_zipped(folder, found, directory / "code" / f"holdfast_user_code_{digest}.zip"))
        _shipped.add((str(sc.applicationId), digest))


def _is_users(folder: Path) -> bool:
    """Whether a folder is the user's, and no environment's."""
    installed = [Path(p).resolve() for p in (sys.prefix, sys.base_prefix)]
    return not any(
        folder == p or (p in folder.parents and "site-packages" in folder.parts) for p in installed
    ) and (not str(folder).endswith(("/bin", "/Scripts")))


def _modules(folder: Path) -> list[Path]:
    """Python files that `import` would find from a folder: modules, and packages with all below them."""
    found = [p for p in sorted(folder.glob("*.py"))]
    for package in sorted(folder.iterdir()):
        if package.is_dir() and package.name not in _SKIPPED and (package / "__init__.py").exists():
            found += [p for p in sorted(package.rglob("*")) if p.is_file() and not _SKIPPED & set(p.parts)]
    size = sum(p.stat().st_size for p in found)
    if size > _LIMIT_BYTES:
        raise PipelineError(
            f"The modules beside the pipeline in {folder} take {size >> 20} MB; at most {_LIMIT_BYTES >> 20} MB are shipped.",
            remedy="Keep the pipeline in a folder of its own, or install what it needs on the executors.",
        )
    return found


def _digest(files: list[Path]) -> str:
    made = hashlib.sha256()
    for file in files:
        made.update(str(file).encode() + b"\0" + file.read_bytes())
    return made.hexdigest()[:16]


def _zipped(folder: Path, files: list[Path], made: Path) -> str:
    """A zip of these files; what was sent before is taken away, an older driver's executors have it."""
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        for older in made.parent.glob("*.zip"):
            if not any(digest in older.name for _, digest in _shipped):  # a live session may still name it
                older.unlink(missing_ok=True)
        part = made.with_suffix(f".{os.getpid()}")
        with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as archive:
            for file in files:
                archive.write(file, file.relative_to(folder))
        os.replace(part, made)
    return str(made)
