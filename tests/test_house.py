"""The rules of the house: floors, libraries, caps, names, documentation, and what starts without torch.

An exception stands in `ALLOWED` (or `SIBLINGS`) with its reason. One that nothing needs any more fails too.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import draftgauge

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "draftgauge"

# Imports go down only; `errors` is everybody's. The roof is the package itself, which names what the floors
# offer, and `python -m draftgauge`.
FLOORS = {
    0: "errors progress tensorfile acceptance ranking tree stats caveats trust repetition",
    1: "store prompts wiring configs keys plainpickle torchfile distcp weights urls remotefiles summary",
    2: "checkpoint recording runs probe neighbours targetfiles targetends rendering featurefiles",
    3: "parts fit matching layouts target features drafters stated engines resulttable",
    4: "shards workers record importing replay measure decode pairing trials search controls soundness health "
    "witness probing",
    5: "evaluate online crosscheck picking exporting formats sources compare train inspection report check diagnose "
    "gates beside kept like trackers",
    6: "fleet viewer sweep",
    7: "cli",
    8: "draftgauge __main__",
}
SIBLINGS = {
    "prompts -> store": "a prompt set is identified by its content, as files are",
    "configs -> wiring": "a config is one of the sources that a wiring is read from",
    "torchfile -> plainpickle": "the pickle is one entry of the zip that torch writes",
    "distcp -> keys": "flat names are divided where a fusion of taps begins",
    "distcp -> plainpickle": "its description is a pickle",
    "distcp -> store": "what is put together is published as all files of ours are",
    "distcp -> torchfile": "each chunk is a file of torch inside another",
    "urls -> remotefiles": "most addresses are of files elsewhere",
    "urls -> store": "what was fetched is published as all files of ours are",
    "weights -> distcp": "weights lie in distributed checkpoints as well",
    "weights -> keys": "which of a file's states is the drafter's shows in its names",
    "weights -> plainpickle": "a trainer's save holds opaque values beside its tensors",
    "weights -> torchfile": "weights lie in torch files as in safetensors",
    "target -> features": "a target's ends are written as features are",
    "drafters -> features": "features bring mapped bytes into torch, the weights too",
    "controls -> trials": "a control compares streaks on a trial",
    "search -> pairing": "a search tries wirings of a pair",
    "search -> trials": "wirings are compared on a trial",
    "trials -> replay": "a trial's streaks are replayed",
    "evaluate -> check": "a run carries the controls that cost little",
    "sweep -> fleet": "what a plan of one machine or many says of `eval` is the same table",
    "gates -> compare": "a gate against a run is a comparison",
    "like -> evaluate": "it gives the options of an evaluation",
    "evaluate -> sources": "a run says what it was measured from",
    "report -> compare": "a report of a run beside a baseline is a comparison",
    "report -> kept": "a report says where the checkpoint that a run keeps is not what was measured",
    "formats -> exporting": "the table of all formats takes those that are written from where they are",
    "crosscheck -> check": "a replay that is not trusted is no witness",
    "crosscheck -> online": "one of the witnesses",
    "shards -> measure": "a shard is a measurement of a few prompts",
    "shards -> pairing": "a worker opens what it measures",
    "measure -> replay": "a measurement is a replay of every item",
}
# Third-party libraries and who may import them; `*` is everybody.
LIBRARIES = {
    "numpy": "*",
    "jaxtyping": "*",
    "torch": "shards target features drafters record importing replay measure decode pairing train trials controls "
    "soundness health witness probing search crosscheck",
    "transformers": "target record",
    "huggingface_hub": "target urls",
    "numba": "ranking tree",
    "scipy": "stats",
    "tokenizers": "report",
    "pyarrow": "runs resulttable parts shards",
    "tomli_w": "diagnose",
    "tqdm": "progress",
    "filelock": "store",
    "jinja2": "rendering report viewer",
    "click": "cli",
    "msgspec": "fleet viewer sweep",
    "tenacity": "fleet engines remotefiles",
    "httpx2": "engines urls remotefiles",
    "fsspec": "remotefiles",
    "pebble": "workers",
    "starlette": "viewer",
    "vl_convert": "report",
    "uvicorn": "viewer",
}
# Optional ones by the extra that brings them, and who may import them: each inside a function.
EXTRAS = {
    "tensorboard": ("tensorboardX", "trackers"),
    "wandb": ("wandb", "trackers"),
    "mlflow": ("mlflow", "trackers"),
    "trackio": ("trackio", "trackers"),
    "ray": ("ray", "workers"),
}
FLOOR_OF = {module: floor for floor, modules in FLOORS.items() for module in modules.split()}
HEAVY = ("torch", "transformers", "numba", "scipy", "pyarrow", "numpy")
TORCHLESS = [m for m in FLOOR_OF if FLOOR_OF[m] < 3] + [
    "stated",
    "resulttable",
    "parts",
    "workers",
    "inspection",
    "fit",
    "layouts",
    "matching",
    "picking",
    "exporting",
    "formats",
    "compare",
    "gates",
    "beside",
    "kept",
    "trackers",
    "report",
    "fleet",
    "viewer",
    "engines",
    "cli",
]

MAX_MODULE_LINES, MAX_BODY_LINES, MAX_PARAMETERS = 500, 60, 7
# What a function is about may be a pair (a checkpoint and a recording); everything that says how is named.
MAX_POSITIONAL = 2
BANNED_NAMES = {"utils", "util", "common", "helpers", "helper", "base", "manager", "misc"}
ALLOWED: Mapping[str, Mapping[str, str]] = {
    "module lines": {},
    "body lines": {},
    "parameters": {
        "cli.engines.references": "click hands over one parameter for each option",
        "cli.fleet.stage": "click hands over one parameter for each option",
        "cli.making.record": "click hands over one parameter for each option",
        "cli.recordings.import_": "click hands over one parameter for each option",
        "cli.reporting.report": "click hands over one parameter for each option",
        "cli.measuring.eval_": "click hands over one parameter for each option",
        "tree._offer": "a kernel that is inlined: a tuple of arrays would be unpacked at every call",
    },
    "keyword-only": {
        "trials.paired_change": "before and after, on one trial",
        "stats.paired_ratio_difference": "two ratios, each numerators before denominators",
    },
    "documented": {},
    "broad except": {
        "workers": "whatever an engine or a system makes of a lost worker is data: the piece is run again",
    },
    "hasattr": {},
    "inheritance": {},
    "test file": {
        "errors": "a table without behaviour: test_cli checks the exit codes",
        "draftgauge": "only names: test_every_public_name_is_what_the_package_says",
        "__main__": "one line that calls the command line",
        "options": "test_cli gives every option to the commands that share it",
        "making": "commands: test_cli runs them",
        "measuring": "commands: test_cli runs them",
        "reading": "commands: test_cli runs them",
        "reporting": "a command: test_page runs it",
        "progress": "what it shows is seen on stderr in test_cli; it decides nothing",
        "sources": "what it says is read back from run.json and summary.json in test_evaluate",
        "weights": "the inside of checkpoint: test_checkpoint covers every form of file",
    },
}


def module_of(path: Path) -> str:
    """The floor's name for a file: its module or sub-package; `draftgauge` for the package's own `__init__`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "draftgauge" if parts == ("__init__",) else parts[0]


FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Every import of a file, wherever it stands in it: (top-level package, module of ours or "")."""
    for node in ast.walk(TREES[path]):
        match node:
            case ast.Import(names=names):
                full = [alias.name for alias in names]
            case ast.ImportFrom(module="draftgauge", names=names):
                full = [f"draftgauge.{alias.name}" for alias in names]
            case ast.ImportFrom(module=str(module), level=0):
                full = [module]
            case ast.ImportFrom():
                pytest.fail(f"{dotted(path)}, line {node.lineno}: a relative import; write draftgauge.NAME")
            case _:
                continue
        for name in full:
            top, _, rest = name.partition(".")
            yield top, rest.partition(".")[0] if top == "draftgauge" else ""


def test_every_module_has_a_floor() -> None:
    modules = {module_of(path) for path in FILES}
    assert modules == FLOOR_OF.keys(), "put it on a floor in FLOORS, or take it off"


def test_imports_go_down_the_floors() -> None:
    upward, siblings = set(), set()
    for path in FILES:
        module = module_of(path)
        for ours in {ours for _, ours in imports(path)} - {"", "errors", module}:
            if FLOOR_OF[ours] > FLOOR_OF[module]:
                upward.add(f"{module} -> {ours}")
            elif FLOOR_OF[ours] == FLOOR_OF[module]:
                siblings.add(f"{module} -> {ours}")
    assert not upward
    assert siblings == SIBLINGS.keys(), "siblings do not import each other, except those named with a reason"


def test_the_page_on_the_house_shows_every_module_on_its_floor() -> None:
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    rows = {
        int(floor): set(re.findall(r"`(\w+)`", row))
        for floor, row in re.findall(r"^\| (\d) \|(.*)$", page, re.M)
    }
    missing = {module: floor for module, floor in FLOOR_OF.items() if floor < 8 and module not in rows[floor]}
    assert not missing, "docs/how-it-works.md has a table of the floors"


def test_libraries_are_imported_where_they_belong() -> None:
    for path in FILES:
        for library in {top for top, _ in imports(path)} - sys.stdlib_module_names - {"draftgauge"}:
            known = {**LIBRARIES, **dict(EXTRAS.values())}
            assert library in known, f"{dotted(path)} imports {library}: say in LIBRARIES who may"
            allowed = known[library].split()
            assert allowed == ["*"] or module_of(path) in allowed, f"{dotted(path)} must not import {library}"


def test_libraries_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {re.split(r"[^\w-]", requirement)[0] for requirement in project["dependencies"]}
    declared = {name.replace("-", "_").removesuffix("_python") for name in named}
    assert declared == LIBRARIES.keys()
    assert project["optional-dependencies"].keys() - {"demo", "dev"} == EXTRAS.keys()


def loaded_after(code: str) -> set[str]:
    """The heavy libraries that a fresh interpreter has loaded once `code` has run."""
    report = f"import sys; print('loaded:', *(m for m in {HEAVY} if m in sys.modules))"
    command = [sys.executable, "-c", f"{code}\n{report}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("loaded:")[2].split())


def test_what_needs_no_torch_loads_none() -> None:
    code = "".join(f"import draftgauge.{module}\n" for module in TORCHLESS)
    assert not loaded_after(code) & {"torch", "transformers"}


@pytest.mark.parametrize(
    "code",
    [
        "import draftgauge",
        "import draftgauge.cli",
        "from click.testing import CliRunner\nfrom draftgauge.cli import cli\n"
        "assert CliRunner().invoke(cli, ['--help']).exit_code == 0",
    ],
    ids=["import", "import cli", "--help"],
)
def test_starting_loads_nothing_heavy(code: str) -> None:
    assert loaded_after(code) == set()


Function = ast.FunctionDef | ast.AsyncFunctionDef


def definitions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, Function | ast.ClassDef]]:
    """Every function and class in a tree with its dotted name; inside a function the name has `<locals>`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function | ast.ClassDef):
            name = f"{prefix}.{node.name}"
            yield name, node
            yield from definitions(node, name if isinstance(node, ast.ClassDef) else f"{name}.<locals>")
        else:
            yield from definitions(node, prefix)


