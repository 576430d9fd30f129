"""Parts of pages that are made from the sources at build time: rules, faults, commands, statuses and so on.

A page holds `<!-- generated: rules -->` where the text of `PARTS["rules"]` goes. Nothing generated is committed.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Sequence

from moeref_conformance import cli
from moeref_conformance.contract.results import Results, Verdict
from moeref_conformance.contract.rules import GROUPS, PROFILES, load_rules
from moeref_conformance.contract.statuses import EXIT_WORDS, STATUSES
from moeref_conformance.report.issues import pieces
from moeref_conformance.report.view import LEGEND

MARK = re.compile(r"^<!-- generated: (\S+) -->$", re.MULTILINE)


def expand(text: str) -> str:
    """`text` with every mark replaced by its part. Raises KeyError for a part that does not exist."""
    return MARK.sub(lambda match: PARTS[match[1]](), text)


def as_rst(lines: Sequence[str]) -> list[str]:
    """Docstring lines as reStructuredText.

    Indented lines after a colon become a literal block, and markup characters outside backticks are escaped.
    """
    out: list[str] = []
    literal = False
    for number, line in enumerate(lines):
        literal = literal and (not line or line.startswith(" "))
        if literal:
            out.append(line)
            continue
        pieces = line.split("`")
        for i in range(0, len(pieces), 2):
            plain = re.sub(r"([*|]|(?<=\w)_(?!\w))", r"\\\1", pieces[i])
            # reStructuredText needs a separator between code and letters that touch it, as in `dtype`s.
            plain = re.sub(r"^(?=\w)", r"\\ ", plain) if i else plain
            pieces[i] = re.sub(r"(?<=\w)$", r"\\ ", plain) if i + 1 < len(pieces) else plain
        out.append("`".join(pieces))
        after = [following for following in lines[number + 1 :] if following]
        if line.endswith(":") and lines[number + 1 : number + 2] == [""] and after and after[0].startswith("    "):
            out[-1] += ":"
            literal = True
    return out


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    """A list of the facts that have a value."""
    return "\n".join(f"- **{name}:** {value}" for name, value in facts if value)


def _plain(text: str) -> str:
    """Text of the sources as Markdown. Code in backticks stays code; everything else is escaped."""
    pieces = text.split("`")
    pieces[::2] = [re.sub(r"([<*\[])", r"\\\1", piece) for piece in pieces[::2]]
    return "`".join(pieces)


def _seen(text: str) -> str:
    """Text as Markdown in which issues are links."""
    return "".join(f"[{piece}]({address})" if address else _plain(piece) for piece, address in pieces(text))


def _code(values: Iterable[str]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def _links(ids: Iterable[str], page: str) -> str:
    return ", ".join(f"[{name}]({page}#{name.lower()})" for name in ids)


def rules() -> str:
    """Every rule under its group: text, reasons, requirements, and the faults that fail it."""
    from moeref_conformance.selftest.faults import FAULTS

    out = []
    for group, about in GROUPS.items():
        out.append(f"## {group}: {about}")
        for rule in sorted((r for r in load_rules().values() if r.group == group), key=lambda r: r.id):
            out.append(f"### {rule.id}\n\n**{rule.level}** {_plain(rule.text)}")
            facts = [
                ("why", _seen("; ".join(rule.why))),
                ("facets", _code(rule.facets) or "none"),
                ("backends", _code(rule.backends) + (f", with {rule.ranks} rank" if rule.ranks else "")),
                ("cells", "; ".join(f"{name} {_code(values)}" for name, values in rule.cells)),
                ("requires", _links(rule.requires, "rules.md") or "nothing"),
                ("folded under", _links(rule.follows, "rules.md")),
                ("reads", _code(rule.steps)),
                ("red with", _links((f.id for f in FAULTS.values() if rule.id in f.rules), "faults.md")),
                ("follows in", _links((f.id for f in FAULTS.values() if rule.id in f.also), "faults.md")),
                ("since", rule.since),
            ]
            out.append(_facts(facts))
    return "\n\n".join(out)


def faults() -> str:
    """Every fault: the bug, the cell that shows it, and the rules that it fails."""
    from moeref_conformance.selftest.faults import FAULTS

    out = []
    for fault in sorted(FAULTS.values(), key=lambda fault: fault.id):
        out.append(f"## {fault.id}\n\n{_seen(fault.bug)}.")
        facts = [
            ("cell", f"`{fault.cell.id}`"),
            ("turns red", _links(fault.rules, "rules.md")),
            ("and with them", _links(fault.also, "rules.md")),
            ("diagnosis", _plain(fault.diagnosis)),
            ("message", _plain(fault.says)),
        ]
        out.append(_facts(facts))
    return "\n\n".join(out)


def known_bugs() -> str:
    """The list that faults are made from: the faults that bring each bug back, or what it waits for."""
    from moeref_conformance.selftest.faults import FAULTS, bugs_of
    from moeref_conformance.selftest.known_bugs import KNOWN_BUGS

    rows = []
    for bug, entry in KNOWN_BUGS.items():
        shown = _links((fault.id for fault in FAULTS.values() if bug in bugs_of(fault)), "faults.md")
        waits = _plain(entry["waits"]) if "waits" in entry else ""
        rows.append((bug, _plain(entry.get("report", bug)), _plain(entry["symptom"]), shown or waits))
    return table(("id", "report", "symptom", "brought back by, or waits for"), rows)


def commands() -> str:
    """Every command of `moeref-conformance` with its arguments."""
    (group,) = (a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction))
    helps = {action.dest: action.help or "" for action in group._choices_actions}
    out = []
    for name, parser in group.choices.items():
        usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
        out.append(f"## {name}\n\n{helps[name][0].upper()}{helps[name][1:]}.\n\n```text\n{_wrapped(usage)}\n```")
        rows = [
            (
                _code(action.option_strings) if action.option_strings else f"`{action.dest}`",
                _value(action),
                _help(action),
            )
            for action in parser._actions
            if not isinstance(action, argparse._HelpAction)
        ]
        out.append(table(("argument", "value", ""), rows))
    return "\n\n".join(out)


def _wrapped(usage: str, width: int = 84) -> str:
    """A usage line broken between arguments."""
    lines = [""]
    for word in re.findall(r"\[[^\]]*\]|\S+", usage):
        if len(lines[-1]) + len(word) >= width:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    return f"`{action.metavar}`" if action.metavar else f"`{action.dest.upper()}`"


def _help(action: argparse.Action) -> str:
    text = _plain((action.help or "") % {"default": action.default})
    return f"{text} (required)".strip() if action.required and action.option_strings else text


def statuses() -> str:
    """Statuses with their signs in the HTML report."""
    return table(("status", "sign", "meaning"), [(f"`{s}`", *LEGEND[s]) for s in STATUSES])


def exit_codes() -> str:
    """Exit codes in words."""
    return table(("code", "meaning"), [(f"`{code}`", words) for code, words in enumerate(EXIT_WORDS)])


def steps() -> str:
    """Steps of a record and the rules that read them."""
    found: dict[str, list[str]] = {}
    for rule in load_rules().values():
        for step in rule.steps:
            found.setdefault(step, []).append(rule.id)
    return table(("step", "read by"), [(f"`{step}`", _links(sorted(ids), "rules.md")) for step, ids in found.items()])


def layout_keys() -> str:
    """The keys of a layout's text form and their defaults."""
    from dataclasses import MISSING, fields

    from moeref.layout import Layout

    def default(value: object) -> str:
        return "" if value is None or value is MISSING else f"`{int(value) if isinstance(value, bool) else value}`"

    shown = {
        "etp": "that of `tp`",
        "world": "the smallest possible",
        "first": "unset",
        "last": "unset",
        "pipeline_layout": "unset",
    }
    return table(("key", "default"), [(f"`{f.name}`", shown.get(f.name) or default(f.default)) for f in fields(Layout)])


