"""Write docs/fleet-walk.md: one measurement across three hosts, with what the commands really print.

`make fleet-walk` makes the hosts out of namespaces (root, and what `make hosts` installs), puts a trainer's
checkpoint into a container on one and a recording onto another, runs every command on the workstation between
them, and writes the page; nothing on it is typed by hand but the sentences between the commands.
"""

import json
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from draftgauge.checkpoint import open_checkpoint  # noqa: E402
from tests.hosts.fleet import Hosts, why_not  # noqa: E402

PAGE = ROOT / "docs" / "fleet-walk.md"
TARGET = ROOT / ".cache" / "SmolLM2-135M-Instruct"
DRAFTER, EARLY = (ROOT / "demo" / "drafter" / name for name in ("step_4000", "step_250"))
DESK, PYTHON = "/data/desk", "/usr/local/bin/python-draftgauge"
FLEET = f"""[hosts.pve1]
ssh = "train"

[containers.ct200]
host = "pve1"
kind = "pct"
id = "200"
work = "/data"
bandwidth = "100 MB/s"

[hosts.eval1]
ssh = "eval"
work = "/data/draftgauge"
python = "{PYTHON}"
"""
PLAN = """fleet = "fleet.toml"
checkpoint = "ct200:out/checkpoint.pt"
recording = "eval1:recordings/{recording}"

[eval]
block_size = 4
budgets = [4, 8, 16]

[baseline]
stored = "earlier.json"

[trainer]
log = "ct200:train.log"
pattern = 'step (?P<step>\\d+) .* (?P<ktok_per_s>[\\d.]+) Ktok/s'
"""
LOG = "step 5300 loss 2.41 | 19.4 Ktok/s\nstep 5329 loss 2.40 | 19.5 Ktok/s\n"
HEAD = """# The latest checkpoint, in the eval harness

<!-- Written by docs/fleet_walk.py from what the commands print: edit that, then run `make fleet-walk`. -->

Training runs in a container on a Proxmox host. The target's hidden states are kept on another host, which cannot
reach the first; of the ten prompts that were asked for, three are left. Somebody at a workstation, which reaches
both, wants to know what the latest checkpoint is worth, beside what an earlier harness stored of step 250. The hosts
are three network namespaces on one machine, each with an sshd, a disk and processes of its own, and no route between
training and evaluation; the container is a real LXC container, and `pct` is a stand-in for Proxmox's that enters it
with `lxc-attach`. Drafter and target are the demo's. [fleet.md](fleet.md) says what each file may hold.
"""


