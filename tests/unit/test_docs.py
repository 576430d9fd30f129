"""The documentation is correct: commands, Python, TOML, quoted output, links, and generated parts."""

from __future__ import annotations

import datetime
import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
from fenced import PATH, ROOT, blocks, check, commands, in_shell, inline_commands, output, words
from moeref_conformance.contract.rules import load_rules
from moeref_conformance.plan import known_failures as known
from moeref_conformance.plan import matrix
from moeref_conformance.plan.machine import detect
from moeref_conformance.selftest.faults import FAULTS

DOCS = ROOT / "docs"
sys.path[:0] = [str(DOCS), str(ROOT)]  # as commands typed in the checkout see docs.examples
import _generate  # noqa: E402

from tests.rollout import test_loop  # noqa: E402

PAGES = {
    path.relative_to(DOCS).as_posix(): _generate.expand(path.read_text(encoding="utf-8"))
    for path in sorted(DOCS.rglob("*.md"))
    if "_build" not in path.parts
}


COMMANDS = {line for page in PAGES.values() for line in [*commands(page), *inline_commands(page)]}


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_names_something_that_exists(command: str) -> None:
    check(command)


@pytest.mark.parametrize("page", [name for name, text in PAGES.items() if blocks(text, "python")])
def test_python_runs(page: str) -> None:
    room: dict[str, object] = {}
    for block in blocks(PAGES[page], "python"):
        exec(compile(block, page, "exec"), room)


