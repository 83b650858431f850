"""Tau by category: hand-computed means, conversations as one unit, the lowest first."""

from typing import Any

import pytest

from draftgauge.report.categories import UNNAMED, tau_by_category


def prompt(
    category: str | None, *, committed: int, rounds: int, conversation: str | None = None
) -> dict[str, Any]:
    policy = {"committed": committed, "rounds": rounds}
    return {"category": category, "conversation": conversation, "policies": {"chain": policy}}


def test_each_category_is_the_mean_over_its_responses_and_the_lowest_comes_first() -> None:
    prompts = {
        "a": prompt("math", committed=6, rounds=2),
        "b": prompt("math", committed=10, rounds=2),
        "c": prompt("code", committed=3, rounds=2),
        "d": prompt(None, committed=9, rounds=1),
    }
    found = tau_by_category({"prompts": prompts}, "chain")
    assert {name: (tau["value"], tau["n"]) for name, tau in found.items()} == {
        "code": (1.5, 1),
        "math": (4.0, 2),
        UNNAMED: (9.0, 1),
    }
    assert list(found) == ["code", "math", UNNAMED]
    assert found["math"]["low"] is None


def test_the_turns_of_a_conversation_are_one_response() -> None:
    prompts = {
        "81/1": prompt("chat", committed=6, rounds=2, conversation="81"),
        "81/2": prompt("chat", committed=2, rounds=2, conversation="81"),
        "82": prompt("chat", committed=3, rounds=1),
    }
    tau = tau_by_category({"prompts": prompts}, "chain")["chat"]
    assert (tau["value"], tau["n"]) == (2.5, 2)


def test_five_prompts_have_an_interval() -> None:
    prompts = {str(i): prompt("math", committed=4 + i, rounds=2) for i in range(6)}
    tau = tau_by_category({"prompts": prompts}, "chain")["math"]
    assert tau["low"] < tau["value"] < tau["high"]


@pytest.mark.parametrize(
    "prompts",
    [{"a": prompt(None, committed=6, rounds=2)}, {"a": prompt("math", committed=0, rounds=0)}],
    ids=["no category", "no round"],
)
def test_without_categories_or_rounds_there_is_nothing(prompts: dict[str, Any]) -> None:
    assert tau_by_category({"prompts": prompts}, "chain") == {}