DEFINITIONS = [
    (path, name, node) for path, tree in TREES.items() for name, node in definitions(tree, dotted(path))
]
FUNCTIONS = [(path, name, node) for path, name, node in DEFINITIONS if isinstance(node, Function)]


def is_public(path: Path, name: str) -> bool:
    """Whether a definition is one that the floors 0 to 4 offer to others."""
    inside = name.removeprefix(dotted(path)).split(".")
    return FLOOR_OF[module_of(path)] <= 4 and not any(part.startswith(("_", "<")) for part in inside)


def parameters(node: Function, *, keywords: bool) -> list[str]:
    """The names of a function's parameters without `self` and `cls`, with or without the keyword-only ones."""
    args = node.args.posonlyargs + node.args.args + (node.args.kwonlyargs if keywords else [])
    return [arg.arg for i, arg in enumerate(args) if i or arg.arg not in ("self", "cls")]


def body_lines(node: Function) -> int:
    """Lines from the first statement after the docstring to the last."""
    first = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    return (node.end_lineno or 0) - first[0].lineno + 1 if first else 0


def judge(rule: str, offenders: Mapping[str, object]) -> None:
    """Fail on what is not allowed, and on an allowance that nothing needs."""
    allowed = ALLOWED[rule].keys()
    broken = [f"{name}: {found}" for name, found in offenders.items() if name not in allowed]
    assert not broken, "\n".join([f"{rule}: mend it, or allow it with a reason", *broken])
    assert allowed <= offenders.keys(), f"{rule}: these allowances are not needed any more"


