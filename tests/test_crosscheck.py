"""The replay beside an online loop, a server and a log: where they part, and where they do not."""

import copy
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from draftgauge.acceptance import Policy, walk_blocks
from draftgauge.crosscheck import Question, beside_replay, crosscheck_checkpoint, first_difference, walks_of
from draftgauge.engines.counts import Served
from draftgauge.errors import EngineError, InputError
from draftgauge.features import as_torch
from draftgauge.measure import blocks_of, measure
from draftgauge.online import rounds_of
from draftgauge.pairing import open_drafter, open_pair
from draftgauge.report.crosscheck import crosscheck_report
from draftgauge.stated import Stated
from tests import planted, tiny
from tests.engine_servers import MODEL, Request, StandIn, serving

CHAIN = Policy("chain")


def walked(checkpoint: Path, recording: Path, **stated: Any) -> dict[str, list[int]]:
    """What every round of the chain accepts, by prompt, under a wiring."""
    pair = open_pair(checkpoint, recording, stated=Stated(wiring=stated))
    drafter = open_drafter(pair.checkpoint, pair.wiring, recording=pair.recording, dtype="float32")
    found = {}
    for item, drafted in measure(drafter, pair.recording, items=pair.items, policies=(CHAIN,)):
        walk = walk_blocks(CHAIN, blocks_of(drafted, item, policies=(CHAIN,)))
        found[item.id] = [accepted for _, accepted in rounds_of(walk)]
    return found


class Serving(StandIn):
    """SGLang that answers each prompt with given tokens, made in rounds that accept what is given."""

    answers: Mapping[tuple[int, ...], tuple[list[int], list[int]]]

    def answer(self, request: Request) -> Any:
        if request.path == "/server_info":
            return {
                "model_path": MODEL,
                "tokenizer_path": MODEL,
                "served_model_name": MODEL,
                "version": "0.5.4",
                "disable_radix_cache": True,
                "speculative_algorithm": "DFLASH",
                "internal_states": [{}],
                **self.said,
            }
        if request.path != "/generate":
            return 404, {"detail": "Not Found"}
        ids, count = tuple(request.body["input_ids"]), request.body["sampling_params"]["max_new_tokens"]
        completion, accepted = self.answers[ids]
        completion = completion[:count]
        histogram = [accepted.count(n) for n in range(max(accepted, default=0) + 1)]
        counts = {
            "spec_verify_ct": len(accepted),
            "spec_num_correct_drafts": sum(accepted),
            "spec_correct_drafts_histogram": histogram,
        }
        meta = {
            "finish_reason": {"type": "length"},
            "prompt_tokens": len(ids),
            "completion_tokens": len(completion),
            **(counts if accepted else {}),
        }
        return {"text": "", "output_ids": completion, "meta_info": meta}


def served(
    pair: planted.Pair, accepted: Mapping[str, list[int]], texts: Mapping[str, list[int]] | None = None
) -> Serving:
    """A server of the pair's prompts."""
    answers = {}
    for item in pair.recording.items:
        tokens = as_torch(pair.recording.tensors(item).tokens).tolist()
        completion = (texts or {}).get(item.id, tokens[item.prompt_len :])
        answers[tuple(tokens[: item.prompt_len])] = (completion, accepted[item.id])
    server = Serving()
    server.answers = answers
    return server


@pytest.fixture(scope="module")
def pair() -> planted.Pair:
    return planted.shared_pair()


@pytest.fixture(scope="module")
def right(pair: planted.Pair) -> dict[str, list[int]]:
    return walked(pair.checkpoint, pair.recording.path)


def asked(pair: planted.Pair, server: StandIn, **more: Any) -> dict[str, Any]:
    with serving(server):
        return crosscheck_checkpoint(
            pair.checkpoint, pair.recording.path, Question(engine=server.url, **more)
        )


def test_a_server_that_computes_the_drafter_agrees(
    pair: planted.Pair, right: Mapping[str, list[int]]
) -> None:
    value = asked(pair, served(pair, right))
    assert value["first_difference"] == {"where": None, "why": "the witnesses agree", "advice": None}
    found = value["served"]
    assert found["convention"] == "sglang_request"
    assert found["theirs"]["value"] == pytest.approx(found["replay"]["value"])
    assert found["difference"]["value"] == pytest.approx(0)
    assert found["survival"] == pytest.approx(found["replay_survival"][: len(found["survival"])])
    assert found["texts"] == {"prompts": len(right), "same": len(right), "parted": []}