def trainers_file(folder: Path) -> Path:
    """The demo's drafter as a trainer would save it: an optimizer, a norm that nobody uses, a step."""
    opened = open_checkpoint(DRAFTER)
    weights = {}
    for name, tensor in opened.tensors.items():
        values = torch.from_numpy(tensor.to_float32())
        weights[name] = values.to(
            {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[tensor.dtype]
        )
    moments = {name: torch.zeros_like(values, dtype=torch.float32) for name, values in weights.items()}
    weights["verifier_norm.weight"] = torch.ones(opened.tensors["norm.weight"].shape)
    state = {
        "model_state_dict": weights,
        "optimizer_state_dict": {"exp_avg": moments, "exp_avg_sq": dict(moments)},
        "step": 4000,
        "config": opened.config,
    }
    path = folder / "checkpoint.pt"
    torch.save(state, path)
    return path


def recording(folder: Path) -> Path:
    """What the demo's target does on three of its ten prompts; the others are said to be missing."""
    words = ("record", "--target", TARGET, "--checkpoint", DRAFTER, "--prompts", "builtin:coding10")
    words += ("--num-prompts", "3", "--max-new-tokens", "192", "--portable", "--recordings", folder, "--json")
    made = Path(json.loads(draftgauge(*words))["path"])
    manifest = json.loads((made / "recording.json").read_text())
    manifest["produced"]["prompts_asked"] = 10
    (made / "recording.json").write_text(json.dumps(manifest))
    return made


def stored_result(folder: Path, made: Path) -> bytes:
    """What an earlier harness would have kept of step 250: bare numbers, under that harness's names."""
    words = ("eval", EARLY, "--recording", made, "--runs", folder / "runs", "--block-size", "4", "--json")
    summary = json.loads(draftgauge(*words))["summary"]
    stored = {}
    for prompt, value in summary["prompts"].items():
        policies = value["policies"]
        stored[prompt] = {
            "vanilla": round(policies["chain"]["streak"], 3),
            "DDTree top-4": round(policies["coverage4"]["streak"], 3),
            "DDTree top-8": round(policies["coverage8"]["streak"], 3),
            "tau with bonus": round(policies["chain"]["tau"], 3),
        }
    return json.dumps(stored).encode()


def draftgauge(*words: object) -> str:
    """What a command prints here, before the walk."""
    command = [sys.executable, "-m", "draftgauge", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603 - our own


class Desk:
    """The workstation."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts

    def put(self, host: str, path: str, data: bytes) -> None:
        """Writes a file on a host."""
        program = 'mkdir -p "$(dirname "$1")" && cat > "$1"'
        self.hosts.run(host, "sh", "-c", program, "sh", path, input=data)

    def shown(self, *words: str) -> str:
        """A command as it would be typed, and what it prints."""
        program = 'cd "$1" && shift && exec env TQDM_DISABLE=1 "$@"'
        done = self.hosts.run(
            "ws", "sh", "-c", program, "sh", DESK, PYTHON, "-m", "draftgauge", *words, check=False, text=True
        )
        if done.returncode not in (0, 4):
            raise SystemExit(f"{words} failed:\n{done.stdout}\n{done.stderr}")
        print(f"{' '.join(words)}: exit code {done.returncode}", file=sys.stderr)
        return f"```text\n$ draftgauge {' '.join(words)}\n{done.stdout.rstrip()}\n```\n"


def walk(desk: Desk, made: Path, stored: bytes) -> list[str]:
    """The page's parts."""
    plan = PLAN.format(recording=made.name)
    for name, data in (
        ("fleet.toml", FLEET.encode()),
        ("drafter.toml", plan.encode()),
        ("earlier.json", stored),
    ):
        desk.put("ws", f"{DESK}/{name}", data)
    return [
        HEAD,
        "## The fleet\n\nOne file names the machines, as you would reach them yourself:\n",
        f"```toml\n{FLEET}```\n",
        "Does everything answer, and who reaches whom?\n",
        desk.shown("fleet", "check", "fleet.toml"),
        "## What would be moved\n\nOf the trainer's file, what an evaluation needs; the optimizer stays behind.\n",
        desk.shown(
            *(
                "stage",
                "--fleet",
                "fleet.toml",
                "ct200:out/checkpoint.pt",
                "eval1:checkpoints/one.safetensors",
            ),
            "--dry-run",
        ),
        "## The measurement\n\nA plan says what to measure, where, and beside what:\n",
        f"```toml\n{plan}```\n",
        "One command stages, checks, evaluates, fetches and compares:\n",
        desk.shown("run", "drafter.toml"),
        "## Again\n\nThe same command finds everything done; only the looking is repeated:\n",
        _end_of(desk.shown("run", "drafter.toml")),
    ]


def _end_of(text: str) -> str:
    """The command, and its output from the table of steps on."""
    head, _, rest = text.partition("what ran")
    return f"{head.splitlines()[0]}\n{head.splitlines()[1]}\n...\nwhat ran{rest}"


def main() -> None:
    """Makes the hosts, walks, writes the page."""
    if reason := why_not():
        sys.exit(f"the three hosts cannot be made here: {reason}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, made = trainers_file(folder), recording(folder / "recordings")
        packed = BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(made, arcname=made.name)
        stored = stored_result(folder, made)
        hosts = Hosts(folder / "hosts", train="4g", ws="4g", eval="4g")
        hosts.folder.mkdir()
        try:
            hosts.up()
            desk = Desk(hosts)
            wrapper = f'#!/bin/sh\nexec {sys.executable} "$@"\n'.encode()
            for host in ("ws", "eval"):
                desk.put(host, PYTHON, wrapper)
                hosts.run(host, "chmod", "755", PYTHON)
            desk.put("train", "/data/out/checkpoint.pt", source.read_bytes())
            desk.put("train", "/data/train.log", LOG.encode())
            program = "mkdir -p /data/draftgauge/recordings && tar -xC /data/draftgauge/recordings"
            hosts.run("eval", "sh", "-c", program, input=packed.getvalue())
            PAGE.write_text("\n".join(walk(desk, made, stored)), encoding="utf-8")
        finally:
            hosts.down()


if __name__ == "__main__":
    main()