def test_modules_are_short() -> None:
    lines = {dotted(path): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    judge("module lines", {name: count for name, count in lines.items() if count > MAX_MODULE_LINES})


def test_functions_are_short() -> None:
    lines = {name: body_lines(node) for _, name, node in FUNCTIONS}
    judge("body lines", {name: count for name, count in lines.items() if count > MAX_BODY_LINES})


def test_functions_have_few_parameters() -> None:
    taken = {name: parameters(node, keywords=True) for _, name, node in FUNCTIONS}
    judge("parameters", {name: names for name, names in taken.items() if len(names) > MAX_PARAMETERS})


def test_parameters_that_say_how_are_named_by_the_caller() -> None:
    public = {
        name: parameters(node, keywords=False) for path, name, node in FUNCTIONS if is_public(path, name)
    }
    judge("keyword-only", {name: names for name, names in public.items() if len(names) > MAX_POSITIONAL})


def test_everything_public_is_documented() -> None:
    bare = {dotted(path): 1 for path, tree in TREES.items() if not ast.get_docstring(tree)}
    bare |= {
        name: node.lineno
        for path, name, node in DEFINITIONS
        if is_public(path, name) and not ast.get_docstring(node)
    }
    judge("documented", bare)


def test_failures_are_not_swallowed() -> None:
    """Below floor 5 every `except` and `suppress` names the errors that it knows what to do about."""
    broad = {}
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            match node:
                case ast.ExceptHandler(type=caught):
                    kinds = [ast.Name("everything")] if caught is None else list(ast.walk(caught))
                case ast.Call(func=ast.Name("suppress") | ast.Attribute(attr="suppress"), args=kinds):
                    pass
                case _:
                    continue
            names = {kind.id for kind in kinds if isinstance(kind, ast.Name)}
            if names & {"everything", "Exception", "BaseException"} and FLOOR_OF[module_of(path)] < 5:
                broad[dotted(path)] = node.lineno
    judge("broad except", broad)


def test_nothing_asks_what_an_object_has() -> None:
    asked = {
        dotted(path): node.lineno
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id == "hasattr"
    }
    judge("hasattr", asked)


def test_classes_of_ours_are_not_inherited() -> None:
    """Only the errors are a tree; elsewhere a shared shape is a `Protocol`, which is not inherited either."""
    ours = {
        node.name
        for path, _, node in DEFINITIONS
        if isinstance(node, ast.ClassDef) and module_of(path) != "errors"
    }
    heirs = {
        name: [ast.unparse(base) for base in node.bases]
        for _, name, node in DEFINITIONS
        if isinstance(node, ast.ClassDef) and ours & {ast.unparse(base).split(".")[-1] for base in node.bases}
    }
    judge("inheritance", heirs)


def test_names_say_what_a_module_is_about() -> None:
    vague = {dotted(path) for path in FILES if BANNED_NAMES & set(re.split(r"[._]", dotted(path)))}
    assert not vague


def test_every_module_has_its_test_file() -> None:
    """`tests/test_NAME.py`, NAME the module's; the sub-package's for an `__init__` with more than a docstring."""
    full = [path for path, tree in TREES.items() if len(tree.body) > 1]
    names = sorted({module_of(path) if path.stem == "__init__" else path.stem for path in full})
    wanted = {name: f"tests/test_{name}.py" for name in names}
    judge("test file", {name: file for name, file in wanted.items() if not (ROOT / file).is_file()})


def test_every_public_name_is_what_the_package_says() -> None:
    says = {
        str(alias.asname): str(node.module).removeprefix("draftgauge.")
        for node in ast.walk(TREES[PACKAGE / "__init__.py"])
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("draftgauge.")
        for alias in node.names
    }
    assert sorted(draftgauge.__all__) == sorted(says)
    defined = {name for _, name, _ in DEFINITIONS}
    assert {f"{module}.{name}" for name, module in says.items()} <= defined
    hidden = says.keys() & FLOOR_OF.keys()
    assert not hidden, (
        "once a module is imported, draftgauge.NAME is the module: give one of them another name"
    )


TEXT = {".py", ".toml", ".txt", ".md", ".yml", ".jsonl", ".json", ".cfg", ""}
PLACES = ("src", "tests", "demo", "bench", "docs", ".github", ".ci")


def text_files() -> list[Path]:
    """Our files, without what tools leave beside them."""
    inside = (path for place in PLACES for path in (ROOT / place).rglob("*"))
    ours = [p for p in (*ROOT.iterdir(), *inside) if p.is_file() and p.suffix in TEXT]
    return [
        p for p in ours if not any(part == "__pycache__" or part.endswith(".egg-info") for part in p.parts)
    ]


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    found = {}
    for path in text_files():
        place = path.relative_to(ROOT).as_posix()
        private = "work|root|tmp" if place.startswith(("src/", "docs/", "README")) else "work|root"
        match = re.search(rf"(?<![\w.:/-])/(?:{private})/\S*", path.read_text(encoding="utf-8"))
        if match:
            found[place] = match.group()
    assert not found