def test_a_server_that_rotates_otherwise_is_the_engines_fault(
    pair: planted.Pair, right: Mapping[str, list[int]]
) -> None:
    """Its texts stay the target's; only what its drafter wins is another, as with a wrong RoPE base."""
    wrong = walked(pair.checkpoint, pair.recording.path, rope_theta=10.0)
    assert wrong != right
    value = asked(pair, served(pair, wrong))
    found = value["first_difference"]
    assert found["where"] == "engine"
    assert "on the same texts acceptance is" in found["why"]
    assert "(sglang_request), from depth 1 on" in found["why"]
    assert "`draftgauge export`" in found["advice"]
    assert value["served"]["relative"] < -0.1


def test_texts_that_are_not_the_references_are_said_first(
    pair: planted.Pair, right: Mapping[str, list[int]]
) -> None:
    texts = {}
    for item in pair.recording.items:
        tokens = as_torch(pair.recording.tensors(item).tokens).tolist()[item.prompt_len :]
        texts[item.id] = [*tokens[:3], (tokens[3] + 1) % planted.VOCABULARY, *tokens[4:]]
    value = asked(pair, served(pair, right, texts))
    found = value["first_difference"]
    assert found["where"] == "references"
    assert "served texts are not the references and no near-tie explains it" in found["why"]
    assert {parted["token"] for parted in value["served"]["texts"]["parted"]} == {3}


