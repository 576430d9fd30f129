"""The command line: what it prints and how it exits."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from kit_toy import MATRIX, Resolved, ToyWorld, failing, run
from moeref_conformance import arguments, cli, report
from moeref_conformance.contract.results import version_of
from moeref_conformance.contract.rules import PROFILES
from moeref_conformance.plan.machine import Machine
from moeref_conformance.run import machinery


@pytest.fixture
def toy(tmp_path):
    path = tmp_path / "toy.toml"
    path.write_text(MATRIX)
    return str(path)


def test_list(toy, capsys):
    assert cli.main(["list", "--matrix", toy, "--target", "kit_toy:target", "--rule", "EXP-012"]) == 0
    out = capsys.readouterr().out
    assert "4 cells" in out
    assert "unclaimed: family=glm4_moe" in out
    assert "EXP-006" in out
    assert "EXP-004" not in out


def test_a_profile_is_selected_by_its_name(toy, capsys, tmp_path):
    assert cli.main(["list", "--matrix", toy, "--profile", "logits"]) == 0
    out = capsys.readouterr().out
    assert "FWD-001  MUST    logits" in out
    assert "EXP-001" not in out
    assert cli.main(["list", "--matrix", toy, "--profile", "weigths"]) == 2
    assert "unknown profile 'weigths'; did you mean 'weights'?" in capsys.readouterr().err
    results = run(tmp_path, settings={"profiles": ("weights",)})
    assert results.header["settings"]["profiles"] == ["weights"]
    statuses = {rule: verdict.status for rule, verdict in results.table["qwen3_moe/tp2/gloo"].items()}
    assert (statuses["EXP-001"], statuses["NAM-001"], statuses["SED-002"]) == ("pass", "pass", "unclaimed")
    assert [standing.profile for standing in results.headline.standings] == [str(PROFILES["weights"])]


def test_list_as_json(toy, capsys):
    assert cli.main(["list", "--matrix", toy, "--target", "kit_toy:target", "--cell", "*/tp2/*", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [cell["claimed"] for cell in data["cells"]] == [True, False]
    assert data["matrix"]["name"] == "toy"


def test_a_reader_that_has_seen_enough_gets_no_traceback():
    """As in `list | head -1`."""
    command = [sys.executable, "-m", "moeref_conformance", "list", "--matrix", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["list", "--matrix", "cpuu"], "did you mean 'cpu'"),
        (["run", "--target", "morf"], "unknown target 'morf'; did you mean 'moeref'?; targets: areal, mbridge, "),
        (["run", "--target", "zzz"], "unknown target 'zzz'; targets: areal, mbridge, "),
        (["smoke", "--target", "kit_toy:target", "--cell", "nothing"], "no cell or tag matches 'nothing'"),
        (["run", "--target", "kit_toy:target", "--known", "no.toml"], "cannot be read"),
        (["report", "no.jsonl"], "moeref-conformance: no.jsonl: cannot be read (No such file or directory)\n"),
        (["inputs", "--matrix", "static", "--cell", "kimi-k2", "--out", "x"], "published models (kimi-k2) have"),
        (
            ["vectors", "--matrix", "static", "--cell", "kimi-k2", "--out", "x"],
            "published models (kimi-k2) have no",
        ),
    ],
)
def test_bad_input_exits_with_2_and_writes_nothing(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(words) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_error_of_the_kit_is_not_taken_for_a_verdict(tmp_path, capsys, monkeypatch):
    run(tmp_path)
    monkeypatch.setattr(report, "write_all", lambda *_: 1 / 0)
    assert cli.main(["report", str(tmp_path / "out" / "results.jsonl")]) == 2
    assert "an error of the kit" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["report", "{results}", "--out"], ["init"], ["smoke", "--target", "moeref", "--out"]]
)
def test_what_cannot_be_written_is_said_before_any_work(arguments, tmp_path, capsys):
    run(tmp_path)
    file = tmp_path / "file"
    file.write_text("")
    words = [word.format(results=tmp_path / "out" / "results.jsonl") for word in arguments]
    if "--out" in words:
        assert cli.main([*words, str(file)]) == 2
        assert (
            capsys.readouterr().err == f"moeref-conformance: {file} cannot be written: {file} is a file, not a folder\n"
        )
    assert cli.main([*words, str(file / "adapter.py")]) == 2
    told = f"moeref-conformance: {file / 'adapter.py'} cannot be written: {file} is a file, not a folder\n"
    assert capsys.readouterr().err == told


def test_an_adapter_without_its_attribute_is_completed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "mine.py").write_text("")
    assert cli.main(["smoke", "--target", "adapters.mine"]) == 2
    assert "unknown target 'adapters.mine'; did you mean 'adapters.mine:target'?; targets: " in capsys.readouterr().err


def test_a_folder_closed_to_this_user_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    assert cli.main(["init", str(tmp_path / "new" / "adapter.py")]) == 2
    told = f"{tmp_path / 'new' / 'adapter.py'} cannot be written: this user may not write to {tmp_path}\n"
    assert capsys.readouterr().err.endswith(told)


def test_report_and_diff(tmp_path, capsys):
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.mkdir()
    bad.mkdir()
    run(good)
    run(bad, ToyWorld(), EXP_002=failing())
    files = [str(folder / "out" / "results.jsonl") for folder in (good, bad)]
    assert cli.main(["report", files[1]]) == 1
    out = capsys.readouterr().out
    assert f"\nnot conformant: does not conform to {PROFILES['weights']}; " in out
    assert f"\n  does not conform to {PROFILES['weights']}: " in out
    assert (bad / "out" / "report.html").is_file()
    assert cli.main(["report", files[0]]) == 0
    folders = [str(folder / "out") for folder in (good, bad)]
    for named in (files, folders):
        assert cli.main(["diff", *named]) == 1
        assert "EXP-002 qwen3_moe/tp2/gloo: pass → fail" in capsys.readouterr().out
    (bad / "out" / "report.html").unlink()
    assert cli.main(["report", folders[1]]) == 1
    assert (bad / "out" / "report.html").is_file()
    assert cli.main(["diff", *reversed(files)]) == 0


def test_a_run_without_a_gpu_says_so_and_what_would_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("moeref_conformance.plan.plan.detect", lambda: Machine(why_not={"gpu": "no device"}))
    monkeypatch.setattr(machinery, "_rank_world", lambda settings, *_: Resolved(settings.target))
    out = tmp_path / "out"
    arguments = ["run", "--target", "moeref", "--matrix", "gpu", "--cell", "tied", "--cell", "fp8", "--out", str(out)]
    assert cli.main(arguments) == 3
    said = capsys.readouterr().out
    assert "No GPU: no device. What would run where there are some:" in said
    assert "1 nccl, 2" in said
    assert f"incomplete: undecided on {PROFILES['weights']}, {PROFILES['logits']}, " in said
    assert "conforms" not in said
    assert "needs a GPU, and there is none here: no device" in (out / "summary.md").read_text()
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert {row["status"] for row in rows if row["kind"] == "verdict"} == {"untested"}
    assert (rows[-1]["kind"], rows[-1]["exit"]) == ("footer", 3)


def test_list_counts_worlds_and_names_needs(capsys):
    assert cli.main(["list", "--matrix", "gpu", "--backends"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].startswith("| what the cells need | cells | 1 GPU | 4 GPUs | 8 GPUs |")
    assert table[-1].startswith("| together | 159 |")
    assert cli.main(["list", "--matrix", "gpu", "--cell", "*flex-deepep/ep16/*", "--target", "moeref"]) == 0
    assert "(needs 16 GPUs and DeepEP)" in capsys.readouterr().out


def test_diff_of_other_matrices_is_refused(tmp_path, capsys):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    (new / "toy.toml").write_text(MATRIX.replace("tp2 = { tp = 2 }", "tp2 = { tp = 2, world = 4 }"))
    run(old)
    run(new)
    assert cli.main(["diff", *(str(folder / "out" / "results.jsonl") for folder in (old, new))]) == 2
    assert "do not compare: matrix" in capsys.readouterr().err


def test_listing_needs_neither_torch_nor_megatron():
    code = "import sys, moeref_conformance.cli as c; c.main(['list']); print({'torch', 'megatron'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["smok"], "unknown command 'smok'; did you mean 'smoke'?"),
        (["--completion", "bsh"], "argument --completion: invalid choice: 'bsh'"),
        (["list", "--backend"], None),  # an abbreviation of --backends
        (["list", "--targett", "x"], "unrecognized arguments: --targett x; did you mean '--target'?"),
        (["diff", "a", "b", "--zzz"], "unrecognized arguments: --zzz"),
        (["run", "--taget", "x"], "required: --target; unknown option '--taget'; did you mean '--target'?"),
        (["run", "--matrix=smoke", "--job", "2"], "required: --target\n"),
    ],
)
def test_a_word_that_is_not_known_brings_the_nearest(words, said, capsys):
    if said is None:
        assert cli._parser().parse_args(words).backends
        return
    with pytest.raises(SystemExit) as ended:
        cli._parser().parse_args(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


VERDICT = "exit codes: 0 conformant, 1 not conformant, 2 error of the kit, 3 incomplete"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        *((command, VERDICT) for command in ("", "run", "smoke", "report")),
        *((command, "exit codes: 0 done, 2 bad input") for command in ("list", "init", "inputs", "vectors", "table")),
        ("diff", "exit codes: 0 nothing is worse, 1 something is, 2 bad input"),
        ("shards", "exit codes: 0 the same shards, known failures excepted, 1 not, 2 bad input"),
    ],
)
def test_help_of_every_command_tells_its_exit_codes(command, said, capsys):
    with pytest.raises(SystemExit):
        cli._parser().parse_args([*command.split(), "--help"])
    assert said in capsys.readouterr().out


def test_help_begins_with_examples_that_parse():
    assert cli._parser().description == arguments.EXAMPLES
    examples = [line.split("   ")[0].split()[1:] for line in arguments.EXAMPLES.splitlines() if "moeref-conf" in line]
    assert len(examples) == 7
    for example in examples:
        cli._parser().parse_args([word.strip("'") for word in example])


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as ended:
        cli._parser().parse_args(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == f"moeref-conformance {version_of('moeref')}"


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("moeref", "739 cells of matrix cpu, up to 8 ranks, about 17 minutes on two cores; importing"),
        ("dump:x", "739 cells of matrix cpu, up to 8 ranks; reading the records of dump:x"),
    ],
)
def test_a_run_says_at_once_how_long_it_takes(target, said, tmp_path):
    options = ["run", "--target", target, "--out", str(tmp_path)]
    assert cli._starting(cli._parser().parse_args(options)).startswith(said)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ([], ", up to 2 ranks, 7 minutes last time; importing"),
        (["--cell", "real"], ", up to 2 ranks; importing"),
        (["--rule", "EXP"], ", up to 2 ranks; importing"),
    ],
)
def test_the_same_run_takes_as_long_as_last_time(toy, tmp_path, more, said):
    took, file = run(tmp_path).took, tmp_path / "out" / "results.jsonl"
    assert took > 0
    file.write_text(file.read_text().replace(f'"seconds": {took}}}', '"seconds": 420}'))
    options = ["run", "--target", "kit_toy:target", "--matrix", toy, "--out", str(tmp_path / "out"), *more]
    assert said in cli._starting(cli._parser().parse_args(options))
    file.write_text('{"kind": "header", "schema": 1}\n')
    assert "; importing" in cli._starting(cli._parser().parse_args(options))


def shadowed(folder, package):
    """A folder with a package of this name, and the environment in which another one is installed."""
    for place in ("installed", "here"):
        (folder / place / package).mkdir(parents=True)
        (folder / place / package / "__init__.py").write_text("")
    paths = [str(folder / "installed"), *filter(None, [os.environ.get("PYTHONPATH")])]  # an empty one is the folder
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def test_a_run_says_if_moeref_is_that_of_the_folder(tmp_path):
    env = shadowed(tmp_path, "moeref")
    program = "import sys, moeref_conformance.cli as c; sys.exit(c.main(['smoke', '--target', 'no.such:target']))"
    done = subprocess.run(
        [sys.executable, "-Pc", program], cwd=tmp_path / "here", env=env, capture_output=True, text=True
    )
    here, installed = (tmp_path / place / "moeref" for place in ("here", "installed"))
    said = f"moeref is that of this folder ({here}), not the installed one ({installed})"
    assert done.stderr.splitlines()[0] == said
    done = subprocess.run([sys.executable, "-Pc", program], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert "this folder" not in done.stderr


def test_a_kit_of_the_folder_is_refused_where_another_runs(tmp_path, monkeypatch, capsys):
    shadowed(tmp_path, "moeref_conformance")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.main(["smoke", "--target", "moeref"]) == 2
    assert f"the ranks would run the kit of this folder ({tmp_path / 'here'}" in capsys.readouterr().err


@pytest.mark.parametrize("program", ["moeref", "moeref_conformance"])
def test_a_shell_completes_commands_and_options(program, tmp_path):
    """Bash is asked as it asks when a user presses Tab."""
    made = subprocess.run([sys.executable, "-m", program, "--completion", "bash"], capture_output=True, text=True)
    (tmp_path / "completion").write_text(made.stdout)
    name = program.replace("_", "-")
    begun, expected = (f"{name} ch", "check") if program == "moeref" else (f"{name} run --mat", "--matrix")
    ask = f"source completion; COMP_WORDS=({begun}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _shtab_{program}; "
    done = subprocess.run(
        ["bash", "-c", ask + 'echo "${COMPREPLY[@]}"'], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [expected]


@pytest.mark.skipif(shutil.which("fish") is None, reason="no fish on PATH")
@pytest.mark.parametrize("program", ["moeref", "moeref_conformance"])
def test_fish_completes_commands_and_options(program, tmp_path):
    made = subprocess.run([sys.executable, "-m", program, "--completion", "fish"], capture_output=True, text=True)
    (tmp_path / "completion").write_text(made.stdout)
    name = program.replace("_", "-")
    begun, expected = (f"{name} ch", "check") if program == "moeref" else (f"{name} run --mat", "--matrix")
    ask = f"source completion; complete -C '{begun}'"
    done = subprocess.run(["fish", "-c", ask], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == [expected]


@pytest.mark.ranks
def test_a_run_says_at_once_what_it_prepares_and_keeps_warnings_of_imports_out(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    command = [sys.executable, "-m", "moeref_conformance", "smoke", "--target", "moeref", "--rule", "NAM-001"]
    command += ["--cell", "qwen3_moe/one/static", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, *cells = done.stderr.splitlines()
    assert first == "1 cell of matrix smoke, up to 1 rank; importing megatron-core and the target moeref"
    assert [line.split()[:3] for line in cells] == [["1/1", "pass", "qwen3_moe/one/static"]]


@pytest.mark.parametrize(
    "words",
    [["moeref", "check", "qwen3-30b-a3b", "--layout", "tp=2,ep=8,etp=1"], ["moeref_conformance", "list", "--backends"]],
)
def test_a_terminal_without_unicode_gets_question_marks(words):
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    end = subprocess.run([sys.executable, "-m", *words], capture_output=True, env=env, check=False)
    assert (end.returncode, end.stderr) == (0, b"")
    assert b"?" in end.stdout