@pytest.mark.parametrize("page", PAGES)
def test_links_and_anchors_lead_somewhere(page: str) -> None:
    for link in re.findall(r"\]\(([^()\s:]+)\)", PAGES[page]):
        place, _, anchor = link.partition("#")
        path = (DOCS / page).parent / place if place else DOCS / page
        assert path.is_file(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", PAGES[path.resolve().relative_to(DOCS).as_posix()], flags=re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}, link


@pytest.mark.parametrize("page", PAGES)
def test_every_table_has_a_head(page: str) -> None:
    """Without one Markdown shows rows as text."""
    text = re.sub(r"^ *```.*?^ *```$", "", PAGES[page], flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"(?<!\|\n)^ *\|.*\|$\n(.*)", text, flags=re.MULTILINE)
    assert [line for line in heads if not re.fullmatch(r" *\|[\s:|-]+\|", line)] == []


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = {f"{line}.md" for block in blocks(PAGES["index.md"], r"\{toctree\}") for line in block.splitlines()}
    assert {page for page in PAGES if page != "index.md"} == {line for line in listed if "/" in line}


def test_the_glossary_is_short_and_has_each_term_once() -> None:
    terms = re.findall(r"^\| (?!term )(.+?) \|", PAGES["reference/glossary.md"], flags=re.MULTILINE)
    assert len(terms) == len(set(terms)) <= 30
    assert "(docs/reference/glossary.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_rules_and_faults_are_all_there() -> None:
    rules, faults = PAGES["reference/rules.md"], PAGES["reference/faults.md"]
    assert set(re.findall(r"^### (.+)$", rules, flags=re.MULTILINE)) == set(load_rules())
    assert set(re.findall(r"^## (.+)$", faults, flags=re.MULTILINE)) == {*FAULTS, "Known bugs"}


def test_every_mark_is_replaced() -> None:
    assert [page for page, text in PAGES.items() if "<!-- generated" in text] == []
    used = {m for path in PAGES for m in _generate.MARK.findall((DOCS / path).read_text(encoding="utf-8"))}
    assert used == set(_generate.PARTS)


def test_steps_of_records_are_those_that_rules_read() -> None:
    (steps,) = re.findall(r"^\| step \| value .*?\n\n", PAGES["reference/records.md"], flags=re.MULTILINE | re.DOTALL)
    described = {
        name for cell in re.findall(r"^\| (`.+?`) \|", steps, flags=re.M) for name in re.findall("`(.+?)`", cell)
    }
    read = {step for rule in load_rules().values() for step in rule.steps}
    assert read - described == {"collectives", "hf", "inputs"}


def test_the_matrix_of_the_how_to_is_one() -> None:
    (text,) = blocks(PAGES["how-to/select-and-matrix.md"], "toml")
    ours = matrix.parse(tomllib.loads(text), Path("ours.toml"))
    assert (len(ours.cells), len(ours.excluded)) == (2 * 2 * 4 + 1 - 1, 1)


def test_the_known_failures_of_the_how_to_are_accepted() -> None:
    (text,) = blocks(PAGES["how-to/known-failures.md"], "toml")
    entries = known.parse(tomllib.loads(text), "known.toml", matrix.load("cpu"), datetime.date(2026, 1, 1))
    assert [entry.outcome for entry in entries] == ["fail", "flaky"]


def test_diagnoses_are_sentences_that_the_kit_says() -> None:
    kit = ROOT / "conformance" / "moeref_conformance"
    rooms = [*(kit / "diagnosis").glob("*.py"), *(kit / "judges").glob("*.py")]
    said = "".join(path.read_text(encoding="utf-8") for path in rooms)
    # As one text: a sentence may go over several lines of the source.
    said = re.sub(r'"\s*\n\s*f?"', "", said)
    (rows,) = re.findall(r"^\| diagnosis .*?\n\n", PAGES["how-to/read-a-failure.md"], flags=re.MULTILINE | re.DOTALL)
    quoted = re.findall(r"^\| `(.+?)` \|", rows, flags=re.MULTILINE)
    assert len(quoted) > 10
    assert [part for text in quoted for part in text.split("…") if part.strip() not in said] == []


@pytest.mark.ranks
@pytest.mark.parametrize("page", ["tutorial/judge-your-framework.md", "tutorial/first-dump.md"])
def test_tutorials_run_as_written(page: str, tmp_path: Path) -> None:
    """The commands of a tutorial that choose a cell, in order, in one folder, and what the page says they print."""
    ran = [line for line in commands(PAGES[page]) if "qwen3_moe/tp2/gloo" in line]
    for line in ran:
        done = in_shell(line, tmp_path, ("docs", "tests"))
        wanted = 1 if "faulty:" in line else 0
        assert done.returncode == wanted, f"{line}: exit {done.returncode}\n{done.stdout}\n{done.stderr[-3000:]}"
        if wanted:  # README.md shows what the same run prints
            command, *shown = blocks((ROOT / "README.md").read_text(encoding="utf-8"), "text")[0].splitlines()
            assert line.startswith(command.removeprefix("$ "))
            assert "\n".join(shown) in done.stdout
    assert len(ran) >= 2
    assert all(shutil.which(words(line)[0], path=PATH) for line in ran)
    for shown in re.findall(r"<!-- qkv-as-q-k-v finding -->\n```text\n(.+?)```", PAGES[page], flags=re.DOTALL):
        assert shown in (tmp_path / "red" / "summary.md").read_text(encoding="utf-8")


@pytest.mark.ranks
def test_commands_after_a_verdict_run_as_written(tmp_path: Path) -> None:
    """In one folder: repeat a failure, keep records, and compare two runs; then vectors of a cell."""
    pages = ("how-to/read-a-failure.md", "how-to/compare-runs.md", "reference/results.md")
    lines = [line for page in pages for line in commands(PAGES[page]) if "--deadline" not in line]
    ended = {}
    for line in lines:
        ended[line] = in_shell(line, tmp_path).returncode
        if " run " in line:  # the failure comes first
            shutil.copytree(tmp_path / "conformance-report", tmp_path / ("new" if "--keep" in line else "old"))
    assert list(ended.values()) == [1, 0, 0, 1, 0], ended
    assert (tmp_path / "records" / "qwen3_moe__tp2__gloo" / "rank0001" / "shards.safetensors").is_file()
    assert (tmp_path / "reports" / "report.html").is_file()
    assert list((tmp_path / "vectors").glob("qwen3_moe*.json"))


@pytest.mark.ranks
@pytest.mark.parametrize("begin", ["nox -s conformance-gpu --no-install", "moeref-conformance run"])
def test_commands_for_gpus_end_with_3_where_there_is_none(begin: str, tmp_path: Path) -> None:
    """As typed in a checkout that is not installed: the session takes this Python, and its exit code is the kit's."""
    if detect().count:
        pytest.skip(f"this machine has GPUs ({detect().versions['GPU']}), where the commands judge")
    links = ("noxfile.py", "pyproject.toml", "matrices", "moeref", "conformance", "constraints")
    lines = [line for line in commands(PAGES["how-to/run-on-gpus.md"]) if line.startswith(begin)]
    assert lines
    for line in lines:
        done = in_shell(line, tmp_path, links)
        assert done.returncode == 3, f"{line}: exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        assert "No GPU: no NVIDIA device under /dev" in done.stdout + done.stderr


@pytest.mark.parametrize("page", ["cpu", "cpu-core-0.16.1"])
def test_a_badge_of_the_readme_says_what_its_page_says(page: str) -> None:
    assert f"(docs/status/{page}.svg)](docs/status/{page}.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    core = "Megatron-Core 0.16.1" if "0.16.1" in page else "Megatron-Core 0.19"
    label, message = re.findall(r"<text[^>]*>([^<]*)<", (DOCS / "status" / f"{page}.svg").read_text(encoding="utf-8"))
    said = PAGES[f"status/{page}.md"]
    profiles = re.findall(r"^- (conforms to|does not conform to|undecided on) ", said, flags=re.MULTILINE)
    rows = re.search(r"^\*\*.*; (\d+ of \d+ rows claimed)\*\*$", said, flags=re.MULTILINE)
    assert core in label
    assert rows is not None
    assert message == f"conforms to {profiles.count('conforms to')} of {len(profiles)} profiles; {rows[1]}"


def test_the_status_page_counts_what_waits_for_gpus() -> None:
    page = PAGES["status/gpu.md"]
    assert output("moeref_conformance", "list", "--matrix", "gpu", "--backends").strip() in page
    if "The GPU run is outstanding" in page:
        assert page.endswith(output("tests.bench.gpu.table", "--under", "###"))


def test_the_table_of_defaults_has_the_traps_that_differ() -> None:
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", PAGES["reference/framework-defaults.md"], flags=re.MULTILINE)
    found = {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows}
    assert found["etp"] == ["2", "2", "2", "2", "1", "2", "1", "1"]
    assert found["seed"] == ["1234", "1234", "1234", "42", "not read", "42", "42", "not read"]
    assert found["sequence_parallel"] == [
        *("False", "False", "False", "True", "False", "True", "False", "True"),
    ]
    assert found["moe_router_load_balancing_type"] == [
        *("aux_loss", "aux_loss", "aux_loss", "none", "none", "none", "aux_loss", "none"),
    ]
    assert found["attention_dropout"][:3] == ["0.1", "0.1", "0.1"]


def rows_of_the_loop(columns: int) -> dict[tuple[str, str], list[float]]:
    """The figures of a table of status/rollout.md, by architecture and layout."""
    rows = re.findall(r"^\| (\w+) \| (\w+=[\w=,]+) \|(.*)\|$", PAGES["status/rollout.md"], flags=re.MULTILINE)
    figures = [((family, layout), [float(one) for one in cells.split("|")]) for family, layout, cells in rows]
    return {cell: numbers for cell, numbers in figures if len(numbers) == columns}


def test_the_loop_agrees_in_every_layout_of_its_matrix() -> None:
    rows = rows_of_the_loop(4)
    assert sorted(rows) == sorted([*test_loop.CELLS, *test_loop.MATRIX])
    assert max(map(max, rows.values())) <= test_loop.CLOSE


def test_replay_closes_the_gap_in_every_architecture() -> None:
    rows = rows_of_the_loop(5)
    assert sorted(rows) == sorted(test_loop.GAPS)
    for agreement, own_k3, own_largest, k3, largest in rows.values():
        assert agreement < 1
        assert own_k3 >= 5 * k3
        assert own_largest >= 4 * largest


def test_at_least_25_published_runs_and_five_of_each_framework() -> None:
    rows = re.findall(r"^\| ([\w-]+) \| \[", PAGES["status/published.md"], flags=re.MULTILINE)
    counts = {name: rows.count(name) for name in rows}
    assert len(rows) >= 25
    assert min(counts.values()) >= 5
