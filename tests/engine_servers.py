"""Small servers on this machine that answer in the shapes of vLLM and SGLang, out of the tiny target.

They speak real HTTP and keep connections open, as the engines do. A test switches faults on by name; what was asked
is kept in `requests`. Speculation is played: a completion is cut into rounds that accept 2, 0, 3, 1, ... tokens.
"""

import fcntl
import json
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from draftgauge.engines.answers import Engine
from draftgauge.engines.calls import Patience
from draftgauge.engines.kinds import connected
from draftgauge.target import Target, generate, load_target, observe
from draftgauge.tensorfile import write_safetensors
from tests.tiny import workshop

MODEL = "tiny"
KEY = "sk-secret-of-the-test"
#: How many tokens each round accepts, in turn, where there is room; the drafter drafts three.
ACCEPTED, DEPTH = (2, 0, 3, 1), 3
#: The layers whose states the servers return; vLLM adds the last one's, before the norm.
TAPS = (1, 3)
AT_ONCE = Patience(attempts=4, wait_s=0.0, timeout_s=30.0)
DROP = "drop"

_model = threading.Lock()


@cache
def target() -> Target:
    return load_target(workshop() / "target")


@cache
def completion(ids: tuple[int, ...], count: int) -> tuple[int, ...]:
    """What the tiny target says, up to and including its stop token."""
    with _model:
        return tuple(generate(target(), [ids], max_new_tokens=count)[0])


def states(ids: Sequence[int]) -> np.ndarray:
    """[T, taps+1, H] of a sequence."""
    with _model:
        seen = observe(target(), ids, taps=TAPS)
    return np.stack([*(tap.numpy() for tap in seen.taps), seen.final.numpy()], axis=1)


def rounds_of(count: int) -> list[int]:
    """Accepted tokens of every round that makes `count` tokens, the first of which the prefill gives."""
    left, accepted = count - 1, []
    while left > 0:
        accepted.append(min(ACCEPTED[len(accepted) % len(ACCEPTED)], left - 1))
        left -= accepted[-1] + 1
    return accepted


