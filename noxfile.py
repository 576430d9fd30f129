"""The project's commands. `nox -l` lists them; arguments after `--` go to the command a session runs.

Every session installs exact versions from `constraints/`, which `nox -s lock` writes. Environments are kept between
runs, and uv links their files from its cache, so that a second environment with torch costs seconds and little disk.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

import nox

nox.needs_version = ">=2026.10"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.download_python = "never"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["lint", "types", "tests", "conformance"]

PYPROJECT = nox.project.load_toml("pyproject.toml")
ROOT = Path(__file__).parent

#: The newest megatron-core that can be installed on each Python; the first row is the one verdicts are published for.
PYTHON_OF_CORE = {"0.19.2": "3.12", "0.16.1": "3.11"}
CORE, *OLDER_CORES = PYTHON_OF_CORE
PYTHON = PYTHON_OF_CORE[CORE]

#: The oldest transformers that `[kit]` lets in, and what goes with it.
OLDEST = ("transformers==4.57.6", "huggingface-hub==0.36.2", "tokenizers==0.22.2")

#: Released bridges, each in an environment of its own.
PEERS = nox.project.load_toml(ROOT / "conformance/moeref_conformance/targets/peers/peers.toml")

# One thread an operator: rank processes and test workers fill the cores, and no result may depend on their number.
# Bytecode is kept even where the caller's environment turns that off: a run starts many processes, and compiling torch
# and megatron-core in each costs more CPU time than most of their work.
ENV = {
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "",
    "PYTHONWARNINGS": "ignore",
    "UV_PYTHON_DOWNLOADS": "never",
}


#: With nox's own --no-install the GPU session takes the machine's Python as it is.
AS_IT_IS = "--no-install" in sys.argv[: sys.argv.index("--") if "--" in sys.argv else None]
GPU = "conformance-report/gpu"
#: The framework whose own sync docs/examples/skyrl_sync.py hands to the kit.
SKYRL = {
    "repository": "https://github.com/NovaSky-AI/SkyRL",
    "commit": "a9564572eb8e91076be43c1bd5e4615e3de17265",
    "package": "skyrl",
}
#: Compressed bytes of the wheel's files, at most, besides the kit's own proof, which grows with each fault.
WHEEL = 1_100_000
#: The kit's exit code where a claimed cell could not be judged.
INCOMPLETE = 3
#: By the name of their schema.
GITHUB = {
    "github-workflows": "workflows/*.yml",
    "github-issue-forms": "ISSUE_TEMPLATE/*-*.yml",
    "github-issue-config": "ISSUE_TEMPLATE/config.yml",
}


def constraints(python: str) -> Path:
    """The file that pins every distribution, transitive ones too, for sessions on `python`, or for a peer."""
    name = f"peers-{python}" if python in PEERS else f"py{python.replace('.', '')}"
    return ROOT / "constraints" / f"{name}.txt"


def index_settings() -> dict[str, str]:
    """Where pip gets packages from, in uv's words, since uv does not read pip's configuration. Settings of uv win."""
    run = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    settings = dict(line.split("=", 1) for line in run.stdout.splitlines() if "=" in line)
    found = {}
    for option, ours, others in (
        ("index-url", "UV_DEFAULT_INDEX", ("UV_INDEX_URL",)),
        ("cert", "SSL_CERT_FILE", ("SSL_CERT_DIR",)),
    ):
        values = [value.strip("'\"") for key, value in settings.items() if key.rpartition(".")[2] == option]
        if values and not any(name in os.environ for name in (ours, *others)):
            found[ours] = values[-1]  # pip lists its environment variables, which win, last
    return found


def install(session: nox.Session, *requirements: str, groups: tuple[str, ...] = (), peer: str = "") -> None:
    """Install `requirements` and dependency groups at the pinned versions, build backends included."""
    pins = constraints(peer or str(session.python))
    wanted = [*requirements, *nox.project.dependency_groups(PYPROJECT, *groups)]
    env = {**ENV, **index_settings(), "UV_BUILD_CONSTRAINT": str(pins), "PIP_BUILD_CONSTRAINT": str(pins)}
    session.install("-c", str(pins), *wanted, env=env)


def judge(session: nox.Session, matrix: str, out: str) -> None:
    """Install the checkout and judge a target, moeref unless `-- --target …` names another."""
    install(session, "-e", ".[kit]")
    command = ["python", "-m", "moeref_conformance", "run", "--target", "moeref"]
    session.run(*command, "--matrix", f"matrices/{matrix}.toml", "--out", out, *session.posargs, env=ENV)


@nox.session(python=PYTHON)
def conformance(session: nox.Session) -> None:
    """Judge moeref in every cell that needs no GPU; the report goes to conformance-report/."""
    judge(session, "cpu", "conformance-report")


def conformance_with(core: str) -> None:
    # nox's own parametrisation would make plain `nox -s conformance` run every version, so each older one is a
    # session of its own under the name that parametrisation would give it.
    @nox.session(python=PYTHON_OF_CORE[core], name=f"conformance(core='{core}')", default=False)
    def conformance_older(session: nox.Session) -> None:
        judge(session, "cpu", f"conformance-report/core-{core}")

    conformance_older.__doc__ = f"The same against megatron-core {core}."


for _core in OLDER_CORES:
    conformance_with(_core)


def on_gpus(session: nox.Session, *groups: str) -> tuple[str, dict[str, str]]:
    """The Python that works on GPUs, and its environment: of this session, or with `--no-install` the machine's own."""
    if not AS_IT_IS:
        install(session, "-e", ".[kit]", groups=groups)
        return "python", ENV
    # A container's torch and Transformer Engine are built for each other: nothing is installed.
    paths = [str(ROOT), str(ROOT / "conformance"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**ENV, "PYTHONPATH": os.pathsep.join(paths)}
    session.run("python3", "-m", "moeref_conformance.plan.check_environment", env=env)
    return "python3", env


@nox.session(python=False if AS_IT_IS else PYTHON, name="conformance-gpu", default=False)
def conformance_gpu(session: nox.Session) -> None:
    """Judge moeref on this machine's GPUs; `--no-install` takes the machine's own Python and packages as they are."""
    python, env = on_gpus(session)
    if "--out" in session.posargs:
        session.error(f"the report of this session goes to {GPU}/")
    command = [python, "-m", "moeref_conformance", "run", "--target", "moeref", "--matrix", "matrices/gpu.toml"]
    session.run(*command, "--out", GPU, *session.posargs, env=env, success_codes=[0, INCOMPLETE])
    ended = Path(GPU, "results.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    if json.loads(ended).get("exit") != 0:
        # nox knows success and failure only, so that the code of an incomplete run has to go past it.
        session.warn("some cells could not be judged: exit code 3")
        sys.exit(INCOMPLETE)


@nox.session(python=False if AS_IT_IS else PYTHON, name="bench-gpu", default=False)
def bench_gpu(session: nox.Session) -> None:
    """Measure what only GPUs show, into conformance-report/bench-gpu.json; `--no-install` as in conformance-gpu."""
    python, env = on_gpus(session, "bench")
    session.run(python, "-m", "pytest", "-m", "gpu", "tests/bench/gpu", "-s", *session.posargs, env=env)


@nox.session(python=PYTHON, name="gpu-status", default=False)
def gpu_status(session: nox.Session) -> None:
    """Write docs/status/gpu.md: which cells wait for which GPUs, and what conformance-gpu and bench-gpu found."""
    install(session, "-e", ".[kit]")
    command = ["python", "-m", "moeref_conformance", "list", "--matrix", "gpu", "--backends"]
    waiting = str(session.run(*command, env=ENV, silent=True)).strip()
    measured = str(session.run("python", "-m", "tests.bench.gpu.table", "--under", "###", env=ENV, silent=True)).strip()
    found, header = Path(GPU), Path(GPU, "results.jsonl")
    ran = header.is_file() and "GPU" in json.loads(header.read_text(encoding="utf-8").splitlines()[0])["versions"]
    summary = (found / "summary.md").read_text(encoding="utf-8").replace("\n### ", "\n## ") if ran else ""
    page = Path("docs/status/gpu.md")
    start, mark, _ = page.read_text(encoding="utf-8").partition("<!-- written by nox -s gpu-status -->\n")
    if not mark:
        session.error(f"{page} has lost its mark: nothing is written")
    state = summary or "**The GPU run is outstanding.** No cell of this matrix has been judged on a GPU.\n"
    written = f"{start}{mark}\n{state}\n## Cells by world\n\n{waiting}\n\n## Benches\n\n{measured}\n"
    page.write_text(written, encoding="utf-8")


def status_with(core: str) -> None:
    name, words = ("status", "status") if core == CORE else (f"status(core='{core}')", f"\"status(core='{core}')\"")
    page = Path("docs/status", "cpu.md" if core == CORE else f"cpu-core-{core}.md")

    @nox.session(python=PYTHON_OF_CORE[core], name=name, default=False)
    def status(session: nox.Session) -> None:
        out = Path("conformance-report", *([] if core == CORE else [f"core-{core}"]))
        judge(session, "cpu", str(out))
        summary = (out / "summary.md").read_text(encoding="utf-8").replace("\n### ", "\n## ")
        title = "# Status on CPU" + ("" if core == CORE else f" with megatron-core {core}")
        head = f"{title}\n\nMeasured, and written here, by:\n\n```sh\n.venv/bin/nox -s {words}\n```\n\n"
        page.write_text(head + summary, encoding="utf-8")
        shutil.copy(out / "badge.svg", page.with_suffix(".svg"))

    status.__doc__ = f"Judge moeref in the CPU matrix with megatron-core {core} and write the verdict to {page}."


for _core in PYTHON_OF_CORE:
    status_with(_core)


def put_on_path(session: nox.Session, source: dict[str, str] | None) -> dict[str, str]:
    """A source at its pinned commit, if there is one, and the environment in which Python finds it.

    MOEREF_MIRRORS may name a folder with bare copies as `owner/name`, for a machine that does not reach them.
    """
    if not source:
        return ENV
    folder = Path(session.create_tmp()).resolve() / source["commit"]
    if not (folder / source["package"]).is_dir():
        repository, partly = source["repository"], ["--filter=blob:none"]  # blobs come when they are asked for
        if mirrors := os.environ.get("MOEREF_MIRRORS"):
            repository, partly = str(Path(mirrors, *repository.split("/")[-2:])), []
        bare, packed = folder.with_suffix(".git"), folder.with_suffix(".tar")
        if not bare.is_dir():
            session.run_install("git", "clone", "-q", "--bare", *partly, repository, str(bare), external=True)
        paths = [source["package"], *source.get("reads", [])]
        session.run_install(
            "git", "-C", str(bare), "archive", "-o", str(packed), source["commit"], *paths, external=True
        )
        with tarfile.open(packed) as files:
            files.extractall(folder, filter="data")
    return {**ENV, "PYTHONPATH": os.pathsep.join(str(folder / path) for path in source.get("paths", ["."]))}


def peers_with(name: str) -> None:
    # Named as nox's own parametrisation would name it; each has its own Python and pins.
    @nox.session(python=PEERS[name]["python"], name=f"peers({name})", default=False)
    def peers(session: nox.Session) -> None:
        install(session, "-e", ".[kit]", *PEERS[name]["install"], peer=name)
        if alone := PEERS[name].get("without_dependencies"):
            session.install("--no-deps", *alone, env={**ENV, **index_settings()})
        env = put_on_path(session, PEERS[name].get("source"))
        kit, out = ["python", "-m", "moeref_conformance"], f"conformance-report/peers/{name}"
        chosen = [word for word in session.posargs if word not in ("--shards", "--scripts", "--bench")]
        asked = set(session.posargs).difference(chosen)
        if not asked:
            # Known failures are excused, so only what is new fails the session.
            where = f"{out}-selection" if chosen else out
            run = ["run", "--target", name, "--matrix", "matrices/peers.toml", "--out", where, *chosen]
            session.run(*kit, *run, env=env)
        if "--shards" in asked or not session.posargs:
            # The bridges pad a vocabulary to a multiple of TP and no further; so does moeref here.
            pair = ["moeref_conformance.targets.moeref:unpadded", name, "--matrix", "matrices/peers.toml"]
            save = [] if chosen else ["--out", f"{out}/shards.json"]
            session.run(*kit, "shards", *pair, *save, *chosen, env=env)
        if "--scripts" in asked or not session.posargs:
            session.run("pytest", "-m", "cpu", "tests/peers", env={**env, "MOEREF_PEER": name})
        if "--bench" in asked:
            session.run("pytest", "-m", "bench", "tests/peers", "-s", env={**env, "MOEREF_PEER": name})

    peers.__doc__ = (
        f"Judge {name}, compare its shards with moeref's, show its defects without the kit, and stream its export "
        "through moeref; `-- --cell …` judges, `-- --shards` compares, `-- --scripts` shows and streams, "
        "`-- --bench` measures exports."
    )


for _peer in PEERS:
    peers_with(_peer)


@nox.session(python=PYTHON, default=False)
def peers_status(session: nox.Session) -> None:
    """Write docs/status/peers.md from what the peers' sessions left in conformance-report/peers/."""
    install(session, "-e", ".[kit]")
    folders = {name: Path("conformance-report/peers", name, "results.jsonl") for name in PEERS}
    results = [str(file) for file in folders.values() if file.is_file()]
    page, defects = Path("docs/status/peers.md"), "conformance/moeref_conformance/targets/peers/defects.toml"
    command = ["python", "-m", "moeref_conformance", "table", *results, "--defects", defects, "--out", str(page)]
    session.run(*command, env=ENV)
    made = "\n".join([*(f".venv/bin/nox -s 'peers({name})'" for name in PEERS), ".venv/bin/nox -s peers_status"])
    head = f"# Released bridges on CPU\n\nMeasured, and written here, by:\n\n```sh\n{made}\n```\n\n"
    page.write_text(head + page.read_text(encoding="utf-8"), encoding="utf-8")


def with_vllm(session: nox.Session) -> dict[str, str]:
    """Install vLLM's CPU build; the environment in which Python finds this checkout."""
    # pip, since torch's CPU build may come from a folder of wheels or an index that only pip is told of.
    session.install("--no-deps", "-r", "constraints/vllm-py311.txt", env=ENV)
    paths = [str(ROOT), str(ROOT / "conformance")]
    return {**ENV, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}


@nox.session(python="3.11", venv_backend="virtualenv", default=False)
def rollout(session: nox.Session) -> None:
    """Close the loop on a CPU: Megatron trains, vLLM samples, routes and weights cross; `-- --example` shows it."""
    env = with_vllm(session)
    if "--example" in session.posargs:
        words = [word for word in session.posargs if word != "--example"]
        session.run("python", "-m", "docs.examples.grpo_moe", *words, env=env)
    else:
        session.run("pytest", "-m", "engine", "tests/rollout", *session.posargs, env=env)


@nox.session(python="3.11", venv_backend="virtualenv", name="rollout-slow", default=False)
def rollout_slow(session: nox.Session) -> None:
    """The loop in every layout of its matrix, and vLLM's HTTP server."""
    session.run("pytest", "-m", "slow", "-s", "tests/rollout", *session.posargs, env=with_vllm(session))


@nox.session(python="3.11", venv_backend="virtualenv", default=False)
def sync(session: nox.Session) -> None:
    """Judge how moeref updates a real vLLM, in matrices/rollout.toml; `-- --faults` proves that the kit can fail."""
    env = with_vllm(session)
    if "--faults" in session.posargs or any("skyrl" in word for word in session.posargs):
        skyrl = put_on_path(session, SKYRL)["PYTHONPATH"]
        env["PYTHONPATH"] = os.pathsep.join((env["PYTHONPATH"], skyrl))
    if "--faults" in session.posargs:
        words = [word for word in session.posargs if word != "--faults"]
        session.run("pytest", "-m", "sync", "tests/rollout", *words, env=env)
    else:
        kit = ["python", "-m", "moeref_conformance", "run", "--target", "moeref"]
        command = [*kit, "--matrix", "rollout", "--deadline", "600"]
        session.run(*command, "--out", "conformance-report/sync", *session.posargs, env=env)


@nox.session(python=PYTHON_OF_CORE[OLDER_CORES[-1]], default=False)
def oldest(session: nox.Session) -> None:
    """Judge moeref in matrices/smoke.toml with the oldest megatron-core and transformers that `[kit]` lets in."""
    install(session, "-e", ".[kit]")
    session.install(*OLDEST, env={**ENV, **index_settings()})
    command = ["python", "-m", "moeref_conformance", "run", "--target", "moeref"]
    session.run(*command, "--matrix", "smoke", "--out", "conformance-report/oldest", *session.posargs, env=ENV)


def preflight_with(core: str) -> None:
    @nox.session(
        python=PYTHON_OF_CORE[core], name="preflight" if core == CORE else f"preflight(core='{core}')", default=False
    )
    def preflight(session: nox.Session) -> None:
        install(session, "-e", ".[kit]", groups=("test",))
        cases = session.posargs or ["5000", "300"]
        session.run("python", "-m", "tests.upstream.preflight_cases", *cases, env=ENV)
        session.run("pytest", "tests/upstream/test_costs_against_megatron.py", env=ENV)
        bad = ("tests/unit/test_bad_input.py", "tests/unit/test_bad_framework_files.py")
        session.run("pytest", *bad, env={**ENV, "MOEREF_FUZZ": "10000"})

    preflight.__doc__ = f"Compare `moeref check` with megatron-core {core} itself in random runs and print the rates."


for _core in PYTHON_OF_CORE:
    preflight_with(_core)


@nox.session(python=PYTHON, default=False)
def static(session: nox.Session) -> None:
    """Judge moeref's names and plans for published models, up to 8192 ranks; the report goes to conformance-report/."""
    judge(session, "static", "conformance-report/static")


@nox.session(python=PYTHON)
def smoke(session: nox.Session) -> None:
    """Judge moeref in the few cells of matrices/smoke.toml."""
    judge(session, "smoke", "conformance-report/smoke")


@nox.session(python=PYTHON)
def tests(session: nox.Session) -> None:
    """Run all tests that need no GPU; `-- tests/unit -k layout` selects."""
    install(session, "-e", ".[kit]", groups=("test",))
    session.run("pytest", "-m", "cpu", "-n", "2", "--dist", "loadgroup", *session.posargs, env=ENV)


@nox.session(python=PYTHON, default=False)
def faults(session: nox.Session) -> None:
    """Ask every fault for all facets, where `tests` asks for those of its rules: what else turns red shows."""
    install(session, "-e", ".[kit]", groups=("test",))
    tests = ("tests/kit/test_faults.py", "-k", "test_fault_turns")
    session.run("pytest", "-m", "cpu", *tests, *session.posargs, env=ENV | {"ALL_FACETS": "1"})


@nox.session(python=PYTHON, default=False)
def commands(session: nox.Session) -> None:
    """Run the commands of the README and the docs that judge many cells, as they stand there."""
    install(session, "-e", ".[kit]", groups=("test",))
    session.run("pytest", "-m", "long", "-v", "tests/unit/test_long_commands.py", *session.posargs, env=ENV)


@nox.session(python=PYTHON)
def lint(session: nox.Session) -> None:
    """Check rules and formatting with ruff, and GitHub's files; `-- --fix` lets ruff mend."""
    install(session, groups=("lint",))
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", *([] if "--fix" in session.posargs else ["--check"]))
    for schema, files in GITHUB.items():
        paths = sorted(str(path) for path in Path(".github").glob(files))
        session.run("check-jsonschema", "--builtin-schema", f"vendor.{schema}", *paths)
    session.run("actionlint")  # with shellcheck for the scripts in workflows
    session.run("shellcheck", ".ci/run")
    session.run("zizmor", "--offline", "--no-progress", "--quiet", ".github")


@nox.session(python=PYTHON)
def types(session: nox.Session) -> None:
    """Check types with mypy --strict."""
    install(session, "-e", ".[kit]", groups=("types",))
    session.run("mypy", *session.posargs)


@nox.session(python=PYTHON, default=False)
def mutants(session: nox.Session) -> None:
    """Change layout, families and bridge bit by bit and list the changes no test sees; `-- moeref/layout` selects."""
    install(session, "-e", ".[kit]", groups=("mutants",))
    wanted = [f"{path.strip('/').removesuffix('.py').replace('/', '.')}.*" for path in session.posargs]
    env = {**ENV, "CI": "1"}  # hypothesis' `ci` profile: the same examples for every mutant
    session.run("mutmut", "run", *(wanted or ["moeref.*"]), env=env)  # what is named is tried anew
    results = session.run("mutmut", "results", env=env, silent=True)
    missed = [line.strip() for line in str(results).splitlines() if not line.endswith((": killed", ": not checked"))]
    session.log("\n".join([f"{len(missed)} not killed (`mutmut show NAME` prints the change):", *missed]))


@nox.session(python=PYTHON, default=False)
def mutants_ranks(session: nox.Session) -> None:
    """After `mutants`: try the mutants of functions that ranks run together; `-- --sample 30` draws some."""
    install(session, "-e", ".[kit]", groups=("mutants",))
    with session.chdir("mutants"):  # its packages come before the installed ones
        session.run("python", "-m", "tests.mutate_ranks", *session.posargs, env=ENV)


@nox.session(python=PYTHON, default=False)
def mutants_kit(session: nox.Session) -> None:
    """Change the kit's judges and oracles bit by bit and list what no fault or test sees; `-- judges.load` selects."""
    install(session, "-e", ".[kit]", groups=("test",))
    session.run("python", "-m", "tests.kit.mutate", *session.posargs, env=ENV)


@nox.session(python=PYTHON, default=False)
def mutants_target(session: nox.Session) -> None:
    """Change moeref bit by bit and list what no cell notices; `-- megatron.lora --sample 30` selects and draws."""
    install(session, "-e", ".[kit]", groups=("test",))
    session.run("python", "-m", "tests.kit.mutate_target", *session.posargs, env=ENV)


@nox.session(python=PYTHON, default=False)
def traces(session: nox.Session) -> None:
    """Try 10,000 random traces of tokens, and 1,000 of weight updates in which any call may fail."""
    install(session, "-e", ".[kit]", groups=("test",))
    for tests, traces in (("test_provenance.py", "10000"), ("test_weight_sync.py", "1000")):
        session.run("pytest", f"tests/unit/{tests}", *session.posargs, env={**ENV, "MOEREF_FUZZ": traces})


@nox.session(python=PYTHON, default=False)
def bench(session: nox.Session) -> None:
    """Measure, each figure next to what it is held against; `-- -k export` selects."""
    install(session, "-e", ".[kit]", groups=("bench",))
    session.run("pytest", "-m", "bench", "tests/bench", "-s", *session.posargs, env=ENV)


@nox.session(python=PYTHON, default=False)
def docs(session: nox.Session) -> None:
    """Build the documentation into docs/_build/html; a warning is an error."""
    install(session, "-e", ".[kit]", groups=("docs",))
    strict = ["-E", "-W", "--keep-going", "-q", "-d", "docs/_build/doctrees"]
    session.run("sphinx-build", *strict, "-b", "html", "docs", "docs/_build/html", *session.posargs, env=ENV)


@nox.session(python=PYTHON, reuse_venv=False, default=False)
def build(session: nox.Session) -> None:
    """Build sdist and wheel, and use the wheel from outside the checkout."""
    install(session, groups=("build",))
    with tempfile.TemporaryDirectory() as folder:
        session.run("python", "-m", "build", "--no-isolation", "--outdir", folder, env=ENV)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            size = sum(info.compress_size for info in files.infolist() if "/selftest/" not in info.filename)
        if size > WHEEL:
            session.error(f"{wheel.name} has {size:,} bytes without selftest, over {WHEEL:,}")
        install(session, f"{wheel}[kit]")
        with session.chdir(folder):
            session.run("python", "-c", "import moeref; print(moeref.__file__)", env=ENV)
            session.run("moeref-conformance", "list", env=ENV)
            judging = ["pytest", "--pyargs", "moeref_conformance", "--target", "moeref"]
            session.run(*judging, "--matrix", "smoke", "--collect-only", "-q", env=ENV)


@nox.session(python=PYTHON, reuse_venv=False, default=False)
def stopwatch(session: nox.Session) -> None:
    """Time what a newcomer waits for: install, a first check, a first verdict by adapter and by a recorded run."""
    begun = time.monotonic()
    install(session, "-e", ".[kit]", groups=("test",))
    seconds = {"install": time.monotonic() - begun}
    tutorial = ["pytest", "-q", "tests/unit/test_docs.py", "-k"]
    for what, command in {
        "first check": ["moeref", "check", "qwen3-30b-a3b", "--layout", "tp=2,ep=8,etp=1"],
        "tutorial of adapters": [*tutorial, "tutorials_run and judge-your-framework"],
        "tutorial of recorded runs": [*tutorial, "tutorials_run and first-dump"],
    }.items():
        begun = time.monotonic()
        session.run(*command, env=ENV, silent=True)
        seconds[what] = time.monotonic() - begun
    session.log("\n".join(["seconds:", *(f"{took:8.1f}  {what}" for what, took in seconds.items())]))


@nox.session(python=PYTHON, default=False)
def lock(session: nox.Session) -> None:
    """Write constraints/ anew; a pin moves only where it must, or everywhere with `-- --upgrade`."""
    install(session, groups=("nox",))
    groups = [word for group in PYPROJECT["dependency-groups"] for word in ("--group", group)]
    # The others need a GPU, or an environment of their own.
    extras = [word for extra in ("kit", "yaml", "zstd") for word in ("--extra", extra)]
    for python in PYTHON_OF_CORE.values():
        pins = constraints(python)
        command = ["uv", "pip", "compile", "pyproject.toml", *extras, *groups, "--python-version", python]
        command += ["--quiet", "--no-annotate", "--output-file", str(pins.relative_to(ROOT)), *session.posargs]
        session.run(*command, env={**ENV, **index_settings(), "UV_CUSTOM_COMPILE_COMMAND": "nox -s lock"})
    for peer, environment in PEERS.items():
        python = environment["python"]
        with tempfile.TemporaryDirectory() as folder:
            wishes = Path(folder, "requirements.in")
            wishes.write_text("\n".join(environment["install"]), encoding="utf-8")
            command = ["uv", "pip", "compile", "pyproject.toml", str(wishes), "--extra", "kit"]
            command += ["--python-version", python, "-c", str(constraints(python).relative_to(ROOT)), "--quiet"]
            command += ["--no-annotate", "--output-file", str(constraints(peer).relative_to(ROOT)), *session.posargs]
            session.run(*command, env={**ENV, **index_settings(), "UV_CUSTOM_COMPILE_COMMAND": "nox -s lock"})
