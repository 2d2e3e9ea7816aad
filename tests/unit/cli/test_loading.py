"""`APP[:pipeline]` finds the pipeline, or says what it found instead."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli.loading import load
from holdfast.errors import PipelineError, UidError

ONE = """
import holdfast as hf
{more}
def make(name):
    made = hf.Pipeline(name)
    made.read("in", hf.records([{{"n": 1}}])).write("out", hf.memory())
    return made
{end}
"""


@pytest.fixture(autouse=True)
def _path_and_modules() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def app(folder: Path, end: str, more: str = "", name: str = "app.py") -> str:
    file = folder / name
    file.write_text(ONE.format(end=end, more=more))
    return str(file)


@pytest.mark.parametrize(
    ("end", "variable", "name"),
    [
        ('pipeline = make("first")\nother = make("second")', "", "first"),
        ('pipeline = make("first")\nother = make("second")', ":other", "second"),
        ('only = make("only")', "", "only"),
        ('one = make("same")\ntwo = one', "", "same"),
        ('def pipeline():\n    return make("called")', "", "called"),
        ('def build() -> hf.Pipeline:\n    return make("annotated")', "", "annotated"),
        ('def build() -> "Pipeline":\n    return make("text")', "", "text"),
        ('def build(rate=5):\n    return make("named")', ":build", "named"),
    ],
)
def test_a_file_gives_its_pipeline(tmp_path: Path, end: str, variable: str, name: str) -> None:
    assert load(app(tmp_path, end) + variable).name == name


@pytest.mark.parametrize(
    ("end", "variable", "why", "found"),
    [
        ("", "", "it holds none", "no pipeline"),
        (
            'a = make("x")\nb = make("y")',
            "",
            "it holds more than one",
            "a (the pipeline 'x'), b (the pipeline 'y')",
        ),
        ('a = make("x")', ":b", "there is no 'b' in it", "a (the pipeline 'x')"),
        ("b = 3", ":b", "'b' is a int, not a pipeline", "no pipeline"),
        ("def b(rate): return 3", ":b", "b() needs arguments: rate", "no pipeline"),
        ("def b(): return 3", ":b", "b() returned a int, not a pipeline", "no pipeline"),
        ("def b(): return None", ":b", "b() returned None, not a pipeline", "no pipeline"),
        (
            "def b() -> hf.Pipeline: ...\ndef c() -> hf.Pipeline: ...",
            "",
            "it holds more than one",
            "b(), c()",
        ),
    ],
)
def test_an_error_lists_what_was_found(tmp_path: Path, end: str, variable: str, why: str, found: str) -> None:
    with pytest.raises(PipelineError) as caught:
        load(app(tmp_path, end) + variable)
    assert why in caught.value.message and str(tmp_path) in caught.value.message
    assert found in str(caught.value.remedy)
    assert caught.value.exit_code == 2


def test_main_blocks_do_not_run_and_the_file_keeps_its_name(tmp_path: Path) -> None:
    end = 'pipeline = make("p")\nif __name__ == "__main__":\n    raise SystemExit("ran as a script")'
    pipeline = load(app(tmp_path, end, name="orders.py"))
    assert pipeline.module == "orders" and "orders" in sys.modules


def test_what_stands_beside_the_file_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "beside_it.py").write_text("NAME = 'from-beside'")
    monkeypatch.chdir(tmp_path)
    target = app(tmp_path / "jobs", "pipeline = make(beside_it.NAME)", "import beside_it")
    assert load(target).name == "from-beside"
    assert sys.path[0] == str(tmp_path / "jobs")


def test_a_dotted_module_is_found_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pack_of_jobs").mkdir()
    (tmp_path / "pack_of_jobs" / "__init__.py").touch()
    app(tmp_path / "pack_of_jobs", 'one = make("dotted")', name="daily.py")
    monkeypatch.chdir(tmp_path)
    assert load("pack_of_jobs.daily").name == "dotted"
    assert load("pack_of_jobs.daily:one").name == "dotted"


def test_a_file_named_like_a_loaded_module_leaves_that_module_alone(tmp_path: Path) -> None:
    import json

    assert load(app(tmp_path, 'pipeline = make("p")', name="json.py")).name == "p"
    assert sys.modules["json"] is json


def test_a_file_named_holdfast_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="this package's own name"):
        load(app(tmp_path, 'pipeline = make("p")', name="holdfast.py"))


def test_a_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    app(tmp_path, "", name="orders.py")
    with pytest.raises(PipelineError) as caught:
        load(str(tmp_path / "order.py"))
    assert "order.py" in caught.value.message and "orders.py" in str(caught.value.remedy)


def test_a_missing_module_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PipelineError, match=f"no module 'nowhere.app' .*{tmp_path}"):
        load("nowhere.app")


def test_a_target_that_is_no_target_is_refused() -> None:
    with pytest.raises(PipelineError, match="names no pipeline"):
        load("app.py:a-b")


def test_an_error_at_the_top_level_shows_the_users_lines_only(tmp_path: Path) -> None:
    target = app(tmp_path, "def broken():\n    return 1 / 0\nbroken()")
    with pytest.raises(PipelineError) as caught:
        load(target)
    assert "ZeroDivisionError" in caught.value.message
    detail = str(caught.value.detail)
    assert "return 1 / 0" in detail and "broken()" in detail
    assert "loading.py" not in detail and "importlib" not in detail
    assert "app" not in sys.modules


def test_a_syntax_error_names_file_and_line(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("x = 1\ny = = 2\n")
    with pytest.raises(PipelineError) as caught:
        load(str(tmp_path / "app.py"))
    assert "SyntaxError" in caught.value.message and "line 2" in str(caught.value)


def test_an_error_of_ours_passes_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(UidError, match="needs a uid"):
        load(app(tmp_path, 'p = hf.Pipeline("")'))
