"""What the documentation says is so: samples run, names and commands exist, tables are complete, doctests hold.

In README.md and docs/ a Python block behind `<!-- run -->` is run, in order with the others of its page, in one
namespace and one empty folder, with no Spark. If it leaves a new `pipeline`, a few epochs of that are run by the
in-process runner, into its real sinks. A block behind `<!-- output -->` is what the block before it printed. A
comment that begins with `<!-- setup` holds Python that a page needs and a reader does not.
"""

import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import re
import shlex
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import holdfast
import holdfast as hf
from holdfast.cli.app import app
from holdfast.cli.exit_codes import MEANING
from holdfast.config import FIELDS
from holdfast.pipeline import Pipeline

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"( *)```\s*([\w-]*)")
EPOCHS = 3


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block or a comment with set-up, and the line of the page that it starts at."""

    line: int
    mark: str
    language: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page, each with the comment that stands before it."""
    lines = iter(enumerate(page.read_text().splitlines(), start=1))
    mark = ""
    for number, line in lines:
        if line.strip() in ("<!-- run -->", "<!-- output -->"):
            mark = line.strip()[5:-4]
        elif line.strip() == "<!-- setup":
            yield Block(number + 1, "setup", "python", _until(lines, "-->", ""))
        elif fence := FENCE.fullmatch(line):
            indent, language = fence.groups()
            yield Block(number + 1, mark, language, _until(lines, f"{indent}```", indent))
            mark = ""
        else:
            assert not (mark and line.strip()), f"{name_of(page)}:{number}: no block follows <!-- {mark} -->"


def _until(lines: Iterator[tuple[int, str]], end: str, indent: str) -> str:
    found = []
    for _, line in lines:
        if line.rstrip() == end:
            break
        found.append(line.removeprefix(indent))
    return "\n".join(found) + "\n"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def runnable(page: Path) -> bool:
    return any(block.mark == "run" for block in blocks(page))


class Sheet:
    """A page's namespace: a module, so that its classes can be pickled as those of a user's file can."""

    def __init__(self, page: Path, folder: Path) -> None:
        self.module = types.ModuleType("page_" + re.sub(r"\W", "_", name_of(page)))
        self._page, self._folder = page, folder
        self._ran: list[Pipeline] = []

    def run(self, block: Block) -> None:
        """Run a block, naming the page's own lines where it fails, and then the pipeline that it left."""
        code = compile("\n" * (block.line - 1) + block.text, str(self._page), "exec")
        exec(code, self.module.__dict__)
        made = getattr(self.module, "pipeline", None)
        if isinstance(made, Pipeline) and not any(made is seen for seen in self._ran):
            self._ran.append(made)
            directory = self._folder / f".runner-{len(self._ran)}"
            hf.testing.run(made, epochs=EPOCHS, capture=False, directory=directory)


@pytest.mark.parametrize("page", [p for p in PAGES if runnable(p)], ids=name_of)
def test_what_a_page_says_can_be_run_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_spark(*_: Any) -> None:
        raise AssertionError("a runnable block must not start Spark: leave <!-- run --> out")

    monkeypatch.setattr("holdfast.engine.session.make_context", no_spark)
    folder = tmp_path / "page"
    folder.mkdir()
    monkeypatch.chdir(folder)
    sheet = Sheet(page, tmp_path)
    monkeypatch.setitem(sys.modules, sheet.module.__name__, sheet.module)
    printed = ""
    for block in blocks(page):
        if block.mark == "output":
            assert printed.strip() == block.text.strip(), f"{name_of(page)}:{block.line}"
        elif block.mark:
            capsys.readouterr()
            sheet.run(block)
            printed = capsys.readouterr().out


def test_the_first_things_a_reader_sees_are_run() -> None:
    for page in ("README.md", "docs/guide/first-pipeline.md", "docs/guide/state.md", "docs/guide/testing.md"):
        assert runnable(ROOT / page), page


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_name_that_a_page_uses_is_exported(page: Path) -> None:
    text = page.read_text()
    rooms = {"testing": hf.testing.__all__, "errors": hf.errors.__all__}
    unknown = {name for name in re.findall(r"\bhf\.([A-Za-z_]\w*)", text) if name not in holdfast.__all__}
    for room, names in rooms.items():
        used = re.findall(rf"\b(?:hf|holdfast)\.{room}\.([A-Za-z_]\w*)", text)
        unknown |= {f"{room}.{name}" for name in used if name not in names}
    assert not unknown


def commands(page: Path) -> Iterator[tuple[int, list[str]]]:
    """The `holdfast` commands in a page's shell blocks, with their lines."""
    for block in blocks(page):
        for number, line in enumerate(block.text.splitlines(), start=block.line):
            if block.language in ("sh", "console") and re.match(r"\s*(\$ )?(\S*/)?holdfast\s", line):
                words = shlex.split(line, comments=True)
                yield number, words[words.index("$") + 2 :] if "$" in words else words[1:]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_that_a_page_shows_exists_with_its_options(page: Path) -> None:
    group: Any = typer.main.get_command(app)
    for number, words in commands(page):
        where = f"{name_of(page)}:{number}"
        command = group if words[0].startswith("-") else group.commands.get(words[0])
        assert command is not None, f"{where}: there is no command {words[0]!r}"
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        for word in words:
            if word.startswith("--"):
                assert word.split("=")[0] in known, f"{where}: {words[0]} has no option {word}"


def test_the_guide_names_every_setting() -> None:
    text = (ROOT / "docs/guide/running.md").read_text()
    assert not [name for name in FIELDS if f"| `{name}` |" not in text]


def test_the_guide_names_every_error_and_every_exit_code() -> None:
    text = (ROOT / "docs/guide/errors.md").read_text()
    assert not [name for name in hf.errors.__all__ if name not in text]
    assert not [code for code in MEANING if f"| {code} |" not in text]


def test_every_link_of_the_readme_leads_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert not [link for link in links if link and not (ROOT / link).exists()]


def test_the_readme_has_room_for_the_benchmarks_table() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("<!-- BENCH:START -->\n") == text.count("<!-- BENCH:END -->\n") == 1
    assert text.index("<!-- BENCH:START -->") < text.index("<!-- BENCH:END -->")


MODULES = [m.name for m in pkgutil.walk_packages(holdfast.__path__, "holdfast.")]


@pytest.mark.parametrize("name", ["holdfast", *(m for m in MODULES if not m.endswith("__main__"))])
def test_the_examples_in_docstrings_hold(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name))
    assert found.failed == 0


def test_every_public_function_and_class_says_what_it_is() -> None:
    public = [getattr(hf, name) for name in holdfast.__all__]
    assert not [thing for thing in public if not (inspect.getdoc(thing) or "").strip()]
