"""Finds the pipeline that a user names: `app.py`, `package.module`, either with `:variable` behind it.

A file is loaded under its own name and never as `__main__`, so what stands under
`if __name__ == "__main__"` does not run. Its folder comes first on the path: what stands beside it can be
imported, here and (`engine.shipping`) on the executors.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from holdfast.errors import HoldfastError, PipelineError
from holdfast.pipeline import Pipeline

T = TypeVar("T")


def load(target: str) -> Pipeline:
    """The pipeline that `APP[:pipeline]` names."""
    app, variable = split(target)
    module = load_file(Path(app)) if app.endswith(".py") else _load_module(app)
    return pick(module, variable)


def split(target: str) -> tuple[str, str | None]:
    """The app and the variable.

    >>> split("jobs/app.py:orders"), split("jobs.app")
    (('jobs/app.py', 'orders'), ('jobs.app', None))
    """
    app, colon, variable = target.rpartition(":")
    if not colon:
        return target, None
    if not variable.isidentifier() or not app:
        raise PipelineError(
            f"{target!r} names no pipeline.", remedy="Write app.py:variable or package.module:variable."
        )
    return app, variable


def load_file(path: Path) -> ModuleType:
    """A Python file as a module of its own name, with its folder first on the path."""
    if not path.is_file():
        raise PipelineError(f"There is no file {path}.", remedy=_nearby(path))
    path = path.resolve()
    _put_first(path.parent)
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader = spec.loader
    try:
        _execute(lambda: loader.exec_module(module), str(path))
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _module_name(path: Path) -> str:
    """The file's stem, unless another module that is loaded already has that name."""
    if path.stem == "holdfast":
        raise PipelineError(
            f"{path} has this package's own name, so executors would import it in its place.",
            remedy="Rename the file.",
        )
    there = sys.modules.get(path.stem)
    same = there is None or getattr(there, "__file__", None) == str(path)
    return path.stem if same else f"{path.stem}_app"


def _load_module(name: str) -> ModuleType:
    _put_first(Path.cwd())
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise PipelineError(
            f"There is no module {name!r} that can be imported from {Path.cwd()}.",
            remedy="Name a file (app.py) or a module (package.app), with :variable behind it if you like.",
        )
    return _execute(lambda: importlib.import_module(name), name)


def _put_first(folder: Path) -> None:
    place = str(folder)
    if place in sys.path:
        sys.path.remove(place)
    sys.path.insert(0, place)


def _execute(action: Callable[[], T], what: str) -> T:
    """Run the user's top level; what it raises is shown from the user's own lines on."""
    try:
        return action()
    except HoldfastError:
        raise
    except (Exception, SystemExit) as error:
        raise PipelineError(
            f"{what} can't be loaded: {type(error).__name__}: {error}",
            remedy="Mend the file; it must be importable without side effects that end the process.",
            detail=_users_traceback(error),
        ) from error


def _users_traceback(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename != __file__ and "importlib" not in f.filename]
    lines = traceback.format_list(own) + traceback.format_exception_only(error)
    return "".join(["Traceback (most recent call last):\n", *lines])


def _nearby(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path()
    found = sorted(p.name for p in folder.glob("*.py"))[:10]
    return f"In {folder.resolve()} there are: {', '.join(found)}." if found else "Check the path."


def pick(module: ModuleType, variable: str | None) -> Pipeline:
    """The pipeline in a module: the named one, `pipeline`, the only one, or what a function returns."""
    names = vars(module)
    if variable is not None:
        if variable not in names:
            raise _not_found(module, f"there is no {variable!r} in it")
        return _pipeline_of(module, variable, names[variable])
    if isinstance(names.get("pipeline"), Pipeline) or inspect.isfunction(names.get("pipeline")):
        return _pipeline_of(module, "pipeline", names["pipeline"])
    found = {id(v): v for v in names.values() if isinstance(v, Pipeline)}
    if len(found) == 1:
        return next(iter(found.values()))
    makers = _makers(module)
    if not found and len(makers) == 1:
        return _pipeline_of(module, makers[0], names[makers[0]])
    raise _not_found(module, "it holds more than one" if found or makers else "it holds none")


def _pipeline_of(module: ModuleType, name: str, value: Any) -> Pipeline:
    if isinstance(value, Pipeline):
        return value
    if not callable(value):
        raise _not_found(module, f"{name!r} is {_a(value)}, not a pipeline")
    needed = _needed(value)
    if needed:
        raise _not_found(module, f"{name}() needs arguments: {', '.join(needed)}")
    made = _execute(value, f"{module.__name__}:{name}()")
    if not isinstance(made, Pipeline):
        raise _not_found(module, f"{name}() returned {_a(made)}, not a pipeline")
    return made


def _needed(function: Callable[..., Any]) -> list[str]:
    """The parameters without which a function can't be called."""
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


def _makers(module: ModuleType) -> list[str]:
    """Functions of the module that say they return a pipeline and can be called as they are."""
    found = []
    for name, value in vars(module).items():
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not _needed(value):
            returns = str(inspect.signature(value).return_annotation)
            if returns.rsplit(".", maxsplit=1)[-1].strip("'>\"") == "Pipeline":
                found.append(name)
    return found


def _a(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _not_found(module: ModuleType, why: str) -> PipelineError:
    names = vars(module)
    pipelines = [f"{n} (the pipeline {v.name!r})" for n, v in names.items() if isinstance(v, Pipeline)]
    functions = [f"{n}()" for n in _makers(module)]
    found = ", ".join(pipelines + functions) or "no pipeline, and no function that says it returns one"
    return PipelineError(
        f"{module.__file__ or module.__name__}: which pipeline? {why}.",
        remedy=f"Name one: APP:variable. Found: {found}.",
    )