def substitutions() -> str:
    """What replaces CUDA on a CPU, and why, by the time of its installation."""
    from moeref_conformance.worlds.cpu import SUBSTITUTIONS

    out = []
    for stage, when in (("torch", "Before Megatron-Core is imported"), ("megatron", "After")):
        rows = [
            (f"`{s.name}`", " ".join((s.install.__doc__ or "").split("\n\n")[0].split()), _plain(s.reason))
            for s in SUBSTITUTIONS
            if s.stage == stage
        ]
        out.append(f"## {when}\n\n{table(('name', 'what it does', 'why'), rows)}")
    return "\n\n".join(out)


def axes() -> str:
    """Axes of a grid, their values and defaults."""
    from moeref_conformance.plan.matrix import GRID_AXES

    rows = []
    for axis in GRID_AXES:
        choices = ("true", "false") if isinstance(axis.default, bool) else axis.choices
        default = "required" if axis.required else f"`{axis.default if axis.default is not False else 'false'}`"
        rows.append((f"`{axis.name}`", _code(choices) or axis.about, default))
    return table(("axis", "values", "default"), rows)


def first_adapter() -> str:
    """The last line of a passing smoke run of the tutorial's adapter."""
    from moeref_conformance.plan.plan import Settings, prepare
    from moeref_conformance.run.header import header
    from moeref_conformance.run.verdicts import not_judged

    from docs.examples.first_adapter import target

    plan = prepare(Settings(target="first_adapter:target", matrix="smoke"), lambda backend: target)
    verdicts = []
    for cell in plan.cells:
        rules = plan.rules_of(cell)
        passed = {rule.id: Verdict(cell=cell.id, rule=rule.id, status="pass") for rule in rules}
        verdicts += (passed | not_judged(plan, cell, rules, "")).values()
    results = Results(header=header(plan), verdicts=verdicts, complete=True)
    return f"```text\n{EXIT_WORDS[results.exit_code]}: {results.headline}\n```"