@dataclass
class Request:
    """One call as it came in."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Any


@dataclass
class StandIn:
    """A server: faults by name, refusals that are given first, and what was asked.

    A refusal is a status with headers, or `DROP` for a connection that ends without an answer.
    """

    faults: set[str] = field(default_factory=set)
    refusals: list[Any] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    folder: Path | None = None
    said: dict[str, Any] = field(default_factory=dict)
    url: str = ""
    held: list[Any] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def asked(self, path: str) -> list[Request]:
        return [request for request in self.requests if request.path == path]

    def answer(self, request: Request) -> Any:
        """The JSON value or text for a call; a tuple of status and value for a refusal."""
        raise NotImplementedError


def finish(ids: Sequence[int], count: int) -> str:
    return "length" if len(ids) == count else "stop"


class Vllm(StandIn):
    """`vllm serve` with a drafter and, in `folder`, the hidden-state connector."""

    def answer(self, request: Request) -> Any:
        match request.path.partition("?")[0]:
            case "/v1/models":
                card = {
                    "id": MODEL,
                    "object": "model",
                    "owned_by": "vllm",
                    "root": MODEL,
                    "max_model_len": 512,
                }
                return {"object": "list", "data": [card, *self.said.get("models", [])]}
            case "/version":
                return {"version": "0.11.2"}
            case "/server_info" if "speculative_config" in self.said:
                return {"vllm_config": {"speculative_config": self.said["speculative_config"]}}
            case "/metrics" if "no metrics" not in self.faults:
                return self.metrics()
            case "/v1/completions":
                return self.complete(request.body)
        return 404, {"detail": "Not Found"}

    def complete(self, body: Mapping[str, Any]) -> Any:
        ids, count = tuple(body["prompt"]), body["max_tokens"]
        if len(ids) + count > 512:
            text = "This model's maximum context length is 512 tokens."
            return 400, {"error": {"message": text, "type": "BadRequestError", "param": None, "code": 400}}
        out = completion(ids, count)
        self.count(len(out))
        if "too many" in self.faults and 7 in ids:
            out = (*out, *([0] * (count + 1 - len(out))))
        choice = {
            "index": 0,
            "text": "",
            "logprobs": None,
            "finish_reason": finish(out, count),
            "stop_reason": None,
            "token_ids": None if "no ids" in self.faults else list(out),
            "prompt_token_ids": [0, *ids] if "other prompt" in self.faults else list(ids),
        }
        said = len(out) + ("wrong usage" in self.faults)
        usage = {"prompt_tokens": len(ids), "completion_tokens": said, "total_tokens": len(ids) + said}
        answer = {
            "id": "cmpl-1",
            "object": "text_completion",
            "model": MODEL,
            "choices": [choice],
            "usage": usage,
        }
        if "per request" in self.faults:
            answer["metrics"] = {"speculative_decoding": self.per_request(len(out))}
        if self.folder is not None:
            path = self.write_states(ids)
            answer["kv_transfer_params"] = {"hidden_states_path": str(path)}
        return answer

    def per_request(self, count: int) -> dict[str, Any]:
        accepted = rounds_of(count)
        return {
            "mean_acceptance_length": 1 + sum(accepted) / max(len(accepted), 1),
            "acceptance_histogram": [accepted.count(n) for n in range(DEPTH + 1)],
            "num_spec_steps": len(accepted),
            "num_accepted_draft_tokens": sum(accepted),
            "num_draft_tokens": DEPTH * len(accepted),
            "num_spec_tokens": DEPTH,
            "per_step_accepted": accepted,
        }

    def count(self, tokens: int) -> None:
        accepted = [] if "no drafter" in self.faults else rounds_of(tokens)
        with self.lock:
            moved = {"rounds": len(accepted), "accepted": sum(accepted), "generated": tokens}
            moved |= {f"position {d}": sum(n > d for n in accepted) for d in range(DEPTH)}
            for name, by in moved.items():
                self.said.setdefault("counters", {}).setdefault(name, 0)
                self.said["counters"][name] += by

    def metrics(self) -> str:
        with self.lock:
            counters = dict(self.said.get("counters", {}))
            if "traffic" in self.faults:  # somebody else's token between two of our looks at rest
                self.said["counters"]["generated"] += len(self.asked("/metrics")) == 3
        ending = "" if "old names" in self.faults else "_total"
        labels = 'engine="0",model_name="tiny"'
        text = [
            "# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.",
            "# TYPE vllm:spec_decode_num_drafts_total counter",
        ]
        drafted = DEPTH * counters.get("rounds", 0)
        for name, value in (
            ("vllm:spec_decode_num_drafts", counters.get("rounds", 0)),
            ("vllm:spec_decode_num_draft_tokens", drafted),
            ("vllm:spec_decode_num_accepted_tokens", counters.get("accepted", 0)),
            ("vllm:generation_tokens", counters.get("generated", 0)),
        ):
            text.append(f"{name}{ending}{{{labels}}} {float(value)}")
        text += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos{ending}{{{labels},position="{d}"}} '
            f"{float(counters.get(f'position {d}', 0))}"
            for d in range(DEPTH)
        ]
        return "\n".join(text) + "\n"

    def write_states(self, ids: Sequence[int]) -> Path:
        assert self.folder is not None
        seen, tokens = states(ids), np.asarray(ids, np.int64)
        if "few states" in self.faults:
            seen, tokens = seen[2:], tokens[2:]
        if "other states" in self.faults:
            tokens = tokens[::-1]
        with self.lock:
            path = self.folder / f"req-{len(self.held)}.safetensors"
            lock = path.with_name(f"{path.name}.lock").open("w")
            self.held.append(lock)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if "held lock" in self.faults:
            return path
        write_safetensors(path, {"hidden_states": seen, "token_ids": np.ascontiguousarray(tokens)})
        fcntl.flock(lock, fcntl.LOCK_UN)
        return path


class Sglang(StandIn):
    """`sglang.launch_server` with a drafter and `--enable-return-hidden-states`."""

    def answer(self, request: Request) -> Any:
        info = "/get_server_info" if "old" in self.faults else "/server_info"
        match request.path:
            case path if path == info:
                return {
                    "model_path": MODEL,
                    "tokenizer_path": MODEL,
                    "served_model_name": MODEL,
                    "api_key": KEY,
                    "version": "0.5.4",
                    "disable_radix_cache": True,
                    "enable_return_hidden_states": "no states" not in self.faults,
                    "speculative_algorithm": "DFLASH",
                    "internal_states": [{"last_gen_throughput": 3.5, "avg_spec_accept_length": 2.0}],
                    **self.said,
                }
            case "/v1/models":
                return {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "sglang"}]}
            case "/generate":
                return self.generate(request.body)
        return 404, {"detail": "Not Found"}

    def generate(self, body: Mapping[str, Any]) -> Any:
        ids, sampling = tuple(body["input_ids"]), body["sampling_params"]
        count = sampling["max_new_tokens"]
        out = completion(ids, count)
        if "too many" in self.faults and 7 in ids:
            out = (*out, *([0] * (count + 1 - len(out))))
        reason = finish(out, count)
        meta: dict[str, Any] = {
            "id": "3f",
            "finish_reason": {"type": "stop", "matched": out[-1]} if reason == "stop" else {"type": "length"},
            "prompt_tokens": len(ids),
            "completion_tokens": len(out),
            "cached_tokens": 0,
            "weight_version": "default",
        }
        if "abort" in self.faults:
            meta["finish_reason"] = {"type": "abort", "message": "Out of memory"}
        if "no drafter" not in self.faults:
            meta |= self.speculation(len(out))
        answer = {"text": "", "output_ids": list(out), "meta_info": meta}
        if {"old", "no ids"} & self.faults:
            del answer["output_ids"]
        if body.get("return_logprob") and "no ids" not in self.faults:
            meta["output_token_logprobs"] = [[-0.5, token, None] for token in out]
        if body.get("return_hidden_states"):
            rows = states(ids)[:, -1].tolist()
            rows = rows[2:] if "few states" in self.faults else rows
            # By chunk of the prefill, then by step: the generated token's state stands alone.
            chunks = [rows] if "whole" in self.faults else [rows[:1], rows[1:], rows[-1]]
            meta["hidden_states"] = chunks
        return answer

    def speculation(self, count: int) -> dict[str, Any]:
        accepted = rounds_of(count)
        histogram = [accepted.count(n) for n in range(DEPTH + 1)]
        old = "old" in self.faults
        return {
            "spec_accept_length": count / max(len(accepted), 1),
            "spec_verify_ct": len(accepted),
            ("spec_accept_token_num" if old else "spec_num_correct_drafts"): sum(accepted),
            ("spec_draft_token_num" if old else "spec_num_proposed_drafts"): DEPTH * len(accepted),
            ("spec_accept_histogram" if old else "spec_correct_drafts_histogram"): histogram,
        }


class Other(StandIn):
    """A server of something else."""

    def answer(self, request: Request) -> Any:
        return "<html>It works!</html>"


@contextmanager
def serving(stand_in: StandIn) -> Iterator[StandIn]:
    """The server, running on a free port of this machine while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.reply(None)

        def do_POST(self) -> None:
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def reply(self, body: Any) -> None:
            request = Request(self.command, self.path, dict(self.headers), body)
            with stand_in.lock:
                stand_in.requests.append(request)
                refusal = stand_in.refusals.pop(0) if stand_in.refusals and body is not None else None
            if refusal == DROP:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if refusal is not None:
                status, headers = refusal
                self.send(status, {"error": {"message": "not now"}}, headers)
                return
            value = stand_in.answer(request)
            status, value = value if isinstance(value, tuple) else (200, value)
            self.send(status, value, {})

        def send(self, status: int, value: Any, headers: Mapping[str, str]) -> None:
            kind = "text/plain" if isinstance(value, str) else "application/json"
            data = (value if isinstance(value, str) else json.dumps(value)).encode()
            self.send_response(status)
            for name, text in {"Content-Type": kind, "Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    stand_in.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield stand_in
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        for lock in stand_in.held:
            lock.close()


@contextmanager
def engine(stand_in: StandIn, **how: Any) -> Iterator[Engine]:
    """The engine that a stand-in is recognised as, asked without waiting between tries."""
    with serving(stand_in), connected(stand_in.url, patience=AT_ONCE, **how) as found:
        yield found