def log_of(path: Path, accepted: Mapping[str, list[int]]) -> Path:
    """Spec-Bench's answers: accepted lengths with the bonus."""
    rows = [
        {"question_id": name, "choices": [{"turns": ["text"], "accept_lengths": [n + 1 for n in lengths]}]}
        for name, lengths in accepted.items()
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_log_that_differs_while_the_server_agrees_is_of_other_text(
    pair: planted.Pair, right: Mapping[str, list[int]], tmp_path: Path
) -> None:
    log = log_of(tmp_path / "log.jsonl", {f"other{i}": [0, 0, 1] for i in range(8)})
    value = asked(pair, served(pair, right), log=log)
    assert value["first_difference"]["where"] == "template or traffic"
    alone = crosscheck_checkpoint(pair.checkpoint, pair.recording.path, Question(log=log))
    assert alone["first_difference"]["where"] == "engine, template or traffic"
    same = log_of(tmp_path / "same.jsonl", right)
    agreed = crosscheck_checkpoint(pair.checkpoint, pair.recording.path, Question(log=same))
    assert agreed["first_difference"]["where"] is None
    assert agreed["log"]["convention"] == "pooled"


def test_a_replay_that_is_not_trusted_is_no_witness(
    pair: planted.Pair, right: Mapping[str, list[int]]
) -> None:
    value = asked(pair, served(pair, right))
    failed = {"slug": "context-read", "verdict": "failed", "measured": "it reads nothing", "advice": "see"}
    doubted = copy.deepcopy(value)
    doubted["replay"]["trust"] = {"trusted": False, "failed": ["context-read"], "controls": [failed]}
    assert first_difference(doubted)["where"] == "recording or wiring"


@pytest.fixture(scope="module")
def online() -> dict[str, Any]:
    shop = tiny.workshop()
    policies = (CHAIN, Policy("ddtree", 8))
    question = Question(policies=policies, target=shop / "target")
    return crosscheck_checkpoint(shop / "drafter", tiny.recording().path, question)


def test_the_online_loop_is_the_replay_round_for_round(online: Mapping[str, Any]) -> None:
    found = online["online"]
    assert found["divergences"] == []
    assert found["lossless"] == found["prompts"] == len(tiny.PROMPTS)
    assert found["policies"].keys() == {"chain", "ddtree8"}
    for slug, counts in found["policies"].items():
        replay = online["replay"]["policies"][slug]
        assert counts["same"] == counts["compared"] == counts["rounds"] == replay["rounds"]
        assert (counts["accepted"], counts["committed"]) == (replay["accepted"], replay["committed"])


def test_a_drafter_that_wins_nothing_is_said_to(online: Mapping[str, Any]) -> None:
    chain = online["replay"]["policies"]["chain"]["tau_pooled"]["value"]
    assert (online["first_difference"]["where"] == "drafter") == (chain < 1.2)


def test_a_target_that_changed_is_said_to_decode_another_text(tmp_path: Path) -> None:
    """Its head's rows are another's: it says other tokens, in the first round already."""
    from tests.test_importing import target_of

    other = target_of(tmp_path / "target", lambda n, t: t.roll(1, 0) if n == "lm_head.weight" else t)
    question = Question(target=other, num_prompts=2)
    value = crosscheck_checkpoint(tiny.workshop() / "drafter", tiny.recording().path, question)
    assert value["online"]["lossless"] == 0
    assert value["first_difference"]["where"] == "references"
    assert all(d["what"] == "text" and not d["near_tie"] for d in value["online"]["divergences"])


DIVERGENCE = {
    "prompt": "a",
    "policy": "chain",
    "what": "rounds",
    "anchor": 9,
    "replay": 2,
    "online": 1,
    "gap": 0.5,
}


@pytest.mark.parametrize(
    ("divergence", "where"),
    [
        ({"near_tie": True, "gap": 1e-5}, None),
        ({"near_tie": False}, "instrument"),
        ({"near_tie": False, "what": "text"}, "references"),
    ],
)
def test_only_what_no_near_tie_explains_is_a_difference(
    divergence: Mapping[str, Any],
    where: str | None,
    pair: planted.Pair,
    right: Mapping[str, list[int]],
    tmp_path: Path,
) -> None:
    log = log_of(tmp_path / "log.jsonl", right)
    value = crosscheck_checkpoint(pair.checkpoint, pair.recording.path, Question(log=log))
    value["online"] = {"divergences": [DIVERGENCE | divergence]}
    assert first_difference(value)["where"] == where


def test_a_near_tie_in_the_served_text_is_no_difference(
    pair: planted.Pair, right: Mapping[str, list[int]]
) -> None:
    value = asked(pair, served(pair, right))
    ties = [{"prompt": str(i), "token": 3, "gap": 1e-5, "near_tie": True} for i in range(6)]
    value["served"]["texts"] = {"prompts": 8, "same": 2, "parted": ties}
    assert first_difference(value)["where"] is None
    value["served"]["texts"]["parted"] = [{**tie, "near_tie": False} for tie in ties]
    assert first_difference(value)["where"] == "references"


def test_what_cannot_be_compared_is_refused(pair: planted.Pair, right: Mapping[str, list[int]]) -> None:
    with pytest.raises(
        InputError, match="nothing is to be held beside the replay; give --target, --engine or --log"
    ):
        crosscheck_checkpoint(pair.checkpoint, pair.recording.path)
    silent = served(pair, right)
    silent.said = {"speculative_algorithm": None}
    for ids, (completion, _) in list(silent.answers.items()):
        silent.answers = {**silent.answers, ids: (completion, [])}
    with pytest.raises(EngineError):
        asked(pair, silent)


def test_the_report_says_the_answer_first(
    pair: planted.Pair, right: Mapping[str, list[int]], online: Mapping[str, Any], tmp_path: Path
) -> None:
    wrong = walked(pair.checkpoint, pair.recording.path, rope_theta=10.0)
    value = asked(pair, served(pair, wrong), log=log_of(tmp_path / "log.jsonl", right))
    text = crosscheck_report(value)
    assert text.startswith("first difference: engine\n")
    for part in ("replay on", "served by http://127.0.0.1", "sglang_request, chain", "log ", "pooled, chain"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 100
    assert "same rounds" in crosscheck_report(dict(online))


def test_the_command(tmp_path: Path) -> None:
    shop = tiny.workshop()
    words = ("crosscheck", shop / "drafter", "--recording", tiny.recording().path, "--num-prompts", 2)
    done = tiny.draftgauge(*words, "--target", shop / "target", "--budgets", "4", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["online"]["policies"].keys() == {"chain", "ddtree4"}
    log = log_of(tmp_path / "log.jsonl", {str(i): [5, 4, 6] for i in range(8)})
    parts = tiny.draftgauge(*words, "--log", log, cwd=tmp_path)
    assert parts.returncode == 4
    assert "the witnesses part, first in: engine, template or traffic" in parts.stderr


def test_a_shorter_chain_is_compared_with_as_short_a_one(
    pair: planted.Pair, right: Mapping[str, list[int]], tmp_path: Path
) -> None:
    """vLLM with num_speculative_tokens 2 of a drafter of depth 5: its counters speak of chain(2)."""
    found = open_pair(pair.checkpoint, pair.recording.path, stated=Stated())
    drafter = open_drafter(found.checkpoint, found.wiring, recording=found.recording, dtype="float32")
    replayed = {
        item.id: blocks_of(drafted, item, policies=(CHAIN,))
        for item, drafted in measure(drafter, found.recording, items=found.items, policies=(CHAIN,))
    }
    short = walks_of(Policy("chain", 2), replayed)
    rounds = sum(len(walk.anchors) for walk in short.values())
    accepted = sum(int(walk.streak.sum()) for walk in short.values())
    counts = Served("pooled", "vLLM counters", len(short), rounds, 2 * rounds, accepted)
    value = beside_replay(counts, replayed)
    assert value["policy"] == "chain2"
    assert value["relative"] == pytest.approx(0)
    whole = dataclasses.replace(counts, drafted_tokens=5 * rounds)
    assert beside_replay(whole, replayed)["policy"] == "chain"