def profiles() -> str:
    """Profiles with their groups of rules."""
    rows = [(f"`{p}`", _plain(p.text), _code(p.groups)) for p in PROFILES.values()]
    return table(("profile", "says that", "rules"), rows)


#: A run that says only its model and TP 2, for each reader.
_LEAST = {
    "megatron-lm": "torchrun --nnodes 1 --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 2",
    "slime": "train.py --actor-num-nodes 1 --actor-num-gpus-per-node 8 --tensor-model-parallel-size 2",
    "miles": "train.py --tensor-model-parallel-size 2",
    "verl": "-m verl.trainer.main_ppo actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
    "nemo-rl": "run_grpo.py policy.megatron_cfg.tensor_model_parallel_size=2",
    "skyrl": "-m skyrl.train.main_base trainer.policy.megatron_config.tensor_model_parallel_size=2",
    "ms-swift": "megatron sft --tensor_model_parallel_size 2",
    "areal": "train.py actor.backend=megatron:d4t2",
}
#: Whose arguments are Megatron-LM's.
_LISTS = ("megatron-lm", "slime", "miles")
#: The model of an argument list, which names no other.
_MODEL = " --num-layers 48 --hidden-size 2048 --num-attention-heads 32 --num-experts 128 --swiglu"
_COMPARED = (
    *("etp", "seed", "precision", "sequence_parallel", "moe_token_dispatcher_type", "moe_router_dtype"),
    *("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_router_bias_update_rate", "moe_grouped_gemm"),
    *("moe_permute_fusion", "apply_rope_fusion", "bias_activation_fusion", "gradient_accumulation_fusion"),
    *("attention_backend", "recompute_granularity", "attention_dropout", "variable_seq_lengths", "layernorm_epsilon"),
)


def framework_defaults() -> str:
    """The values of a run that says nothing, by framework."""
    from moeref.check.readers import check_reading, read
    from moeref.config.core import known_fields

    columns = []
    for framework in _LEAST:
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "run.sh"
            path.write_text(_LEAST[framework] + (_MODEL if framework in _LISTS else ""))
            report = check_reading(read(framework, [str(path)], "0.19.2"), model="qwen3-30b-a3b", verify=False)
        own = {name: value.value for name, value in report.read.items()}
        fields = {name: entry.get("default") for name, entry in known_fields("0.19.2").items()}
        fields |= {"attention_backend": "auto", "seed": "not read"}
        if framework not in _LISTS:
            fields |= {"layernorm_epsilon": "the model's", "attention_dropout": "the model's"}
        columns.append([str(own.get(name, fields.get(name))) for name in _COMPARED])
    return table(["", *_LEAST], ([f"`{name}`", *values] for name, *values in zip(_COMPARED, *columns, strict=True)))


def published_runs() -> str:
    """The verdict on each published run."""
    words = {"works": "will work", "refused": "will not work", "unknown": "not known"}
    rows = []
    for file in sorted(pathlib.Path(__file__).parents[1].joinpath("tests/upstream/published").glob("*.toml")):
        facts = tomllib.loads(file.read_text(encoding="utf-8"))
        for run in facts["run"]:
            link = f"[{run['file']}]({facts['repository']}/blob/{facts['commit']}/{run['file']})"
            given = f" with {run['with']}" if "with" in run else ""
            rows.append([file.stem, link + given, run["model"], words[run["verdict"]], run.get("why", "")])
    return table(["`--from`", "file", "model", "verdict", "why"], rows)


PARTS: dict[str, Callable[[], str]] = {
    "rules": rules,
    "faults": faults,
    "known-bugs": known_bugs,
    "commands": commands,
    "statuses": statuses,
    "exit-codes": exit_codes,
    "steps": steps,
    "layout-keys": layout_keys,
    "substitutions": substitutions,
    "axes": axes,
    "first-adapter": first_adapter,
    "profiles": profiles,
    "framework-defaults": framework_defaults,
    "published-runs": published_runs,
}
